"""Where Kafka's partitions end, asked beside the consumer, which may be paused or wait for a store."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

import confluent_kafka as ck
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined] # not in __all__

from hps.config.update_settings import KafkaSettings
from hps.updates.arrivals import Arrivals
from hps.updates.kafka.client import client_log, client_options
from hps.updates.stream_places import Place

log = logging.getLogger(__name__)

_ANSWER_S = 2.0


class WaitingMessages:
    """Implements `hps.updates.arrivals.Waiting`. ``applied()``: up to where the reader has each of its
    partitions in the stores."""

    def __init__(self, settings: KafkaSettings, applied: Callable[[], Mapping[Place, int]]) -> None:
        self._applied = applied
        self._arrivals = Arrivals()
        self._admin = AdminClient(
            {**client_options(settings.brokers), **settings.options}, logger=client_log
        )

    def look(self) -> None:
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        asked = {ck.TopicPartition(*place): latest for place in self._applied()}
        if not asked:
            return
        at_s = time.monotonic()
        ends: dict[Place, int] = {}
        try:
            answers = self._admin.list_offsets(asked, request_timeout=_ANSWER_S)
            for partition, answer in answers.items():
                ends[partition.topic, partition.partition] = answer.result().offset
        except ck.KafkaException as error:
            log.debug("where partitions end is not known: %s", error)
        self._arrivals.saw(ends, at_s)

    def ages_s(self) -> Mapping[Place, float | None]:
        now_s = time.monotonic()
        return {
            place: self._arrivals.age_s(place, applied, now_s)
            for place, applied in self._applied().items()
        }
