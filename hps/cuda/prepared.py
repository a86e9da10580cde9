"""Prepared launches: arguments made once, for requests that differ only in their keys.

Filling in the arguments of 26 tables takes the host ten times as long as the keys take the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.cuda import launch
from hps.cuda.fetch import PART as FETCH_PART
from hps.cuda.fetch import PARTS_AT as FETCH_PARTS_AT
from hps.cuda.fetch import FetchKernels
from hps.cuda.launch import (
    BAGS_ARGS,
    FETCH_ARGS,
    PARTS,
    POOL_ARGS,
    blocks_of,
    moves_of,
    tile_of,
    unit_of,
    windows_of,
)
from hps.cuda.loader import BLOCK, CudaKernel, KernelStruct, cupy, kernel
from hps.cuda.pool import PART, PARTS_AT, ROWS_PART, ROWS_PARTS_AT, tile_and_unit
from hps.cuda.reader_events import ReaderEvents
from hps.cuda.staging import StagingBuffer, padded_bytes
from hps.cuda.table import GpuTable

_ALIGN = 256


@dataclass(frozen=True, slots=True)
class FixedBags:
    """One table's arguments of a prepared pooling.

    ``n`` keys, ``hotness`` per bag, and ``out (n / hotness, dim)`` on the device.
    """

    table: GpuTable
    n: int
    hotness: int
    mean: bool
    out: Any


class PreparedPooling:
    """A pooling whose arguments were made once. One thread at a time, on the current device.

    The caller fills ``keys``, each ``(n,) int64`` in pinned memory, calls `launch`, and reads `missing`
    once the stream is done. The tables must not be freed.
    """

    def __init__(self, readers: ReaderEvents, requests: Sequence[FixedBags]) -> None:
        self._readers = readers
        self._staging = StagingBuffer()
        self._staging.begin(sum(padded_bytes(8 * request.n) for request in requests))
        buffers = [self._staging.allocate(request.n, np.int64) for request in requests]
        self.keys = [keys for keys, _ in buffers]
        parts = [(request, at) for request, (_, at) in zip(requests, buffers, strict=True)]
        self._launches = [
            _PoolingLaunch(parts[start : start + PARTS]) for start in range(0, len(parts), PARTS)
        ]

    def launch(self, stream: Any) -> None:
        """Pool on ``stream``, without waiting. Counts as a use of the keys."""
        self._staging.send(stream)
        for each in self._launches:
            self._readers.run(stream, partial(each.run, stream))

    def steps(self, _stream: Any) -> tuple[list[Any], list[int]]:
        """Return the same launch as steps of the batch scheduler, and the addresses of the counts that sum
        up to `missing`. They use this object's memory."""
        counts = [address_of(each.result) for each in self._launches]
        return [*self._staging.steps(), *(each.step() for each in self._launches)], counts

    def missing(self) -> int:
        """Return the number of keys without a row, once the stream is done; unless 0, the outs are
        undefined."""
        return sum(int(each.result[0]) for each in self._launches)


class _PoolingLaunch:
    """One launch of a prepared pooling."""

    def __init__(self, parts: Sequence[tuple[FixedBags, int]]) -> None:
        cp = cupy()
        self._tables = [request.table for request, _ in parts]
        tile, unit = tile_and_unit([table.table.dim for table in self._tables])
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
                *(bags, request.hotness, self._blocks, 0, table.stamping),
                *(request.mean, table.table.dtype == np.float16, 0),
            )
            self._blocks += blocks_of(bags, tile)
        self._outs = [
            request.out for request, _ in parts
        ]  # keeps the memory that the kernel writes to
        self._counts = cp.zeros(2, np.uint32)
        self._pinned = cp.cuda.alloc_pinned_memory(4)
        self.result: NDArray[np.uint32] = np.frombuffer(self._pinned, np.uint32, 1)
        self._args["parts"], self._args["result"] = len(parts), self._pinned.ptr
        self._args["missing"] = self._counts.data.ptr
        self._args["done"] = self._counts.data.ptr + 4
        self._kernel: CudaKernel = kernel(f"pool_kernel<{tile}, {unit}>")
        self._now = self._args.array["part"]["now"]
        cp.cuda.get_current_stream().synchronize()

    def run(self, stream: Any) -> None:
        self._now[: len(self._tables)] = [table.now for table in self._tables]
        self._kernel.launch(self._blocks, self._args, stream.ptr)

    def step(self) -> Any:
        """Return the launch as a step of the batch scheduler."""
        fresh = [
            (address_of(self._now[i : i + 1]), address_of(table.now_cell))
            for i, table in enumerate(self._tables)
        ]
        from hps.native.scheduler import Step

        return Step.kernel(
            self._kernel.address,
            self._blocks,
            BLOCK,
            address_of(self._args.array),
            reads_tables=True,
            fresh=fresh,
        )


def address_of(array: NDArray[Any]) -> int:
    """Return the address of a host array."""
    return int(array.ctypes.data)


@dataclass(frozen=True, slots=True)
class FixedRows:
    """One feature's bags of fetched rows: ``rows (n, dim)`` and ``source (n,)`` on the device.

    ``fallback (dim,)``, also on the device, is for source 0.
    """

    rows: Any
    source: Any
    fallback: Any
    hotness: int
    mean: bool
    out: Any


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
                    request.mean,
                    request.fallback.dtype == np.float16,
                ),
            )
            blocks += blocks_of(bags, tile)
        args["parts"] = len(requests)
        return kernel(f"pool_rows_kernel<{tile}, {unit}>"), blocks, args


