"""TierChain: several tiers as one. Fetches go down the chain, writes go up."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from hps.errors import ConfigError
from hps.tiers.base import FetchContext, Part, Tier, TierInfo
from hps.types import EmbeddingTable, KeyArray, Source, VectorArray, VersionArray


class TierChain:
    """Tiers in lookup order, the fastest first; may be empty.

    `fetch` asks each tier for the misses of the tiers above it, and stops when none are left. The mutating
    verbs go from the bottom up: if a tier raises, the tiers above it are unchanged, so a cache never holds
    a row that its store rejected. As thread-safe as its tiers."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.tiers = tuple(tiers)
        self.info = _summary(self.tiers)

    def fetch(self, parts: Sequence[Part], ctx: FetchContext) -> None:
        for tier in self.tiers:
            parts = [part for part in parts if len(part.missing)]
            if not parts:
                return
            tier.fetch(parts, ctx)

    def insert(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        for tier in reversed(self.tiers):
            tier.insert(table, keys, vectors, versions)

    def update(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        for tier in reversed(self.tiers):
            tier.update(table, keys, vectors, versions)

    def delete(self, table: EmbeddingTable, keys: KeyArray, versions: VersionArray) -> None:
        for tier in reversed(self.tiers):
            tier.delete(table, keys, versions)

    def evict(self, table: EmbeddingTable, keys: KeyArray) -> None:
        for tier in reversed(self.tiers):
            tier.evict(table, keys)

    def close(self) -> None:
        """Close every tier, even if one raises."""
        with ExitStack() as stack:
            for tier in reversed(self.tiers):
                stack.callback(tier.close)


def _summary(tiers: tuple[Tier, ...]) -> TierInfo:
    """Combine the tiers' `TierInfo`.

    The chain blocks, is durable or is shared if any tier is; it is a cache only if every tier is. Its name
    joins the tiers' names. ``source`` is the first tier's; each row still reports the tier it came from."""
    infos = [tier.info for tier in tiers]
    if not infos:
        return TierInfo("empty", Source.DEFAULT, cache=True)
    memories = {info.memory for info in infos}
    if len(memories) > 1:
        memory_of_each = ", ".join(f"{info.name} in {info.memory} memory" for info in infos)
        raise ConfigError(
            f"the tiers of a chain must share one memory, got {memory_of_each}; bridge them"
        )
    return TierInfo(
        name="+".join(info.name for info in infos),
        source=infos[0].source,
        memory=infos[0].memory,
        blocking=any(info.blocking for info in infos),
        volatile=all(info.volatile for info in infos),
        shared=any(info.shared for info in infos),
        cache=all(info.cache for info in infos),
    )
