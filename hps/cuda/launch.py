"""The kernels' argument structs, their choice of tile and the copies' unit."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

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
        *((name, np.uint32) for name in ("scratch_mask", "now", "update", "tombstone")),
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


def tile_of(row_bytes: int) -> tuple[int, int]:
    """Threads per key and keys per tile, as measured to be fastest; see README.md."""
    if row_bytes <= 32:
        return 4, 1
    return (4, 2) if row_bytes == 256 else (8, 1)


def fetch_name(tile: tuple[int, int], unit: int, form: int, *, stamp: bool, keep: bool) -> str:
    flags = ", ".join("true" if flag else "false" for flag in (stamp, keep))
    return f"fetch_kernel<{tile[0]}, {tile[1]}, {unit}, {form}, {flags}>"


def blocks_of(n: int, threads_a_key: int = 1, keys_a_tile: int = 1) -> int:
    """Blocks for ``n`` keys."""
    return -(-n // (BLOCK // threads_a_key * keys_a_tile))
