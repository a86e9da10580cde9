"""FusedLookup: rows straight from memory to where they are wanted, past parts and their bookkeeping.

A second, optional protocol beside `Tier`: most requests find every key in the cache, and for those a
fetch's reports per key (versions, sources, what is missing) and the deduplication before it cost more
than the lookup itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

from hps.tiers.base import Tier, TierInfo
from hps.tiers.chain import TierChain
from hps.tiers.wrappers import Metered, Observe
from hps.types import EmbeddingTable, KeyArray, VectorArray

Ask = tuple[EmbeddingTable, KeyArray, VectorArray]
"""A table, keys ``(n,) int64`` that may repeat, and ``out (n, dim)`` of its dtype for their rows."""


@runtime_checkable
class FusedLookup(Protocol):
    """A tier in memory that can answer a whole request, or say that it can't."""

    @property
    def info(self) -> TierInfo: ...

    def gather(self, asks: list[Ask]) -> bool:
        """Write the row of every key to its place.

        False when a key has no row here, be it deleted: what is in the outs has no meaning then, and
        the request goes the ordinary way. Counts as a use of the keys. Thread-safe as `fetch`.
        """
        ...


def fused(tier: Tier) -> FusedLookup | None:
    """The one-pass lookup of ``tier``, seen through meters, or of the first tier of a chain; None when
    it has none."""
    if isinstance(tier, TierChain):
        return fused(tier.tiers[0]) if tier.tiers else None
    if isinstance(tier, Metered):
        inner = fused(tier.inner)
        return None if inner is None else _MeteredGather(inner, tier.observe)
    return tier if isinstance(tier, FusedLookup) else None


class _MeteredGather:
    """Tells ``observe`` of every gather that found all of its rows; what didn't is observed when it is
    fetched the ordinary way."""

    def __init__(self, inner: FusedLookup, observe: Observe) -> None:
        self.inner = inner
        self._observe = observe

    @property
    def info(self) -> TierInfo:
        return self.inner.info

    def gather(self, asks: list[Ask]) -> bool:
        return self.alike([(table, len(keys)) for table, keys, _ in asks])(asks)

    def alike(self, sizes: Sequence[tuple[EmbeddingTable, int]]) -> Callable[[list[Ask]], bool]:
        inner, clock = gather_alike(self.inner, sizes), time.perf_counter
        found = [(table, n, n) for table, n in sizes]
        # Who has to look up a counter per table prefers to do it once.
        observe_alike = getattr(self._observe, "alike", None)
        observe = observe_alike(found) if observe_alike else partial(self._observe, found)

        def gather(asks: list[Ask]) -> bool:
            start = clock()
            if not inner(asks):
                return False
            observe(clock() - start)
            return True

        return gather


def gather_alike(
    tier: FusedLookup, sizes: Sequence[tuple[EmbeddingTable, int]]
) -> Callable[[list[Ask]], bool]:
    """``tier.gather`` for asks that all have these tables and numbers of keys, in this order."""
    return tier.alike(sizes) if isinstance(tier, _MeteredGather) else tier.gather
