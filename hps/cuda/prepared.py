"""Prepared launches: arguments made once, for requests that differ only in their keys.

Filling in the arguments of 26 tables takes the host ten times as long as the keys take the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.cuda.launch import (
    BAGS_ARGS,
    COMBINERS,
    COUNT_ARGS,
    COUNTED_BEHIND,
    PARTS,
    POOL_ARGS,
    blocks_of,
)
from hps.cuda.loader import BLOCK, CudaKernel, KernelStruct, cupy, kernel
from hps.cuda.pool import PART, PARTS_AT, ROWS_PART, ROWS_PARTS_AT, PoolShape, tile_and_unit
from hps.cuda.reader_events import ReaderEvents
from hps.cuda.staging import StagingBuffer, padded_bytes
from hps.cuda.table import GpuTable
from hps.row_format import RowFormat
from hps.types import Pooling

_NOWHERE: Mapping[int, int] = {}


@dataclass(frozen=True, slots=True)
class FixedBags:
    """One table's arguments of a prepared pooling.

    ``n`` keys, ``hotness`` per bag, and ``out (n / hotness, dim)`` on the device.
    """

    table: GpuTable
    n: int
    hotness: int
    pooling: Pooling
    out: Any


class PreparedPooling:
    """A pooling whose arguments were made once. One thread at a time, on the current device.

    The caller fills ``keys``, each ``(n,) int64`` in pinned memory, end to end in ``flat``, or passes
    addresses of keys on the device; calls `launch`, and reads `missing` once the stream is done. The tables
    must not be freed.
    """

    def __init__(self, readers: ReaderEvents, requests: Sequence[FixedBags]) -> None:
        self._readers = readers
        self._staging = StagingBuffer()
        total = sum(request.n for request in requests)
        self._staging.begin(padded_bytes(8 * total))
        self.flat, flat_at = self._staging.allocate(total, np.int64)
        ends = np.cumsum([request.n for request in requests]).tolist()
        starts = [end - request.n for end, request in zip(ends, requests, strict=True)]
        self.keys = [self.flat[start:end] for start, end in zip(starts, ends, strict=True)]
        parts = [(each, flat_at + 8 * start) for each, start in zip(requests, starts, strict=True)]
        self._launches = [
            _PoolingLaunch(parts[start : start + PARTS]) for start in range(0, len(parts), PARTS)
        ]

    def launch(self, stream: Any, on_device: Mapping[int, int] = _NOWHERE) -> None:
        """Pool on ``stream``, without waiting. Counts as a use of the keys.

        ``on_device``: the addresses of the keys that are on the device, by their table's number; always for
        the same tables."""
        if len(on_device) < len(self.keys):
            self._staging.send(stream)
        for number, address in on_device.items():
            self._launches[number // PARTS].set_keys(number % PARTS, address)
        for each in self._launches:
            self._readers.run(stream, partial(each.run, stream))

    def steps(self, _stream: Any) -> tuple[list[Any], list[int]]:
        """Return the same launch as steps of the batch scheduler, and the addresses of the counts that sum
        up to `missing`. They use this object's memory."""
        counts = [address_of(each.result) for each in self._launches]
        return [
            *self._staging.steps(),
            *(step for each in self._launches for step in each.steps()),
        ], counts

    def missing(self) -> int:
        """Return the number of keys without a row, once the stream is done; unless 0, the outs are
        undefined."""
        return sum(int(each.result[0]) for each in self._launches)


