"""One table in device memory: its arrays, and the launches of every kernel but fetch's."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.cuda import layout
from hps.cuda.launch import SCAN_ARGS, blocks_of, unit_of
from hps.cuda.layout import BUCKET_BYTES, TICKS_A_TURN, Shape, shape_of
from hps.cuda.loader import args_of, cupy, kernel
from hps.errors import ConfigError
from hps.types import EmbeddingTable

KEEP_LINES_BELOW, KEEP_ROWS_FROM = 64 << 20, 128
"""Lines of this size in all are asked to stay in the second-level cache if rows are this large."""
OLDEST = layout.AGES - 1


class GpuTable:
    """Arrays of ``table`` on the current device, with room for ``capacity`` (> 0) rows; empty at first.

    Raises ConfigError, with the capacity that would fit, when there is no memory for it. Attributes
    may be read from any thread; the methods are the writer's.
    """

    def __init__(self, table: EmbeddingTable, capacity: int) -> None:
        cp = cupy()
        self.table = table
        self.shape: Shape = shape_of(table, capacity)
        shape = self.shape
        if shape.bytes > _free_bytes():
            raise self._too_large()
        try:
            self.lines = cp.empty(shape.buckets * BUCKET_BYTES, np.uint8)
            self.rows = cp.empty(shape.rows * shape.stride, np.uint8)
            self.versions = cp.zeros(shape.rows, np.uint64)
            self.spare = cp.arange(shape.capacity, shape.rows, dtype=np.uint32)
        except cp.cuda.memory.OutOfMemoryError as error:
            raise self._too_large() from error
        self.pointers = (self.lines.data.ptr, self.rows.data.ptr, self.versions.data.ptr)
        self.sizes = (shape.buckets, shape.stride, table.row_bytes)
        self.keep = self.lines.nbytes <= KEEP_LINES_BELOW and shape.stride >= KEEP_ROWS_FROM
        self.now = 0
        self._admitted = 0
        self.evicted = 0
        self.dropped = 0
        fillers = cp.asarray(layout.fillers(shape.buckets))
        stream = cp.cuda.get_current_stream()
        args = self.scan_args(fillers=fillers.data.ptr)
        kernel("clear_kernel").launch(blocks_of(shape.capacity), args, stream.ptr)
        stream.synchronize()

    def _too_large(self) -> ConfigError:
        free = _free_bytes()
        fitting = layout.fitting_capacity(self.table, int(free * 0.95))
        return ConfigError(
            f"the GPU cache of table {self.table.id} needs {self.shape.bytes:,} bytes for "
            f"{self.shape.capacity:,} rows, and {free:,} are free on the device; at most "
            f"{fitting:,} rows fit"
        )

    def scan_args(self, **fields: int) -> NDArray[Any]:
        """Arguments of scan.cu's kernels for this table."""
        args = args_of(SCAN_ARGS)
        args["lines"], args["rows"], args["row_versions"] = self.pointers
        args["buckets"], args["stride"], args["row_bytes"] = self.sizes
        args["now"] = self.now
        for name, value in fields.items():
            args[name] = value
        return args

    def account(self, admitted: int, evicted: int, dropped: int) -> None:
        """Count what a write did; the clock ticks with every sixteenth of the capacity admitted."""
        self.evicted += evicted
        self.dropped += dropped
        self._admitted += admitted
        ticks, self._admitted = divmod(self._admitted, max(1, self.shape.capacity // TICKS_A_TURN))
        self.now = (self.now + ticks) % layout.AGES

    def clear(self, stream: Any) -> None:
        """Empty every slot, on ``stream``."""
        kernel("clear_kernel").launch(blocks_of(self.shape.capacity), self.scan_args(), stream.ptr)

    def count(self, stream: Any) -> tuple[int, int]:
        """Rows and tombstones held. Waits for ``stream``."""
        counts = self._scan(stream, max_age=OLDEST)
        return int(counts[0]), int(counts[1])

    def export(self, stream: Any, max_age: int = OLDEST) -> tuple[Any, Any, Any, Any]:
        """Device arrays of the resident rows used within the last ``max_age`` ticks: keys (n,), vectors (n,
        dim), versions (n,), ages (n,) uint8 in ticks. In no order. Waits for ``stream``."""
        cp = cupy()
        with stream:
            room = int(self._scan(stream, max_age=max_age)[0])
            keys, numbers = cp.empty(room, np.int64), cp.empty(room, np.uint32)
            ages, versions = cp.empty(room, np.uint8), cp.empty(room, np.uint64)
            vectors = cp.empty((room, self.table.dim), self.table.dtype)
            if room:
                pointers = {"keys": keys.data.ptr, "numbers": numbers.data.ptr}
                self._scan(stream, max_age=max_age, ages=ages.data.ptr, limit=room, **pointers)
                self.gather(stream, numbers, vectors, versions)
            stream.synchronize()
        return keys, vectors, versions, ages

    def gather(self, stream: Any, numbers: Any, out: Any, versions: Any = None) -> None:
        """Rows by number, ``numbers (n,) uint32``, into ``out (n, dim)`` on ``stream``."""
        unit = unit_of(self.table.row_bytes, [out.data.ptr])
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
            kernel("export_kernel").launch(blocks_of(self.shape.capacity), args, stream.ptr)
            counts: NDArray[np.uint64] = count.get()
        return counts


def _free_bytes() -> int:
    """What can be had on the current device, CuPy's own unused memory included."""
    cp = cupy()
    free, _total = cp.cuda.runtime.memGetInfo()
    return int(free + cp.get_default_memory_pool().free_bytes())
