"""Launches of insert, update, delete and evict, with the steps between two writes; see README.md."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from hps.cuda.launch import WRITE_ARGS, WRITE_TILE, blocks_of, unit_of, write_name
from hps.cuda.layout import MAX_SPARE, NO_ROW
from hps.cuda.loader import KernelStruct, cupy, kernel
from hps.cuda.reader_events import ReaderEvents
from hps.cuda.table import GpuTable

ARGS = struct.Struct("<17Q14I")  # WRITE_ARGS, packed in one call like fetch's
_ON_DEVICE = 3  # cudaMemcpyDeviceToDevice


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """Rows of a write: C-contiguous device arrays, or None.

    ``keys (n,)``, ``versions (n,)``, ``vectors (n, dim)`` (None: the keys are deleted),
    ``scores (n,) uint64`` if the caller gives them (`EvictionPolicy.SCORE`) and ``members (n,) uint8``: the
    members that have the same row, a bit each.
    """

    keys: Any
    versions: Any
    vectors: Any = None
    scores: Any = None
    members: Any = None

    def addresses(self, start: int, row_bytes: int) -> tuple[int, int, int, int]:
        """Return the addresses from row ``start`` on of keys, vectors, versions and scores; 0 for None."""
        return (
            self.keys.data.ptr + 8 * start,
            0 if self.vectors is None else self.vectors.data.ptr + row_bytes * start,
            self.versions.data.ptr + 8 * start,
            0 if self.scores is None else self.scores.data.ptr + 8 * start,
        )


class GpuTableWriter:
    """Changes tables on the current device, on a separate stream. One thread at a time."""

    def __init__(self, readers: ReaderEvents) -> None:
        cp = cupy()
        self.stream = cp.cuda.Stream(non_blocking=True)
        self._readers = readers
        self._given = cp.cuda.Event(disable_timing=True)
        self._position = cp.empty(MAX_SPARE, np.uint32)
        self._scratch = cp.full(2 * MAX_SPARE, NO_ROW, np.uint32)
        self._counters = cp.zeros(5, np.uint32)
        self._pinned = cp.cuda.alloc_pinned_memory(16)
        self._counted = np.frombuffer(self._pinned, np.uint32, 4)
        self._args = KernelStruct(WRITE_ARGS)
        cp.cuda.get_current_stream().synchronize()

    def release(self) -> None:
        """Free the memory, after the last write; no other may follow."""
        self.finish()
        self._position = self._scratch = self._counters = None

    def after(self, stream: Any) -> None:
        """Make later writes wait for the work that is on ``stream`` now."""
        self._given.record(stream)
        self.stream.wait_event(self._given)

    def write(
        self,
        table: GpuTable,
        rows: WrittenRows,
        oldest_tombstone: int,
        *,
        update: bool = False,
        unique: bool = False,
    ) -> None:
        """Insert or update ``rows``, or delete their keys; ``unique``: no key is repeated.

        Every fetch launched after the return sees the result.
        """
        row_bytes, total = table.table.row_bytes, len(rows.keys)
        position = 0 if unique else self._position.data.ptr
        batch = table.update_batch if update else table.shape.batch
        for start in range(0, total, batch):
            n = min(batch, total - start)
            addresses = rows.addresses(start, row_bytes)
            members = 0 if rows.members is None else rows.members.data.ptr + start
            self._pack(table, n, addresses, position, oldest_tombstone, members)
            if not unique:
                self._launch("dedup_kernel", n)
            self._write_some(table, unit_of(row_bytes | addresses[1]), n, update=update)

    def evict(self, table: GpuTable, keys: Any) -> None:
        """Evict ``keys (n,)``, a device array."""
        self._pack(table, len(keys), (keys.data.ptr, 0, 0, 0))
        self._run_eviction(table, "evict_kernel", len(keys), WRITE_TILE)

    def clear(self, table: GpuTable) -> None:
        """Evict all rows and tombstones of ``table``."""
        if len(table.state.members) > 1:
            self._pack(table, table.shape.slots, (0, 0, 0, 0))
            self._run_eviction(table, "leave_kernel", table.shape.slots)
            return
        table.clear(self.stream)
        self.finish()

    def leave(self, table: GpuTable) -> None:
        """End the membership of ``table``; its rows and those of other members stay valid for these."""
        state = table.state
        with state.lock:
            if len(state.members) == 1:
                state.members.clear()
                return
        self.clear(table)  # before another member may get the number
        with state.lock:
            del state.members[table.member]

    def _run_eviction(self, table: GpuTable, name: str, n: int, threads: int = 1) -> None:
        self._launch(name, n, threads)
        self.finish()
        if table.shape.roomy:
            table.state.filled -= int(self._counted[3])

    def finish(self) -> None:
        """Wait for all launches by spinning: the steps are shorter than a sleep."""
        self.stream.synchronize()

    def _write_some(self, table: GpuTable, unit: int, n: int, *, update: bool) -> None:
        """Write at most as many keys as there are spare rows. All earlier launches must be complete."""
        self._readers.hold_back(self.stream)  # readers saw the spare rows until the last write
        self._launch(write_name(unit, update=update, scored=table.shape.scored), n, WRITE_TILE)
        fills = table.shape.roomy and not update and table.is_open(n)
        if fills:
            self._launch("compact_kernel", n)
            spare = table.spare.data.ptr + 4 * table.state.filled
            copy = cupy().cuda.runtime.memcpyAsync
            copy(spare, self._position.data.ptr, 4 * n, _ON_DEVICE, self.stream.ptr)
        self.finish()
        table.account(*self._counted[:3].tolist())
        if fills:
            table.state.filled += n - int(self._counted[3])

    def _launch(self, name: str, keys: int, threads_a_key: int = 1) -> None:
        kernel(name).launch(blocks_of(keys, threads_a_key), self._args, self.stream.ptr)

    def _pack(
        self,
        table: GpuTable,
        n: int,
        addresses: tuple[int, int, int, int],
        position: int = 0,
        oldest_tombstone: int = 0,
        members: int = 0,
    ) -> None:
        """Pack the arguments of the next launch; ``addresses`` as `WrittenRows` returns them."""
        ARGS.pack_into(
            self._args.array.data,
            0,
            *table.pointers,
            table.slot_scores_at,
            table.spare.data.ptr + 4 * table.state.filled,
            *addresses,
            position,
            self._scratch.data.ptr,
            self._counters.data.ptr,
            self._pinned.ptr,
            self._position.data.ptr,
            members,
            oldest_tombstone,
            *table.sizes,
            n,
            (1 << (2 * n - 1).bit_length()) - 1,
            table.clock.first_score,
            table.policy.rule,
            not addresses[1],
            table.clock.age,
            table.shape.roomy,
            table.is_open(n),
            table.hidden,
            0,
        )
