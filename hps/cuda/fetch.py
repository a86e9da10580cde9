"""One launch of fetch over all tables of a batch, and the buffers it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.bounded_memo import memoize
from hps.cuda import launch
from hps.cuda.fetch_kernels import PART, PARTS_AT, FetchKernels
from hps.cuda.launch import (
    FETCH_ARGS,
    MANY_KEYS,
    PARTS,
    blocks_of,
    tile_of,
    unit_of,
    units_of,
    windows_of,
)
from hps.cuda.loader import BLOCK, KernelStruct, cupy, kernel
from hps.cuda.reader_events import ReaderEvents
from hps.cuda.staging import IN_PLACE, Copy, StagingBuffer, staging_bytes
from hps.cuda.table import GpuTable
from hps.native import COMPILED, WorkerPool

if COMPILED:
    from hps.native.launching import FetchLaunch

_PLANS_KEPT = 64
_NO_MISSES = np.empty(0, np.uint32)


FetchArguments = tuple[GpuTable, Any, Any, Any, Any, Any, int, int]
"""One table's arguments of a fetch of n keys: the table; keys, and positions in them (None: all), on host or
device; out, versions and source (each or None) on the device; the oldest tombstone that counts; n."""


class MissList:
    """Memory for the positions that a fetch misses: pinned, or for large fetches on the device."""

    def __init__(self) -> None:
        self._size = 0
        self.reserve(1)

    def reserve(self, count: int) -> int:
        """Return the address of memory for ``count`` positions."""
        if count > self._size:
            cp, self._size = cupy(), 1 << (count - 1).bit_length()
            self._pinned = cp.cuda.alloc_pinned_memory(4 * self._size)
            self._host: NDArray[np.uint32] = np.frombuffer(self._pinned, np.uint32, self._size)
            self._device = cp.empty(self._size, np.uint32) if 4 * self._size > IN_PLACE else None
        return int(self._pinned.ptr if self._device is None else self._device.data.ptr)

    def read(self, count: int, stream: Any) -> NDArray[np.uint32]:
        """Return the first ``count`` positions, once ``stream`` is done; waits if they must be copied."""
        if self._device is not None:
            copy = cupy().cuda.runtime.memcpyAsync
            copy(self._pinned.ptr, self._device.data.ptr, 4 * count, 2, stream.ptr)
            stream.synchronize()
        return self._host[:count]


class FetchWorkspace:
    """Buffers and counters on the current device, for one fetch (or pooling) at a time."""

    def __init__(self, copy: Copy = np.copyto, threads: WorkerPool | None = None) -> None:
        """``copy`` copies host arrays to pinned memory; ``threads`` large arrays of keys."""
        cp = cupy()
        self.staging = StagingBuffer(copy)
        self._threads = threads
        self.misses = MissList()
        self.counts = cp.zeros(2, np.uint32)
        self._pinned = cp.cuda.alloc_pinned_memory(8)
        self.result = np.frombuffer(self._pinned, np.uint32, 2)
        self.result[:] = 0
        self.result_at = self._pinned.ptr
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        self.count, self.count_args = kernel("count_kernel"), KernelStruct(launch.COUNT_ARGS)
        self.count_args["miss_count"] = self.counts.data.ptr
        self.count_args["result"] = self.result_at
        self._later: Any = None
        cp.cuda.get_current_stream().synchronize()

    def fetch(
        self, readers: ReaderEvents, stream: Any, requests: Sequence[FetchArguments]
    ) -> NDArray[np.uint32]:
        """Run ``requests`` (1 … PARTS of them, none empty) on ``stream`` and wait for it.

        They have versions all or none: without, deleted keys are misses. Returns the misses, ascending,
        as positions in the batch: all keys of the requests, one after the other.
        """
        needed, total, tables = 0, 0, []
        for table, keys, positions, _, _, _, _, n in requests:
            tables.append(table)
            total += n
            if type(keys) is np.ndarray or type(positions) is np.ndarray:
                needed += staging_bytes(keys, positions)
        if needed:
            self.staging.begin(needed, in_place=True)
        form = launch.VECTORS if requests[0][4] is None else launch.TIER
        many = total >= MANY_KEYS
        plan = self._plans.get((form, many, *tables)) or self._plan(form, total, tables)
        if plan.native is None or windows_of(plan.host_bytes, total) > 1:
            missed = self._run(readers, stream, requests, plan, total)
        else:
            missed = self._run_native(readers, stream, requests, plan, total)
        return np.sort(self.misses.read(missed, stream)) if missed else _NO_MISSES

    def _run_native(
        self,
        readers: ReaderEvents,
        stream: Any,
        requests: Sequence[FetchArguments],
        plan: _Plan,
        total: int,
    ) -> int:
        """Launch the fetch of ``total`` keys, and wait for it; return the number of its misses."""
        addresses, parts = plan.row_bytes, []
        copied = total >= launch.COPIED_IN_CHUNKS and all(
            type(keys) is np.ndarray and positions is None for _, keys, positions, *_ in requests
        )
        put: Callable[[Any], int] = self._reserve if copied else self.staging.put
        for _, keys, positions, rows, versions, source, oldest, n in requests:
            out = rows.data.ptr
            addresses |= out
            parts.append(
                (
                    put(keys),
                    put(positions),
                    out,
                    0 if versions is None else versions.data.ptr,
                    0 if source is None else source.data.ptr,
                    oldest,
                    n,
                )
            )
        for table in plan.timed:
            table.clock.publish()
        native = plan.native
        what = plan.function(addresses), plan.keys_a_block, parts, self.misses.reserve(total)
        at = stream.ptr, readers.end_of(stream).ptr
        if copied:
            arrays, size = [request[1] for request in requests], launch.chunk_keys(total)
            native.run_parts_copied(*what, arrays, size, *at, self._threads)
        else:
            native.run_parts(*what, *at, total >= launch.COUNTED_BEHIND)
        missed: int = native.wait()
        return missed

    def _reserve(self, array: Any) -> int:
        """Return the address of staging memory for ``array``, to which it is copied later; 0 for None."""
        return 0 if array is None else self.staging.allocate(array.size, array.dtype)[1]

    def _run(
        self,
        readers: ReaderEvents,
        stream: Any,
        requests: Sequence[FetchArguments],
        plan: _Plan,
        total: int,
    ) -> int:
        """Like `_run_native`, without the compiled core or in several windows."""
        blocks, run = self._fill(requests, plan)
        args, windows = plan.args, windows_of(plan.host_bytes, total)
        if windows > 1 and (self._later is None or len(self._later) < total):
            self._later = cupy().empty(1 << (total - 1).bit_length(), np.uint32)
        behind = total >= launch.COUNTED_BEHIND
        args["misses"] = self.misses.reserve(total)
        args["result"] = 0 if behind else self.result_at
        readers.run(stream, lambda: run.launch(blocks, args, stream, windows, self._later))
        if behind:
            self.count.launch(1, self.count_args, stream.ptr)
        stream.synchronize()
        return int(self.result[0])

    def _fill(self, requests: Sequence[FetchArguments], plan: _Plan) -> tuple[int, FetchKernels]:
        """Fill the arguments and the staging buffer; return the blocks to launch and the kernels."""
        base, blocks, addresses = 0, 0, plan.row_bytes
        put, parts = self.staging.put, plan.args["part"]
        for part, request in zip(parts, requests, strict=False):
            table, keys, positions, rows, versions, source, oldest, n = request
            part["keys"], part["positions"] = put(keys), put(positions)
            part["out"], part["n"], part["base"] = rows.data.ptr, n, base
            part["versions"] = 0 if versions is None else versions.data.ptr
            part["source"] = 0 if source is None else source.data.ptr
            part["oldest_tombstone"] = oldest
            part["first_block"], part["now"] = blocks, table.clock.now
            addresses |= rows.data.ptr
            base += n
            blocks += blocks_of(n, plan.tile)
        return blocks, plan.kernels(unit_of(addresses))

    def _plan(self, form: int, keys: int, tables: Sequence[GpuTable]) -> _Plan:
        """Make the launch plan for ``keys`` of ``tables``; kept, since a model's requests repeat."""
        key = form, keys >= MANY_KEYS, *tables
        return memoize(self._plans, key, _Plan(self, form, keys, tables), _PLANS_KEPT)


