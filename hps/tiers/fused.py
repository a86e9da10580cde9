"""FusedLookup: rows straight from memory to where they are wanted, past parts and their bookkeeping.

A second, optional protocol beside `Tier`: most requests find every key in the cache, and for those a
fetch's reports per key (versions, sources, what is missing) and the deduplication before it cost more
than the lookup itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from hps.tiers.base import Tier, TierInfo
from hps.tiers.chain import TierChain
from hps.types import EmbeddingTable, KeyArray, VectorArray

Ask = tuple[EmbeddingTable, KeyArray, VectorArray]
"""A table, keys ``(n,) int64`` that may repeat, and ``out (n, dim)`` of its dtype for their rows."""


@runtime_checkable
class FusedLookup(Protocol):
    """A tier in memory that can answer a whole request, or say that it can't."""

    @property
    def info(self) -> TierInfo: ...

    def gather(self, asks: Sequence[Ask]) -> bool:
        """Write the row of every key to its place.

        False when a key has no row here, be it deleted: what is in the outs has no meaning then, and
        the request goes the ordinary way. Counts as a use of the keys. Thread-safe as `fetch`.
        """
        ...


def fused(tier: Tier) -> FusedLookup | None:
    """The one-pass lookup of ``tier``, or of the first tier of a chain; None when it has none."""
    while isinstance(tier, TierChain) and tier.tiers:
        tier = tier.tiers[0]
    return tier if isinstance(tier, FusedLookup) else None
