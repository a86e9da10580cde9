"""The scored table on a CUDA device."""

from __future__ import annotations

from threading import RLock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.cgroups import free_host_bytes
from hps.cuda.launch import blocks_of, unit_of
from hps.cuda.loader import KernelStruct, cupy, kernel
from hps.errors import BadRequest
from hps.native.twin_scored import MOST_BUCKETS, SLOTS, DoublingTable, Write

_TABLE = (
    *("keys", "scores", "digests", "rows", "host_rows", "floors", "heads", "size"),
    *("counters", "next_counters"),
)
_BATCH = (
    *("wanted", "batch_rows", "batch_scores", "accumulate", "next", "touched", "sorted", "found"),
    *("numbers", "evicted", "evicted_keys", "evicted_rows", "evicted_scores"),
)
ARGS = np.dtype(
    [
        *((name, np.uint64) for name in (*_TABLE, *_BATCH)),
        ("base_score", np.uint64),
        *((name, np.uint32) for name in ("base", "segments", "row_bytes", "n", "operation")),
        *((name, np.uint32) for name in ("rule", "device_slots", "unused")),
    ],
    align=True,
)
_MOVED = ("keys", "scores", "digests", "rows", "host_rows")
SPLIT_ARGS = np.dtype(
    [
        *((f"old_{name}", np.uint64) for name in _MOVED),
        *((name, np.uint64) for name in _MOVED),
        *((name, np.uint32) for name in ("base", "segments", "row_bytes", "n")),
        *((name, np.uint32) for name in ("device_slots", "unused")),
    ],
    align=True,
)
TYPES = {"f4": 0, "f8": 1, "f2": 2, "1": 3, "2": 4, "4": 5, "8": 6}
"""Codes of the rows' numbers, by kind and bytes; integers by their bytes."""
NO_TYPE, ERASES = len(TYPES), len(TYPES) + 1
_ERASE = len(Write)
_WARP, _FIND_TILE, _PARTS = 32, 4, 8
_SHARDS, _EVICTED, _COUNTERS = 64, 32, 96
_SCRATCH = ("next", "touched", "sorted", "evicted")
_SLOT_BYTES, _BUCKET_BYTES = 17, 68


def _address(memory: Any) -> int:
    """Return the address of an array or of pinned memory; 0 for None."""
    if memory is None:
        return 0
    return int(memory.ptr if hasattr(memory, "ptr") else memory.data.ptr)


