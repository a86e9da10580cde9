"""Reading the CPU cache's tables: what the process that owns them and those attached to it have in common."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hps.errors import BadRequest
from hps.native import COMPILED, CacheTable, gather_all, pool_bags
from hps.tiers.bags import Ask, Bags
from hps.tiers.base import FetchContext, Part, TierInfo
from hps.tiers.checks import check_bags, check_gather, check_part
from hps.types import EmbeddingTable, KeyArray, Source, VectorArray, oldest_tombstone

_INFO = TierInfo("cpu", Source.CPU, cache=True)
_NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class CacheStats:
    """How a table's share of the cache stands. ``evictions`` counts rows dropped to make room."""

    rows: int
    tombstones: int
    capacity: int
    bytes: int
    evictions: int


class CacheReads:
    """A table that is not held misses. ``threads``: how many one call with many keys may use; ``clock``
    returns Unix seconds and drives the forgetting of tombstones. Any number of threads may call."""

    def __init__(self, *, threads: int = 1, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._threads = threads
        self._tables: dict[EmbeddingTable, CacheTable] = {}

    @property
    def info(self) -> TierInfo:
        return _INFO

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

    def gather(self, asks: list[Ask], bags: Sequence[Bags] = (), /) -> bool:
        """See `FusedLookup.gather`."""
        if not COMPILED:
            self._check(asks, bags)
        try:
            if asks and not gather_all(self._tables, asks, self._threads):
                return False
            for each in bags:
                held = self._tables.get(each.table)
                if held is None:
                    return False
                each.missing = pool_bags(
                    held, each.keys, each.offsets, each.weights, each.divisors, each.out
                )
        except (TypeError, ValueError):
            self._check(asks, bags)  # says in words what the compiled table refused
            raise
        return True

    def complete(self, bags: Bags, rows: VectorArray) -> bool:
        """See `FusedLookup.complete`."""
        held = self._tables.get(bags.table)
        if held is None or bags.missing is None:
            return held is not None
        given = bags.offsets, bags.weights, bags.divisors, bags.out, bags.missing, rows
        return pool_bags(held, bags.keys, *given) is None

    def _check(self, asks: list[Ask], bags: Sequence[Bags]) -> None:
        for table, keys, out in asks:
            check_gather(table, keys, out)
        for each in bags:
            check_bags(each)

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

    def _hold(self, table: EmbeddingTable, held: CacheTable) -> None:
        held.threads = self._threads
        self._tables[table] = held

    def _oldest_tombstone(self, table: EmbeddingTable, held: CacheTable) -> int:
        return oldest_tombstone(table, self._clock()) if held.tombstones else 0
