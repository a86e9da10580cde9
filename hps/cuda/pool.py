"""Pooling on the device, of cached or fetched rows: one launch over all tables."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.cuda.fetch import FetchWorkspace
from hps.cuda.launch import BAGS_ARGS, COMBINERS, COUNTED_BEHIND, PARTS, POOL_ARGS, blocks_of
from hps.cuda.loader import KernelStruct, kernel
from hps.cuda.reader_events import ReaderEvents
from hps.cuda.staging import StagingBuffer, staging_bytes
from hps.cuda.table import GpuTable
from hps.row_format import RowFormat
from hps.types import EmbeddingTable, Pooling

PART = struct.Struct("<7Q14I")
PARTS_AT = POOL_ARGS.fields["part"][1]  # type: ignore[index] # None for a plain dtype
ROWS_PART = struct.Struct("<6Q8I")
ROWS_PARTS_AT = BAGS_ARGS.fields["part"][1]  # type: ignore[index]
_WIDEST = 32
_WARP_DIMS = 16, 32, 64, 128
_VALUES = 4, 4, 4, 4, 4, 8
"""Values that a lane sums, by the code of the row format."""
_DECODED = 8
"""Bags of one key that a warp works on."""


@dataclass(frozen=True, slots=True)
class PoolShape:
    """The kernel of a pooling, and the threads of a block for each bag."""

    kernel: str
    threads: int

    @staticmethod
    def of(
        tables: Sequence[EmbeddingTable],
        outs: Sequence[int],
        *,
        single: bool,
        weighted: bool = False,
    ) -> PoolShape:
        """Return the shape for poolings of ``tables`` to the addresses ``outs``.

        ``single``: all bags have one key; ``weighted``: some have weights."""
        formats = {(table.row_format, table.dim) for table in tables}
        row_format, dim = next(iter(formats))
        if len(formats) == 1 and dim in _WARP_DIMS and not reduce(or_, outs) & 15:
            if single and not weighted:
                return PoolShape(f"decode_warp_kernel<{row_format.code}, {dim}>", 32 // _DECODED)
            values = _VALUES[row_format.code or 0]
            name = f"{row_format.code}, {dim}, {values}, {str(weighted).lower()}"
            return PoolShape(f"pool_warp_kernel<{name}>", dim // values)
        tile, unit = tile_and_unit([table.dim for table in tables])
        return PoolShape(f"pool_kernel<{tile}, {unit}>", tile)

    def blocks(self, bags: int) -> int:
        return blocks_of(bags, self.threads)


@dataclass(slots=True)
class KernelBags:
    """One table's arguments of a pooling.

    ``keys (n,) int64``, ``offsets (bags + 1,) int64`` or None for ``hotness`` keys per bag, ``weights (n,)
    float32`` or None: each on host or device. ``out (bags, dim)`` on the device.
    """

    table: GpuTable
    keys: Any
    offsets: Any
    weights: Any
    out: Any
    hotness: int
    pooling: Pooling


def pool(
    space: FetchWorkspace, readers: ReaderEvents, stream: Any, requests: Sequence[KernelBags]
) -> int:
    """Pool ``requests`` (none without bags) on ``stream`` and wait for it.

    Returns the number of keys without a row; unless it is 0, the outs are undefined.
    """
    missing = 0
    for start in range(0, len(requests), PARTS):
        missing += _pool_some(space, readers, stream, requests[start : start + PARTS])
    return missing


def _pool_some(
    space: FetchWorkspace, readers: ReaderEvents, stream: Any, requests: Sequence[KernelBags]
) -> int:
    staging = space.staging
    staging.begin(
        sum(staging_bytes(request.keys, request.offsets, request.weights) for request in requests)
    )
    shape = PoolShape.of(
        [r.table.table for r in requests],
        [r.out.data.ptr for r in requests],
        single=all(r.offsets is None and r.hotness == 1 for r in requests),
        weighted=any(r.weights is not None for r in requests),
    )
    args, blocks = KernelStruct(POOL_ARGS), 0
    for index, request in enumerate(requests):
        table, bags = request.table, len(request.out)
        buckets, stride, _, on_device = table.sizes
        lines, rows, host_rows, _ = table.pointers
        PART.pack_into(
            args.array.data,
            PARTS_AT + index * PART.size,
            *(lines, rows, host_rows),
            staging.put(request.keys),
            staging.put(request.offsets),
            staging.put(request.weights),
            request.out.data.ptr,
            *(buckets, stride, table.table.dim, on_device),
            *(bags, request.hotness, blocks, table.clock.now, table.clock.stamping),
            *(COMBINERS[request.pooling], table.table.dtype == np.float16, table.hidden),
            *(table.table.row_format.code, 0),
        )
        blocks += shape.blocks(bags)
    behind = sum(len(r.keys) for r in requests) >= COUNTED_BEHIND
    args["parts"], args["result"] = len(requests), 0 if behind else space.result_at
    args["missing"], args["done"] = space.counts.data.ptr, space.counts.data.ptr + 4
    staging.send(stream)
    run = kernel(shape.kernel)
    readers.run(stream, lambda: run.launch(blocks, args, stream.ptr))
    if behind:
        space.count.launch(1, space.count_args, stream.ptr)
    stream.synchronize()
    return int(space.result[0])


def tile_and_unit(dims: Sequence[int]) -> tuple[int, int]:
    """Return the threads per bag, and the values that each reads at a time."""
    unit = 4 if all(dim % 4 == 0 for dim in dims) else 1
    widest = max(dims) // unit
    return min(_WIDEST, max(4, 1 << (widest - 1).bit_length())), unit


@dataclass(slots=True)
class RowBags:
    """Bags of fetched rows. Other fields as in `KernelBags`.

    ``rows (n, row_width)``, stored in ``row_format``, and ``source (n,) uint8`` on the device, one per key;
    ``fallback (dim,)``, on the host and of the dtype of ``out``, for source 0.
    """

    rows: Any
    source: Any
    fallback: NDArray[Any]
    offsets: Any
    weights: Any
    out: Any
    hotness: int
    pooling: Pooling
    row_format: RowFormat


def pool_rows(staging: StagingBuffer, stream: Any, requests: Sequence[RowBags]) -> None:
    """Pool ``requests`` (none without bags) on ``stream`` and wait for it."""
    for start in range(0, len(requests), PARTS):
        _pool_some_rows(staging, stream, requests[start : start + PARTS])
        stream.synchronize()


def _pool_some_rows(staging: StagingBuffer, stream: Any, requests: Sequence[RowBags]) -> None:
    staging.begin(
        sum(
            staging_bytes(request.fallback, request.offsets, request.weights)
            for request in requests
        )
    )
    tile, unit = tile_and_unit([len(request.fallback) for request in requests])
    args, blocks = KernelStruct(BAGS_ARGS), 0
    for index, request in enumerate(requests):
        bags, dim = len(request.out), len(request.fallback)
        ROWS_PART.pack_into(
            args.array.data,
            ROWS_PARTS_AT + index * ROWS_PART.size,
            *(request.rows.data.ptr, request.source.data.ptr, staging.put(request.fallback)),
            *(staging.put(request.offsets), staging.put(request.weights), request.out.data.ptr),
            *(
                dim,
                bags,
                request.hotness,
                blocks,
                COMBINERS[request.pooling],
                request.fallback.dtype == np.float16,
                request.row_format.code,
                request.row_format.row_bytes(dim),
            ),
        )
        blocks += blocks_of(bags, tile)
    args["parts"] = len(requests)
    staging.send(stream)
    kernel(f"pool_rows_kernel<{tile}, {unit}>").launch(blocks, args, stream.ptr)
