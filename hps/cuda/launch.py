"""Argument structs of the kernels, tile sizes and copy units."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hps.cuda import layout
from hps.cuda.loader import BLOCK
from hps.types import Pooling

PARTS = 32
"""The most parts that one launch of fetch_kernel takes; more are launched one after the other."""

FETCH_PART = np.dtype(
    [
        *((name, np.uint64) for name in ("lines", "rows", "host_rows", "row_versions", "keys")),
        *((name, np.uint64) for name in ("positions", "out", "versions", "source")),
        ("oldest_tombstone", np.uint64),
        *((name, np.uint32) for name in ("buckets", "stride", "row_bytes", "on_device", "n")),
        *((name, np.uint32) for name in ("base", "first_block", "now", "policy", "code")),
    ],
    align=True,
)
FETCH_ARGS = np.dtype(
    [
        ("misses", np.uint64),
        ("miss_count", np.uint64),
        ("done", np.uint64),
        ("result", np.uint64),
        ("later", np.uint64),
        ("miss_keys", np.uint64),
        ("parts", np.uint32),
        ("window", np.uint16),
        ("window_shift", np.uint16),
        ("sequence", np.uint32),
        ("unused", np.uint32),
        ("part", FETCH_PART, PARTS),
    ],
    align=True,
)
WRITE_ARGS = np.dtype(
    [
        *(
            (name, np.uint64)
            for name in ("lines", "rows", "host_rows", "row_versions", "slot_scores")
        ),
        *((name, np.uint64) for name in ("spare", "keys", "vectors", "versions", "scores")),
        *((name, np.uint64) for name in ("position", "scratch", "counters", "result")),
        *((name, np.uint64) for name in ("kept", "members")),
        ("oldest_tombstone", np.uint64),
        *((name, np.uint32) for name in ("buckets", "stride", "row_bytes", "on_device", "n")),
        *((name, np.uint32) for name in ("scratch_mask", "start", "policy")),
        *((name, np.uint32) for name in ("tombstone", "age", "roomy", "open", "hidden", "unused")),
    ],
    align=True,
)
SCAN_ARGS = np.dtype(
    [
        *((name, np.uint64) for name in ("lines", "rows", "host_rows", "row_versions", "keys")),
        *((name, np.uint64) for name in ("numbers", "scores", "versions", "out", "count", "limit")),
        *((name, np.uint64) for name in ("slot_scores", "least")),
        *((name, np.uint32) for name in ("buckets", "stride", "row_bytes", "on_device", "n")),
        *((name, np.uint32) for name in ("now", "fresh", "hidden")),
    ],
    align=True,
)
POOL_PART = np.dtype(
    [
        *((name, np.uint64) for name in ("lines", "rows", "host_rows", "keys", "offsets")),
        *((name, np.uint64) for name in ("weights", "out")),
        *((name, np.uint32) for name in ("buckets", "stride", "dim", "on_device", "bags")),
        *((name, np.uint32) for name in ("hotness", "first_block", "now", "policy", "combiner")),
        *((name, np.uint32) for name in ("half", "hidden", "format", "unused")),
    ],
    align=True,
)
POOL_ARGS = np.dtype(
    [
        *((name, np.uint64) for name in ("missing", "done", "result")),
        *((name, np.uint32) for name in ("parts", "unused")),
        ("part", POOL_PART, PARTS),
    ],
    align=True,
)
BAGS_PART = np.dtype(
    [
        *(
            (name, np.uint64)
            for name in ("rows", "source", "fallback", "offsets", "weights", "out")
        ),
        *((name, np.uint32) for name in ("dim", "bags", "hotness", "first_block", "combiner")),
        *((name, np.uint32) for name in ("half", "format", "row_bytes")),
    ],
    align=True,
)
BAGS_ARGS = np.dtype(
    [
        *((name, np.uint32) for name in ("parts", "unused")),
        ("part", BAGS_PART, PARTS),
    ],
    align=True,
)
SCATTER_PART = np.dtype(
    [
        *((name, np.uint64) for name in ("rows", "row_versions", "sources", "positions", "picks")),
        *((name, np.uint64) for name in ("out", "versions", "source")),
        *((name, np.uint32) for name in ("row_bytes", "n", "first_block", "unused")),
    ],
    align=True,
)
SCATTER_ARGS = np.dtype(
    [
        *((name, np.uint32) for name in ("parts", "unused")),
        ("part", SCATTER_PART, PARTS),
    ],
    align=True,
)
PLACE_PART = np.dtype(
    [("out", np.uint64), ("source", np.uint64), ("base", np.uint32), ("row_bytes", np.uint32)],
    align=True,
)
PLACE_ARGS = np.dtype(
    [
        *((name, np.uint64) for name in ("positions", "rows", "sources")),
        *((name, np.uint32) for name in ("n", "stride", "parts", "unused")),
        ("part", PLACE_PART, PARTS),
    ],
    align=True,
)
PARTITION_ARGS = np.dtype(
    [
        *(
            (name, np.uint64)
            for name in ("keys", "positions", "count", "lists", "grouped", "counts")
        ),
        *((name, np.uint32) for name in ("n", "owners", "left_out", "unused")),
    ]
)
COMBINERS: Mapping[Pooling, int] = {"none": 0, "sum": 0, "mean": 1, "sqrtn": 2}
"""``combiner`` of `POOL_PART` and `BAGS_PART`, as in ``pool.cuh``; what is not pooled is a sum of one row."""
COUNT_ARGS = np.dtype(
    [
        *((name, np.uint64) for name in ("miss_count", "result")),
        *((name, np.uint32) for name in ("sequence", "unused")),
    ]
)
COUNTED_BEHIND = 1 << 16
"""From so many keys on a launch behind the fetch reports its misses: counting the blocks that have ended
delays each block until its slowest key is done."""
COPIED_IN_CHUNKS = 1 << 16
"""From so many keys on the host on, threads copy them to pinned memory in chunks, while the device fetches
the chunk before, whose keys it reads there."""
UNANSWERED = 255
"""A source code for scatter: the key has neither row nor version."""

GPU_CODE = 1
"""Source code that fetch writes for a row: `Source.GPU`. In ``code`` of `FETCH_PART` it is the low byte; the
high half are those of the bits that hide a row from the table (`GpuTableShape.hidden`)."""

ROWS, TIER, NUMBERS, VECTORS = 0, 1, 2, 3
"""Forms of fetch: rows only; rows, versions and sources; row numbers; rows and, if wanted, sources, of
several tables."""

WRITE_TILE = 4
MANY_KEYS = 1 << 17
"""So many keys fill the device also with two threads each."""
_SHORT_ROW = 132
_UNROLLED = {16: (2, 4, 8, 16, 32), 4: (9, 17, 33)}
"""Units of rows that are copied without a loop, by their bytes. Those of 4 bytes are of dim 32 to 128 in
formats with a scale."""


def unit_of(sizes: int) -> int:
    """Return the bytes that a thread moves at a time: 16, 4, 2 or 1, the largest that divides ``sizes``.

    ``sizes``: all sizes and addresses, combined by bitwise or."""
    return 1 if sizes & 1 else 2 if sizes & 3 else 4 if sizes & 15 else 16


def tile_of(row_bytes: int, keys: int) -> int:
    """Return the threads per key, as measured to be fastest; see README.md.

    A warp fetches 16 keys together, or 8, so that a small batch has enough warps."""
    return 2 if row_bytes <= _SHORT_ROW and keys >= MANY_KEYS else 4


def units_of(row_bytes: int, unit: int) -> int:
    """Return the units of a row, 16 bytes or 4 each, that kernels copy without a loop; 0 if they need one."""
    units, rest = divmod(row_bytes, unit)
    return units if not rest and units in _UNROLLED.get(unit, ()) else 0


def fetch_name(tile: int, unit: int, units: int, form: int, *, stamp: bool, sweep: bool) -> str:
    flags = ", ".join("true" if flag else "false" for flag in (stamp, sweep))
    return f"fetch_kernel<{tile}, {unit}, {units}, {form}, {flags}>"


def sweep_name(tile: int, unit: int, units: int) -> str:
    return f"sweep_kernel<{tile}, {unit}, {units}>"


def write_name(unit: int, *, update: bool, scored: bool) -> str:
    flags = ", ".join("true" if flag else "false" for flag in (update, scored))
    return f"write_kernel<{unit}, {flags}>"


def chunk_keys(keys: int) -> int:
    """Return the size of the chunks in which ``keys`` of the host are copied; see README.md."""
    return min(max(keys // 4, 1 << 16), 1 << 18)


def windows_of(host_bytes: int, keys: int) -> int:
    """Return the number of windows in which ``keys`` rows are read from ``host_bytes`` of pinned memory."""
    windows = -(-host_bytes // (1 << layout.WINDOW_SHIFT))
    return windows if windows > 1 and keys >= windows * layout.KEYS_A_WINDOW else 1


def blocks_of(n: int, threads_a_key: int = 1) -> int:
    """Return the blocks for ``n`` keys."""
    return -(-n // (BLOCK // threads_a_key))
