"""From one vector per key to one vector per sample.

Sums are taken in the order of the keys, in float32 for float16 tables, in the table's type
otherwise. A bag without keys pools to zeros under every pooling. NaN in a weight or in a row is
carried through to its sample, and to no other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.types import JaggedKeys, Pooling, VectorArray


def pool(vectors: VectorArray, keys: JaggedKeys, pooling: Pooling) -> VectorArray:
    """Pool ``vectors (n, dim)``, one row per key of ``keys``, to ``(batch, dim)``.

    ``sum`` adds ``w * v``; ``mean`` divides that by the sum of the bag's weights (its number of keys
    when there are none), and gives zeros where that is 0. ``none`` returns ``vectors``.
    """
    if not is_pooled(pooling, keys):
        return vectors
    rows = vectors.astype(np.float32) if vectors.dtype == np.float16 else vectors
    with np.errstate(all="ignore"):  # overflow to infinity is an answer, not a warning
        if keys.weights is not None:
            rows = rows * keys.weights[:, None]
        pooled = _sum_bags(rows, keys)
        if pooling == "mean":
            _divide(pooled, _bag_weights(keys))
        return pooled.astype(vectors.dtype, copy=False)


def is_pooled(pooling: Pooling, keys: JaggedKeys) -> bool:
    """Whether vectors are made of rows, instead of being rows."""
    return pooling != "none" and (keys.weights is not None or keys.hotness != 1)


def divisors(keys: JaggedKeys) -> NDArray[np.float32]:
    """(batch,) what a mean in float32 divides by."""
    with np.errstate(all="ignore"):
        return _bag_weights(keys).astype(np.float32, copy=False)


def _sum_bags(rows: NDArray[Any], keys: JaggedKeys) -> NDArray[Any]:
    """(batch, ...) sums of each bag's ``rows (n, ...)``."""
    hotness = keys.hotness
    if hotness is not None:
        bags: NDArray[Any] = rows.reshape(keys.batch, hotness, *rows.shape[1:])
        summed: NDArray[Any] = np.add.reduce(bags, axis=1)
        return summed
    assert keys.offsets is not None
    pooled = np.zeros((keys.batch, *rows.shape[1:]), rows.dtype)
    # reduceat gives an empty bag its successor's first row, so empty bags are left out.
    filled = np.flatnonzero(keys.offsets[1:] > keys.offsets[:-1])
    if len(filled):
        pooled[filled] = np.add.reduceat(rows, keys.offsets[filled], axis=0)
    return pooled


def _bag_weights(keys: JaggedKeys) -> NDArray[Any]:
    """(batch,) what a mean divides by."""
    if keys.weights is not None:
        return _sum_bags(keys.weights, keys)
    if keys.offsets is not None:
        return np.diff(keys.offsets)
    return np.full(keys.batch, keys.hotness)


def _divide(pooled: NDArray[Any], by: NDArray[Any]) -> None:
    """``pooled (batch, dim) /= by (batch,)`` in place; zeros where ``by`` is 0."""
    empty = by == 0
    if empty.any():
        pooled[empty] = 0
        by = np.where(empty, by.dtype.type(1), by)
    pooled /= by[:, None].astype(pooled.dtype, copy=False)
