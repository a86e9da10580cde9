"""Pooling on the device, of cached or fetched rows: one launch over all tables."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.cuda.fetch import FetchWorkspace
from hps.cuda.launch import BAGS_ARGS, PARTS, POOL_ARGS, blocks_of
from hps.cuda.loader import KernelStruct, kernel
from hps.cuda.reader_events import ReaderEvents
from hps.cuda.staging import StagingBuffer, staging_bytes
from hps.cuda.table import GpuTable

PART = struct.Struct("<7Q12I")
PARTS_AT = POOL_ARGS.fields["part"][1]  # type: ignore[index] # None for a plain dtype
ROWS_PART = struct.Struct("<6Q6I")
ROWS_PARTS_AT = BAGS_ARGS.fields["part"][1]  # type: ignore[index]
_WIDEST = 32


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
    mean: bool


def pool(
    space: FetchWorkspace, readers: ReaderEvents, stream: Any, asks: Sequence[KernelBags]
) -> int:
    """Pool ``asks`` (none without bags) on ``stream`` and wait for it.

    Returns the number of keys without a row; unless it is 0, the outs are undefined.
    """
    missing = 0
    for start in range(0, len(asks), PARTS):
        missing += _pool_some(space, readers, stream, asks[start : start + PARTS])
    return missing


def _pool_some(
    space: FetchWorkspace, readers: ReaderEvents, stream: Any, asks: Sequence[KernelBags]
) -> int:
    staging = space.staging
    staging.begin(sum(staging_bytes(ask.keys, ask.offsets, ask.weights) for ask in asks))
    tile, unit = tile_and_unit([ask.table.table.dim for ask in asks])
    args, blocks = KernelStruct(POOL_ARGS), 0
    for index, ask in enumerate(asks):
        table, bags = ask.table, len(ask.out)
        buckets, stride, _, on_device = table.sizes
        lines, rows, host_rows, _ = table.pointers
        PART.pack_into(
            args.array.data,
            PARTS_AT + index * PART.size,
            *(lines, rows, host_rows),
            staging.put(ask.keys),
            staging.put(ask.offsets),
            staging.put(ask.weights),
            ask.out.data.ptr,
            *(buckets, stride, table.table.dim, on_device),
            *(bags, ask.hotness, blocks, table.now, table.stamping),
            *(ask.mean, table.table.dtype == np.float16, 0),
        )
        blocks += blocks_of(bags, tile)
    args["parts"], args["result"] = len(asks), space.result_at
    args["missing"], args["done"] = space.counts.data.ptr, space.counts.data.ptr + 4
    staging.send(stream)
    run = kernel(f"pool_kernel<{tile}, {unit}>")
    readers.run(stream, lambda: run.launch(blocks, args, stream.ptr))
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

    ``rows (n, dim)`` and ``source (n,) uint8`` on the device, one per key; ``fallback (dim,)``, on the
    host, for source 0.
    """

    rows: Any
    source: Any
    fallback: NDArray[Any]
    offsets: Any
    weights: Any
    out: Any
    hotness: int
    mean: bool


def pool_rows(staging: StagingBuffer, stream: Any, asks: Sequence[RowBags]) -> None:
    """Pool ``asks`` (none without bags) on ``stream`` and wait for it."""
    for start in range(0, len(asks), PARTS):
        _pool_some_rows(staging, stream, asks[start : start + PARTS])
        stream.synchronize()


def _pool_some_rows(staging: StagingBuffer, stream: Any, asks: Sequence[RowBags]) -> None:
    staging.begin(sum(staging_bytes(ask.fallback, ask.offsets, ask.weights) for ask in asks))
    tile, unit = tile_and_unit([len(ask.fallback) for ask in asks])
    args, blocks = KernelStruct(BAGS_ARGS), 0
    for index, ask in enumerate(asks):
        bags, dim = len(ask.out), len(ask.fallback)
        ROWS_PART.pack_into(
            args.array.data,
            ROWS_PARTS_AT + index * ROWS_PART.size,
            *(ask.rows.data.ptr, ask.source.data.ptr, staging.put(ask.fallback)),
            *(staging.put(ask.offsets), staging.put(ask.weights), ask.out.data.ptr),
            *(dim, bags, ask.hotness, blocks, ask.mean, ask.fallback.dtype == np.float16),
        )
        blocks += blocks_of(bags, tile)
    args["parts"] = len(asks)
    staging.send(stream)
    kernel(f"pool_rows_kernel<{tile}, {unit}>").launch(blocks, args, stream.ptr)
