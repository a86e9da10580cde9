"""FusedLookup: rows written straight from memory into the answer, without parts.

A second, optional protocol besides `Tier`. Most requests find every key in the cache; for those, a
fetch's results per key (versions, sources, misses) and the deduplication before it cost more than the
lookup itself. Rows that are pooled need not be written anywhere."""

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
    """The signature of `FusedLookup.gather`."""

    def __call__(self, asks: list[Ask], bags: Sequence[Bags] = (), /) -> bool: ...


@runtime_checkable
class FusedLookup(Protocol):
    """A tier in memory that can answer a whole request, or report its misses."""

    @property
    def info(self) -> TierInfo: ...

    def gather(self, asks: list[Ask], bags: Sequence[Bags] = (), /) -> bool:
        """Write the row of every key of ``asks`` to its ``out``, and pool ``bags``.

        False if a key of ``asks`` has no row here (also if it is deleted), or a table is not held at
        all: the contents of the outputs are then undefined, and the request takes the slow path. Misses
        of ``bags`` are in their ``missing``. Counts as a use of the keys. Thread-safe like `fetch`."""
        ...

    def complete(self, bags: Bags, rows: VectorArray) -> bool:
        """Pool the bags with misses again, with ``rows (m, dim)`` for the missing keys.

        False if another row of these bags is no longer here."""
        ...


def fused_lookup_of(tier: Tier) -> FusedLookup | None:
    """Return the fused lookup of ``tier`` (through meters), or of a chain's first tier; None without one."""
    if isinstance(tier, TierChain):
        return fused_lookup_of(tier.tiers[0]) if tier.tiers else None
    if isinstance(tier, MeteredTier):
        inner = fused_lookup_of(tier.inner)
        return None if inner is None else _MeteredGather(inner, tier.observe)
    return tier if isinstance(tier, FusedLookup) else None


class _MeteredGather:
    """Reports every gather and the rows it found to ``observe``.

    Its misses are reported when the slow path fetches them; a gather that returns False is not reported."""

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
        # An observer that looks up a counter per table may offer `alike`, to do so once.
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
    """Return the hits of a gather per table, in the form of a fetch without misses."""
    sizes = [(table, len(keys)) for table, keys, _ in asks]
    for each in bags:
        misses = 0 if each.missing is None else len(each.missing)
        sizes.append((each.table, len(each.keys) - misses))
    return [(table, n, n) for table, n in sizes]


def prepare_gather(
    tier: FusedLookup, sizes: Sequence[tuple[EmbeddingTable, int]]
) -> GatherFunction:
    """Return ``tier.gather`` for asks, then bags, with exactly these tables and numbers of keys, in this
    order."""
    return tier.prepare(sizes) if isinstance(tier, _MeteredGather) else tier.gather
