"""Ranking of hot keys: by the scores of one cache, or merged from several caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hps.native import dedup
from hps.types import EmbeddingTable, KeyArray

HotKeys = tuple[KeyArray, NDArray[np.uint8]]
"""Keys (n,), hottest first, and their scores (n,), 255 the highest."""


class RankedCache(Protocol):
    """A cache that ranks its keys by use."""

    def top_k(self, table: EmbeddingTable, n: int) -> HotKeys: ...

    def capacity(self, table: EmbeddingTable) -> int: ...


class MergedRanking:
    """The ranking of several ``caches``, in lookup order, as one.

    The first cache answers most requests, so its hot keys look cold to the later caches. Therefore its keys
    rank before theirs."""

    def __init__(self, caches: Sequence[RankedCache]) -> None:
        self._caches = tuple(caches)

    def top_k(self, table: EmbeddingTable, n: int) -> HotKeys:
        """Return the ``n`` hottest keys, each once, with its score in the first cache that has it."""
        keys, scores = np.empty(0, np.int64), np.empty(0, np.uint8)
        for cache in self._caches:
            if len(keys) >= n:
                break
            more, their_scores = cache.top_k(table, n)
            scores = np.concatenate([scores, their_scores])
            keys, numbers = dedup(np.concatenate([keys, more]))
            # Distinct keys are numbered as they appear.
            seen = np.maximum.accumulate(np.concatenate([[-1], numbers]))
            scores = scores[seen[1:] > seen[:-1]][:n]
            keys = keys[:n]
        return keys, scores

    def capacity(self, table: EmbeddingTable) -> int:
        """Return the most keys that `top_k` can return."""
        return sum(cache.capacity(table) for cache in self._caches)


def hottest(keys: KeyArray, scores: NDArray[np.unsignedinteger[Any]], n: int) -> HotKeys:
    """Return the ``n`` of ``keys (m,)`` with the highest ``scores (m,)``, highest first.

    A returned score is 255 minus the distance to the highest score, at least 0."""
    if not len(keys):
        return keys[:0], np.empty(0, np.uint8)
    distance = scores.max() - scores
    if distance.max() < 1 << 16:
        distance = distance.astype(np.uint16)  # NumPy sorts uint16 by radix
    order = np.argsort(distance, kind="stable")[:n]
    return keys[order], (255 - np.minimum(distance[order], 255)).astype(np.uint8)