class _Plan:
    """The fixed part of launches over some tables. ``row_bytes``: their sizes combined by bitwise or.

    ``timed``: the tables whose epochs end by time. ``native``: launches by the compiled core, or None."""

    def __init__(
        self, workspace: FetchWorkspace, form: int, keys: int, tables: Sequence[GpuTable]
    ) -> None:
        self._form = form
        sizes = {table.table.row_bytes for table in tables}
        self.row_bytes = reduce(or_, sizes)
        self.tile = tile_of(max(sizes), keys)
        self.keys_a_block = BLOCK // self.tile
        self._size = max(sizes) if len(sizes) == 1 else 0
        self._stamp = any(table.clock.stamping for table in tables)
        self._kernels: dict[int, FetchKernels] = {}
        self._functions: dict[int, int] = {}
        self.host_bytes = max(table.shape.host_bytes for table in tables)
        self.timed = [table for table in tables if table.clock.is_timed]
        self.args = args = KernelStruct(FETCH_ARGS)
        args["miss_count"] = workspace.counts.data.ptr
        args["done"] = workspace.counts.data.ptr + 4
        args["parts"] = len(tables)
        for index, table in enumerate(tables):
            PART.pack_into(
                args.array.data,
                PARTS_AT + index * PART.size,
                *(*table.pointers, 0, 0, 0, 0, 0, 0, *table.sizes),
                *(0, 0, 0, 0, table.clock.stamping, table.code),
            )
        self.native: Any = None
        if COMPILED:
            count, count_args = workspace.count.address, workspace.count_args.array.ctypes.data
            now = [table.clock.cell.ctypes.data for table in tables]
            self.native = FetchLaunch.make(args.array.ctypes.data, count, count_args, now)

    def function(self, addresses: int) -> int:
        """Return the kernel for rows and outs at ``addresses``, combined by bitwise or."""
        function = self._functions.get(addresses & 15)
        if function is None:
            function = self.kernels(unit_of(addresses)).one().address
            self._functions[addresses & 15] = function
        return function

    def kernels(self, unit: int) -> FetchKernels:
        kernels = self._kernels.get(unit)
        if kernels is None:
            units = units_of(self._size, unit)
            kernels = FetchKernels(self.tile, unit, units, self._form, stamp=self._stamp)
            self._kernels[unit] = kernels
        return kernels


