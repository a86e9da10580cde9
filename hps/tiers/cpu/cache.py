"""CpuCache: the hot rows in this process's memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from hps.errors import ConfigError
from hps.native import CacheTable, dedup
from hps.tiers.base import newest_of_each
from hps.tiers.checks import check_keys, check_rows
from hps.tiers.cpu.cache_memory import CacheMemory
from hps.tiers.cpu.cache_reads import CacheReads
from hps.tiers.cpu.use_counts import UseCounts
from hps.types import EmbeddingTable, KeyArray, VectorArray, VersionArray

if TYPE_CHECKING:
    from hps.tiers.mapped.overlaid_table import OverlaidTable

Eviction = Literal["lru", "lfu", "random", "fifo"]
"""Eviction policy: drops the least recently used row, the least frequently used one (use counts fade), a
random one, or the one inserted first."""
_EXPIRED_AT_ONCE = 1 << 16
"""Buckets that `CpuCache.expire` reads per call: some milliseconds, for which other writes wait."""


class CpuCache(CacheReads):
    """Keeps the hottest rows of each table, up to its capacity.

    Layout and concurrency: hps/native/include/hps/cache_layout.hpp. Rows may have any dtype; they are
    copied, never converted.

    ``capacities``: rows per table. A table without capacity, or with 0, is kept out: it misses, and
    writes to it are dropped. ``eviction``: the eviction policy; ``evictions`` sets it for single
    tables. ``memory``: the memory of the tables. ``threads``: the most threads for one call with many
    keys. Reads never wait and may be called from many threads; writes are serialized. ``clock`` returns
    Unix seconds and drives the expiry of tombstones. ``on_left_out`` receives the number of changed rows
    that `add_table` with ``used_only`` left out."""

    def __init__(
        self,
        capacities: Mapping[EmbeddingTable, int],
        *,
        eviction: Eviction = "lru",
        evictions: Mapping[EmbeddingTable, Eviction] | None = None,
        memory: CacheMemory | None = None,
        threads: int = 1,
        clock: Callable[[], float] = time.time,
        on_left_out: Callable[[int], None] = lambda _rows: None,
    ) -> None:
        super().__init__(threads=threads, clock=clock)
        self._mapped: dict[EmbeddingTable, OverlaidTable] = {}
        self._used_only: set[EmbeddingTable] = set()
        self._on_left_out = on_left_out
        self._eviction = eviction
        self._memory = memory or CacheMemory()
        try:
            for table, rows in capacities.items():
                self.add_table(table, rows, (evictions or {}).get(table))
        except BaseException:
            self.close()
            raise

    def add_table(
        self,
        table: EmbeddingTable,
        rows: int,
        eviction: Eviction | None = None,
        *,
        on_demand: bool = False,
        used_only: bool = False,
    ) -> None:
        """Add ``table``, empty, with a capacity of ``rows`` rows; ``on_demand``: see `CacheMemory.make`.

        ``used_only``: of changes that hide rows of a mapped file, insert those of rows in use alone."""
        if rows < 0:
            raise ConfigError(f"the cache of table {table.id} can't have {rows} rows; 0 is none")
        if rows == 0:
            self.drop_table(table)
            return
        eviction = eviction or self._eviction
        if eviction not in get_args(Eviction):
            raise ConfigError(f"eviction must be lru, lfu, random or fifo, not {eviction!r}")
        held = self._memory.make(table, rows, eviction, on_demand=on_demand)
        held.threads = self._threads
        self._unmap(table)
        if used_only:
            self._used_only.add(table)
        self._caches[table] = self._tables[table] = held

    def drop_table(self, table: EmbeddingTable) -> None:
        """Remove ``table`` and free its memory."""
        self._tables.pop(table, None)
        self._used_only.discard(table)
        self._unmap(table)
        if self._caches.pop(table, None) is not None and self._memory.shared:
            self._memory.shared.drop(table)

    def map_table(self, table: EmbeddingTable, mapped: OverlaidTable) -> None:
        """Read ``table``, which has a capacity, from ``mapped`` first.

        The rows of the file should be in memory: readers wait for those that are not. From now on `insert`
        drops rows that the file answers. Changes that hide rows of the file are inserted just before: all
        while there is room, then, or with ``used_only``, only those of rows in use. Attached processes read
        the file, too. Raises KeyError for a table without capacity, OSError if the file's marks cannot be
        shared."""
        held, shared = self._caches[table], self._memory.shared
        uses = np.zeros(mapped.file.header.rows, np.uint8)
        if shared is not None:
            uses = shared.share_mapped(table, mapped)
        self._mapped[table] = mapped
        self._use_counts[table] = UseCounts(mapped.file.table, uses)
        self._tables[table] = self._layered(mapped.file.table, held)
        mapped.on_hiding = partial(self._replace, table)

    def _unmap(self, table: EmbeddingTable) -> None:
        self._use_counts.pop(table, None)
        mapped = self._mapped.pop(table, None)
        if mapped is not None and all(each is not mapped for each in self._mapped.values()):
            mapped.on_hiding = None

    def is_mapped(self, table: EmbeddingTable) -> bool:
        """True after `map_table`."""
        return table in self._mapped

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
        held = self._caches.get(table)
        if held is None:
            return
        mapped = self._mapped.get(table)
        if mapped is not None and vectors is not None and not resident_only:
            others = np.flatnonzero(~mapped.answers_directly(keys))
            keys, vectors, versions = keys[others], vectors[others], versions[others]
        self._put(table, held, keys, vectors, versions, resident_only=resident_only)

    def _replace(
        self,
        table: EmbeddingTable,
        keys: KeyArray,
        vectors: VectorArray | None,
        versions: VersionArray,
    ) -> None:
        """Insert changes that are about to hide rows of the table's mapped file; see `map_table`.

        On the thread that writes the stores, so that no reader misses between the two."""
        held, counts = self._caches.get(table), self._use_counts.get(table)
        if held is None or counts is None:
            return
        is_full = held.rows + len(keys) > held.capacity
        if vectors is not None and (is_full or table in self._used_only):
            try:
                used = counts.used(keys)
            except RuntimeError:  # the file is damaged; the stores report it
                return
            if table in self._used_only:
                self._on_left_out(int(np.count_nonzero(~used)))
            keys, vectors, versions = keys[used], vectors[used], versions[used]
        self._put(table, held, keys, vectors, versions, resident_only=False)

    def _put(
        self,
        table: EmbeddingTable,
        held: CacheTable,
        keys: KeyArray,
        vectors: VectorArray | None,
        versions: VersionArray,
        *,
        resident_only: bool,
    ) -> None:
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
        if held := self._caches.get(table):
            held.evict(keys)

    def expire(self, table: EmbeddingTable, oldest: int, begin: int = 0) -> tuple[int, int]:
        """Evict rows with versions below ``oldest`` from a part of the table, from bucket ``begin`` on.

        Returns their number, and the bucket with which to continue, 0 at the end. Reads do not check the age
        of rows: so the thread that writes the cache calls this from time to time."""
        held = self._caches.get(table)
        if held is None:
            return 0, 0
        end = begin + _EXPIRED_AT_ONCE
        return held.expire(oldest, begin, _EXPIRED_AT_ONCE), end if end < held.buckets else 0

    def status(self) -> dict[str, Any]:
        """Describe the tables that are read from mapped files, and the shared memory if there is one."""
        mapped = list(self._mapped.values())
        size = sum(each.file.header.bytes for each in mapped)
        facts: dict[str, Any] = {"mapped_tables": len(mapped), "mapped_bytes": size}
        return facts | ({"shared_memory": s.status()} if (s := self._memory.shared) else {})

    def close(self) -> None:
        self._tables.clear()
        self._caches.clear()
        self._mapped.clear()
        self._use_counts.clear()
        if self._memory.shared:
            self._memory.shared.close()
