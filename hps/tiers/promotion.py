"""Promoting: what a tier held goes to whoever copies rows upwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hps.tiers.base import FetchContext, Part, Tier
from hps.tiers.wrappers import TierWrapper
from hps.types import EmbeddingTable, KeyArray

Promote = Callable[[EmbeddingTable, KeyArray], None]
"""``promote(table, keys)`` takes the keys of rows to be copied upwards; it must not block."""


class PromotingTier(TierWrapper):
    """Hands the keys of rows that ``inner`` held to ``promote``; never defaults, nor deletions.

    Not when the tier ``above``, which had been asked first, was skipped: it may hold them, and could
    not take them now. As safe beside other threads as ``inner`` and ``promote`` are.
    """

    def __init__(self, inner: Tier, promote: Promote, above: str) -> None:
        super().__init__(inner)
        self._promote = promote
        self._above = above

    def fetch(self, parts: Sequence[Part], ctx: FetchContext) -> None:
        asked = [part.missing for part in parts]
        self.inner.fetch(parts, ctx)
        if self._above in ctx.degraded:
            return
        for part, positions in zip(parts, asked, strict=True):
            found = positions[part.source[positions] != 0]
            if len(found):
                self._promote(part.table, part.keys[found])
