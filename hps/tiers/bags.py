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
    """Keys ``(n,) int64`` of a table, possibly repeated, pooled into ``out (bags, dim)``.

    Bag ``b`` has the keys ``offsets[b]:offsets[b + 1]`` of ``offsets (bags + 1,) int64``. Without
    offsets all bags have the same number of keys. Rows are multiplied by ``weights (n,) float32``; sums
    are divided by ``divisors (bags,) float32``. An empty bag, and a bag with divisor 0, gets zeros.
    Sums are float32, in the order of the keys.

    ``missing (m,)`` is set by a gather: the ascending positions of the keys that have no row here, or
    None if all have one. The contents of ``out`` for bags with missing keys are undefined."""

    table: EmbeddingTable
    keys: KeyArray
    out: VectorArray
    offsets: IndexArray | None = None
    weights: NDArray[np.float32] | None = None
    divisors: NDArray[np.float32] | None = None
    missing: IndexArray | None = None
