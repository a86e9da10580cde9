"""A Kafka reader's partitions and its progress in each."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping

import confluent_kafka as ck

from hps.tiers.positions import TopicPartition
from hps.updates.kafka.cluster import KafkaCluster, Topic
from hps.updates.kafka.start_positions import PartitionProgress, StartPositions
from hps.updates.source import HeldRows

_RETRY_S = 0.5  # retry interval for what Kafka did not answer


class AssignedPartitions:
    """The partitions that a reader has; used by its polling thread.

    Any thread may call `applied`, `waiting`, `held` and `record_ends`."""

    def __init__(self, starts: StartPositions) -> None:
        self.moved = False
        """True if the partitions or offsets differ from the consumer's assignment."""
        self._starts = starts
        self._progress: dict[TopicPartition, PartitionProgress] = {}
        # With their earlier progress.
        self._unknown_starts: dict[TopicPartition, PartitionProgress | None] = {}
        self._broken: set[TopicPartition] = set()  # those at whose offset Kafka could not continue
        self._find_at = 0.0

    @property
    def complete(self) -> bool:
        """True if each partition's start offset is known."""
        return not self._unknown_starts

    def get(self, partition: TopicPartition) -> PartitionProgress | None:
        return self._progress.get(partition)

    def items(self) -> Iterable[tuple[TopicPartition, PartitionProgress]]:
        return self._progress.items()

    def applied(self) -> dict[TopicPartition, int]:
        """Offset up to which the stores have the messages that Kafka keeps, by partition."""
        return {partition: each.reached for partition, each in dict(self._progress).items()}

    def waiting(self) -> dict[TopicPartition, int]:
        """Number of unapplied messages, by partition."""
        return {partition: each.waiting for partition, each in dict(self._progress).items()}

    def record_ends(self, ends: Mapping[TopicPartition, int]) -> None:
        """Record end offsets."""
        for partition, reading in dict(self._progress).items():
            reading.end = ends.get(partition, reading.end)

    def assignment(self) -> list[ck.TopicPartition]:
        """Each polled partition with the offset to poll next, or the first after it that Kafka keeps."""
        return [
            ck.TopicPartition(*partition, max(each.next, each.low))
            for partition, each in self.items()
            if each.held is None
        ]

    def held(self) -> dict[TopicPartition, HeldRows]:
        """Partitions that are not polled, since their next rows wait for a network. Any thread may call."""
        found = {partition: each.held for partition, each in dict(self._progress).items()}
        return {partition: held for partition, held in found.items() if held is not None}

    def hold(self, held: Mapping[TopicPartition, HeldRows]) -> None:
        """Do not poll these partitions; the caller sets `next` to the message that waits."""
        for partition, rows in held.items():
            if (reading := self.get(partition)) is not None:
                reading.held, self.moved = rows, True

    def release(self, partition: TopicPartition) -> None:
        """Poll a partition again from the message that waited."""
        if (reading := self.get(partition)) is not None:
            reading.held, self.moved = None, True

    def set_partitions(self, partitions: Collection[TopicPartition]) -> None:
        """Set the partitions to read."""
        for partition in (self._progress.keys() | self._unknown_starts.keys()) - set(partitions):
            self._progress.pop(partition, None)
            self._unknown_starts.pop(partition, None)
            self._broken.discard(partition)
            self.moved = True
        for partition in partitions:
            if partition not in self._progress:
                self._unknown_starts.setdefault(partition, None)

    def find_starts(
        self, topics: Mapping[str, Topic], cluster: KafkaCluster, consumer: ck.Consumer
    ) -> Collection[TopicPartition]:
        """Find start offsets of new partitions; returns those found. Raises TierError, Unavailable."""
        now = time.monotonic()
        if self.complete or now < self._find_at:
            return ()
        found = self._starts.find(self._unknown_starts, topics, self._broken, cluster, consumer)
        self._progress |= found
        self._broken -= found.keys()
        for partition in found:
            del self._unknown_starts[partition]
        self.moved, self._find_at = True, now + _RETRY_S
        return found.keys()

    def verify(self, topics: Mapping[str, Topic]) -> None:
        """Restart partitions of topics that were created again."""
        for (name, partition), reading in list(self._progress.items()):
            if (topic := topics.get(name)) is not None and topic.id != reading.topic_id:
                self._restart((name, partition), reading)

    def interrupt(self, partition: TopicPartition) -> None:
        """Restart a partition where Kafka cannot continue."""
        if (reading := self.get(partition)) is not None:
            self._restart(partition, reading)
            self._broken.add(partition)

    def restart(self) -> None:
        """Restart all partitions at the stores' positions."""
        for partition in list(self._progress):
            self._restart(partition, None)

    def rewind(self) -> None:
        """Poll unapplied messages again."""
        for reading in self._progress.values():
            reading.next, reading.held = reading.applied, None
        self.moved = True

    def clear(self) -> None:
        self._progress.clear()
        self._unknown_starts.clear()
        self._broken.clear()
        self._find_at = 0.0

    def _restart(self, partition: TopicPartition, former: PartitionProgress | None) -> None:
        # First: a concurrent reader must not see it as complete.
        self._unknown_starts[partition] = former
        del self._progress[partition]
        self._find_at = 0.0
