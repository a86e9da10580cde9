"""One launch of pool over all tables of a batch."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hps.cuda.fetch import Workspace
from hps.cuda.launch import PARTS, POOL_ARGS, blocks_of
from hps.cuda.loader import Struct, kernel
from hps.cuda.readers import Readers
from hps.cuda.staging import staged
from hps.cuda.table import GpuTable

_PART = struct.Struct("<7Q12I")
_PARTS_AT = POOL_ARGS.fields["part"][1]  # type: ignore[index] # None for a plain dtype
_WIDEST = 32


@dataclass(slots=True)
class Bags:
    """One table's share of a pooling. ``keys (n,) int64``, ``offsets (bags + 1,) int64`` or None for
    ``hotness`` keys a bag, ``weights (n,) float32`` or None: each on host or device. ``out (bags, dim)``
    on the device."""

    table: GpuTable
    keys: Any
    offsets: Any
    weights: Any
    out: Any
    hotness: int
    mean: bool


def pool(space: Workspace, readers: Readers, stream: Any, asks: Sequence[Bags]) -> int:
    """Pool ``asks`` (none without bags) on ``stream``; returns how many keys have no row, and then the
    outs have no meaning. Waits for the stream."""
    missing = 0
    for start in range(0, len(asks), PARTS):
        missing += _pool_some(space, readers, stream, asks[start : start + PARTS])
    return missing


def _pool_some(space: Workspace, readers: Readers, stream: Any, asks: Sequence[Bags]) -> int:
    staging = space.staging
    staging.begin(sum(staged(ask.keys, ask.offsets, ask.weights) for ask in asks))
    unit = 4 if all(_is_even(ask) for ask in asks) else 1
    widest = max(ask.table.table.dim for ask in asks) // unit
    tile = min(_WIDEST, max(4, 1 << (widest - 1).bit_length()))
    args, blocks = Struct(POOL_ARGS), 0
    for index, ask in enumerate(asks):
        table, bags = ask.table, len(ask.out)
        buckets, stride, _, on_device = table.sizes
        lines, rows, host_rows, _ = table.pointers
        _PART.pack_into(
            args.array.data,
            _PARTS_AT + index * _PART.size,
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


def _is_even(ask: Bags) -> bool:
    """Whether four values at a time can be read."""
    return ask.table.table.dim % 4 == 0
