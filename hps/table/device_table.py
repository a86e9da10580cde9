"""The scored table on a CUDA device."""

from __future__ import annotations

from threading import RLock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.cuda.launch import blocks_of, unit_of
from hps.cuda.loader import KernelStruct, cupy, kernel
from hps.native.twin_cache import mixed
from hps.native.twin_scored import MOST_BUCKETS, SLOTS, DoublingTable, ScoreRule, Write

_ARRAYS = (
    *("wanted", "batch_rows", "batch_scores", "accumulate", "order", "starts", "found", "numbers"),
    *("evicted", "evicted_keys", "evicted_rows", "evicted_scores"),
)
"""Arrays of one call."""
ARGS = np.dtype(
    [
        *((name, np.uint64) for name in ("keys", "scores", "digests", "rows", "locks", "size")),
        *((name, np.uint64) for name in _ARRAYS),
        ("base_score", np.uint64),
        *((name, np.uint32) for name in ("base", "segments", "row_bytes", "n", "operation")),
        *((name, np.uint32) for name in ("rule", "type", "unused")),
    ],
    align=True,
)
TYPES = {"f4": 0, "f8": 1, "f2": 2, "1": 3, "2": 4, "4": 5, "8": 6}
"""Codes of the rows' numbers, by kind and bytes; integers by their bytes."""
_ERASE = len(Write)
_WARP = 32
_SLOT_BYTES = 17


