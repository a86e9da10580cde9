"""One launch of fetch over all tables of a batch, and the buffers it needs."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.cuda import launch
from hps.cuda.launch import (
    FETCH_ARGS,
    PARTS,
    blocks_of,
    fetch_name,
    moves_of,
    tile_of,
    unit_of,
)
from hps.cuda.loader import args_of, cupy, kernel
from hps.cuda.readers import Readers
from hps.cuda.table import GpuTable

_RESULT_BYTES = 16
_IN_PLACE = 1 << 19
"""Staging buffers up to this size are read and written by the kernel where they are, in pinned host memory:
the latency of two copies is worth more than the bus traffic."""
# FETCH_PART, packed in one go: setting the fields one by one takes longer than the fetch.
_PART = struct.Struct("<9Q8I")
_PARTS_AT = FETCH_ARGS.fields["part"][1]  # type: ignore[index]


@dataclass(slots=True)
class Ask:
    """One table's share of a fetch. ``keys`` and ``positions`` (or None for all) on host or device; ``out``,
    ``versions`` and ``source`` on the device; ``n`` keys are asked for."""

    table: GpuTable
    keys: Any
    positions: Any
    out: Any
    versions: Any
    source: Any
    n: int
    oldest_tombstone: int


class Workspace:
    """Staging buffers of one fetch at a time on the current device."""

    def __init__(self) -> None:
        self.args = args_of(FETCH_ARGS)
        self._bytes = 0
        self._counts = cupy().zeros(2, np.uint32)
        self.args["miss_count"] = self._counts.data.ptr
        self.args["done"] = self._counts.data.ptr + 4
        cupy().cuda.get_current_stream().synchronize()
        self._grow(1 << 16)

    def fetch(
        self, readers: Readers, stream: Any, asks: Sequence[Ask], code: int
    ) -> NDArray[np.uint32]:
        """Run ``asks`` (1 … PARTS of them, none empty) on ``stream``. Returns, ascending, the misses as
        positions in the batch: ask after ask, each key asked for counted. Waits for the stream."""
        total = sum(ask.n for ask in asks)
        used = self._reserve(asks, total)
        in_place = used <= _IN_PLACE
        base = self._pinned.ptr if in_place else self._device.data.ptr
        end = self._stage(asks, code, base)
        self.args["misses"] = base + end
        name, blocks = self._choose(asks)
        copy = cupy().cuda.runtime.memcpyAsync
        if not in_place:
            copy(base, self._pinned.ptr, end, 1, stream.ptr)
        readers.run(stream, lambda: kernel(name).launch(blocks, self.args, stream.ptr))
        stream.synchronize()
        misses = int(self._result[0])
        if misses and not in_place:
            copy(self._pinned.ptr + end, base + end, 4 * misses, 2, stream.ptr)
            stream.synchronize()
        return np.sort(self._host[end : end + 4 * misses].view(np.uint32))

    def _stage(self, asks: Sequence[Ask], code: int, start: int) -> int:
        """Fill in the arguments and the staging buffer, which the kernel sees at ``start``; returns the bytes
        used, by the result and by keys and positions that were on the host."""
        at, base, blocks = _RESULT_BYTES, 0, 0
        tile = self._tile(asks)
        for index, ask in enumerate(asks):
            keys, at = self._put(ask.keys, at, start)
            positions, at = self._put(ask.positions, at, start)
            _PART.pack_into(
                self.args.data,
                _PARTS_AT + index * _PART.size,
                *ask.table.pointers,
                keys,
                positions,
                ask.out.data.ptr,
                ask.versions.data.ptr,
                ask.source.data.ptr,
                ask.oldest_tombstone,
                *ask.table.sizes,
                ask.n,
                base,
                blocks,
                ask.table.now,
                code,
            )
            base += ask.n
            blocks += blocks_of(ask.n, tile)
        self.args["parts"] = len(asks)
        return at

    def _put(self, array: Any, at: int, start: int) -> tuple[int, int]:
        """The device address of ``array``, which is copied to ``at`` in the staging buffer if it is on the
        host, and where the next one goes."""
        if array is None:
            return 0, at
        if not isinstance(array, np.ndarray):
            return int(array.data.ptr), at
        end = at + array.nbytes
        self._host[at:end].view(array.dtype)[:] = array
        end = -(-end // 16) * 16
        return start + at, end

    @staticmethod
    def _tile(asks: Sequence[Ask]) -> int:
        return tile_of(max(ask.table.table.row_bytes for ask in asks))

    def _choose(self, asks: Sequence[Ask]) -> tuple[str, int]:
        unit = min(unit_of(ask.table.table.row_bytes, [ask.out.data.ptr]) for ask in asks)
        tile = self._tile(asks)
        sizes = {ask.table.table.row_bytes for ask in asks}
        moves = moves_of(max(sizes), tile, unit) if len(sizes) == 1 else 0
        keep = all(ask.table.keep for ask in asks)
        blocks = sum(blocks_of(ask.n, tile) for ask in asks)
        return fetch_name(tile, unit, moves, launch.TIER, stamp=True, keep=keep), blocks

    def _reserve(self, asks: Sequence[Ask], total: int) -> int:
        needed = _RESULT_BYTES + 4 * total
        for ask in asks:
            for array in (ask.keys, ask.positions):
                if isinstance(array, np.ndarray):
                    needed += array.nbytes + 16
        if needed > self._bytes:
            self._grow(1 << (needed - 1).bit_length())
        return needed

    def _grow(self, size: int) -> None:
        cp = cupy()
        self._bytes = size
        self._device = cp.empty(size, np.uint8)
        self._pinned = cp.cuda.alloc_pinned_memory(size)
        self._host = np.frombuffer(self._pinned, np.uint8, size)
        self._result = self._host[:4].view(np.uint32)
        self.args["result"] = self._pinned.ptr


class Direct:
    """Fetches from one table without host work: device keys in, rows or row numbers out, misses left on
    the device. For callers that keep everything there, and for measuring the kernel alone."""

    def __init__(self, readers: Readers) -> None:
        self._readers = readers

    def fetch(
        self,
        table: GpuTable,
        keys: Any,
        out: Any,
        misses: Any,
        *,
        form: int = launch.ROWS,
        tile: int | None = None,
        stamp: bool = True,
        keep: bool | None = None,
        defines: tuple[str, ...] = (),
    ) -> None:
        """``keys (n,)``, n > 0; ``out (n, dim)`` or, for ``launch.NUMBERS``, ``(n,) uint32``. ``misses
        (4 + n,) uint32``: [0] must be zero and counts them, from [4] on stand their positions, in no
        order."""
        tile = tile or tile_of(table.table.row_bytes)
        args = args_of(FETCH_ARGS)
        args["misses"], args["miss_count"] = misses.data.ptr + 16, misses.data.ptr
        args["parts"] = 1
        part = args["part"][0]
        part["lines"], part["rows"], part["row_versions"] = table.pointers
        part["keys"], part["out"], part["n"] = keys.data.ptr, out.data.ptr, len(keys)
        part["buckets"], part["stride"], part["row_bytes"] = table.sizes
        part["now"] = table.now
        unit = 16 if form == launch.NUMBERS else unit_of(table.table.row_bytes, [out.data.ptr])
        moves = 0 if form == launch.NUMBERS else moves_of(table.table.row_bytes, tile, unit)
        keep = table.keep if keep is None else keep
        run = kernel(fetch_name(tile, unit, moves, form, stamp=stamp, keep=keep), defines)
        stream = cupy().cuda.get_current_stream()
        blocks = blocks_of(len(keys), tile)
        self._readers.run(stream, lambda: run.launch(blocks, args, stream.ptr))


__all__ = ["PARTS", "Ask", "Direct", "Workspace"]
