"""What insert, update, delete and evict launch, and what lies between two of them; README.md says why."""

from __future__ import annotations

from typing import Any

import numpy as np

from hps.cuda.launch import WRITE_ARGS, WRITE_TILE, blocks_of, unit_of, write_name
from hps.cuda.layout import MAX_SPARE, NO_ROW
from hps.cuda.loader import Struct, cupy, kernel
from hps.cuda.readers import Readers
from hps.cuda.table import GpuTable


class Writer:
    """Changes tables on the current device, on a stream of its own. One thread at a time."""

    def __init__(self, readers: Readers) -> None:
        cp = cupy()
        self.stream = cp.cuda.Stream(non_blocking=True)
        self._readers = readers
        self._given = cp.cuda.Event(disable_timing=True)
        self._position = cp.empty(MAX_SPARE, np.uint32)
        self._scratch = cp.full(2 * MAX_SPARE, NO_ROW, np.uint32)
        self._counters = cp.zeros(4, np.uint32)
        self._pinned = cp.cuda.alloc_pinned_memory(12)
        self._counted = np.frombuffer(self._pinned, np.uint32, 3)
        cp.cuda.get_current_stream().synchronize()

    def after(self, stream: Any) -> None:
        """Make what follows wait for what ``stream`` was given so far."""
        self._given.record(stream)
        self.stream.wait_event(self._given)

    def write(
        self,
        table: GpuTable,
        keys: Any,
        vectors: Any,
        versions: Any,
        oldest_tombstone: int,
        *,
        scores: Any = None,
        update: bool = False,
        unique: bool = False,
    ) -> None:
        """Insert or update ``keys (n,)`` with ``vectors (n, dim)``; delete them where it is None. Device
        arrays, C-contiguous; ``scores (n,) uint64`` where the caller gives them (`Policy.SCORE`);
        ``unique`` says that no key stands twice. Every fetch launched after the return sees the result."""
        for start in range(0, len(keys), table.shape.batch):
            n = min(table.shape.batch, len(keys) - start)
            args = self._args(table, keys.data.ptr + 8 * start, n)
            args["versions"] = versions.data.ptr + 8 * start
            if vectors is not None:
                args["vectors"] = vectors.data.ptr + table.table.row_bytes * start
            if scores is not None:
                args["scores"] = scores.data.ptr + 8 * start
            args["tombstone"], args["oldest_tombstone"] = vectors is None, oldest_tombstone
            if not unique:
                self._dedup(args, n)
            self._write_some(table, args, n, update=update)

    def evict(self, table: GpuTable, keys: Any) -> None:
        """Drop ``keys (n,)``, a device array."""
        n = len(keys)
        self._launch("evict_kernel", self._args(table, keys.data.ptr, n), n, WRITE_TILE)
        self.finish()

    def clear(self, table: GpuTable) -> None:
        table.clear(self.stream)
        self.finish()

    def finish(self) -> None:
        """Wait for what was launched. The steps are short: sleeping would cost more than they take."""
        self.stream.synchronize()

    def _dedup(self, args: Struct, n: int) -> None:
        args["position"] = self._position.data.ptr
        args["scratch_mask"] = (1 << (2 * n - 1).bit_length()) - 1
        self._launch("dedup_kernel", args, n)

    def _write_some(self, table: GpuTable, args: Struct, n: int, *, update: bool) -> None:
        """At most as many keys as there are spare rows. Everything launched before is complete."""
        unit = unit_of(table.table.row_bytes | int(args["vectors"]))
        self._readers.hold_back(self.stream)  # the spare rows were shown until the last write
        name = write_name(unit, update=update, scored=table.shape.scored)
        self._launch(name, args, n, WRITE_TILE)
        self.finish()
        table.account(*self._counted.tolist())
        if table.static:
            table.filled += n

    def _launch(self, name: str, args: Struct, keys: int, threads_a_key: int = 1) -> None:
        kernel(name).launch(blocks_of(keys, threads_a_key), args, self.stream.ptr)

    def _args(self, table: GpuTable, keys: int, n: int) -> Struct:
        args = Struct(WRITE_ARGS)
        args["lines"], args["rows"], args["host_rows"], args["row_versions"] = table.pointers
        args["buckets"], args["stride"], args["row_bytes"], args["on_device"] = table.sizes
        args["spare"] = table.spare.data.ptr + 4 * table.filled
        args["policy"], args["start"] = int(table.policy.rule), table.first_score
        args["age"], args["slot_scores"] = table.age, table.slot_scores_at
        args["keys"], args["n"] = keys, n
        args["scratch"] = self._scratch.data.ptr
        args["counters"], args["result"] = self._counters.data.ptr, self._pinned.ptr
        return args
