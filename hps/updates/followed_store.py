"""Followed store: other processes feed it; this node reads the streams for its caches alone.

A promotion copies what the store holds at that moment. If a cache were refreshed with an update before the
store has it, a promotion could then put the older row back, and it would stay: the update does not come
again. Two rules prevent that:

* Caches are refreshed with a batch once the store contains it, according to its stream positions.
* The updates of a table are read from the position that the store had before the first of its rows was
  promoted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence

from hps.errors import HpsError, TierError
from hps.tiers.base import FetchContext, Part, Tier
from hps.tiers.positions import Applied, StreamPosition, TopicPartition
from hps.tiers.wrappers import TierWrapper
from hps.types import EmbeddingTable
from hps.updates.source import TableUpdate
from hps.updates.stream_positions import (
    Contained,
    FedStore,
    Readers,
    StreamPositions,
    describe_loss,
)

OtherWriter = Callable[[TopicPartition], int | None]
"""``other_writer(partition)``: the offset up to which a writer that keeps no positions in the store has
applied a partition; None when that is unknown."""


class FollowedStore(TierWrapper):
    """Wraps ``tier``, which promotions read; ``store`` is the same one with its stream positions.

    `fetch` may be called from many threads; what concerns a table, from one at a time: that of the reader
    that feeds it."""

    def __init__(self, tier: Tier, store: FedStore) -> None:
        super().__init__(tier)
        self._store = store
        # Offsets of each table's updates in the caches, and offsets last read from the store.
        self._progress: dict[EmbeddingTable, dict[TopicPartition, int]] = {}
        self._stored: dict[EmbeddingTable, dict[TopicPartition, Applied]] = {}
        self._losses: dict[EmbeddingTable, str] = {}

    @property
    def name(self) -> str:
        return self._store.name

    @property
    def versioned(self) -> bool:
        return self._store.versioned

    def fetch(self, parts: Sequence[Part], ctx: FetchContext) -> None:
        try:
            for part in parts:
                self._start(part.table)
        except TierError:
            if self.name not in ctx.degraded:
                ctx.degraded.append(self.name)
            return
        self.inner.fetch(parts, ctx)

    def free(self, tables: Sequence[EmbeddingTable]) -> None:
        """Free the positions of ``tables``, which are no longer served."""
        for table in tables:
            self._progress.pop(table, None)
            self._stored.pop(table, None)
            self._losses.pop(table, None)

    def positions(
        self, readers: Readers, contained: Contained, other_writer: OtherWriter | None
    ) -> FollowedPositions:
        """Positions of one reader's streams in this store."""
        return FollowedPositions(self, readers, contained, other_writer)

    def progress(self, table: EmbeddingTable) -> dict[TopicPartition, int]:
        """Offsets up to which the caches have the updates of ``table``. Raises TierError."""
        self._start(table)
        return self._progress[table]

    def reached(
        self, table: EmbeddingTable, partition: TopicPartition, offset: int = 0, topic_id: str = ""
    ) -> int | None:
        """Offset up to which the store has the updates of ``table`` from the topic ``topic_id``.

        The store is asked unless it had reached ``offset`` before. 0 if it has those of an earlier
        topic of that name, None if it has no position. Raises TierError."""
        seen = self._stored.get(table, {}).get(partition)
        if seen is None or seen.offset < offset or _differ(seen.topic_id, topic_id):
            seen = self._read_positions(table).get(partition)
        if seen is None:
            return None
        return 0 if _differ(seen.topic_id, topic_id) else seen.offset

    def loss(self, table: EmbeddingTable, tables: Collection[EmbeddingTable]) -> str:
        """See `StreamPositions`; checks ``table``, one of its reader's ``tables``.

        After a loss, the progress of all of these falls back to the store's."""
        try:
            if table in self._stored:
                self._read_positions(table)
            losses = {each: self._losses[each] for each in tables if each in self._losses}
            if losses:
                self._fall_back(tables)
        except HpsError:
            return ""  # checked again later
        for each in losses:
            self._losses.pop(each, None)
        return next(iter(losses.values()), "")

    def _start(self, table: EmbeddingTable) -> None:
        """Record the store's position before a row of ``table`` is promoted or an update of it read."""
        if table not in self._progress:
            found = self._store.store.positions(table)
            self._progress.setdefault(
                table, {partition: at.offset for partition, at in found.items()}
            )

    def _read_positions(self, table: EmbeddingTable) -> dict[TopicPartition, Applied]:
        """Read the store's offsets for ``table``."""
        now = dict(self._store.store.positions(table))
        for partition, before in self._stored.get(table, {}).items():
            at = now.get(partition, Applied(0))
            if at.offset < before.offset or _differ(at.topic_id, before.topic_id):
                self._losses[table] = describe_loss(self.name, partition, at.offset, before.offset)
        self._stored[table] = now
        return now

    def _fall_back(self, tables: Collection[EmbeddingTable]) -> None:
        """Repeat refreshes: promotions may have copied rows that the store then lost."""
        for table in [each for each in tables if each in self._stored]:
            now = self._read_positions(table)
            self._progress[table] = {
                partition: min(offset, now[partition].offset)
                for partition, offset in self._progress[table].items()
                if partition in now
            }


