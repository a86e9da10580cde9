"""NumPy twins of the lookups without reports per key (bindings_gather.cpp)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.native.twin_cache import CacheTable
from hps.types import IndexArray, KeyArray, VectorArray

Floats = NDArray[np.float32]


def gather_all(
    tables: Mapping[Any, CacheTable],
    requests: Sequence[tuple[Any, KeyArray, VectorArray]],
    threads: int = 1,
) -> bool:
    """`CacheTable.gather` for every ``(name of a table, keys, out)``; False if a key has no row, or
    ``tables`` has no such table. The outs are undefined then."""
    held = [tables.get(name) for name, _, _ in requests]
    return all(
        table is not None and table.gather(keys, out)
        for table, (_, keys, out) in zip(held, requests, strict=True)
    )


def pool_bags(
    table: CacheTable,
    keys: KeyArray,
    offsets: IndexArray | None,
    weights: Floats | None,
    divisors: Floats | None,
    out: VectorArray,
    supplied: IndexArray | None = None,
    rows: VectorArray | None = None,
) -> IndexArray | None:
    """Pool the rows of ``keys (n,)``, each times its entry of ``weights (n,)``, to ``out (bags, dim)``.

    Sums are taken in order and in float32; each bag is divided by its entry of ``divisors (bags,)``; zeros
    for an empty bag and if the divisor is 0.

    Bag ``b`` has the keys ``offsets[b]:offsets[b + 1]``, of ``offsets (bags + 1,)``; without, all have
    equally many. ``rows (g, dim)`` are used for the keys at the ascending positions ``supplied (g,)``; then
    bags without any of these are left unchanged. Returns the positions of keys without a row, None if there
    are none; their bags are undefined. Counts as a use of the keys.
    """
    bags, n = len(out), len(keys)
    offsets = _offsets(offsets, bags, n)
    vectors = np.zeros((n, out.shape[1]), out.dtype)
    versions, source = np.zeros(n, np.uint64), np.zeros(n, np.uint8)
    table.fetch(keys, np.arange(n), 0, vectors, versions, source)
    has_no_row, wanted = source == 0, np.ones(bags, bool)
    if supplied is not None and rows is not None:
        wanted[:] = False
        wanted[np.searchsorted(offsets, supplied, side="right") - 1] = True
        vectors[supplied], has_no_row[supplied] = rows, False
        has_no_row &= np.repeat(wanted, np.diff(offsets))
    with np.errstate(all="ignore"):
        out[wanted] = _pooled(vectors, offsets, weights, divisors)[wanted]
    missing = np.flatnonzero(has_no_row)
    return missing if len(missing) else None


def pool_rows(
    rows: VectorArray,
    numbers: IndexArray | None,
    offsets: IndexArray | None,
    weights: Floats | None,
    divisors: Floats | None,
    out: VectorArray,
) -> None:
    """Pool like `pool_bags`, from an array: key ``i`` has ``rows[numbers[i]]``, or ``rows[i]`` without
    ``numbers (n,)``. Rows of float64 are summed in float64."""
    vectors = rows if numbers is None else rows.take(numbers, axis=0)
    with np.errstate(all="ignore"):
        out[...] = _pooled(vectors, _offsets(offsets, len(out), len(vectors)), weights, divisors)


def _offsets(offsets: IndexArray | None, bags: int, n: int) -> IndexArray:
    return np.arange(bags + 1) * (n // bags if bags else 0) if offsets is None else offsets


def _pooled(
    vectors: VectorArray, offsets: IndexArray, weights: Floats | None, divisors: Floats | None
) -> NDArray[Any]:
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
