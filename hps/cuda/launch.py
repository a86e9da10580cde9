"""The kernels' argument structs, their choice of tile and the copies' unit."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hps.cuda.layout import SECTOR
from hps.cuda.loader import BLOCK

PARTS = 32
"""The most parts that one launch of fetch_kernel takes; more are launched one after the other."""

FETCH_PART = np.dtype(
    [
        *((name, np.uint64) for name in ("lines", "rows", "row_versions", "keys", "positions")),
        *((name, np.uint64) for name in ("out", "versions", "source", "oldest_tombstone")),
        *((name, np.uint32) for name in ("buckets", "stride", "row_bytes", "n")),
        *((name, np.uint32) for name in ("base", "first_block", "now", "code")),
    ],
    align=True,
)
FETCH_ARGS = np.dtype(
    [
        ("misses", np.uint64),
        ("miss_count", np.uint64),
        ("done", np.uint64),
        ("result", np.uint64),
        ("parts", np.uint32),
        ("unused", np.uint32),
        ("part", FETCH_PART, PARTS),
    ],
    align=True,
)
WRITE_ARGS = np.dtype(
    [
        *((name, np.uint64) for name in ("lines", "rows", "row_versions", "spare", "keys")),
        *((name, np.uint64) for name in ("vectors", "versions", "plan", "position", "scratch")),
        *((name, np.uint64) for name in ("counters", "oldest_tombstone")),
        *((name, np.uint32) for name in ("buckets", "stride", "row_bytes", "n")),
        *((name, np.uint32) for name in ("scratch_mask", "now", "unused", "tombstone")),
    ],
    align=True,
)
SCAN_ARGS = np.dtype(
    [
        *((name, np.uint64) for name in ("lines", "rows", "row_versions", "fillers", "keys")),
        *((name, np.uint64) for name in ("numbers", "ages", "versions", "out", "count", "limit")),
        *((name, np.uint32) for name in ("buckets", "stride", "row_bytes", "n", "now", "max_age")),
    ],
    align=True,
)

ROWS, TIER, NUMBERS = 0, 1, 2
"""Forms of fetch: rows only; rows, versions and sources; row numbers."""

WRITE_TILE = 8


def unit_of(row_bytes: int, pointers: Iterable[int] = ()) -> int:
    """The bytes that one thread moves at a time: 16, 4 or 2, whatever divides sizes and addresses."""
    sizes = [row_bytes, *pointers]
    return next(unit for unit in (16, 4, 2) if all(size % unit == 0 for size in sizes))


def tile_of(row_bytes: int) -> int:
    """Threads per key, as measured to be fastest; see README.md."""
    return 4 if row_bytes <= 256 else 8


def moves_of(row_bytes: int, tile: int, unit: int) -> int:
    """How many moves of ``unit`` bytes each thread of a tile makes for a row; 0 when not all make the same,
    or too many for registers."""
    moves, rest = divmod(row_bytes, tile * unit)
    fits = rest == 0 and moves in (1, 2, 4) and unit == 16 and row_bytes % SECTOR == 0
    return moves if fits else 0


def fetch_name(tile: int, unit: int, moves: int, form: int, *, stamp: bool, keep: bool) -> str:
    flags = ", ".join("true" if flag else "false" for flag in (stamp, keep))
    return f"fetch_kernel<{tile}, {unit}, {moves}, {form}, {flags}>"


def blocks_of(n: int, threads_a_key: int = 1) -> int:
    """Blocks for ``n`` keys."""
    return -(-n // (BLOCK // threads_a_key))
