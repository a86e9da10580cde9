"""CpuCache: the hot rows in this process's memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from hps.errors import BadRequest, ConfigError
from hps.native import COMPILED, CacheTable, cache_bytes, dedup, gather_all
from hps.tiers.base import FetchContext, Part, TierInfo, newest_of_each
from hps.tiers.capacity import plan_capacity
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

__all__ = ["CacheStats", "CpuCache", "Eviction", "plan_capacity"]

MOST_ROWS = 2**32 - 2
_INFO = TierInfo("cpu", Source.CPU, cache=True)


_NOTHING = np.empty(0, np.int64)

Eviction = Literal["lru", "lfu", "random", "fifo"]
"""What makes room: the row whose last use is longest ago, the one used least (uses fade), any row, the
one inserted first."""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """How a table's share of the cache stands. ``evictions`` counts rows dropped to make room."""

    rows: int
    tombstones: int
    capacity: int
    bytes: int
    evictions: int


class CpuCache:
    """Keeps the hottest rows of each table, up to its capacity; hps/native/include/hps/cache_layout.hpp
    tells how. Rows may be of any dtype; they are copied, never converted.

    ``capacities``: rows per table. A table that has none, or 0, is kept out: it misses, and writes to
    it are dropped. ``eviction``: what makes room; ``evictions`` says it for single tables. Reads wait for
    nobody and may be called from many threads; writes take turns. ``clock`` returns Unix seconds and
    drives the forgetting of tombstones.
    """

    def __init__(
        self,
        capacities: Mapping[EmbeddingTable, int],
        *,
        eviction: Eviction = "lru",
        evictions: Mapping[EmbeddingTable, Eviction] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._eviction = eviction
        self._threads = 1
        self._tables: dict[EmbeddingTable, CacheTable] = {}
        for table, rows in capacities.items():
            self.add_table(table, rows, (evictions or {}).get(table))

    @property
    def info(self) -> TierInfo:
        return _INFO

    def add_table(self, table: EmbeddingTable, rows: int, eviction: Eviction | None = None) -> None:
        """Begin to keep ``table``, empty, with room for ``rows`` rows."""
        if rows < 0:
            raise ConfigError(f"the cache of table {table.id} can't have {rows} rows; 0 is none")
        if rows == 0:
            self.drop_table(table)
            return
        eviction = eviction or self._eviction
        if eviction not in get_args(Eviction):
            raise ConfigError(f"eviction must be lru, lfu, random or fifo, not {eviction!r}")
        like = np.empty((0, table.dim), table.dtype)
        try:
            held = CacheTable(rows, like, eviction, int(Source.CPU))
        except (MemoryError, ValueError) as error:
            size = (
                cache_bytes(rows, table.row_bytes) if rows <= MOST_ROWS else rows * table.row_bytes
            )
            raise ConfigError(
                f"no memory for a cache of {rows} rows ({size / 2**20:,.0f} MiB) of table "
                f"{table.id}; lower the cache's capacity_bytes, share or cache_rows"
            ) from error
        self._tables[table] = held

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
            oldest = self._oldest_tombstone(part.table, held)
            try:
                left = held.fetch(
                    part.keys, part.missing, oldest, part.out, part.versions, part.source
                )
            except (TypeError, ValueError):
                check_part(part)  # the compiled table refused the arrays; this says why in words
                raise
            part.missing = _NOTHING if left is None else left

    def gather(self, asks: list[Ask]) -> bool:
        """See `FusedLookup.gather`."""
        if not COMPILED:
            self._check(asks)
        try:
            return gather_all(self._tables, asks, self._threads)
        except (TypeError, ValueError):
            self._check(asks)  # says in words what the compiled table refused
            raise

    def _check(self, asks: list[Ask]) -> None:
        for table, keys, out in asks:
            check_gather(table, keys, out)

    def insert(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        self._write(table, keys, vectors, versions, resident_only=False)

    def update(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        self._write(table, keys, vectors, versions, resident_only=True)

    def delete(self, table: EmbeddingTable, keys: KeyArray, versions: VersionArray) -> None:
        """A tombstone enters colder than any row, so a flood of deletions drives out few rows."""
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
        # A key's row could make room for another of the same call, and its older one come after it.
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

    def top_k(self, table: EmbeddingTable, n: int) -> tuple[KeyArray, NDArray[np.uint8]]:
        """The keys (k,) of the ``n`` hottest rows of ``table``, hottest first, and their scores (k,) from
        255 down: how lately they were used (``lru``) or inserted (``fifo``, ``random``), or how often they
        are used (``lfu``). Looks at every bucket."""
        if n < 0:
            raise BadRequest(f"table {table.id}: can't list {n} keys")
        held = self._tables.get(table)
        return held.top_k(n) if held else (_NOTHING, np.empty(0, np.uint8))

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
        if held is None:
            return CacheStats(0, 0, 0, 0, 0)
        return CacheStats(held.rows, held.tombstones, held.capacity, held.bytes, held.evictions)

    def close(self) -> None:
        self._tables.clear()

    def _oldest_tombstone(self, table: EmbeddingTable, held: CacheTable) -> int:
        return oldest_tombstone(table, self._clock()) if held.tombstones else 0
