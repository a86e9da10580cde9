"""CpuCache: the hot rows in this process's memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from hps.errors import ConfigError
from hps.native import dedup
from hps.tiers.base import newest_of_each
from hps.tiers.checks import check_keys, check_rows
from hps.tiers.cpu.cache_memory import CacheMemory
from hps.tiers.cpu.cache_reads import CacheReads
from hps.types import EmbeddingTable, KeyArray, VectorArray, VersionArray

Eviction = Literal["lru", "lfu", "random", "fifo"]
"""Eviction policy: drops the least recently used row, the least frequently used one (use counts fade), a
random one, or the one inserted first."""


class CpuCache(CacheReads):
    """Keeps the hottest rows of each table, up to its capacity.

    Layout and concurrency: hps/native/include/hps/cache_layout.hpp. Rows may have any dtype; they are
    copied, never converted.

    ``capacities``: rows per table. A table without capacity, or with 0, is kept out: it misses, and
    writes to it are dropped. ``eviction``: the eviction policy; ``evictions`` sets it for single
    tables. ``memory``: the memory of the tables. ``threads``: the most threads for one call with many
    keys. Reads never wait and may be called from many threads; writes are serialized. ``clock`` returns
    Unix seconds and drives the expiry of tombstones."""

    def __init__(
        self,
        capacities: Mapping[EmbeddingTable, int],
        *,
        eviction: Eviction = "lru",
        evictions: Mapping[EmbeddingTable, Eviction] | None = None,
        memory: CacheMemory | None = None,
        threads: int = 1,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(threads=threads, clock=clock)
        self._eviction = eviction
        self._memory = memory or CacheMemory()
        try:
            for table, rows in capacities.items():
                self.add_table(table, rows, (evictions or {}).get(table))
        except BaseException:
            self.close()
            raise

    def add_table(self, table: EmbeddingTable, rows: int, eviction: Eviction | None = None) -> None:
        """Add ``table``, empty, with a capacity of ``rows`` rows."""
        if rows < 0:
            raise ConfigError(f"the cache of table {table.id} can't have {rows} rows; 0 is none")
        if rows == 0:
            self.drop_table(table)
            return
        eviction = eviction or self._eviction
        if eviction not in get_args(Eviction):
            raise ConfigError(f"eviction must be lru, lfu, random or fifo, not {eviction!r}")
        held = self._memory.make(table, rows, eviction)
        held.threads = self._threads
        self._tables[table] = held

    def drop_table(self, table: EmbeddingTable) -> None:
        """Remove ``table`` and free its memory."""
        if self._tables.pop(table, None) is not None and self._memory.shared:
            self._memory.shared.drop(table)

    def insert(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        self._write(table, keys, vectors, versions, resident_only=False)

    def update(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        self._write(table, keys, vectors, versions, resident_only=True)

    def delete(self, table: EmbeddingTable, keys: KeyArray, versions: VersionArray) -> None:
        """Insert tombstones, ranked colder than any row, so that a flood of deletions evicts few rows."""
        self._write(table, keys, None, versions, resident_only=False)

    def _write(
        self,
        table: EmbeddingTable,
        keys: KeyArray,
        vectors: VectorArray | None,
        versions: VersionArray,
        *,
        resident_only: bool,
    ) -> None:
        if vectors is None:
            check_keys(table, keys, versions)
        else:
            check_rows(table, keys, vectors, versions)
        held = self._tables.get(table)
        if held is None:
            return
        # Each key must occur once: else its newer row could be evicted by another row of this call before
        # its older version is written.
        if len(dedup(keys)[0]) < len(keys):
            keep = newest_of_each(keys, versions)
            keys, versions = keys[keep], versions[keep]
            vectors = None if vectors is None else vectors[keep]
        oldest = self._oldest_tombstone(table, held)
        held.write(keys, vectors, versions, oldest, resident_only)

    def evict(self, table: EmbeddingTable, keys: KeyArray) -> None:
        check_keys(table, keys)
        if held := self._tables.get(table):
            held.evict(keys)

    def status(self) -> dict[str, Any]:
        """Describe the shared memory, if other processes may attach to it."""
        return {"shared_memory": self._memory.shared.status()} if self._memory.shared else {}

    def close(self) -> None:
        self._tables.clear()
        if self._memory.shared:
            self._memory.shared.close()
