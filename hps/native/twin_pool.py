"""NumPy twin of pooling (src/cache_pool.cpp), and of gathers from several tables (bindings_gather.cpp)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.native.twin_rows import decode_rows, decoded
from hps.types import IndexArray, KeyArray, VectorArray

Floats = NDArray[np.float32]


def pool_rows(
    rows: VectorArray,
    numbers: IndexArray | None,
    offsets: IndexArray | None,
    weights: Floats | None,
    divisors: Floats | None,
    out: VectorArray,
    *,
    format: int | None = None,
) -> None:
    """Pool like `CacheTable.pool_bags`, from an array: key ``i`` has ``rows[numbers[i]]``, or ``rows[i]``
    without ``numbers (n,)``. Rows of float64 are summed in float64."""
    vectors = rows if numbers is None else rows.take(numbers, axis=0)
    if format is not None:
        vectors = decoded(vectors, out.shape[1], format)
    with np.errstate(all="ignore"):
        out[...] = pool(vectors, full_offsets(offsets, len(out), len(vectors)), weights, divisors)


def pool_bags(
    fetch: Callable[[KeyArray, VectorArray], NDArray[np.bool_]],
    like: VectorArray,
    keys: KeyArray,
    offsets: IndexArray | None,
    weights: Floats | None,
    divisors: Floats | None,
    out: VectorArray,
    supplied: tuple[IndexArray, Floats] | None,
    format: int | None,
) -> IndexArray | None:
    """Pool as `CacheTable.pool_bags` describes.

    ``fetch`` writes the rows of keys (n,), which are as those of ``like``, and returns which have none."""
    bags, n = len(out), len(keys)
    offsets = full_offsets(offsets, bags, n)
    rows = np.zeros((n, like.shape[1]), like.dtype)
    has_no_row, wanted = fetch(keys, rows), np.ones(bags, bool)
    vectors = rows.astype(np.float32) if format is None else decoded(rows, out.shape[1], format)
    if supplied is not None:
        positions, known = supplied
        wanted[:] = False
        wanted[np.searchsorted(offsets, positions, side="right") - 1] = True
        vectors[positions], has_no_row[positions] = known, False
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


def gather_all(
    tables: Mapping[Any, Any],
    requests: Sequence[tuple[Any, KeyArray, VectorArray]],
    threads: int = 1,
) -> bool:
    """Gather from a `CacheTable` or `MappedTable` for every ``(name of a table, keys (n,), out)``.

    ``out`` gets the rows as they are stored if it is ``(n, width)`` of their dtype, else their values:
    ``(n, dim)`` float32 or float16. False if a key has no row, or ``tables`` has no such table. The outs are
    undefined then."""
    held = [tables.get(name) for name, _, _ in requests]
    return all(
        table is not None and _gather(table, keys, out)
        for table, (_, keys, out) in zip(held, requests, strict=True)
    )


def _gather(table: Any, keys: KeyArray, out: VectorArray) -> bool:
    like = table.like
    if table.format is None or (out.dtype, out.shape[1]) == (like.dtype, like.shape[1]):
        return bool(table.gather(keys, out))
    rows = np.zeros((len(keys), like.shape[1]), like.dtype)
    if not table.gather(keys, rows):
        return False
    decode_rows(rows, None, out, table.format)
    return True