class ScoredTable(DoublingTable):
    """`twin_scored.ScoredTable` on the device that is current when it is made; arrays are CuPy's.

    A call runs on the thread's current stream and has ended when it returns. Thread-safe: one call at a
    time, whose keys the device works on in parallel."""

    def __init__(self, buckets: int, max_buckets: int, like: NDArray[Any]) -> None:
        if not 0 < buckets <= max_buckets <= MOST_BUCKETS:
            raise ValueError("a table has 1 to 2^32 - 1 buckets")
        self._cupy, self.like, self.max_buckets = cupy(), like, max_buckets
        self._base, self._lock = buckets, RLock()
        self._row_bytes = like.shape[1] * like.itemsize
        self._code = TYPES[f"{'f' if like.dtype.kind == 'f' else ''}{like.itemsize}"]
        self._args = KernelStruct(ARGS)
        self._allocate(buckets)

    def _allocate(self, buckets: int) -> None:
        cp, slots, args = self._cupy, buckets * SLOTS, self._args
        try:
            arrays = {
                "keys": cp.zeros(slots, np.int64),
                "scores": cp.zeros(slots, np.uint64),
                "digests": cp.zeros(slots, np.uint8),
                "rows": cp.zeros((slots, self.like.shape[1]), self.like.dtype),
                "locks": cp.zeros(buckets, np.uint32),
                "size": cp.zeros(1, np.uint64),
            }
        except cp.cuda.memory.OutOfMemoryError as error:
            raise MemoryError(str(error)) from None  # nothing has changed
        for name, array in arrays.items():
            args[name] = array.data.ptr
        self._keys, self._scores, self._digests, self._rows, self._locks, self._size = (
            arrays.values()
        )
        self.buckets, self.size = buckets, 0
        args["base"], args["segments"] = self._base, buckets // self._base - 1
        args["row_bytes"], args["type"] = self._row_bytes, self._code

    @staticmethod
    def bytes_for(buckets: int, row_bytes: int) -> int:
        """Return the bytes of ``buckets`` full buckets."""
        return buckets * (SLOTS * (_SLOT_BYTES + row_bytes) + 4)

    @property
    def rows(self) -> Any:
        """The memory of all rows (128 * buckets, dim), by number."""
        return self._rows

    # -- reading ----------------------------------------------------------------------------------

    def find(self, keys: Any, rows: Any, scores: Any) -> Any:
        found = self._cupy.zeros(len(keys), np.bool_)
        self._find(keys, batch_rows=rows, batch_scores=scores, found=found)
        return found

    def find_rows(self, keys: Any) -> Any:
        numbers = self._cupy.empty(len(keys), np.int64)
        self._find(keys, numbers=numbers)
        return numbers

    def _find(self, keys: Any, **arrays: Any) -> None:
        with self._lock:
            self._launch("scored_find_kernel", len(keys), wanted=keys, **arrays)

    def export(self, first: int, slots: int, with_rows: bool) -> tuple[Any, Any, Any]:
        cp = self._cupy
        with self._lock:
            numbers = first + cp.flatnonzero(self._digests[first : first + slots])
            keys, scores = self._keys[numbers], self._scores[numbers]
            rows = self._rows[numbers] if with_rows else None
            cp.cuda.get_current_stream().synchronize()
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
        arrays: dict[str, Any] = {}
        if with_evicted:
            arrays["evicted"] = cp.zeros(n, np.bool_)
            arrays["evicted_keys"] = cp.empty(n, np.int64)
            arrays["evicted_rows"] = cp.empty((n, self.like.shape[1]), self.like.dtype)
            arrays["evicted_scores"] = cp.empty(n, np.uint64)
        found = self._change(
            operation,
            keys,
            rule=rule,
            base_score=base,
            batch_rows=rows,
            batch_scores=scores,
            accumulate=accumulate,
            **arrays,
        )
        if not with_evicted:
            return found, None
        evicted = arrays.pop("evicted")
        keys, rows, scores = (array[evicted] for array in arrays.values())
        return found, (keys, rows, scores)

    def erase(self, keys: Any, scores: Any) -> Any:
        return self._change(_ERASE, keys, batch_scores=scores)

    def _change(self, operation: int, keys: Any, **arguments: Any) -> Any:
        """Launch an operation on all keys; return ``found (n,)``. Positions of one key go to one warp."""
        cp = self._cupy
        found = cp.zeros(len(keys), np.bool_)
        if not len(keys):
            return found
        order = cp.argsort(keys)  # stable
        ordered = keys[order]
        first = cp.ones(len(keys), np.bool_)
        first[1:] = ordered[1:] != ordered[:-1]
        starts = cp.append(cp.flatnonzero(first), len(keys)).astype(np.uint32)
        with self._lock:
            self._launch(
                "scored_write_kernel",
                len(starts) - 1,
                wanted=keys,
                found=found,
                operation=operation,
                order=order.astype(np.uint32),
                starts=starts,
                **arguments,
            )
            self.size = int(self._size[0])
        return found

    def _launch(self, name: str, n: int, **arguments: Any) -> None:
        """Launch a kernel with a warp for each of ``n`` keys, and wait for it."""
        if not n:
            return
        args, sizes = self._args, self._row_bytes
        for field in _ARRAYS:
            array = arguments.get(field)
            args[field] = 0 if array is None else array.data.ptr
        for field in ("batch_rows", "evicted_rows"):
            sizes |= int(args[field])
        args["n"] = n
        for field in ("operation", "rule", "base_score"):
            args[field] = arguments.get(field, 0)
        stream = self._cupy.cuda.get_current_stream()
        kernel(f"{name}<{unit_of(sizes)}>").launch(blocks_of(n, _WARP), args, stream.ptr)
        stream.synchronize()

    # -- the table as a whole -----------------------------------------------------------------------

    def clear(self) -> None:
        with self._lock:
            self._digests[:] = 0
            self._size[:] = 0
            self._cupy.cuda.get_current_stream().synchronize()
            self.size = 0

    def _double(self) -> None:
        """Move the keys whose bucket is a new one; the others keep their slots."""
        half, slots = self.buckets, self.buckets * SLOTS
        old = self._keys, self._scores, self._digests, self._rows
        self._allocate(2 * half)
        for new, former in zip(
            (self._keys, self._scores, self._digests, self._rows), old, strict=True
        ):
            new[:slots] = former
        cp = self._cupy
        numbers = cp.flatnonzero(self._digests[:slots])
        self._size[0] = len(numbers)
        keys = self._keys[numbers]
        moved = numbers[mixed(keys) & np.uint64(2 * half // self._base - 1) >= half // self._base]
        keys, scores, rows = self._keys[moved], self._scores[moved], self._rows[moved]
        self._digests[moved] = 0
        self._size[0] -= len(moved)
        self.write(Write.INSERT, keys, rows, None, ScoreRule.GIVEN, 0, scores, False)
        self.size = int(self._size[0])
