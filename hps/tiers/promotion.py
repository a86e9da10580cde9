"""PromotingTier: reports the keys of rows that a tier returned, so that they are promoted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hps.tiers.base import FetchContext, Part, Tier
from hps.tiers.wrappers import TierWrapper
from hps.types import EmbeddingTable, KeyArray

Promote = Callable[[EmbeddingTable, KeyArray], None]
"""``promote(table, keys)`` receives the keys of rows to copy upwards; it must not block."""


class PromotingTier(TierWrapper):
    """Passes the keys of rows that ``inner`` returned to ``promote``, but no defaults or deletions.

    Promotes nothing if the tier ``above`` was skipped: it may hold the rows already, and could not accept
    them now. As thread-safe as ``inner`` and ``promote``."""

    def __init__(self, inner: Tier, promote: Promote, above: str) -> None:
        super().__init__(inner)
        self._promote = promote
        self._above = above

    def fetch(self, parts: Sequence[Part], ctx: FetchContext) -> None:
        requested = [part.missing for part in parts]
        self.inner.fetch(parts, ctx)
        if self._above in ctx.degraded:
            return
        for part, positions in zip(parts, requested, strict=True):
            hits = positions[part.source[positions] != 0]
            if len(hits):
                self._promote(part.table, part.keys[hits])
