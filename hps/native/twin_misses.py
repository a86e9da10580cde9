"""NumPy twin of the gather of missing rows (include/hps/miss_gather.hpp), and of the copy of keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.native.twin_cache import CacheTable
from hps.native.twin_layered import LayeredTable
from hps.native.twin_mapped import MappedTable
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
    tables: Sequence[CacheTable | LayeredTable | MappedTable | None],
    bases: NDArray[np.uint32],
    keys: KeyArray,
    positions: NDArray[np.uint32],
    rows: NDArray[np.uint8],
    sources: NDArray[np.uint8],
    code: int,
    counts: NDArray[np.uint32],
    listed: bool = False,
    pool: WorkerPool | None = None,
    placing: Any = None,
    stream: int = 0,
) -> int:
    """Copy the rows of missing keys from ``tables`` to ``rows``; return the number of keys without a row.

    The batch has a part per table, which begins at its entry of ``bases (parts,)``. ``positions (m,)`` are
    those of the missing keys in the batch, in any order. ``keys`` are all keys of the batch or, if
    ``listed``, those at ``positions``. The row of the i-th missing key fills the first bytes of ``rows[i]``,
    of ``rows (m, stride)``, and ``sources[i]`` becomes ``code``, or `UNANSWERED` if the table has no row (or
    is None). A deleted key has no row. Adds each part's misses and rows found to ``counts (parts, 2)``.
    Counts as a use of the rows. Thread-safe, also in parallel to the tables' writers. Raises ValueError for a
    position outside the batch. ``placing`` and ``stream`` are of the compiled core.
    """
    if not listed and len(positions) and positions.max() >= len(keys):
        raise ValueError("positions must be those of keys")
    missing = keys if listed else keys[positions]
    part_of = np.searchsorted(bases, positions, side="right") - 1
    sources[:] = UNANSWERED
    for part, table in enumerate(tables):
        mine = np.flatnonzero(part_of == part)
        if table is not None and len(mine):
            _gather_part(table, missing[mine], mine, rows, sources, code)
        counts[part] += np.array(
            [len(mine), np.count_nonzero(sources[mine] != UNANSWERED)], np.uint32
        )
    return int(np.count_nonzero(sources == UNANSWERED))


def copy_keys(
    arrays: Sequence[KeyArray], out: NDArray[np.int64], pool: WorkerPool | None = None
) -> int:
    """Copy ``arrays`` of keys to ``out``, one after the other; return their number."""
    total = sum(map(len, arrays))
    if total > len(out):
        raise ValueError("out must hold all keys")
    if total:
        np.concatenate(arrays, out=out[:total])
    return total


def _gather_part(
    table: CacheTable | LayeredTable | MappedTable,
    keys: KeyArray,
    places: NDArray[np.int64],
    rows: NDArray[np.uint8],
    sources: NDArray[np.uint8],
    code: int,
) -> None:
    """Gather the rows of ``keys (n,)`` to ``rows[places]``, and set their ``sources``."""
    n, like = len(keys), table.like
    out = np.zeros((n, *like.shape[1:]), like.dtype)
    has_row = ~table.read_rows(keys, out)
    rows[places[has_row], : out.itemsize * out.shape[1]] = out[has_row].view(np.uint8)
    sources[places[has_row]] = code
