"""NumPy twin of the gather of missing rows (include/hps/miss_gather.hpp)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.native.twin_cache import CacheTable
from hps.types import KeyArray

UNANSWERED = 255
"""The source code of a key without a row."""


class WorkerPool:
    """Threads for many short calls of `gather_misses`; this twin starts none. Thread-safe."""

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError("threads must be at least 1")
        self.threads = threads


def gather_misses(
    tables: Sequence[CacheTable | None],
    keys: Sequence[KeyArray],
    positions: NDArray[np.uint32],
    rows: NDArray[np.uint8],
    sources: NDArray[np.uint8],
    code: int,
    pool: WorkerPool | None = None,
) -> int:
    """Copy the rows of missing keys from ``tables`` to ``rows``; return the number of keys without a row.

    The batch consists of ``keys``, an array ``(n,)`` per table, one after the other. ``positions (m,)``
    are those of the missing keys in it, in any order; the row of the i-th fills the first bytes of
    ``rows[i]``, of ``rows (m, stride)``, and ``sources[i]`` becomes ``code``, or `UNANSWERED` if the table
    has no row (or is None). A deleted key has no row. Counts as a use of the rows. Thread-safe, also in
    parallel to the tables' writers. Raises ValueError for a position outside the batch.
    """
    batch = np.concatenate(keys)
    ends = np.cumsum([len(own) for own in keys])
    if len(positions) and positions.max() >= len(batch):
        raise ValueError("positions must be those of keys")
    part_of = np.searchsorted(ends, positions, side="right")
    sources[:] = UNANSWERED
    for part, table in enumerate(tables):
        mine = np.flatnonzero(part_of == part)
        if table is not None and len(mine):
            _gather_part(table, batch[positions[mine]], mine, rows, sources, code)
    return int(np.count_nonzero(sources == UNANSWERED))


def _gather_part(
    table: Any,
    keys: KeyArray,
    places: NDArray[np.int64],
    rows: NDArray[np.uint8],
    sources: NDArray[np.uint8],
    code: int,
) -> None:
    """Gather the rows of ``keys (n,)`` to ``rows[places]``, and set their ``sources``."""
    n, like = len(keys), table.like
    out = np.zeros((n, *like.shape[1:]), like.dtype)
    found = np.zeros(n, np.uint8)
    table.fetch(keys, np.arange(n), 0, out, np.zeros(n, np.uint64), found)
    has_row = found != 0
    rows[places[has_row], : out.itemsize * out.shape[1]] = out[has_row].view(np.uint8)
    sources[places[has_row]] = code