class PreparedFetch:
    """A prepared fetch of ``n`` keys of each table. One thread at a time, on the current device.

    The caller fills ``keys``, each ``(n,) int64`` in pinned memory, calls `launch`, and reads `misses` once
    the stream is done. ``rows``, ``versions`` and ``sources`` are the result's arrays on the device;
    ``sources_block`` is the memory of all sources. The tables must not be freed.
    """

    def __init__(self, readers: ReaderEvents, requests: Sequence[tuple[GpuTable, int]]) -> None:
        cp = cupy()
        self._readers = readers
        total = sum(n for _, n in requests)
        self._staging = StagingBuffer()
        self._staging.begin(sum(padded_bytes(8 * n) for _, n in requests))
        buffers = [self._staging.allocate(n, np.int64) for _, n in requests]
        self.keys = [keys for keys, _ in buffers]
        sizes = [-(-n * table.table.row_bytes // _ALIGN) * _ALIGN for table, n in requests]
        rows_block, versions = cp.empty(sum(sizes), np.uint8), cp.empty(total, np.uint64)
        self.sources_block = cp.zeros(total, np.uint8)
        self.rows, self.versions, self.sources = [], [], []
        at, first = 0, 0
        for (table, n), size in zip(requests, sizes, strict=True):
            shape = (n, table.table.dim)
            self.rows.append(cp.ndarray(shape, table.table.dtype, rows_block.data + at))
            self.versions.append(versions[first : first + n])
            self.sources.append(self.sources_block[first : first + n])
            at, first = at + size, first + n
        parts = [
            (table, n, keys_at, rows, versions, source)
            for (table, n), (_, keys_at), rows, versions, source in zip(
                requests, buffers, self.rows, self.versions, self.sources, strict=True
            )
        ]
        self._launches = [
            _FetchLaunch(parts[start : start + PARTS]) for start in range(0, len(parts), PARTS)
        ]
        cp.cuda.get_current_stream().synchronize()

    def launch(self, stream: Any, oldest_tombstones: Sequence[int]) -> None:
        """Fetch on ``stream``, without waiting; older tombstones count as absent. Counts as a use of the
        keys."""
        self._staging.send(stream)
        self.sources_block.data.memset_async(0, self.sources_block.nbytes, stream)
        start = 0
        for each in self._launches:
            oldest = oldest_tombstones[start : start + PARTS]
            self._readers.run(stream, partial(each.run, stream, oldest))
            start += PARTS

    def misses(self) -> list[NDArray[np.int64]]:
        """Return the ascending positions of each table's missing keys, once the stream is done."""
        return [positions for each in self._launches for positions in each.misses()]


class _FetchLaunch:
    """One launch of a prepared fetch."""

    def __init__(self, parts: Sequence[tuple[GpuTable, int, int, Any, Any, Any]]) -> None:
        cp = cupy()
        self._tables = [part[0] for part in parts]
        total = sum(part[1] for part in parts)
        widest = max(table.table.row_bytes for table in self._tables)
        tile = tile_of(widest, 0)
        self._args, self._blocks, base, addresses = KernelStruct(FETCH_ARGS), 0, 0, 0
        for index, (table, n, keys_at, rows, versions, source) in enumerate(parts):
            FETCH_PART.pack_into(
                self._args.array.data,
                FETCH_PARTS_AT + index * FETCH_PART.size,
                *(*table.pointers, keys_at, 0, rows.data.ptr, versions.data.ptr, source.data.ptr),
                *(0, *table.sizes, n, base, self._blocks, 0, table.stamping, launch.GPU_CODE),
            )
            base += n
            addresses |= rows.data.ptr | table.table.row_bytes
            self._blocks += blocks_of(n, tile)
        self._ends = np.cumsum([part[1] for part in parts])
        self._starts = self._ends - [part[1] for part in parts]
        self._counts = cp.zeros(2, np.uint32)
        self._pinned = cp.cuda.alloc_pinned_memory(4 + 4 * total)
        self._result: NDArray[np.uint32] = np.frombuffer(self._pinned, np.uint32, 1 + total)
        self._args["parts"], self._args["result"] = len(parts), self._pinned.ptr
        self._args["misses"] = self._pinned.ptr + 4
        self._args["miss_count"] = self._counts.data.ptr
        self._args["done"] = self._counts.data.ptr + 4
        unit = unit_of(addresses)
        alike = len({table.table.row_bytes for table in self._tables}) == 1
        self._kernels = FetchKernels(
            tile,
            unit,
            moves_of(widest, tile, unit) if alike else 0,
            launch.TIER,
            stamp=any(table.stamping for table in self._tables),
        )
        host_bytes = max(table.shape.host_bytes for table in self._tables)
        self._windows = windows_of(host_bytes, total)
        self._later = cp.empty(total, np.uint32) if self._windows > 1 else None
        self._now = self._args.array["part"]["now"]
        self._oldest = self._args.array["part"]["oldest_tombstone"]

    def run(self, stream: Any, oldest_tombstones: Sequence[int]) -> None:
        self._now[: len(self._tables)] = [table.now for table in self._tables]
        self._oldest[: len(self._tables)] = oldest_tombstones
        self._kernels.launch(self._blocks, self._args, stream, self._windows, self._later)

    def misses(self) -> list[NDArray[np.int64]]:
        found = np.sort(self._result[1 : 1 + int(self._result[0])]).astype(np.int64)
        cuts = np.searchsorted(found, self._ends).tolist()
        first, split = 0, []
        for cut, start in zip(cuts, self._starts.tolist(), strict=True):
            split.append(found[first:cut] - start if cut > first else found[:0])
            first = cut
        return split
