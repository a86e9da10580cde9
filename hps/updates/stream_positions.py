"""Stream positions of the stores that one reader feeds: where to start, what to record, losses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from hps.errors import HpsError
from hps.tiers.positions import PositionedStore, StreamPosition, TopicPartition
from hps.types import EmbeddingTable
from hps.updates.source import TableUpdate

Contained = Callable[[EmbeddingTable, str, int], int | None]
"""``contained(table, topic, partition)``: the offset up to which the files of a table contain the
partition; None if the files do not state it."""
Readers = Callable[[str], Sequence[EmbeddingTable]]
"""``readers(topic)``: the tables that a topic may change."""


@dataclass(frozen=True, slots=True)
class FedStore:
    """A store that a stream is written to.

    ``versioned``: it keeps a version per row; HPS's layouts do not, and their rows count as version 0
    everywhere."""

    name: str
    store: PositionedStore
    versioned: bool = True


class StreamPositions(ABC):
    """Positions of one reader's streams, used by its source and its ingestor on one thread.

    ``stores``: those that the reader writes. ``readers``: the tables that a topic may change.
    ``versioned``: all stores, also those that others write, keep a version per row."""

    stores: Sequence[FedStore] = ()
    readers: Readers
    versioned: bool

    @abstractmethod
    def identify(self, topic: str, partition: int, topic_id: str) -> bool:
        """Compare the positions' topic with Kafka's ``topic_id``; True if the topic was created again.

        The positions are then set to the partition's first message. Raises TierError."""

    @abstractmethod
    def restart(self, topic: str, partition: int) -> None:
        """Set all positions to the partition's first message. Raises TierError."""

    @abstractmethod
    def mark_applied(
        self, positions: Sequence[StreamPosition], recorded: set[EmbeddingTable]
    ) -> None:
        """Record that everything up to ``positions`` is applied.

        The stores of the tables in ``recorded`` have recorded it already."""

    @abstractmethod
    def loss(self) -> str:
        """Reason why the source must restart; empty if it need not.

        It must when a store has less of a partition than before, as one that came back without its
        rows. Each call checks one partition or table, in turn."""

    @abstractmethod
    def _positions(self, topic: str, partition: int) -> list[int | None]:
        """Position of each store and table, or else what the table's files contain, if known."""

    def furthest(self, topic: str, partition: int) -> int:
        """Return the highest recorded position: the partition has had that many messages.

        Raises TierError."""
        return max((offset or 0 for offset in self._positions(topic, partition)), default=0)

    def start_offset(self, topic: str, partition: int) -> int | None:
        """Offset from which updates of the partition may be missing; None: perhaps all of them.

        The source continues there. Raises TierError."""
        offsets = self._positions(topic, partition)
        known = [offset for offset in offsets if offset is not None]
        return min(known) if known and len(known) == len(offsets) else None

    def missing(self, table: EmbeddingTable, update: TableUpdate) -> str:
        """Reason why ``update`` must not reach the caches yet; empty when it may.

        It always may where the reader writes the stores before the caches."""
        return ""

    def positions_to_record(
        self, table: EmbeddingTable, positions: Sequence[StreamPosition]
    ) -> list[StreamPosition]:
        """Positions for a store to record with the last rows of ``table`` in a batch up to ``positions``."""
        return []

    def unrecorded(self) -> Iterator[tuple[EmbeddingTable, list[StreamPosition]]]:
        """Positions still to be recorded for tables without new rows; each is yielded once."""
        return iter(())


def describe_loss(store: str, topic_partition: TopicPartition, offset: int, reached: int) -> str:
    """Describe the loss of a ``store`` that has updates up to ``offset`` and had them up to ``reached``."""
    topic, partition = topic_partition
    return (
        f"{store} has the updates of {topic}/{partition} up to {offset}, but had them up to {reached}: rows "
        "were lost, by a restart or a failover, or the topic was created again"
    )


def _unknown(_table: EmbeddingTable, _topic: str, _partition: int) -> int | None:
    return None


