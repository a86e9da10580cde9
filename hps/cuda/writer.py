"""The steps of insert, update, delete and evict, and what lies between them; README.md says why."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.cuda.launch import WRITE_ARGS, WRITE_TILE, blocks_of, unit_of
from hps.cuda.layout import MAX_SPARE, NO_ROW
from hps.cuda.loader import args_of, cupy, kernel
from hps.cuda.readers import Readers
from hps.cuda.table import GpuTable


class Writer:
    """Changes tables on the current device, on a stream of its own. One thread at a time."""

    def __init__(self, readers: Readers) -> None:
        cp = cupy()
        self.stream = cp.cuda.Stream(non_blocking=True)
        self._readers = readers
        self._done = cp.cuda.Event(disable_timing=True)
        self._plan = cp.empty(MAX_SPARE, np.uint32)
        self._position = cp.empty(MAX_SPARE, np.uint32)
        self._scratch = cp.empty(2 * MAX_SPARE, np.uint32)
        self._counters = cp.zeros(4, np.uint64)
        pinned = cp.cuda.alloc_pinned_memory(32)
        self._counted = np.frombuffer(pinned, np.uint64, 4)

    def write(
        self,
        table: GpuTable,
        keys: Any,
        vectors: Any,
        versions: Any,
        oldest_tombstone: int,
        *,
        update: bool = False,
    ) -> None:
        """Insert or update ``keys (n,)`` with ``vectors (n, dim)``; delete them where it is None. Device
        arrays, C-contiguous. Every fetch launched after the return sees the result."""
        for start in range(0, len(keys), table.shape.spare):
            some = slice(start, start + table.shape.spare)
            rows = None if vectors is None else vectors[some]
            args = self._args(table, keys[some], rows, versions[some])
            args["oldest_tombstone"] = oldest_tombstone
            self._write_some(table, args, "true" if update else "false")

    def evict(self, table: GpuTable, keys: Any) -> None:
        """Drop ``keys (n,)``, a device array."""
        args = self._args(table, keys, None, None)
        self._launch("evict_kernel", args, WRITE_TILE)
        self.finish()

    def clear(self, table: GpuTable) -> None:
        table.clear(self.stream)
        self.finish()

    def finish(self) -> None:
        """Wait for what was launched. The steps are short: sleeping would cost more than they take."""
        self._done.record(self.stream)
        self._done.synchronize()

    def _write_some(self, table: GpuTable, args: NDArray[Any], update: str) -> None:
        """As many keys as there are spare rows, step by step. Everything launched before is complete."""
        n, unit = int(args["n"]), self._unit(args)
        size = 1 << (2 * n - 1).bit_length()
        args["scratch_mask"] = size - 1
        with self.stream:
            self._scratch[:size].fill(NO_ROW)
            self._counters.fill(0)
        self._launch("dedup_kernel", args)
        self._readers.hold_back(self.stream)  # the spare rows were shown until the last write
        self._launch(f"choose_kernel<{unit}, {update}>", args, WRITE_TILE)
        self._counters.get(stream=self.stream, out=self._counted, blocking=False)
        self.finish()
        admitted, evicted, dropped, _ = self._counted.tolist()
        table.account(admitted, evicted, dropped)
        args["now"] = table.now
        if admitted:
            self._readers.hold_back(self.stream)  # the rows in the claimed slots were shown
            self._launch(f"fill_kernel<{unit}>", args, WRITE_TILE)
            self.finish()
            self._readers.hold_back(self.stream)  # the slots' former keys were there
            self._launch("publish_kernel", args)
            self.finish()

    def _launch(self, name: str, args: NDArray[Any], threads_a_key: int = 1) -> None:
        kernel(name).launch(blocks_of(int(args["n"]), threads_a_key), args, self.stream.ptr)

    def _args(self, table: GpuTable, keys: Any, vectors: Any, versions: Any) -> NDArray[Any]:
        args = args_of(WRITE_ARGS)
        args["lines"], args["rows"], args["row_versions"] = table.pointers
        args["buckets"], args["stride"], args["row_bytes"] = table.sizes
        args["spare"], args["now"] = table.spare.data.ptr, table.now
        args["keys"], args["n"] = keys.data.ptr, len(keys)
        if versions is not None:
            args["versions"] = versions.data.ptr
        if vectors is not None:
            args["vectors"] = vectors.data.ptr
        args["plan"], args["position"] = self._plan.data.ptr, self._position.data.ptr
        args["scratch"], args["counters"] = self._scratch.data.ptr, self._counters.data.ptr
        args["tombstone"] = vectors is None
        return args

    @staticmethod
    def _unit(args: NDArray[Any]) -> int:
        return unit_of(int(args["row_bytes"]), [int(args["vectors"])])
