"""Reads of the CPU cache's tables, by the owner and by attached processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hps.cuda.miss_fill import MissBatch
from hps.errors import BadRequest
from hps.native import (
    COMPILED,
    CacheTable,
    LayeredTable,
    MappedTable,
    WorkerPool,
    gather_all,
    gather_misses,
)
from hps.tiers.base import Ask, Bags, FetchContext, Part, TierInfo
from hps.tiers.checks import check_bags, check_gather, check_part
from hps.tiers.cpu.use_counts import UseCounts
from hps.types import EmbeddingTable, KeyArray, Source, VectorArray, oldest_tombstone

_NOTHING = np.empty(0, np.int64)
_GATHERS_PER_COUNT = 32


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Statistics of one table in the cache. ``evictions`` counts rows dropped to make room."""

    rows: int
    tombstones: int
    capacity: int
    bytes: int
    evictions: int


class CacheReads:
    """Reads tables; a table that is not in the cache misses. Thread-safe.

    A table may have its rows in a mapped file: the file is read first, and the cache holds the rows that
    replace those of the file, or that the file does not have.

    ``threads``: the most threads for one call with many keys. ``clock`` returns Unix seconds and drives
    the expiry of tombstones."""

    info = TierInfo("cpu", Source.CPU, cache=True)

    def __init__(self, *, threads: int = 1, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._threads = threads
        self._caches: dict[EmbeddingTable, CacheTable] = {}
        self._tables: dict[EmbeddingTable, CacheTable | LayeredTable] = {}  # what reads ask
        self._use_counts: dict[EmbeddingTable, UseCounts] = {}
        self._gathers = 0

    def fetch(self, parts: Sequence[Part], ctx: FetchContext) -> None:
        for part in parts:
            held = self._tables.get(part.table)
            if held is None:
                continue
            if not COMPILED:
                check_part(part)
            oldest = self._oldest_tombstone(part.table, held)
            try:
                left = held.fetch(
                    part.keys, part.missing, oldest, part.out, part.versions, part.source
                )
            except (TypeError, ValueError):
                check_part(part)  # raises an error that says why the arrays were rejected
                raise
            part.missing = _NOTHING if left is None else left

    def gather(self, asks: list[Ask], bags: Sequence[Bags] = (), /) -> bool:
        """Write the vector of every key of ``asks`` to its ``out``, and pool ``bags``.

        Returns False if a key of ``asks`` has no row in this cache or is deleted, or if a table is not in
        it. The outputs are then undefined, and the caller takes the slow path. Misses of ``bags`` do not
        return False; they are listed in ``Bags.missing``. Counts as a use of the keys."""
        if not COMPILED:
            self._check(asks, bags)
        try:
            if asks and not gather_all(self._tables, asks, self._threads):
                return False
            for each in bags:
                held = self._tables.get(each.table)
                if held is None:
                    return False
                each.missing = held.pool_bags(
                    each.keys, each.offsets, each.weights, each.divisors, each.out
                )
        except (TypeError, ValueError):
            self._check(asks, bags)  # raises an error that says why the arrays were rejected
            raise
        if self._use_counts:
            self._count_uses(asks, bags)
        return True

    def _count_uses(self, asks: list[Ask], bags: Sequence[Bags]) -> None:
        """Count the uses of mapped rows in some of the gathers."""
        self._gathers += 1  # threads may lose some
        if self._gathers % _GATHERS_PER_COUNT:
            return
        for table, keys in (*((t, k) for t, k, _ in asks), *((b.table, b.keys) for b in bags)):
            if (counts := self._use_counts.get(table)) is not None:
                with suppress(RuntimeError):  # the file is damaged; the stores report it
                    counts.add(keys)

    def gather_misses(self, batch: MissBatch, pool: WorkerPool | None = None) -> int:
        """Write the rows that this cache has of a batch of misses; see `MissBatch`.

        Returns the number of keys without a row, which includes deleted keys. Counts as a use of the rows.
        ``pool``: threads to gather with; None: the caller's alone."""
        left = gather_misses(
            [self._tables.get(table) for table in batch.tables],
            batch.bases,
            batch.keys,
            batch.positions,
            batch.rows,
            batch.sources,
            int(self.info.source),
            batch.counts,
            batch.listed,
            pool,
            batch.placing,
            batch.stream,
        )
        batch.is_placed = batch.placing is not None
        return left

    def native_tables(
        self, tables: Sequence[EmbeddingTable]
    ) -> list[CacheTable | LayeredTable | None]:
        """Return the memory of each of ``tables``, for native readers; None for one that is kept out."""
        return [self._tables.get(table) for table in tables]

    def complete(self, bags: Bags, vectors: VectorArray) -> bool:
        """Pool again the bags with misses, with ``vectors (m, dim)`` float32 for the missing keys.

        Returns False if a row that was not missing has left this cache since the gather."""
        held = self._tables.get(bags.table)
        if held is None or bags.missing is None:
            return held is not None
        supplied = bags.missing, vectors
        missing = held.pool_bags(
            bags.keys, bags.offsets, bags.weights, bags.divisors, bags.out, supplied
        )
        return missing is None

    def _check(self, asks: list[Ask], bags: Sequence[Bags]) -> None:
        for table, keys, out in asks:
            check_gather(table, keys, out)
        for each in bags:
            check_bags(each)

    def top_k(self, table: EmbeddingTable, n: int) -> tuple[KeyArray, NDArray[np.uint8]]:
        """Return the keys (k,) of the ``n`` hottest rows, hottest first, with scores (k,) from 255.

        Scores follow the last use (``lru``), the insertion (``fifo``, ``random``) or the frequency of
        use (``lfu``, and tables with a mapped file). Scans every bucket."""
        if n < 0:
            raise BadRequest(f"table {table.id}: cannot list {n} keys")
        if (counts := self._use_counts.get(table)) is not None:
            return counts.top_k(n)
        held = self._caches.get(table)
        return held.top_k(n) if held else (_NOTHING, np.empty(0, np.uint8))

    def size(self, table: EmbeddingTable) -> int:
        """Number of rows of ``table``, without tombstones."""
        held = self._caches.get(table)
        return held.rows if held else 0

    def capacity(self, table: EmbeddingTable) -> int:
        """The most rows that the cache keeps of ``table``; 0 if it is kept out."""
        held = self._caches.get(table)
        return held.capacity if held else 0

    def stats(self, table: EmbeddingTable) -> CacheStats:
        """Statistics of ``table``; all zero if it is kept out."""
        held = self._caches.get(table)
        if held is None:
            return CacheStats(0, 0, 0, 0, 0)
        return CacheStats(held.rows, held.tombstones, held.capacity, held.bytes, held.evictions)

    def _layered(self, mapped: MappedTable, cache: CacheTable) -> LayeredTable:
        """The rows of ``mapped``, then those of ``cache``."""
        layered = LayeredTable(mapped, cache, int(self.info.source))
        layered.threads = self._threads
        return layered

    def _oldest_tombstone(self, table: EmbeddingTable, held: CacheTable | LayeredTable) -> int:
        return oldest_tombstone(table, self._clock()) if held.tombstones else 0
