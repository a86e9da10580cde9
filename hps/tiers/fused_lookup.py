"""Fused lookup: copies rows from a cache in memory straight into a request's output, without parts.

Most requests find every key in the cache. For those, the deduplication and a fetch's results per key
(versions, sources, misses) would cost more than the lookup itself. Rows that are pooled are not written
anywhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hps.cuda.miss_fill import MissBatch
from hps.native import CacheTable, LayeredTable, WorkerPool
from hps.tiers.base import Ask, Bags, Tier, TierInfo
from hps.tiers.chain import TierChain
from hps.tiers.cpu.cache_reads import CacheReads
from hps.tiers.wrappers import FetchObserver, MeteredTier
from hps.types import EmbeddingTable, VectorArray

GatherFunction = Callable[[list[Ask], Sequence[Bags]], bool]
"""The signature of `CacheReads.gather`."""


def fused_lookup_of(tier: Tier) -> FusedLookup | None:
    """Return the cache that ``tier`` is, or a chain's first tier; None if that is not one in memory.

    Looks through `MeteredTier`, and then reports gathers to its observer."""
    if isinstance(tier, TierChain):
        return fused_lookup_of(tier.tiers[0]) if tier.tiers else None
    if isinstance(tier, MeteredTier):
        inner = fused_lookup_of(tier.inner)
        return None if inner is None else _MeteredGather(inner, tier.observe)
    return tier if isinstance(tier, CacheReads) else None


class _MeteredGather:
    """Reports the rows of successful gathers to ``observe``.

    Misses are not reported here but when the slow path fetches them, so a gather that returns False is not
    reported at all."""

    def __init__(self, inner: FusedLookup, observe: FetchObserver) -> None:
        self.info: TierInfo = inner.info
        self.complete: Callable[[Bags, VectorArray], bool] = inner.complete
        self.native_tables: Callable[
            [Sequence[EmbeddingTable]], list[CacheTable | LayeredTable | None]
        ]
        self.native_tables = inner.native_tables
        self._inner = inner
        self._observe = observe

    def gather(self, asks: list[Ask], bags: Sequence[Bags] = (), /) -> bool:
        sizes = [(table, len(keys)) for table, keys, _ in asks]
        sizes += [(each.table, len(each.keys)) for each in bags]
        return self.prepare(sizes)(asks, bags)

    def gather_misses(self, batch: MissBatch, pool: WorkerPool | None = None) -> int:
        before, start = batch.counts[:, 1].copy(), time.perf_counter()
        left = self._inner.gather_misses(batch, pool)
        seconds = time.perf_counter() - start
        found = (batch.counts[:, 1] - before).tolist()
        hits = [(table, n, n) for table, n in zip(batch.tables, found, strict=True) if n]
        if hits:
            self._observe(hits, seconds)
        return left

    def prepare(self, sizes: Sequence[tuple[EmbeddingTable, int]]) -> GatherFunction:
        inner, clock = prepare_gather(self._inner, sizes), time.perf_counter
        everything = [(table, n, n) for table, n in sizes]
        # An observer may offer `prepare`, to look up its counters once instead of at each gather.
        prepare = getattr(self._observe, "prepare", None)
        observe_all: Any = prepare(everything) if prepare else partial(self._observe, everything)

        def gather(asks: list[Ask], bags: Sequence[Bags] = (), /) -> bool:
            start = clock()
            if not inner(asks, bags):
                return False
            seconds = clock() - start
            for each in bags:
                if each.missing is not None:
                    self._observe(_hits(asks, bags), seconds)
                    return True
            observe_all(seconds)
            return True

        return gather


FusedLookup = CacheReads | _MeteredGather


def _hits(asks: list[Ask], bags: Sequence[Bags]) -> list[tuple[EmbeddingTable, int, int]]:
    """Return ``(table, hits, hits)`` per ask and bags, as if only the hits had been requested."""
    sizes = [(table, len(keys)) for table, keys, _ in asks]
    for each in bags:
        misses = 0 if each.missing is None else len(each.missing)
        sizes.append((each.table, len(each.keys) - misses))
    return [(table, n, n) for table, n in sizes]


def prepare_gather(
    tier: FusedLookup, sizes: Sequence[tuple[EmbeddingTable, int]]
) -> GatherFunction:
    """Return a gather for asks, then bags, with exactly these tables and numbers of keys, in this order."""
    return tier.prepare(sizes) if isinstance(tier, _MeteredGather) else tier.gather
