"""A Kafka reader's partitions and its progress in each."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping

import confluent_kafka as ck

from hps.tiers.positions import Place
from hps.updates.kafka.cluster import KafkaCluster, Topic
from hps.updates.kafka.start_positions import PartitionProgress, StartPositions

_RETRY_S = 0.5  # retry interval for what Kafka did not answer


class AssignedPartitions:
    """The partitions that a reader has; used by its polling thread.

    Any thread may call `applied`, `waiting` and `record_ends`."""

    def __init__(self, placement: StartPositions) -> None:
        self.moved = False
        """True if the partitions or offsets differ from the consumer's assignment."""
        self._placement = placement
        self._progress: dict[Place, PartitionProgress] = {}
        self._unplaced: dict[Place, PartitionProgress | None] = {}  # with their earlier progress
        self._broken: set[Place] = set()  # those at whose offset Kafka could not continue
        self._place_at = 0.0

    @property
    def complete(self) -> bool:
        """True if each partition's start offset is known."""
        return not self._unplaced

    def get(self, place: Place) -> PartitionProgress | None:
        return self._progress.get(place)

    def items(self) -> Iterable[tuple[Place, PartitionProgress]]:
        return self._progress.items()

    def applied(self) -> dict[Place, int]:
        """Offset up to which the stores have the messages that Kafka keeps, by partition."""
        return {place: each.reached for place, each in dict(self._progress).items()}

    def waiting(self) -> dict[Place, int]:
        """Number of unapplied messages, by partition."""
        return {place: each.waiting for place, each in dict(self._progress).items()}

    def record_ends(self, ends: Mapping[Place, int]) -> None:
        """Record end offsets."""
        for place, reading in dict(self._progress).items():
            reading.end = ends.get(place, reading.end)

    def assignment(self) -> list[ck.TopicPartition]:
        """Each partition with the offset to poll next, or the first after it that Kafka keeps."""
        return [ck.TopicPartition(*place, max(each.next, each.low)) for place, each in self.items()]

    def set_partitions(self, places: Collection[Place]) -> None:
        """Set the partitions to read."""
        for place in (self._progress.keys() | self._unplaced.keys()) - set(places):
            self._progress.pop(place, None)
            self._unplaced.pop(place, None)
            self._broken.discard(place)
            self.moved = True
        for place in places:
            if place not in self._progress:
                self._unplaced.setdefault(place, None)

    def place(
        self, topics: Mapping[str, Topic], cluster: KafkaCluster, consumer: ck.Consumer
    ) -> Collection[Place]:
        """Find start offsets of new partitions; returns those found. Raises TierError, Unavailable."""
        now = time.monotonic()
        if self.complete or now < self._place_at:
            return ()
        found = self._placement.place(self._unplaced, topics, self._broken, cluster, consumer)
        self._progress |= found
        self._broken -= found.keys()
        for place in found:
            del self._unplaced[place]
        self.moved, self._place_at = True, now + _RETRY_S
        return found.keys()

    def verify(self, topics: Mapping[str, Topic]) -> None:
        """Restart partitions of topics that were created again."""
        for (name, partition), reading in list(self._progress.items()):
            if (topic := topics.get(name)) is not None and topic.id != reading.topic_id:
                self._restart((name, partition), reading)

    def interrupt(self, place: Place) -> None:
        """Restart a partition where Kafka cannot continue."""
        if (reading := self.get(place)) is not None:
            self._restart(place, reading)
            self._broken.add(place)

    def restart(self) -> None:
        """Restart all partitions at the stores' positions."""
        for place in list(self._progress):
            self._restart(place, None)

    def rewind(self) -> None:
        """Poll unapplied messages again."""
        for reading in self._progress.values():
            reading.next = reading.applied
        self.moved = True

    def clear(self) -> None:
        self._progress.clear()
        self._unplaced.clear()
        self._broken.clear()
        self._place_at = 0.0

    def _restart(self, place: Place, former: PartitionProgress | None) -> None:
        self._unplaced[place] = former  # first: a concurrent reader must not see it as complete
        del self._progress[place]
        self._place_at = 0.0
