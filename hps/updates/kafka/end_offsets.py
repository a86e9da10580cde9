"""Where Kafka's partitions end, asked beside the consumer, which may be paused or wait for a store."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from hps.errors import Unavailable
from hps.tiers.positions import Place
from hps.updates.arrival_times import ArrivalTimes
from hps.updates.kafka.cluster import KafkaCluster

log = logging.getLogger(__name__)


class KafkaReader(Protocol):
    """Who reads: `hps.updates.kafka.source.KafkaSource`. Any thread may ask."""

    def applied(self) -> Mapping[Place, int]:
        """Up to where each of the partitions that are its own is in the stores."""
        ...

    def lag(self) -> Mapping[Place, int] | None:
        """None while it does not know which partitions these are, or where they begin."""
        ...

    def saw(self, ends: Mapping[Place, int]) -> None:
        """End offsets of its partitions."""
        ...


class PendingMessages:
    """Implements `hps.updates.arrival_times.PendingUpdates`, of ``topics``, some of which nobody may have
    made yet."""

    def __init__(self, cluster: KafkaCluster, reader: KafkaReader, topics: Sequence[str]) -> None:
        self._cluster = cluster
        self._reader = reader
        self._arrivals = ArrivalTimes()
        # Of a reader that does not know yet what there is: of topics that are not there, it has everything.
        self._places: Mapping[Place, int] = {(topic, 0): 0 for topic in topics}
        self._known = False

    def look(self) -> None:
        places, at_s = self._applied(), time.monotonic()
        ends: dict[Place, int] = {}
        try:
            if self._known:
                ends = self._cluster.ends(places)
                self._reader.saw(ends)
            elif not self._cluster.topics({topic for topic, _partition in places}.__contains__):
                ends = dict.fromkeys(places, 0)
        except Unavailable as error:
            log.debug("where partitions end is not known: %s", error)
        self._arrivals.saw(ends, at_s)

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
