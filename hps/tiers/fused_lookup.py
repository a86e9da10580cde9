"""FusedLookup: rows straight from memory to where they are wanted, past parts and their bookkeeping.

A second, optional protocol beside `Tier`: most requests find every key in the cache, and for those a
fetch's reports per key (versions, sources, what is missing) and the deduplication before it cost more
than the lookup itself. Rows that are wanted pooled need not even be written anywhere.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

from hps.tiers.bags import Ask, Bags
from hps.tiers.base import Tier, TierInfo
from hps.tiers.chain import TierChain
from hps.tiers.wrappers import FetchObserver, MeteredTier
from hps.types import EmbeddingTable, VectorArray


class GatherFunction(Protocol):
    """`FusedLookup.gather`."""

    def __call__(self, asks: list[Ask], bags: Sequence[Bags] = (), /) -> bool: ...


@runtime_checkable
class FusedLookup(Protocol):
    """A tier in memory that can answer a whole request, or say what it lacks."""

    @property
    def info(self) -> TierInfo: ...

    def gather(self, asks: list[Ask], bags: Sequence[Bags] = (), /) -> bool:
        """Write the row of every key of ``asks`` to its place, and pool ``bags``.

        False when a key of ``asks`` has no row here, be it deleted, or a table is not held at all: what
        is in the outs has no meaning then, and the request goes the ordinary way. What is lacking
        of ``bags`` is in their ``missing``. Counts as a use of the keys. Thread-safe as `fetch`.
        """
        ...

    def complete(self, bags: Bags, rows: VectorArray) -> bool:
        """Pool those bags anew that lack rows, with ``rows (m, dim)`` for the keys that are missing.

        False when another row of theirs is no longer here.
        """
        ...


def fused_lookup_of(tier: Tier) -> FusedLookup | None:
    """The one-pass lookup of ``tier``, seen through meters, or of the first tier of a chain; None when
    it has none."""
    if isinstance(tier, TierChain):
        return fused_lookup_of(tier.tiers[0]) if tier.tiers else None
    if isinstance(tier, MeteredTier):
        inner = fused_lookup_of(tier.inner)
        return None if inner is None else _MeteredGather(inner, tier.observe)
    return tier if isinstance(tier, FusedLookup) else None


class _MeteredGather:
    """Tells ``observe`` of every gather and the rows it found; what it lacked is observed when it is
    fetched the ordinary way, and a gather that failed not at all."""

    def __init__(self, inner: FusedLookup, observe: FetchObserver) -> None:
        self.inner = inner
        self._observe = observe

    @property
    def info(self) -> TierInfo:
        return self.inner.info

    def gather(self, asks: list[Ask], bags: Sequence[Bags] = (), /) -> bool:
        return self.alike([(each[0], len(each[1])) for each in [*asks, *map(_ask, bags)]])(
            asks, bags
        )

    def complete(self, bags: Bags, rows: VectorArray) -> bool:
        return self.inner.complete(bags, rows)

    def alike(self, sizes: Sequence[tuple[EmbeddingTable, int]]) -> GatherFunction:
        inner, clock = prepare_gather(self.inner, sizes), time.perf_counter
        everything = [(table, n, n) for table, n in sizes]
        # Who has to look up a counter per table prefers to do it once.
        observe_alike = getattr(self._observe, "alike", None)
        found_all: Any = (
            observe_alike(everything) if observe_alike else partial(self._observe, everything)
        )

        def gather(asks: list[Ask], bags: Sequence[Bags] = (), /) -> bool:
            start = clock()
            if not inner(asks, bags):
                return False
            seconds = clock() - start
            for each in bags:
                if each.missing is not None:
                    self._observe(_found(asks, bags), seconds)
                    return True
            found_all(seconds)
            return True

        return gather


def _ask(bags: Bags) -> Ask:
    return bags.table, bags.keys, bags.out


def _found(asks: list[Ask], bags: Sequence[Bags]) -> list[tuple[EmbeddingTable, int, int]]:
    """What a gather found, as if it had not been asked for more."""
    sizes = [(table, len(keys)) for table, keys, _ in asks]
    for each in bags:
        lacking = 0 if each.missing is None else len(each.missing)
        sizes.append((each.table, len(each.keys) - lacking))
    return [(table, n, n) for table, n in sizes]


def prepare_gather(
    tier: FusedLookup, sizes: Sequence[tuple[EmbeddingTable, int]]
) -> GatherFunction:
    """``tier.gather`` for asks, then bags, that all have these tables and numbers of keys, in this order."""
    return tier.alike(sizes) if isinstance(tier, _MeteredGather) else tier.gather