class ScoredTable(DoublingTable):
    """`twin_scored.ScoredTable` on the device that is current when it is made; arrays are CuPy's.

    Of each bucket, the rows of ``device_slots`` slots, a multiple of 16, are in device memory, the others in
    pinned host memory. If there are others, keys take a bucket's first empty slot, and a write moves a row to
    the device if there is an empty slot, or a row with a lower score, which goes to host memory instead.

    A call runs on the thread's current stream, behind earlier calls on any stream. It returns when its
    kernels are launched; `write` with evicted rows, `export` and `size` wait for the device. Thread-safe."""

    def __init__(
        self, buckets: int, max_buckets: int, like: NDArray[Any], device_slots: int = SLOTS
    ) -> None:
        if not 0 < buckets <= max_buckets <= MOST_BUCKETS:
            raise ValueError("a table has 1 to 2^32 - 1 buckets")
        self._cupy, self.like, self.max_buckets = cupy(), like, max_buckets
        self._base, self._lock = buckets, RLock()
        self._row_bytes = like.shape[1] * like.itemsize
        self._stream: Any = None
        cp, args = self._cupy, KernelStruct(ARGS)
        self._args, self._size = args, cp.zeros(_SHARDS, np.uint64)
        self._counters, self._turn = cp.zeros((2, _COUNTERS), np.uint32), 0
        self._counted = np.frombuffer(
            cp.cuda.alloc_pinned_memory(4 * _COUNTERS), np.uint32, _COUNTERS
        )
        self._scratch = cp.empty((len(_SCRATCH), 0), np.uint32)
        args["size"] = self._size.data.ptr
        args["base"], args["row_bytes"] = buckets, self._row_bytes
        args["device_slots"] = self._device_slots = device_slots
        self._type = TYPES[f"{'f' if like.dtype.kind == 'f' else ''}{like.itemsize}"]
        self._hold(self._allocated(buckets))

    def _allocated(self, buckets: int) -> dict[str, Any]:
        """Return the arrays of an empty table. Raises MemoryError."""
        cp, slots, on_host = self._cupy, buckets * SLOTS, SLOTS - self._device_slots
        try:
            pinned = self._pinned(buckets * on_host * self._row_bytes)
            return {
                "keys": cp.empty(slots, np.int64),
                "scores": cp.empty(slots, np.uint64),
                "digests": cp.zeros(slots, np.uint8),
                "rows": cp.empty((slots - buckets * on_host, self.like.shape[1]), self.like.dtype),
                "host_rows": pinned,
                "floors": cp.zeros(buckets * _PARTS, np.uint64),
                "heads": cp.zeros(buckets, np.uint32),
            }
        except cp.cuda.memory.OutOfMemoryError as error:
            raise MemoryError(str(error)) from None

    def _pinned(self, size: int) -> Any:
        cp = self._cupy
        if not size:
            return None
        if size > (free := free_host_bytes()):
            raise MemoryError(f"{size} bytes of pinned host memory, of which {free} are free")
        try:
            return cp.cuda.PinnedMemory(size)
        except cp.cuda.runtime.CUDARuntimeError as error:
            raise MemoryError(f"{size} bytes of pinned host memory: {error}") from None

    def _hold(self, arrays: dict[str, Any]) -> None:
        for name, array in arrays.items():
            self._args[name] = _address(array)
        self._arrays = arrays
        self.buckets = len(arrays["heads"])
        self._args["segments"] = self.buckets // self._base - 1

    @staticmethod
    def bytes_for(buckets: int, row_bytes: int, device_slots: int = SLOTS) -> int:
        """Return the bytes of ``buckets`` full buckets on the device."""
        return buckets * (SLOTS * _SLOT_BYTES + device_slots * row_bytes + _BUCKET_BYTES)

    @property
    def rows(self) -> Any:
        """The memory of all rows (128 * buckets, dim). Raises BadRequest if some are on the host."""
        if self._device_slots < SLOTS:
            raise BadRequest("the rows are in two memories (device_share): read them with find")
        return self._arrays["rows"]

    @property
    def size(self) -> int:
        """The number of rows."""
        with self._lock:
            self._follow()
            return int(self._size.get().sum())

    def _follow(self) -> Any:
        """Return the current stream, behind the calls on other ones."""
        stream, former = self._cupy.cuda.get_current_stream(), self._stream
        if former is not None and former.ptr != stream.ptr:
            stream.wait_event(former.record())
        self._stream = stream
        return stream

    # -- reading ----------------------------------------------------------------------------------

    def find(self, keys: Any, rows: Any, scores: Any) -> Any:
        found = self._cupy.empty(len(keys), np.bool_)
        self._find(keys, batch_rows=rows, batch_scores=scores, found=found)
        return found

    def find_rows(self, keys: Any) -> Any:
        numbers = self._cupy.empty(len(keys), np.int64)
        self._find(keys, numbers=numbers)
        return numbers

    def _find(self, keys: Any, **arrays: Any) -> None:
        with self._lock:
            stream, unit = self._follow(), self._set(keys, **arrays)
            self._launch(f"scored_find_kernel<{unit}>", blocks_of(len(keys), _FIND_TILE), stream)

    def export(self, first: int, slots: int, with_rows: bool) -> tuple[Any, Any, Any]:
        cp = self._cupy
        with self._lock:
            self._follow()
            arrays = self._arrays
            numbers = first + cp.flatnonzero(arrays["digests"][first : first + slots])
            keys, scores = arrays["keys"][numbers], arrays["scores"][numbers]
            if not with_rows:
                return keys, scores, None
            if self._device_slots == SLOTS:
                return keys, scores, arrays["rows"][numbers]
            rows = cp.empty((len(keys), self.like.shape[1]), self.like.dtype)
            self._find(keys, batch_rows=rows)
            return keys, scores, rows

    # -- writing ----------------------------------------------------------------------------------

    def write(
        self,
        operation: int,
        keys: Any,
        rows: Any,
        accumulate: Any,
        rule: int,
        base: int,
        scores: Any,
        with_evicted: bool,
    ) -> tuple[Any, tuple[Any, Any, Any] | None]:
        cp, n = self._cupy, len(keys)
        evicted: dict[str, Any] = {}
        if with_evicted:
            evicted["evicted_keys"] = cp.empty(n, np.int64)
            evicted["evicted_rows"] = cp.empty((n, self.like.shape[1]), self.like.dtype)
            evicted["evicted_scores"] = cp.empty(n, np.uint64)
        with self._lock:
            found = self._change(
                operation,
                keys,
                with_evicted,
                rule=rule,
                base_score=base,
                batch_rows=rows,
                batch_scores=scores,
                accumulate=accumulate,
                **evicted,
            )
            if not with_evicted:
                return found, None
            keys, rows, scores = evicted.values()
            if self._evicted() < n:
                at = cp.flatnonzero(self._scratch[-1].view(np.bool_)[:n])
                keys, rows, scores = keys[at], rows[at], scores[at]
        return found, (keys, rows, scores)

    def _evicted(self) -> int:
        """Wait for the batch; return the number of rows that it evicted or did not admit."""
        stream, counted = self._follow(), self._counted
        address = self._address_of_counters(self._turn)
        runtime = self._cupy.cuda.runtime
        kind = runtime.memcpyDeviceToHost
        runtime.memcpyAsync(counted.ctypes.data, address, counted.nbytes, kind, stream.ptr)
        stream.synchronize()
        return int(counted[_EVICTED:].sum())

    def _address_of_counters(self, turn: int) -> int:
        return int(self._counters.data.ptr) + turn * 4 * _COUNTERS

    def erase(self, keys: Any, scores: Any) -> Any:
        with self._lock:
            return self._change(_ERASE, keys, False, batch_scores=scores)

    def _change(self, operation: int, keys: Any, with_evicted: bool, **arguments: Any) -> Any:
        """Launch an operation on all keys; return ``found (n,)``."""
        cp, n, args = self._cupy, len(keys), self._args
        found, stream = cp.empty(n, np.bool_), self._follow()
        unit = self._set(keys, found=found, operation=operation, **arguments)
        self._lend_scratch(n, stream)
        if not with_evicted:
            args["evicted"] = 0
        args["counters"] = self._address_of_counters(1 - self._turn)
        args["next_counters"] = self._address_of_counters(self._turn)
        if n:
            self._turn = 1 - self._turn
        self._launch("scored_link_kernel", blocks_of(n), stream)
        code = {Write.ACCUMULATE: self._type, _ERASE: ERASES}.get(operation, NO_TYPE)
        on_host = "true" if self._device_slots < SLOTS else "false"
        tile = 8 if self._row_bytes > 4 * unit else 2
        name = f"scored_write_kernel<{unit}, {tile}, {code}, {on_host}>"
        self._launch(name, blocks_of(n), stream)
        return found

    def _lend_scratch(self, n: int, stream: Any) -> None:
        """Set the arrays that kernels use within a batch: those of the batch before, if they suffice."""
        most = self._scratch.shape[1]
        if n > most:
            stream.synchronize()  # before other streams get the memory of the old one
            most = max(n, 2 * most)
            self._scratch = self._cupy.empty((len(_SCRATCH), most), np.uint32)
        for i, name in enumerate(_SCRATCH):
            self._args[name] = int(self._scratch.data.ptr) + 4 * i * most

    def _set(self, keys: Any, **arguments: Any) -> int:
        """Set the arguments of a batch. Return the bytes that a thread moves at a time."""
        args, sizes = self._args, self._row_bytes
        for name in _BATCH:
            array = arguments.get(name)
            args[name] = 0 if array is None else array.data.ptr
        args["wanted"], args["n"] = keys.data.ptr, len(keys)
        for name in ("operation", "rule", "base_score"):
            args[name] = arguments.get(name, 0)
        for name in ("batch_rows", "evicted_rows"):
            sizes |= int(args[name])
        return unit_of(sizes)

    def _launch(self, name: str, blocks: int, stream: Any) -> None:
        if blocks:
            kernel(name).launch(blocks, self._args, stream.ptr)

    # -- the table as a whole -----------------------------------------------------------------------

    def clear(self) -> None:
        with self._lock:
            self._follow()
            for array in (self._arrays["digests"], self._arrays["floors"], self._size):
                array.fill(0)

    def _double(self) -> None:
        """Copy all rows; those whose bucket is a new one move there, the others keep their slots."""
        stream, old = self._follow(), self._arrays
        args, sizes = KernelStruct(SPLIT_ARGS), self._row_bytes
        args["n"] = self.buckets
        self._hold(self._allocated(2 * self.buckets))
        for name in _MOVED:
            args[f"old_{name}"], args[name] = _address(old[name]), self._args[name]
        for name in ("base", "segments", "row_bytes", "device_slots"):
            args[name] = self._args[name]
        for name in ("old_rows", "rows"):
            sizes |= int(args[name])
        blocks = blocks_of(int(args["n"]), _WARP)
        kernel(f"scored_split_kernel<{unit_of(sizes)}>").launch(blocks, args, stream.ptr)
        stream.synchronize()  # before other streams get the memory of the old arrays