class StoreStreamPositions(StreamPositions):
    """`StreamPositions` in ``stores``, which one thread feeds.

    ``contained``: the start position of a store that has applied nothing yet."""

    def __init__(
        self, stores: Sequence[FedStore], readers: Readers, contained: Contained = _unknown
    ) -> None:
        self.stores = tuple(stores)
        self.versioned = all(each.versioned for each in self.stores)
        self.readers = readers
        self._files_contain = contained
        self._restarted: set[TopicPartition] = set()
        self._unrecorded: dict[EmbeddingTable, dict[TopicPartition, StreamPosition]] = {}
        self._reached: dict[TopicPartition, int] = {}  # offsets that every store must have

    def identify(self, topic: str, partition: int, topic_id: str) -> bool:
        found = False
        for store, table in self._fed(topic):
            if store.identify(table, topic, partition, topic_id):
                found = True
                self.restart(topic, partition)
        return found

    def restart(self, topic: str, partition: int) -> None:
        topic_partition = (topic, partition)
        self._restarted.add(topic_partition)
        self._reached[topic_partition] = 0
        for unrecorded in self._unrecorded.values():
            unrecorded.pop(topic_partition, None)
        for store, table in self._fed(topic):
            store.restart(table, topic, partition)

    def start_offset(self, topic: str, partition: int) -> int | None:
        offset = super().start_offset(topic, partition)
        if self.readers(topic):
            self._reached[topic, partition] = offset or 0
        return offset

    def positions_to_record(
        self, table: EmbeddingTable, positions: Sequence[StreamPosition]
    ) -> list[StreamPosition]:
        late = self._unrecorded.pop(table, {})
        now = {(p.topic, p.partition): p for p in positions if table in self.readers(p.topic)}
        noted = []
        for partition, position in (late | now).items():
            since = late.get(partition, position).continues_from
            contained = self._contained(table, *partition)
            if contained is not None and contained >= since:
                since = 0  # a store starts with what the files contain
            noted.append(replace(position, continues_from=since))
        return noted

    def mark_applied(
        self, positions: Sequence[StreamPosition], recorded: set[EmbeddingTable]
    ) -> None:
        for position in positions:
            partition = (position.topic, position.partition)
            tables = self.readers(position.topic)
            if tables:  # else no store has any of it: its messages are dead letters
                self._reached[partition] = position.offset
            for table in tables:
                if table not in recorded:
                    unrecorded = self._unrecorded.setdefault(table, {})
                    since = unrecorded.get(partition, position).continues_from
                    unrecorded[partition] = replace(position, continues_from=since)

    def unrecorded(self) -> Iterator[tuple[EmbeddingTable, list[StreamPosition]]]:
        while self._unrecorded:
            table = next(iter(self._unrecorded))
            yield table, self.positions_to_record(table, ())

    def loss(self) -> str:
        if not (self.stores and self._reached):
            return ""
        partition = next(iter(self._reached))
        try:
            offset = super().start_offset(*partition) or 0
        except HpsError:
            return ""  # an unavailable store is checked later
        reached = self._reached.pop(partition)
        if offset < reached:
            self._reached.clear()
            self._unrecorded.clear()
            names = " or ".join(each.name for each in self.stores)
            return describe_loss(names, partition, offset, reached)
        self._reached[partition] = reached
        return ""

    def _fed(self, topic: str) -> Iterator[tuple[PositionedStore, EmbeddingTable]]:
        return ((each.store, table) for each in self.stores for table in self.readers(topic))

    def _contained(self, table: EmbeddingTable, topic: str, partition: int) -> int | None:
        if (topic, partition) in self._restarted:
            return None
        return self._files_contain(table, topic, partition)

    def _positions(self, topic: str, partition: int) -> list[int | None]:
        offsets = []
        for store, table in self._fed(topic):
            applied = store.applied(table, topic, partition)
            if applied is None:
                applied = self._contained(table, topic, partition)
            offsets.append(applied)
        return offsets