class FollowedPositions(StreamPositions):
    """`StreamPositions` of a reader that refreshes caches after ``followed`` was fed.

    ``other_writer``: the positions of a writer that keeps none in the store, such as HPS; None if there
    cannot be one. While neither the store nor that writer has a position, updates do not wait."""

    def __init__(
        self,
        followed: FollowedStore,
        readers: Readers,
        contained: Contained,
        other_writer: OtherWriter | None,
    ) -> None:
        self._followed = followed
        self.readers = readers
        self._contained = contained
        self._other_writer = other_writer
        self._topic_ids: dict[TopicPartition, str] = {}
        self._tables: dict[EmbeddingTable, None] = {}  # those of topics that are read
        self._to_check: deque[EmbeddingTable] = deque()
        self.versioned = followed.versioned

    def identify(self, topic: str, partition: int, topic_id: str) -> bool:
        """Compare as `StreamPositions.identify` does.

        The store's writer records the topic's id in the store. Until then the store counts as having
        none of the topic's updates."""
        topic_partition = topic, partition
        self._topic_ids[topic_partition] = topic_id
        tables = self.readers(topic)
        ahead = [table for table in tables if self._followed.progress(table).get(topic_partition)]
        if not any(
            self._followed.reached(table, topic_partition, 0, topic_id) == 0 for table in ahead
        ):
            return False
        self.restart(topic, partition)
        return True

    def restart(self, topic: str, partition: int) -> None:
        for table in self.readers(topic):
            self._followed.progress(table)[topic, partition] = 0

    def missing(self, table: EmbeddingTable, update: TableUpdate) -> str:
        name = self._followed.name
        for end in update.ends:
            partition = end.topic, end.partition
            try:
                reached = self._reached(table, partition, end.offset)
            except HpsError as error:
                return f"{name}: {error}"
            at = f"{end.topic}/{end.partition}"
            if reached is None and self._other_writer is None:
                return (
                    f"{name} has no position of {at} for table {table.id}: no writer (`hps ingest`, or a "
                    "node of the shared group) feeds this version, or it has not begun"
                )
            if reached is not None and reached < end.offset:
                return (
                    f"{name} has the updates of table {table.id} up to {reached} of {at}, the caches wait "
                    f"for {end.offset}: its writer is behind or stopped"
                )
        return ""

    def mark_applied(
        self, positions: Sequence[StreamPosition], recorded: set[EmbeddingTable]
    ) -> None:
        for position in positions:
            partition = position.topic, position.partition
            for table in self.readers(position.topic):
                self._tables[table] = None
                self._followed.progress(table)[partition] = position.offset

    def loss(self) -> str:
        if not self._tables:
            return ""
        if not self._to_check:
            self._to_check.extend(self._tables)
        return self._followed.loss(self._to_check.popleft(), self._tables)

    def _reached(self, table: EmbeddingTable, partition: TopicPartition, offset: int) -> int | None:
        reached = self._followed.reached(
            table, partition, offset, self._topic_ids.get(partition, "")
        )
        if self._other_writer is not None and (reached is None or reached < offset):
            other = self._other_writer(partition)
            reached = other if reached is None else max(reached, other or 0)
        return reached

    def _positions(self, topic: str, partition: int) -> list[int | None]:
        offsets = []
        for table in self.readers(topic):
            self._tables[table] = None
            offset = self._followed.progress(table).get((topic, partition))
            if offset is None:
                offset = self._contained(table, topic, partition)
            offsets.append(offset)
        return offsets


def _differ(one: str, other: str) -> bool:
    """True for two known ids that differ."""
    return bool(one and other and one != other)
