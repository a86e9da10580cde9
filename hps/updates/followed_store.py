"""Followed store: fed by other processes from the streams that this node reads for its caches alone.

A promotion copies what the store holds at that moment. A cache that was refreshed with an update before the
store has it could therefore get the row from before the update, from a promotion, and keep it: the update
does not come again. Two rules keep that from happening:

* Caches are refreshed with a batch once the store contains it, which its stream positions tell.
* The updates of a table are read from where the store was before the first of its rows was promoted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from hps.errors import HpsError, TierError
from hps.tiers.base import FetchContext, Part, Tier
from hps.tiers.positions import Applied, Place, StreamPosition
from hps.tiers.wrappers import TierWrapper
from hps.types import EmbeddingTable
from hps.updates.source import TableUpdate
from hps.updates.stream_positions import Contained, FedStore, Readers, describe_loss

OtherWriter = Callable[[Place], int | None]
"""``other_writer(place)``: the offset up to which a writer that keeps no positions in the store has applied a
partition; None when that is unknown."""


class FollowedStore(TierWrapper):
    """``tier``, as promotions read it, and ``store``, the same one with its stream positions.

    `fetch` may be called from many threads; everything else from one at a time.
    """

    def __init__(self, tier: Tier, store: FedStore) -> None:
        super().__init__(tier)
        self._store = store
        # Up to where the caches have each table's updates, and up to where the store was seen to have them.
        self._progress: dict[EmbeddingTable, dict[Place, int]] = {}
        self._seen: dict[EmbeddingTable, dict[Place, Applied]] = {}
        self._to_check: deque[EmbeddingTable] = deque()
        self._lost = ""

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

    def forget(self, tables: Sequence[EmbeddingTable]) -> None:
        """Free what is kept for ``tables``, which are served no more."""
        for table in tables:
            self._progress.pop(table, None)
            self._seen.pop(table, None)

    def places(
        self, readers: Readers, contained: Contained, other_writer: OtherWriter | None
    ) -> FollowedPositions:
        """The positions of one reader's streams in this store."""
        return FollowedPositions(self, readers, contained, other_writer)

    def progress(self, table: EmbeddingTable) -> dict[Place, int]:
        """Up to where the caches have the updates of ``table``. Raises TierError."""
        self._start(table)
        return self._progress[table]

    def reached(
        self, table: EmbeddingTable, place: Place, offset: int = 0, topic_id: str = ""
    ) -> int | None:
        """Up to where the store has the updates of ``table`` from the topic ``topic_id``, asked anew unless
        it was seen at ``offset``; 0 when it has those of a former topic, None when it has no position.
        Raises TierError."""
        seen = self._seen.get(table, {}).get(place)
        if seen is None or seen.offset < offset or _differ(seen.topic_id, topic_id):
            seen = self._look(table).get(place)
        if seen is None:
            return None
        return 0 if _differ(seen.topic_id, topic_id) else seen.offset

    def lost(self) -> str:
        """See `hps.updates.stream_positions.StreamPositions`, in any table seen so far; each call checks
        one table. Progress is that of the store then."""
        if not self._to_check:
            self._to_check.extend(self._seen)
        try:
            if self._to_check and (table := self._to_check.popleft()) in self._seen:
                self._look(table)
            if self._lost:
                self._fall_back()
        except HpsError:
            return ""  # checked again later
        lost, self._lost = self._lost, ""
        return lost

    def _start(self, table: EmbeddingTable) -> None:
        """Note where the store is, before a row of ``table`` is promoted or an update of it read."""
        if table not in self._progress:
            found = self._store.store.positions(table)
            self._progress.setdefault(table, {place: at.offset for place, at in found.items()})

    def _look(self, table: EmbeddingTable) -> dict[Place, Applied]:
        """Up to where the store has the updates of ``table``, now."""
        now = dict(self._store.store.positions(table))
        for place, before in self._seen.get(table, {}).items():
            at = now.get(place, Applied(0))
            if at.offset < before.offset or _differ(at.topic_id, before.topic_id):
                self._lost = describe_loss(self.name, place, at.offset, before.offset)
        self._seen[table] = now
        return now

    def _fall_back(self) -> None:
        """Rows that the store lost may have been promoted as they were before: refresh them once more."""
        for table in list(self._seen):
            now = self._look(table)
            self._progress[table] = {
                place: min(offset, now[place].offset)
                for place, offset in self._progress[table].items()
                if place in now
            }


class FollowedPositions:
    """`hps.updates.stream_positions.StreamPositions` of a reader that refreshes caches after
    ``followed`` was fed.

    ``other_writer``: asked as well where others may feed the store without keeping positions in it, as HPS
    does; while neither knows a position, nothing is waited for.
    """

    def __init__(
        self,
        followed: FollowedStore,
        readers: Readers,
        contained: Contained,
        other_writer: OtherWriter | None,
    ) -> None:
        self._followed = followed
        self._readers = readers
        self._contained = contained
        self._other_writer = other_writer
        self._topic_ids: dict[Place, str] = {}
        self.stores: Sequence[FedStore] = ()
        self.versioned = followed.versioned
        self.lost = followed.lost

    def identify(self, topic: str, partition: int, topic_id: str) -> bool:
        """See `Places`. The store's writer keeps the id there; until then the store counts as one that has
        none of the topic's updates."""
        place = topic, partition
        self._topic_ids[place] = topic_id
        tables = self._readers(topic)
        ahead = [table for table in tables if self._followed.progress(table).get(place)]
        if not any(self._followed.reached(table, place, 0, topic_id) == 0 for table in ahead):
            return False
        self.restart(topic, partition)
        return True

    def furthest(self, topic: str, partition: int) -> int:
        offsets = (self._position(table, topic, partition) for table in self._readers(topic))
        return max((offset or 0 for offset in offsets), default=0)

    def restart(self, topic: str, partition: int) -> None:
        for table in self._readers(topic):
            self._followed.progress(table)[topic, partition] = 0

    def begin(self, topic: str, partition: int) -> int | None:
        offsets = [self._position(table, topic, partition) for table in self._readers(topic)]
        known = [offset for offset in offsets if offset is not None]
        return min(known) if known and len(known) == len(offsets) else None

    def missing(self, table: EmbeddingTable, update: TableUpdate) -> str:
        name = self._followed.name
        for end in update.ends:
            place = end.topic, end.partition
            try:
                reached = self._reached(table, place, end.offset)
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

    def told(
        self, table: EmbeddingTable, positions: Sequence[StreamPosition]
    ) -> list[StreamPosition]:
        return []

    def took(self, positions: Sequence[StreamPosition], told: set[EmbeddingTable]) -> None:
        for position in positions:
            place = position.topic, position.partition
            for table in self._readers(position.topic):
                self._followed.progress(table)[place] = position.offset

    def unnoted(self) -> Iterator[tuple[EmbeddingTable, list[StreamPosition]]]:
        return iter(())

    def _reached(self, table: EmbeddingTable, place: Place, offset: int) -> int | None:
        reached = self._followed.reached(table, place, offset, self._topic_ids.get(place, ""))
        if self._other_writer is not None and (reached is None or reached < offset):
            other = self._other_writer(place)
            reached = other if reached is None else max(reached, other or 0)
        return reached

    def _position(self, table: EmbeddingTable, topic: str, partition: int) -> int | None:
        offset = self._followed.progress(table).get((topic, partition))
        return self._contained(table, topic, partition) if offset is None else offset


def _differ(one: str, other: str) -> bool:
    """Whether two ids are known and not the same."""
    return bool(one and other and one != other)
