"""FusedLookup: copies rows from memory straight into a request's output, without parts.

A second, optional protocol besides `Tier`. Most requests find every key in the cache. For those, the
deduplication and a fetch's results per key (versions, sources, misses) would cost more than the lookup
itself. Rows that are pooled are not written anywhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

from hps.tiers.base import Ask, Bags, Tier, TierInfo
from hps.tiers.chain import TierChain
from hps.tiers.wrappers import FetchObserver, MeteredTier
from hps.types import EmbeddingTable, VectorArray


class GatherFunction(Protocol):
    """The signature of `FusedLookup.gather`."""

    def __call__(self, asks: list[Ask], bags: Sequence[Bags] = (), /) -> bool: ...


@runtime_checkable
class FusedLookup(Protocol):
    """A tier in memory that can answer a whole request, or report its misses."""

    @property
    def info(self) -> TierInfo: ...

    def gather(self, asks: list[Ask], bags: Sequence[Bags] = (), /) -> bool:
        """Write the row of every key of ``asks`` to its ``out``, and pool ``bags``.

        Returns False if a key of ``asks`` has no row in this tier or is deleted, or if the tier does
        not hold a table. The outputs are then undefined, and the caller takes the slow path. Misses of
        ``bags`` do not return False; they are listed in ``Bags.missing``. Counts as a use of the keys.
        Thread-safe like `fetch`."""
        ...

    def complete(self, bags: Bags, rows: VectorArray) -> bool:
        """Pool again the bags with misses, with ``rows (m, dim)`` for the missing keys.

        Returns False if a row that was not missing has left this tier since the gather."""
        ...


def fused_lookup_of(tier: Tier) -> FusedLookup | None:
    """Return the fused lookup of ``tier``, or of a chain's first tier; None if it has none.

    Looks through `MeteredTier`, and then reports gathers to its observer."""
    if isinstance(tier, TierChain):
        return fused_lookup_of(tier.tiers[0]) if tier.tiers else None
    if isinstance(tier, MeteredTier):
        inner = fused_lookup_of(tier.inner)
        return None if inner is None else _MeteredGather(inner, tier.observe)
    return tier if isinstance(tier, FusedLookup) else None


class _MeteredGather:
    """Reports the rows of successful gathers to ``observe``.

    Misses are not reported here but when the slow path fetches them, so a gather that returns False is not
    reported at all."""

    def __init__(self, inner: FusedLookup, observe: FetchObserver) -> None:
        self.inner = inner
        self._observe = observe

    @property
    def info(self) -> TierInfo:
        return self.inner.info

    def gather(self, asks: list[Ask], bags: Sequence[Bags] = (), /) -> bool:
        return self.prepare([(each[0], len(each[1])) for each in [*asks, *map(_ask, bags)]])(
            asks, bags
        )

    def complete(self, bags: Bags, rows: VectorArray) -> bool:
        return self.inner.complete(bags, rows)

    def prepare(self, sizes: Sequence[tuple[EmbeddingTable, int]]) -> GatherFunction:
        inner, clock = prepare_gather(self.inner, sizes), time.perf_counter
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


def _ask(bags: Bags) -> Ask:
    return bags.table, bags.keys, bags.out


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
