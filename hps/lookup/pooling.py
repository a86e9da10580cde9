"""Pooling: from one vector per key to one vector per sample.

A bag's vector is computed in float32 (rows of float64 in float64), and each operation is rounded:

1. ``sum``: the first row times its weight, then each further row times its weight is added, in the order of
   the keys. Without weights, the rows themselves are added.
2. ``mean`` divides every value by the sum of the bag's weights, added in the same order; without weights, by
   the number of keys.
3. ``sqrtn`` squares each weight, adds the squares in the same order, and divides every value by the square
   root of that sum; without weights, by the square root of the number of keys. This is the combiner
   ``sqrtn`` of TensorFlow's ``embedding_lookup_sparse``.

Divisors are float32 even if rows are float64. A bag whose divisor is 0, and a bag without keys, is zeros.
NaN in a weight or in a row reaches its sample, and no other.

Every kernel does the same (`hps/native/src/cache_pool.cpp`, `hps/cuda/pool.cu`, their NumPy twin), so the
bits of a vector do not depend on the kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.lookup.base import Feature
from hps.native import pool_rows, twin_pool
from hps.tiers.base import POOLED_DTYPES
from hps.types import IndexArray, JaggedKeys, Pooling, VectorArray

Floats = NDArray[np.float32]


def pool(
    rows: VectorArray,
    keys: JaggedKeys,
    pooling: Pooling,
    numbers: IndexArray | None = None,
    out: VectorArray | None = None,
    *,
    dtype: Any = None,
) -> VectorArray:
    """Pool the rows ``(., dim)`` of ``keys`` to ``(batch, dim)`` of ``dtype``, into ``out`` if given.

    ``dtype``: by default that of the rows. Key ``i`` has ``rows[numbers[i]]``, or ``rows[i]`` without
    ``numbers (n,)``. ``sum``, ``mean`` and ``sqrtn`` as above; ``none`` gives the rows themselves.
    """
    if not is_pooled(pooling, keys):
        picked = rows if numbers is None else rows.take(numbers, axis=0)
        return picked if dtype is None else picked.astype(dtype, copy=False)
    if out is None:
        out = np.empty((keys.batch, rows.shape[1]), rows.dtype if dtype is None else dtype)
    run = pool_rows if rows.dtype in POOLED_DTYPES else twin_pool.pool_rows
    by = divisors(keys, pooling)
    run(rows, numbers, offsets_of(keys), weights_of(keys), by, out)
    return out


def is_pooled(pooling: Pooling, keys: JaggedKeys) -> bool:
    """True if vectors are pooled from rows, instead of being rows."""
    return pooling != "none" and (keys.weights is not None or keys.hotness != 1)


def gives_narrow_rows(feature: Feature, keys: JaggedKeys) -> bool:
    """True if the vectors of ``keys`` are rows of a narrow format, which may be returned as stored."""
    if feature.max_norm is not None or is_pooled(feature.pooling, keys):
        return False
    return not feature.table.row_format.is_plain


def divisors(keys: JaggedKeys, pooling: Pooling) -> Floats | None:
    """Return the divisor of each bag's sum, ``(batch,)``; None if sums are not divided."""
    if pooling == "mean":
        return _summed_weights(keys, weights_of(keys))
    if pooling != "sqrtn":
        return None
    weights = weights_of(keys)
    with np.errstate(all="ignore"):
        squares = None if weights is None else weights * weights
        return np.sqrt(_summed_weights(keys, squares))


def _summed_weights(keys: JaggedKeys, weights: Floats | None) -> Floats:
    """Return the sum of each bag's ``weights (n,)``, ``(batch,)``; without weights, its number of keys."""
    if weights is not None:
        summed = np.empty((keys.batch, 1), np.float32)
        pool_rows(weights[:, None], None, offsets_of(keys), None, None, summed)
        return summed[:, 0]
    if keys.offsets is not None:
        return np.diff(keys.offsets).astype(np.float32)
    return np.full(keys.batch, keys.hotness, np.float32)


def offsets_of(keys: JaggedKeys) -> IndexArray | None:
    """Return the offsets as kernels take them: contiguous."""
    return None if keys.offsets is None else np.ascontiguousarray(keys.offsets)


def weights_of(keys: JaggedKeys) -> Floats | None:
    """Return the weights as kernels take them: contiguous."""
    return None if keys.weights is None else np.ascontiguousarray(keys.weights)
