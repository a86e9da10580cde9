"""Which keys are hot: of one cache by its scores, of several by which one is asked first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hps.types import EmbeddingTable, KeyArray

HotKeys = tuple[KeyArray, NDArray[np.uint8]]
"""Keys (n,), hottest first, and their scores (n,), 255 the highest."""


class RankedCache(Protocol):
    """A cache that knows its hottest keys."""

    def top_k(self, table: EmbeddingTable, n: int) -> HotKeys: ...

    def capacity(self, table: EmbeddingTable) -> int: ...


class MergedRanking:
    """``caches`` as one, the one asked first first. What that answers the others are not asked for, so it
    looks cold to them: its keys come before theirs."""

    def __init__(self, caches: Sequence[RankedCache]) -> None:
        self._caches = tuple(caches)

    def top_k(self, table: EmbeddingTable, n: int) -> HotKeys:
        """The ``n`` hottest keys, each once, with its score where it comes first."""
        found = [cache.top_k(table, n) for cache in self._caches]
        keys = np.concatenate([keys for keys, _ in found])
        scores = np.concatenate([scores for _, scores in found])
        first = np.sort(np.unique(keys, return_index=True)[1])[:n]
        return keys[first], scores[first]

    def capacity(self, table: EmbeddingTable) -> int:
        """The most keys that `top_k` can list."""
        return sum(cache.capacity(table) for cache in self._caches)


def hottest(keys: KeyArray, scores: NDArray[np.unsignedinteger[Any]], n: int) -> HotKeys:
    """The ``n`` of ``keys (m,)`` with the highest ``scores (m,)``, highest first, and how far each lies below
    the highest of all, from 255 down."""
    if not len(keys):
        return keys[:0], np.empty(0, np.uint8)
    behind = scores.max() - scores
    if behind.max() < 1 << 16:
        behind = behind.astype(np.uint16)  # sorted in one pass over its digits
    order = np.argsort(behind, kind="stable")[:n]
    return keys[order], (255 - np.minimum(behind[order], 255)).astype(np.uint8)


__all__ = ["HotKeys", "MergedRanking", "RankedCache", "hottest"]
