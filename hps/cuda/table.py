"""One table in device memory: its arrays, and the launches of every kernel but fetch's and the writes'."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.cuda import layout
from hps.cuda.launch import SCAN_ARGS, blocks_of, unit_of
from hps.cuda.layout import (
    AGES_A_TURN,
    BUCKET_BYTES,
    COUNT_BITS,
    POLICY_BITS,
    TICKS_A_TURN,
    WAYS,
    Policy,
    Shape,
    shape_of,
)
from hps.cuda.loader import Struct, cupy, kernel
from hps.errors import ConfigError
from hps.types import EmbeddingTable, KeyArray

_RANKED_AT_ONCE = 1 << 20
"""Slots that `GpuTable.ranks` looks at in one go."""


class GpuTable:
    """Arrays of ``table`` on the current device, with room for ``capacity`` (> 0) rows; empty at first.
    ``host_rows`` of them lie in pinned host memory, where the kernels reach them over the bus. The clock
    ticks ``ticks`` times while the table admits as many rows as it has room for; epochs last ``epoch_s``
    seconds, or until the caller says so.

    A ``static`` table is filled before anyone reads it, with unique keys, and then sealed.

    Raises ConfigError, with the capacity that would fit, when there is no memory for it. Attributes
    may be read from any thread; the methods are the writer's.
    """

    def __init__(
        self,
        table: EmbeddingTable,
        capacity: int,
        policy: Policy = Policy.LRU,
        host_rows: int = 0,
        *,
        static: bool = False,
        ticks: int = TICKS_A_TURN,
        epoch_s: float | None = None,
    ) -> None:
        cp = cupy()
        self.table = table
        self._ticks = ticks
        self._epoch_s = epoch_s
        self._since = time.monotonic()
        self.static = static
        self.policy = Policy.NONE if static else policy
        self.shape: Shape = shape_of(table, capacity, host_rows, static=static)
        shape = self.shape
        if shape.bytes > free_bytes():
            raise self._too_large()
        try:
            self.lines = cp.empty(shape.buckets * BUCKET_BYTES, np.uint8)
            self.rows = cp.empty(shape.device_rows * shape.stride, np.uint8)
            self.versions = cp.zeros(shape.rows, np.uint64)
            self.spare = cp.arange(shape.rows - shape.spare, shape.rows, dtype=np.uint32)
        except cp.cuda.memory.OutOfMemoryError as error:
            raise self._too_large() from error
        self.host = _pinned(table, shape.host_bytes)
        host = self.host.ptr - shape.device_rows * shape.stride if self.host else 0
        self.pointers = (
            self.lines.data.ptr,
            self.rows.data.ptr,
            host % 2**64,
            self.versions.data.ptr,
        )
        self.sizes = (shape.buckets, shape.stride, table.row_bytes, shape.device_rows)
        # What fetch is told of the policy: 0 when hits leave no trace.
        self.stamping = 0 if self.policy is Policy.SCORE else int(self.policy)
        self.age = 0
        if self.policy is Policy.LRU:
            self.age = max(1, ticks // AGES_A_TURN)
            self.stamping |= self.age << POLICY_BITS
        self.filled = 0  # of a static table: rows written, which no later write takes
        self.sealed = False
        self.clock = 1
        self.epoch = 0
        self._admitted = 0
        self.evicted = 0
        self.dropped = 0
        self._clear(cp.cuda.get_current_stream(), fresh=True)
        cp.cuda.get_current_stream().synchronize()

    def _too_large(self) -> ConfigError:
        free = free_bytes()
        fitting = layout.fitting_capacity(self.table, int(free * 0.95), static=self.static)
        return ConfigError(
            f"the GPU cache of table {self.table.id} needs {self.shape.bytes:,} bytes for "
            f"{self.shape.capacity:,} rows, and {free:,} are free on the device; at most "
            f"{fitting:,} rows fit"
        )

    @property
    def now(self) -> int:
        """What a hit brings a score up to: the clock, or the epoch where uses are counted."""
        if self.policy is Policy.LFU:
            if self._epoch_s is not None:
                self.epoch = int((time.monotonic() - self._since) / self._epoch_s)
            return (self.epoch % (1 << 32 - COUNT_BITS)) << COUNT_BITS
        return self.clock

    @property
    def first_score(self) -> int:
        """The score of a row when it comes, unless the caller gives one."""
        return {Policy.LRU: self.now, Policy.LFU: self.now + 1}.get(self.policy, 0)

    def scan_args(self, **fields: int) -> Struct:
        """Arguments of scan.cu's kernels for this table."""
        args = Struct(SCAN_ARGS)
        args["lines"], args["rows"], args["host_rows"], args["row_versions"] = self.pointers
        args["buckets"], args["stride"], args["row_bytes"], args["on_device"] = self.sizes
        for name, value in fields.items():
            args[name] = value
        return args

    def account(self, admitted: int, evicted: int, dropped: int) -> None:
        """Count what a write did; the clock ticks as more rows are admitted."""
        self.evicted += evicted
        self.dropped += dropped
        self._admitted += admitted
        ticks, self._admitted = divmod(self._admitted, max(1, self.shape.capacity // self._ticks))
        self.clock += ticks

    def clear(self, stream: Any) -> None:
        """Empty every slot, on ``stream``."""
        self._clear(stream, fresh=False)

    def _clear(self, stream: Any, *, fresh: bool) -> None:
        args = self.scan_args(fresh=0 if not fresh else 2 if self.static else 1)
        kernel("clear_kernel").launch(blocks_of(self.shape.slots), args, stream.ptr)

    def count(self, stream: Any) -> tuple[int, int]:
        """Rows and tombstones held. Waits for ``stream``."""
        counts = self._scan(stream)
        return int(counts[0]), int(counts[1])

    def ranks(self, stream: Any) -> tuple[KeyArray, NDArray[np.uint32]]:
        """Host arrays of the resident rows' keys (n,) and scores (n,), in no order; what a writer beside it
        changes may be told before or after, or twice. Waits for ``stream``. From any thread; takes
        little memory of the device."""
        cp, pieces = cupy(), []
        room = min(self.shape.slots, _RANKED_AT_ONCE)
        with stream:
            keys, numbers = cp.empty(room, np.int64), cp.empty(room, np.uint32)
            scores = cp.empty(room, np.uint32)
            to = {"keys": keys.data.ptr, "numbers": numbers.data.ptr, "scores": scores.data.ptr}
            for first in range(0, self.shape.buckets, room // WAYS):
                buckets = min(room // WAYS, self.shape.buckets - first)
                lines = self.lines.data.ptr + first * BUCKET_BYTES
                n = int(self._scan(stream, lines=lines, buckets=buckets, limit=room, **to)[0])
                pieces.append((keys[:n].get(), scores[:n].get()))
        return np.concatenate([k for k, _ in pieces]), np.concatenate([s for _, s in pieces])

    def export(
        self, stream: Any, least: int = 0, *, with_versions: bool = True
    ) -> tuple[Any, Any, Any, Any]:
        """Device arrays of the resident rows whose score is at least ``least``: keys (n,), vectors (n, dim),
        versions (n,) or None, scores (n,) uint32. In no order. Waits for ``stream``."""
        cp = cupy()
        with stream:
            room = int(self._scan(stream, least=least)[0])
            keys, numbers = cp.empty(room, np.int64), cp.empty(room, np.uint32)
            scores = cp.empty(room, np.uint32)
            versions = cp.empty(room, np.uint64) if with_versions else None
            vectors = cp.empty((room, self.table.dim), self.table.dtype)
            if room:
                pointers = {"keys": keys.data.ptr, "numbers": numbers.data.ptr}
                self._scan(stream, least=least, scores=scores.data.ptr, limit=room, **pointers)
                self.gather(stream, numbers, vectors, versions)
            stream.synchronize()
        return keys, vectors, versions, scores

    def gather(self, stream: Any, numbers: Any, out: Any, versions: Any = None) -> None:
        """Rows by number, ``numbers (n,) uint32``, into ``out (n, dim)`` on ``stream``."""
        unit = unit_of(self.table.row_bytes | out.data.ptr)
        threads = 4 if self.table.row_bytes <= 64 else 8
        if self.table.row_bytes <= 32 and unit == 16:
            threads = 2
        args = self.scan_args(
            numbers=numbers.data.ptr,
            out=out.data.ptr,
            versions=0 if versions is None else versions.data.ptr,
            n=len(numbers),
        )
        kernel(f"gather_kernel<{threads}, {unit}>").launch(
            blocks_of(len(numbers), threads), args, stream.ptr
        )

    def _scan(self, stream: Any, **fields: int) -> NDArray[np.uint64]:
        cp = cupy()
        with stream:
            count = cp.zeros(2, np.uint64)
            args = self.scan_args(count=count.data.ptr, **fields)
            slots = int(args["buckets"]) * WAYS
            kernel("export_kernel").launch(blocks_of(slots), args, stream.ptr)
            counts: NDArray[np.uint64] = count.get()
        return counts


def _pinned(table: EmbeddingTable, size: int) -> Any:
    """Pinned host memory that kernels can read and write; None for none."""
    cp = cupy()
    if not size:
        return None
    try:
        return cp.cuda.PinnedMemoryPointer(cp.cuda.PinnedMemory(size), 0)
    except cp.cuda.runtime.CUDARuntimeError as error:
        raise ConfigError(
            f"the GPU cache of table {table.id} needs {size:,} bytes of pinned host memory, which can't "
            f"be had: {error}"
        ) from error


def free_bytes() -> int:
    """What can be had on the current device, CuPy's own unused memory included."""
    cp = cupy()
    free, _total = cp.cuda.runtime.memGetInfo()
    return int(free + cp.get_default_memory_pool().free_bytes())
