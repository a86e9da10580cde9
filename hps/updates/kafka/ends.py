"""Where Kafka's partitions end, asked beside the consumer, which may be paused or wait for a store."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import confluent_kafka as ck
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined] # not in __all__

from hps.config.update_settings import KafkaSettings
from hps.tiers.positions import Place
from hps.updates.arrivals import Arrivals
from hps.updates.kafka.client import client_log, client_options
from hps.updates.kafka.credentials import Credentials

log = logging.getLogger(__name__)

_ANSWER_S = 2.0


class Reader(Protocol):
    """Who reads: `hps.updates.kafka.source.KafkaSource`. Any thread may ask."""

    def applied(self) -> Mapping[Place, int]:
        """Up to where each of the partitions that are its own is in the stores."""
        ...

    def lag(self) -> Mapping[Place, int | None] | None:
        """None while it does not know which partitions these are, or where they begin."""
        ...


class WaitingMessages:
    """Implements `hps.updates.arrivals.Waiting`, of ``topics``, some of which nobody may have made yet."""

    def __init__(self, settings: KafkaSettings, reader: Reader, topics: Sequence[str]) -> None:
        self._reader = reader
        self._arrivals = Arrivals()
        # Of a reader that does not know yet what there is: of topics that are not there, it has everything.
        self._places: Mapping[Place, int] = {(topic, 0): 0 for topic in topics}
        self._known = False
        self._credentials = Credentials(settings)
        self._admin = AdminClient(
            {**client_options(settings.brokers), **settings.client_options()}, logger=client_log
        )

    def look(self) -> None:
        self._credentials.renew(self._admin)
        places, at_s = self._applied(), time.monotonic()
        ends: dict[Place, int] = {}
        try:
            if self._known:
                self._ask(places, ends)
            else:
                there = self._admin.list_topics(timeout=_ANSWER_S).topics
                if not any(topic in there for topic, _partition in places):
                    ends = dict.fromkeys(places, 0)
        except ck.KafkaException as error:
            log.debug("where partitions end is not known: %s", error)
        self._arrivals.saw(ends, at_s)

    def _ask(self, places: Mapping[Place, int], ends: dict[Place, int]) -> None:
        """Fill in what is told before something fails."""
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        asked = {ck.TopicPartition(*place): latest for place in places}
        if not asked:
            return
        for partition, answer in self._admin.list_offsets(asked, request_timeout=_ANSWER_S).items():
            ends[partition.topic, partition.partition] = answer.result().offset

    def _applied(self) -> Mapping[Place, int]:
        """Those of the reader, or what it had while it is told anew."""
        applied = self._reader.applied()
        if (
            self._reader.lag() is not None
        ):  # asked last: what was taken from the reader is known by then
            self._places, self._known = applied, True
        return self._places

    def ages_s(self) -> Mapping[Place, float | None]:
        now_s = time.monotonic()
        return {
            place: self._arrivals.age_s(place, applied, now_s)
            for place, applied in self._applied().items()
        }