class _PoolingLaunch:
    """One launch of a prepared pooling."""

    def __init__(self, parts: Sequence[tuple[FixedBags, int]]) -> None:
        cp = cupy()
        self._tables = [request.table for request, _ in parts]
        shape = PoolShape.of(
            [table.table for table in self._tables],
            [request.out.data.ptr for request, _ in parts],
            single=all(request.hotness == 1 for request, _ in parts),
        )
        self._args, self._blocks = KernelStruct(POOL_ARGS), 0
        for index, (request, keys_at) in enumerate(parts):
            table, bags = request.table, request.n // request.hotness
            buckets, stride, _, on_device = table.sizes
            lines, rows, host_rows, _ = table.pointers
            PART.pack_into(
                self._args.array.data,
                PARTS_AT + index * PART.size,
                *(lines, rows, host_rows, keys_at, 0, 0, request.out.data.ptr),
                *(buckets, stride, table.table.dim, on_device),
                *(bags, request.hotness, self._blocks, 0, table.clock.stamping),
                *(COMBINERS[request.pooling], table.table.dtype == np.float16, table.hidden),
                *(table.table.row_format.code, 0),
            )
            self._blocks += shape.blocks(bags)
        self._outs = [
            request.out for request, _ in parts
        ]  # keeps the memory that the kernel writes to
        self._counts = cp.zeros(2, np.uint32)
        self._pinned = cp.cuda.alloc_pinned_memory(8)
        self.result: NDArray[np.uint32] = np.frombuffer(self._pinned, np.uint32, 2)
        self._is_counted_behind = sum(request.n for request, _ in parts) >= COUNTED_BEHIND
        self._args["parts"] = len(parts)
        self._args["result"] = 0 if self._is_counted_behind else self._pinned.ptr
        self._args["missing"] = self._counts.data.ptr
        self._count, self._count_args = kernel("count_kernel"), KernelStruct(COUNT_ARGS)
        self._count_args["miss_count"] = self._counts.data.ptr
        self._count_args["result"] = self._pinned.ptr
        self._args["done"] = self._counts.data.ptr + 4
        self._kernel: CudaKernel = kernel(shape.kernel)
        self._now = self._args.array["part"]["now"]
        cp.cuda.get_current_stream().synchronize()

    def set_keys(self, part: int, address: int) -> None:
        self._args.array["part"]["keys"][part] = address

    def run(self, stream: Any) -> None:
        self._now[: len(self._tables)] = [table.clock.now for table in self._tables]
        self._kernel.launch(self._blocks, self._args, stream.ptr)
        if self._is_counted_behind:
            self._count.launch(1, self._count_args, stream.ptr)

    def steps(self) -> list[Any]:
        """Return the same as steps of the batch scheduler."""
        fresh = [
            (address_of(self._now[i : i + 1]), address_of(table.clock.cell))
            for i, table in enumerate(self._tables)
        ]
        from hps.native.scheduler import Step

        args, count = address_of(self._args.array), address_of(self._count_args.array)
        pool = Step.kernel(
            self._kernel.address, self._blocks, BLOCK, args, reads_tables=True, fresh=fresh
        )
        behind = [Step.kernel(self._count.address, 1, BLOCK, count, False, [])]
        return [pool, *(behind if self._is_counted_behind else [])]


def address_of(array: NDArray[Any]) -> int:
    """Return the address of a host array."""
    return int(array.ctypes.data)


@dataclass(frozen=True, slots=True)
class FixedRows:
    """One feature's bags of fetched rows: ``rows (n, row_width)``, stored in ``row_format``, and ``source
    (n,)`` on the device.

    ``fallback (dim,)``, also on the device and of the dtype of ``out``, is for source 0.
    """

    rows: Any
    source: Any
    fallback: Any
    hotness: int
    pooling: Pooling
    out: Any
    row_format: RowFormat


class PreparedRowPooling:
    """Poolings of fetched rows with prepared launches."""

    def __init__(self, requests: Sequence[FixedRows]) -> None:
        self._asks = list(requests)  # keeps the memory that the kernels use
        self._launches = [
            self._prepare(self._asks[start : start + PARTS])
            for start in range(0, len(requests), PARTS)
        ]

    def launch(self, stream: Any) -> None:
        for run, blocks, args in self._launches:
            run.launch(blocks, args, stream.ptr)

    def steps(self) -> list[Any]:
        """Return the same launch as steps of the batch scheduler. They use this object's memory."""
        from hps.native.scheduler import Step

        return [
            Step.kernel(run.address, blocks, BLOCK, address_of(args.array), False, [])
            for run, blocks, args in self._launches
        ]

    @staticmethod
    def _prepare(requests: Sequence[FixedRows]) -> tuple[CudaKernel, int, KernelStruct]:
        tile, unit = tile_and_unit([len(request.fallback) for request in requests])
        args, blocks = KernelStruct(BAGS_ARGS), 0
        for index, request in enumerate(requests):
            bags, dim = len(request.out), len(request.fallback)
            ROWS_PART.pack_into(
                args.array.data,
                ROWS_PARTS_AT + index * ROWS_PART.size,
                *(request.rows.data.ptr, request.source.data.ptr, request.fallback.data.ptr),
                *(0, 0, request.out.data.ptr),
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
        return kernel(f"pool_rows_kernel<{tile}, {unit}>"), blocks, args