@dataclass(frozen=True, slots=True)
class FetchVariant:
    """The kernel that `DirectFetch` launches.

    ``form``: `launch.ROWS` or `launch.NUMBERS`. ``tile``: threads per key; None: the fastest for the row
    size. ``stamp``: count as a use of the keys. ``defines``: see `loader.kernel`.
    """

    form: int = launch.ROWS
    tile: int | None = None
    stamp: bool = True
    defines: tuple[str, ...] = ()


_ROWS = FetchVariant()


class DirectFetch:
    """Fetches from one table without host work, for device arrays and for measuring the kernel.

    Device keys in, rows or row numbers out; misses stay on the device.
    """

    def __init__(self, readers: ReaderEvents) -> None:
        self._readers = readers
        self._kernels: dict[tuple[Any, ...], FetchKernels] = {}

    def fetch(
        self,
        table: GpuTable,
        keys: Any,
        out: Any,
        misses: Any,
        variant: FetchVariant = _ROWS,
        *,
        positions: Any = None,
        source: Any = None,
    ) -> None:
        """Fetch ``keys (n,)``, n > 0, to ``out (n, dim)`` or, for ``launch.NUMBERS``, ``(n,) uint32``.

        ``misses (4 + n,) uint32``: [0] must be zero and counts the misses; their positions follow from [4]
        on, unordered. With ``launch.VECTORS``, ``positions (m,) int64``, m > 0, are those of the keys to
        fetch and of their rows in ``out``, and ``misses`` are places in ``positions``; ``source (n,) uint8``
        receives a code for each row. ``keys``, ``positions``, ``out`` and ``source`` may be in the memory
        of another device, to which the current one has peer access.
        """
        numbers = variant.form == launch.NUMBERS
        n = len(keys if positions is None else positions)
        tile = variant.tile or tile_of(4 if numbers else table.table.row_bytes, n)
        args = KernelStruct(FETCH_ARGS)
        args["misses"], args["miss_count"] = misses.data.ptr + 16, misses.data.ptr
        args["parts"] = 1
        part = args["part"][0]
        part["lines"], part["rows"], part["host_rows"], part["row_versions"] = table.pointers
        part["buckets"], part["stride"], part["row_bytes"], part["on_device"] = table.sizes
        part["keys"], part["out"], part["n"] = keys.data.ptr, out.data.ptr, n
        part["positions"] = 0 if positions is None else positions.data.ptr
        part["source"] = 0 if source is None else source.data.ptr
        part["now"], part["policy"], part["code"] = (
            table.clock.now,
            table.clock.stamping,
            table.code,
        )
        unit = 16 if numbers else unit_of(table.table.row_bytes | out.data.ptr)
        kernels = self._kernels_for(table, variant, tile, unit)
        stream, blocks, later = cupy().cuda.get_current_stream(), blocks_of(n, tile), None
        windows = 1
        if variant.form == launch.ROWS:
            windows = windows_of(table.shape.host_bytes, len(keys))
        if windows > 1:
            later = cupy().empty(len(keys), np.uint32)
        self._readers.run(stream, lambda: kernels.launch(blocks, args, stream, windows, later))

    def _kernels_for(
        self, table: GpuTable, variant: FetchVariant, tile: int, unit: int
    ) -> FetchKernels:
        form, defines = variant.form, variant.defines
        units = 0 if form == launch.NUMBERS else units_of(table.table.row_bytes, unit)
        stamp = variant.stamp and bool(table.clock.stamping)
        key = tile, unit, units, form, stamp, defines
        kernels = self._kernels.get(key)
        if kernels is None:
            kernels = FetchKernels(tile, unit, units, form, stamp=stamp, defines=defines)
            self._kernels[key] = kernels
        return kernels


__all__ = [
    "PART",
    "PARTS",
    "PARTS_AT",
    "DirectFetch",
    "FetchArguments",
    "FetchVariant",
    "FetchWorkspace",
]
