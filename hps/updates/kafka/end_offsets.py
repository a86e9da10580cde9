"""End offsets of Kafka's partitions, polled in parallel to a consumer that may be paused or stuck."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from hps.errors import Unavailable
from hps.tiers.positions import TopicPartition
from hps.updates.arrival_times import ArrivalTimes
from hps.updates.kafka.cluster import KafkaCluster
from hps.updates.kafka.source import KafkaSource

log = logging.getLogger(__name__)


class PendingMessages:
    """`hps.updates.arrival_times.PendingUpdates` of ``topics``, some of which may not exist yet."""

    def __init__(self, cluster: KafkaCluster, reader: KafkaSource, topics: Sequence[str]) -> None:
        self._cluster = cluster
        self._reader = reader
        self._arrivals = ArrivalTimes()
        # Used until the reader knows its partitions. A topic that does not exist counts as applied.
        self._places: Mapping[TopicPartition, int] = {(topic, 0): 0 for topic in topics}
        self._known = False

    def poll(self) -> None:
        partitions, at_s = self._applied(), time.monotonic()
        ends: dict[TopicPartition, int] = {}
        try:
            if self._known:
                ends = self._cluster.ends(partitions)
                self._reader.record_ends(ends)
            elif not self._cluster.topics({topic for topic, _partition in partitions}.__contains__):
                ends = dict.fromkeys(partitions, 0)
        except Unavailable as error:
            log.debug("end offsets are unknown: %s", error)
        self._arrivals.record_ends(ends, at_s)

    def _applied(self) -> Mapping[TopicPartition, int]:
        """The reader's offsets, or its earlier ones while it gets new partitions."""
        applied = self._reader.applied()
        if self._reader.lag() is not None:  # checked last: by then, revoked partitions are known
            self._places, self._known = applied, True
        return self._places

    def ages_s(self) -> Mapping[TopicPartition, float | None]:
        now_s = time.monotonic()
        return {
            partition: self._arrivals.age_s(partition, applied, now_s)
            for partition, applied in self._applied().items()
        }
