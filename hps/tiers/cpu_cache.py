"""CpuCache: the hot rows in this process's memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from hps.errors import ConfigError
from hps.native import COMPILED
from hps.tiers.base import FetchContext, Part, TierInfo
from hps.tiers.cache_table import CacheStats, CacheTable
from hps.tiers.capacity import plan_capacity, slot_bytes
from hps.tiers.checks import check_gather, check_keys, check_part, check_rows
from hps.tiers.fused import Ask
from hps.types import (
    EmbeddingTable,
    KeyArray,
    Source,
    VectorArray,
    VersionArray,
    oldest_tombstone,
)

__all__ = ["CacheStats", "CpuCache", "plan_capacity"]

_INFO = TierInfo("cpu", Source.CPU, cache=True)


class CpuCache:
    """Keeps the most recently used rows of each table, up to its capacity; see cache_table.py for
    how. Rows may be of any dtype; they are copied, never converted.

    ``capacities``: rows per table. A table that has none, or 0, is kept out: it misses, and writes to
    it are dropped. `fetch` may be called from many threads beside the one that writes. ``clock`` returns
    Unix seconds and drives the forgetting of tombstones.
    """

    def __init__(
        self,
        capacities: Mapping[EmbeddingTable, int],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._tables: dict[EmbeddingTable, CacheTable] = {}
        for table, rows in capacities.items():
            self.add_table(table, rows)

    @property
    def info(self) -> TierInfo:
        return _INFO

    def add_table(self, table: EmbeddingTable, rows: int) -> None:
        """Begin to keep ``table``, with room for ``rows`` rows (rounded down to whole buckets)."""
        if rows < 0:
            raise ConfigError(f"the cache of table {table.id} can't have {rows} rows; 0 is none")
        if rows == 0:
            self.drop_table(table)
            return
        try:
            self._tables[table] = CacheTable(table, rows)
        except (MemoryError, ValueError) as error:
            size = rows * slot_bytes(table)
            raise ConfigError(
                f"no memory for a cache of {rows} rows ({size / 2**20:,.0f} MiB) of table "
                f"{table.id}; lower the cache's capacity_bytes, share or cache_rows"
            ) from error

    def drop_table(self, table: EmbeddingTable) -> None:
        """Forget ``table`` and free its memory."""
        self._tables.pop(table, None)

    def fetch(self, parts: Sequence[Part], ctx: FetchContext) -> None:
        for part in parts:
            held = self._tables.get(part.table)
            if held is None:
                continue
            if not COMPILED:
                check_part(part)
            oldest_tombstone = self._oldest_tombstone(held) if held.tombstones else 0
            try:
                held.fetch(part, oldest_tombstone)
            except (TypeError, ValueError):
                check_part(part)  # the compiled probe refused the arrays; this says why in words
                raise

    def gather(self, asks: Sequence[Ask]) -> bool:
        """See `FusedLookup.gather`."""
        for table, keys, out in asks:
            held = self._tables.get(table)
            if held is None:
                return False
            if not COMPILED:
                check_gather(table, keys, out)
            try:
                if not held.gather(keys, out):
                    return False
            except (TypeError, ValueError):
                check_gather(table, keys, out)  # says in words what the compiled probe refused
                raise
        return True

    def insert(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        check_rows(table, keys, vectors, versions)
        if held := self._tables.get(table):
            held.insert(keys, vectors, versions, self._oldest_tombstone(held))

    def update(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        check_rows(table, keys, vectors, versions)
        if held := self._tables.get(table):
            held.update(keys, vectors, versions, self._oldest_tombstone(held))

    def delete(self, table: EmbeddingTable, keys: KeyArray, versions: VersionArray) -> None:
        check_keys(table, keys, versions)
        if held := self._tables.get(table):
            held.delete(keys, versions, self._oldest_tombstone(held))

    def evict(self, table: EmbeddingTable, keys: KeyArray) -> None:
        check_keys(table, keys)
        if held := self._tables.get(table):
            held.evict(keys)

    def size(self, table: EmbeddingTable) -> int:
        """Rows held of ``table``, tombstones not counted."""
        held = self._tables.get(table)
        return held.rows if held else 0

    def capacity(self, table: EmbeddingTable) -> int:
        """The most rows the cache keeps of ``table``; 0 when it is kept out."""
        held = self._tables.get(table)
        return held.capacity if held else 0

    def stats(self, table: EmbeddingTable) -> CacheStats:
        """How ``table`` stands; all zero when it is kept out."""
        held = self._tables.get(table)
        return held.stats() if held else CacheStats(0, 0, 0, 0, 0)

    def close(self) -> None:
        self._tables.clear()

    def _oldest_tombstone(self, held: CacheTable) -> int:
        return oldest_tombstone(held.table, self._clock()) if held.tombstones else 0
