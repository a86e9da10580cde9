"""NumPy twins of the compiled kernels: slow, obvious, and the reference for their tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.types import IndexArray, KeyArray


def _rotate_right(x: NDArray[np.uint64], r: int) -> NDArray[np.uint64]:
    return (x >> np.uint64(r)) | (x << np.uint64(64 - r))


def _check(keys: KeyArray) -> None:
    if keys.dtype != np.int64 or keys.ndim != 1 or not keys.flags.c_contiguous:
        raise TypeError(f"keys must be contiguous int64 (n,), got {keys.dtype} {keys.shape}")


def partition_hash(keys: KeyArray) -> NDArray[np.uint64]:
    """Return HPS's hash ``(n,)`` of ``keys (n,)``, which chooses their partition.

    The mixer is Pelle Evensen's rrxmrrxmsx_0."""
    _check(keys)
    x = keys.view(np.uint64).copy()
    x ^= _rotate_right(x, 25) ^ _rotate_right(x, 50)
    x *= np.uint64(0xA24BAED4963EE407)
    x ^= _rotate_right(x, 24) ^ _rotate_right(x, 49)
    x *= np.uint64(0x9FB21C651E98DF25)
    return x ^ (x >> np.uint64(28))


def dedup(keys: KeyArray) -> tuple[KeyArray, IndexArray]:
    """Return the distinct keys in order of first appearance, and each key's position among them."""
    _check(keys)
    unique, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return unique[order], rank[inverse.reshape(-1)]


def stack_distances(ids: IndexArray, distinct: int) -> IndexArray:
    """Return the stack distances ``(n,)`` of the accesses ``ids (n,)``, each below ``distinct``.

    A distance is the number of different ids since the last access to the same id, itself included: an LRU
    cache of at least that many rows has the row. The first access to an id has -1. Raises ValueError
    for ``distinct`` above n, IndexError for an id outside of its range. Source: Mattson et al.,
    Evaluation techniques for storage hierarchies, 1970; counted by a Fenwick tree."""
    _check(ids)
    n = len(ids)
    if distinct > n:
        raise ValueError("stack_distances takes fewer than 2^32 - 1 ids, distinct of them")
    if n and not 0 <= ids.min() <= ids.max() < distinct:
        raise IndexError("an id is outside of 0..distinct")
    tree, last = [0] * (n + 1), [0] * distinct

    def add(at: int, change: int) -> None:
        while at <= n:
            tree[at] += change
            at += at & -at

    distances, live = np.full(n, -1, np.int64), 0
    for i, each in enumerate(ids.tolist()):
        before = at = last[each]
        if before:
            older = 0
            while at:
                older += tree[at]
                at &= at - 1
            distances[i] = live - older + 1
            add(before, -1)
        else:
            live += 1
        last[each] = i + 1
        add(i + 1, 1)
    return distances


def count_in_buckets(
    values: NDArray[Any],
    bounds: NDArray[np.float64],
    counts: NDArray[np.int64],
    sums: NDArray[np.float64],
) -> None:
    """Count ``values (n,)``, float32 or float64 and finite, in a histogram's buckets.

    Adds to ``counts (b + 1,)`` the number of values up to each of the ascending ``bounds (b,)`` and above
    the one before, the last one without an upper bound; to ``sums (2,)`` the sum of the positive values and
    that of the others. Callers serialize the calls that add to the same arrays."""
    if counts.shape != (len(bounds) + 1,) or sums.shape != (2,):
        raise ValueError("counts must be one more than bounds, sums two")
    # Sorting is fast; a search of the bucket of every value takes five times as long.
    ordered = np.sort(values)
    upto = ordered.searchsorted(bounds, "right")
    counts += np.diff(upto, prepend=0, append=len(ordered))
    positive = ordered.searchsorted(0, "right")
    sums += ordered[positive:].sum(dtype=np.float64), ordered[:positive].sum(dtype=np.float64)
