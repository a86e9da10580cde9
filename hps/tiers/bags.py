"""Bags: keys whose rows are pooled while they are read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hps.types import EmbeddingTable, IndexArray, KeyArray, VectorArray

Ask = tuple[EmbeddingTable, KeyArray, VectorArray]
"""A table, keys ``(n,) int64`` that may repeat, and ``out (n, dim)`` of its dtype for their rows."""

POOLED_DTYPES = frozenset({np.dtype(np.float32), np.dtype(np.float16)})
"""Row dtypes that `Bags` can pool."""


@dataclass(slots=True)
class Bags:
    """Keys ``(n,) int64`` of a table, which may repeat, whose rows are pooled into ``out (bags, dim)``.

    Bag ``b`` has the keys ``offsets[b]:offsets[b + 1]`` of ``offsets (bags + 1,) int64``; without, all have
    as many. Rows are multiplied by ``weights (n,) float32``, sums divided by ``divisors (bags,)
    float32``; an empty bag, and one whose divisor is 0, gets zeros. Sums are taken in the order of
    the keys and in float32. ``missing (m,)``: after a gather, the ascending positions of the keys
    that have no row here, None when all have; what their bags have in ``out`` has no meaning yet.
    """

    table: EmbeddingTable
    keys: KeyArray
    out: VectorArray
    offsets: IndexArray | None = None
    weights: NDArray[np.float32] | None = None
    divisors: NDArray[np.float32] | None = None
    missing: IndexArray | None = None
