"""One launch of a prepared fetch, the list of its misses, and the placing of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from operator import or_
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from hps.cuda import launch
from hps.cuda.fetch_kernels import PART, PARTS_AT, FetchKernels
from hps.cuda.launch import (
    COUNT_ARGS,
    COUNTED_BEHIND,
    FETCH_ARGS,
    PLACE_ARGS,
    blocks_of,
    chunk_keys,
    tile_of,
    unit_of,
    units_of,
    windows_of,
)
from hps.cuda.loader import BLOCK, CudaKernel, KernelStruct, cupy, kernel
from hps.cuda.prepared import address_of
from hps.cuda.reader_events import ReaderEvents
from hps.cuda.scatter import tile_of_rows
from hps.cuda.table import GpuTable
from hps.native import COMPILED, WorkerPool, copy_keys
from hps.types import KeyArray

if COMPILED:
    from hps.native.launching import FetchLaunch, PlaceLaunch

Piece = tuple[int, int, int]
"""Keys of one chunk: the number of their table, and their range among its keys."""


class FetchedKeys:
    """The keys of a fetch of ``n`` keys of each table, and the places of their rows in a block.

    Arguments as for `VectorFetch`. ``flat``: pinned memory for keys on the host, of all tables together."""

    readers: ReaderEvents
    chunks: list[FetchChunk]

    def __init__(
        self,
        requests: Sequence[tuple[GpuTable, int]],
        offsets: Sequence[int],
        on_device: Sequence[bool],
        sources: int,
    ) -> None:
        self.requests, self.offsets, self.on_device = list(requests), list(offsets), on_device
        self.sources = sources
        self.total = sum(n for _, n in requests)
        self.lists_keys = any(on_device)
        self.flat, self.flat_at = pinned_array(self.total, np.int64, needed=not all(on_device))
        ends = np.cumsum([n for _, n in requests]).tolist()
        self.starts = [end - n for (_, n), end in zip(requests, ends, strict=True)]
        self.keys = [self.flat[end - n : end] for (_, n), end in zip(requests, ends, strict=True)]


class FetchChunk:
    """One launch of a fetch, and the list of its misses.

    ``tables`` and ``bases``: its parts' tables, and the position of each part's first key among the keys
    of the chunk. ``indices``: the parts' numbers among the fetch's tables. ``first``, ``last``: its range of
    keys."""

    def __init__(self, fetch: FetchedKeys, pieces: Sequence[Piece]) -> None:
        self._fetch, self._pieces = fetch, pieces
        held = [fetch.requests[index][0] for index, _, _ in pieces]
        self._held = held
        self.tables = [table.table for table in held]
        self.indices = np.array([index for index, _, _ in pieces], np.int64)
        self.starts = [start for _, start, _ in pieces]
        sizes = [stop - start for _, start, stop in pieces]
        ends = np.cumsum(sizes)
        self.bases = (ends - sizes).astype(np.uint32)
        self._partial = False
        self._sizes, self._first_keys = np.array(sizes), np.array(self.starts)
        self.first = fetch.starts[pieces[0][0]] + pieces[0][1]
        self.last = self.first + int(ends[-1])
        self._offsets = np.array(
            [
                fetch.offsets[index] + start * table.table.row_bytes
                for (index, start, _), table in zip(pieces, held, strict=True)
            ],
            np.uint64,
        )
        self._prepare_results(int(ends[-1]))
        self._prepare_fetch(sizes)
        self._prepare_place()

    # -- preparation ------------------------------------------------------------------------------

    def _prepare_results(self, n: int) -> None:
        cp = cupy()
        self._counts = cp.zeros(2, np.uint32)
        self._result, result_at = pinned_array(2, np.uint32)
        self._positions, self.positions_at = pinned_array(n, np.uint32)
        self._miss_keys, keys_at = pinned_array(n, np.int64, needed=self._fetch.lists_keys)
        self._end = cp.cuda.Event(disable_timing=True)
        self._args = args = KernelStruct(FETCH_ARGS)
        args["misses"], args["miss_keys"] = self.positions_at, keys_at
        args["miss_count"], args["done"] = self._counts.data.ptr, self._counts.data.ptr + 4
        self._is_counted_behind = n >= COUNTED_BEHIND
        args["result"] = 0 if self._is_counted_behind else result_at
        self._count, self._count_args = kernel("count_kernel"), KernelStruct(COUNT_ARGS)
        self._count_args["miss_count"], self._count_args["result"] = args["miss_count"], result_at

    def _prepare_fetch(self, sizes: Sequence[int]) -> None:
        fetch, args, held = self._fetch, self._args, self._held
        n, widths = sum(sizes), [table.table.row_bytes for table in held]
        tile, unit = tile_of(max(widths), n), unit_of(reduce(or_, widths))
        self._device_parts = []
        self._blocks, self._keys_a_block = 0, BLOCK // tile
        for part, ((index, start, _), table, size) in enumerate(
            zip(self._pieces, held, sizes, strict=True)
        ):
            keys_at = fetch.flat_at + 8 * (fetch.starts[index] + start)
            if fetch.on_device[index]:
                self._device_parts.append((part, index, 8 * start))
            source = fetch.sources and fetch.sources + fetch.starts[index] + start
            PART.pack_into(
                args.array.data,
                PARTS_AT + part * PART.size,
                *(*table.pointers, keys_at, 0, 0, 0, source, 0, *table.sizes),
                *(size, self.bases[part], self._blocks, 0, table.clock.stamping, table.code),
            )
            self._blocks += blocks_of(size, tile)
        args["parts"] = len(held)
        parts = args.array["part"][: len(held)]
        self._now, self._outs, self._keys = parts["now"], parts["out"], parts["keys"]
        self._ns = parts["n"]
        alike = len(set(widths)) == 1
        self._kernels = FetchKernels(
            tile,
            unit,
            units_of(widths[0], unit) if alike else 0,
            launch.VECTORS,
            stamp=any(table.clock.stamping for table in held),
        )
        self._windows = windows_of(max(table.shape.host_bytes for table in held), n)
        self._later = cupy().empty(n, np.uint32) if self._windows > 1 else None
        self._addresses = [0] * len(self._device_parts)
        self.timed = [table for table in held if table.clock.is_timed]
        self.native: Any = self._native_launch() if self._windows == 1 else None

    def _native_launch(self) -> Any:
        """Return the launches by the compiled core; None if it is missing."""
        if not COMPILED:
            return None
        native = FetchLaunch.make(
            address_of(self._args.array),
            self._count.address,
            address_of(self._count_args.array),
            [address_of(table.clock.cell) for table in self._held],
        )
        native.prepare_block(
            self._kernels.one().address,
            self._blocks,
            self._keys_a_block,
            self._is_counted_behind,
            self._offsets.tolist(),
            [part for part, _, _ in self._device_parts],
        )
        return native

    def _prepare_place(self) -> None:
        self.stride = -(-max(table.row_bytes for table in self.tables) // 16) * 16
        self._place_tile, unit = tile_of_rows(self.tables)
        self._place_args = args = KernelStruct(PLACE_ARGS)
        args["stride"], args["parts"] = self.stride, len(self.tables)
        parts = args.array["part"][: len(self.tables)]
        parts["base"], parts["row_bytes"] = self.bases, [table.row_bytes for table in self.tables]
        parts["source"] = self._args.array["part"]["source"][: len(self.tables)]
        self._place_outs = parts["out"]
        self._place: CudaKernel = kernel(f"place_kernel<{self._place_tile}, {unit}>")
        self._native_place: Any = None
        if COMPILED:
            rows_a_block = BLOCK // self._place_tile
            at = self._place.address, rows_a_block, address_of(args.array)
            self._native_place = PlaceLaunch.make(*at)

    # -- fetching ---------------------------------------------------------------------------------

    def take_keys(self, arrays: Sequence[Any], pool: WorkerPool | None) -> None:
        """Copy the chunk's keys from host ``arrays`` to pinned memory; note where those on the device are."""
        fetch = self._fetch
        self._addresses = [
            arrays[index].data.ptr + offset for _, index, offset in self._device_parts
        ]
        if len(self._device_parts) == len(self._pieces):
            return
        if self._device_parts:
            for index, start, stop in self._pieces:
                if not fetch.on_device[index]:
                    fetch.keys[index][start:stop] = arrays[index][start:stop]
            return
        mine = [arrays[index][start:stop] for index, start, stop in self._pieces]
        copy_keys(mine, fetch.flat[self.first : self.last], pool)

    def launch_copied(
        self, stream: Any, block: int, arrays: Sequence[KeyArray], pool: WorkerPool | None
    ) -> None:
        """Launch in pieces while ``pool`` copies the keys of all tables, in ``arrays`` on the host."""
        self.refresh(None)
        end, threads = self._fetch.readers.end_of(stream).ptr, cast(Any, pool)
        mine = [arrays[index][start:stop] for index, start, stop in self._pieces]
        size = chunk_keys(self.last - self.first)
        self.native.run_block_copied(block, mine, size, stream.ptr, end, threads)

    def launch(self, stream: Any, block: int, used: NDArray[np.int64] | None) -> None:
        self.refresh(used)
        readers = self._fetch.readers
        if self.native is not None:
            self.native.run_block(block, self._addresses, stream.ptr, readers.end_of(stream).ptr)
            return
        for (part, _, _), address in zip(self._device_parts, self._addresses, strict=True):
            self._keys[part] = address
        self._now[:] = [table.clock.now for table in self._held]
        np.add(self._offsets, np.uint64(block), out=self._outs)
        readers.run(stream, partial(self._run, stream))
        if self._is_counted_behind:
            self._count.launch(1, self._count_args, stream.ptr)
        self._end.record(stream)

    def refresh(self, used: NDArray[np.int64] | None) -> None:
        """Set what may differ from the launch before; ``used`` as for `VectorFetch.launch`."""
        if used is not None or self._partial:
            self._limit(used)
        for table in self.timed:
            table.clock.publish()

    def fill_steps(
        self, keys_at: Sequence[int], hotness: Sequence[int], tables: Sequence[Any]
    ) -> tuple[list[Any], Any]:
        """See `VectorFetch.fill_steps`."""
        from hps.native.scheduler import FillChunk

        for part, index, offset in self._device_parts:
            self._keys[part] = keys_at[index] + offset
        self._outs[:] = self._place_outs[:] = self._offsets
        fresh = [
            (address_of(self._now[i : i + 1]), address_of(table.clock.cell))
            for i, table in enumerate(self._held)
        ]
        steps = [_kernel_step(self._kernels.one(), self._blocks, self._args, fresh)]
        if self._is_counted_behind:
            steps.append(_kernel_step(self._count, 1, self._count_args))
        parts = [
            (
                *(tables[index], int(self.bases[i]), start, stop - start, hotness[index], index),
                address_of(self._ns[i : i + 1]),
            )
            for i, (index, start, stop) in enumerate(self._pieces)
        ]
        fields = self._place_args.array
        arguments = (
            *(address_of(fields["positions"]), address_of(fields["rows"])),
            *(address_of(fields["sources"]), address_of(fields["n"])),
        )
        return steps, FillChunk.make(
            parts,
            *(address_of(self._result), self.positions_at, address_of(self._miss_keys)),
            place=_kernel_step(self._place, 0, self._place_args),
            rows_per_block=BLOCK // self._place_tile,
            arguments=arguments,
        )

    def _limit(self, used: NDArray[np.int64] | None) -> None:
        """Fetch only the first ``used (tables,)`` keys of each table of the fetch; None: all."""
        self._partial = used is not None
        self._ns[:] = self._sizes
        if used is not None:
            self._ns[:] = np.clip(used[self.indices] - self._first_keys, 0, self._sizes)

    def _run(self, stream: Any) -> None:
        self._kernels.launch(self._blocks, self._args, stream, self._windows, self._later)

    def wait(self, stream: Any) -> int:
        """Wait until the chunk is fetched; return the number of its misses."""
        if self.native is not None:
            missed: int = self.native.wait()
            return missed
        self._end.synchronize()
        return int(self._result[0])

    def misses(self, start: int, stop: int) -> tuple[NDArray[np.uint32], KeyArray, bool]:
        """Return the positions of misses in the chunk, in no order; after `wait`.

        With them the keys: of these misses if the last value is true, else all keys of the chunk."""
        positions, fetch = self._positions[start:stop], self._fetch
        if fetch.lists_keys:
            return positions, self._miss_keys[start:stop], True
        return positions, fetch.flat[self.first : self.last], False

    def placing(self) -> Any:
        """Return the `PlaceLaunch` of the chunk's rows; None without the compiled core."""
        self._place_outs[:] = self._outs
        return self._native_place

    def place(self, stream: Any, first: int, n: int, rows_at: int, sources_at: int) -> None:
        """Write ``n`` rows, `stride` bytes apart, to the positions of the misses from ``first`` on.

        ``rows_at``, ``sources_at``: addresses for kernels of the rows and of their source codes."""
        args, self._place_outs[:] = self._place_args, self._outs
        args["positions"], args["n"] = self.positions_at + 4 * first, n
        args["rows"], args["sources"] = rows_at, sources_at
        self._place.launch(blocks_of(n, self._place_tile), args, stream.ptr)


def _kernel_step(
    run: CudaKernel, blocks: int, args: KernelStruct, fresh: Sequence[tuple[int, int]] = ()
) -> Any:
    """Return a launch as a step of the batch scheduler; with ``fresh`` it reads tables."""
    from hps.native.scheduler import Step

    at = address_of(args.array)
    return Step.kernel(run.address, blocks, BLOCK, at, reads_tables=bool(fresh), fresh=fresh)


def pinned_array(count: int, dtype: Any, *, needed: bool = True) -> tuple[NDArray[Any], int]:
    """Allocate ``(count,)`` of pinned memory, zeroed; return it with its address. Empty, and 0, unless
    needed."""
    if not needed:
        return np.empty(0, dtype), 0
    memory = cupy().cuda.alloc_pinned_memory(count * np.dtype(dtype).itemsize)
    array: NDArray[Any] = np.frombuffer(memory, dtype, count)
    array[:] = 0
    return array, int(memory.ptr)
