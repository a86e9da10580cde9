"""Bags: keys whose rows are read and pooled in one pass."""

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
    """Keys ``(n,) int64`` of a table, possibly repeated, pooled into ``out (bags, dim)``.

    Bag ``b`` has the keys ``offsets[b]:offsets[b + 1]`` of ``offsets (bags + 1,) int64``. Without
    offsets all bags have the same number of keys. Each row is multiplied by its weight in ``weights (n,)
    float32``, and each sum is divided by its divisor in ``divisors (bags,) float32``. An empty bag, and a
    bag with divisor 0, gets zeros. Sums are float32 and added in the order of the keys.

    A gather sets ``missing (m,)``: the ascending positions of the keys without a row in this tier, or
    None if all have one. ``out`` is undefined for bags with missing keys."""

    table: EmbeddingTable
    keys: KeyArray
    out: VectorArray
    offsets: IndexArray | None = None
    weights: NDArray[np.float32] | None = None
    divisors: NDArray[np.float32] | None = None
    missing: IndexArray | None = None
