"""NumPy twin of pooling (src/cache_pool.cpp)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.types import IndexArray, KeyArray, VectorArray

Floats = NDArray[np.float32]


def pool_rows(
    rows: VectorArray,
    numbers: IndexArray | None,
    offsets: IndexArray | None,
    weights: Floats | None,
    divisors: Floats | None,
    out: VectorArray,
) -> None:
    """Pool like `CacheTable.pool_bags`, from an array: key ``i`` has ``rows[numbers[i]]``, or ``rows[i]``
    without ``numbers (n,)``. Rows of float64 are summed in float64."""
    vectors = rows if numbers is None else rows.take(numbers, axis=0)
    with np.errstate(all="ignore"):
        out[...] = pool(vectors, full_offsets(offsets, len(out), len(vectors)), weights, divisors)


def pool_bags(
    fetch: Callable[[KeyArray, VectorArray], NDArray[np.bool_]],
    keys: KeyArray,
    offsets: IndexArray | None,
    weights: Floats | None,
    divisors: Floats | None,
    out: VectorArray,
    supplied: tuple[IndexArray, VectorArray] | None,
) -> IndexArray | None:
    """Pool as `CacheTable.pool_bags` describes.

    ``fetch`` writes the rows (n, dim) of keys (n,), and returns which of these have no row."""
    bags, n = len(out), len(keys)
    offsets = full_offsets(offsets, bags, n)
    vectors = np.zeros((n, out.shape[1]), out.dtype)
    has_no_row, wanted = fetch(keys, vectors), np.ones(bags, bool)
    if supplied is not None:
        positions, rows = supplied
        wanted[:] = False
        wanted[np.searchsorted(offsets, positions, side="right") - 1] = True
        vectors[positions], has_no_row[positions] = rows, False
        has_no_row &= np.repeat(wanted, np.diff(offsets))
    with np.errstate(all="ignore"):
        out[wanted] = pool(vectors, offsets, weights, divisors)[wanted]
    missing = np.flatnonzero(has_no_row)
    return missing if len(missing) else None


def full_offsets(offsets: IndexArray | None, bags: int, n: int) -> IndexArray:
    """Return ``offsets (bags + 1,)``; without, those of bags with equally many of the ``n`` keys."""
    return np.arange(bags + 1) * (n // bags if bags else 0) if offsets is None else offsets


def pool(
    vectors: VectorArray, offsets: IndexArray, weights: Floats | None, divisors: Floats | None
) -> NDArray[Any]:
    """Pool ``vectors (n, dim)``, one per key, to ``(bags, dim)``; see `CacheTable.pool_bags`."""
    summed = _sum_in_order(vectors, offsets, weights)
    if divisors is None:
        return summed
    by = np.where(np.diff(offsets) > 0, divisors, 1)[:, None].astype(summed.dtype)
    return np.where(by == 0, by.dtype.type(0), summed / np.where(by == 0, by.dtype.type(1), by))


def _sum_in_order(
    vectors: VectorArray, offsets: IndexArray, weights: Floats | None
) -> NDArray[Any]:
    """Return the sums (bags, dim): adds the first rows of all bags, then their second ones, and so on."""
    rows = vectors.astype(np.result_type(vectors.dtype, np.float32))
    if weights is not None:
        rows *= weights[:, None]
    sizes = np.diff(offsets)
    total = np.zeros((len(sizes), rows.shape[1]), rows.dtype)
    filled = np.flatnonzero(sizes)
    total[filled] = rows[offsets[filled]]
    for i in range(1, int(sizes.max(initial=0))):
        longer = np.flatnonzero(sizes > i)
        total[longer] += rows[offsets[longer] + i]
    return total
