"""NumPy twins of the lookups that skip the reports per key (bindings_gather.cpp)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.native.twin_cache import CacheTable
from hps.types import IndexArray, KeyArray, VectorArray

Floats = NDArray[np.float32]


def gather_all(
    tables: Mapping[Any, CacheTable],
    asks: Sequence[tuple[Any, KeyArray, VectorArray]],
    threads: int = 1,
) -> bool:
    """`CacheTable.gather` for every ``(name of a table, keys, out)``; False when a key has no row, or
    ``tables`` has no such table. What is in the outs has no meaning then."""
    held = [tables.get(name) for name, _, _ in asks]
    return all(
        table is not None and table.gather(keys, out)
        for table, (_, keys, out) in zip(held, asks, strict=True)
    )


def pool_bags(
    table: CacheTable,
    keys: KeyArray,
    offsets: IndexArray | None,
    weights: Floats | None,
    divisors: Floats | None,
    out: VectorArray,
    given: IndexArray | None = None,
    rows: VectorArray | None = None,
) -> IndexArray | None:
    """Sum the rows of ``keys (n,)``, each times its entry of ``weights (n,)``, by bags to ``out (bags,
    dim)``, in order and in float32, and divide each bag by its entry of ``divisors (bags,)``; zeros
    for an empty bag and where that is 0.

    Bag ``b`` has the keys ``offsets[b]:offsets[b + 1]``, of ``offsets (bags + 1,)``; without, all have as
    many. ``rows (g, dim)`` are taken for the keys at the ascending positions ``given (g,)``. Returns
    the positions of keys that have no row, None when there are none; what their bags have has no
    meaning. Counts as a use of the keys.
    """
    bags = len(out)
    if offsets is None:
        offsets = np.arange(bags + 1) * (len(keys) // bags if bags else 0)
    vectors = np.zeros((len(keys), out.shape[1]), out.dtype)
    versions, source = np.zeros(len(keys), np.uint64), np.zeros(len(keys), np.uint8)
    left = table.fetch(keys, np.arange(len(keys)), 0, vectors, versions, source)
    found = source != 0
    if given is not None and rows is not None:
        vectors[given], found[given] = rows, True
    del left
    with np.errstate(all="ignore"):
        summed = vectors.astype(np.float32)
        if weights is not None:
            summed *= weights[:, None]
        for bag, (start, stop) in enumerate(pairwise(offsets)):
            total = np.zeros(out.shape[1], np.float32)
            for i in range(start, stop):
                total = summed[i] if i == start else total + summed[i]
            if divisors is not None and stop > start:
                by = divisors[bag]
                total = total / by if by != 0 else np.zeros_like(total)
            out[bag] = total
    missing = np.flatnonzero(~found)
    return missing if len(missing) else None
