"""One table in device memory: its arrays, and the launches of all kernels except fetch and write."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.cuda.launch import GPU_CODE, SCAN_ARGS, blocks_of, unit_of
from hps.cuda.layout import (
    BUCKET_BYTES,
    MAX_SPARE,
    MOST_MEMBERS,
    ROOMY_LOAD,
    TICKS_A_TURN,
    WAYS,
    EvictionPolicy,
    GpuTableShape,
    eviction_ranks,
    plan_table_shape,
)
from hps.cuda.loader import KernelStruct, cupy, kernel
from hps.cuda.memory import free_bytes, out_of_memory_error, pinned
from hps.cuda.table_clock import TableClock
from hps.types import EmbeddingTable, KeyArray

_RANKED_AT_ONCE = 1 << 20
"""Slots that `GpuTable.ranks` and `expired` read per launch."""


@dataclass(frozen=True, slots=True)
class GpuTableOptions:
    """Options of a `GpuTable`.

    ``host_rows`` of its rows are in pinned host memory, which the kernels access over the bus. ``load``: rows
    per slot; with less than 1, more of the rows find a slot (all of them with `ROOMY_LOAD`). A ``static``
    table is filled before it has readers and then sealed; ``policy`` and ``load`` are ignored. The clock
    ticks ``ticks`` times while the table admits as many rows as its capacity; epochs last ``epoch_s``
    seconds, or until the caller advances them.
    """

    policy: EvictionPolicy = EvictionPolicy.LRU
    host_rows: int = 0
    static: bool = False
    load: float = 1.0
    ticks: int = TICKS_A_TURN
    epoch_s: float | None = None


@dataclass(slots=True)
class TableState:
    """What the ``members`` of a table, by their numbers, have in common besides arrays and clock.

    Members are added under ``lock``, by any thread, and removed by the writer's. ``common_version``: that of
    their common rows; None: none were written for two members yet. ``filled``: rows that slots of a roomy
    table own; the spare list begins after so many. ``sealed``: filled and static. ``evicted``, ``dropped``:
    rows so far."""

    members: dict[int, EmbeddingTable]
    lock: Lock = field(default_factory=Lock)
    common_version: int | None = None
    filled: int = 0
    sealed: bool = False
    evicted: int = 0
    dropped: int = 0


class GpuTable:
    """Arrays of ``table`` on the current device for ``capacity`` (> 0) rows; empty at first.

    Raises ConfigError, with the capacity that would fit, if there is not enough memory. Attributes
    may be read from any thread; the methods are the writer's.
    """

    lines: Any
    rows: Any
    versions: Any
    spare: Any
    slot_scores: Any
    """Scores of 64 bits by slot, where the caller gives them; else None."""

    def __init__(
        self, table: EmbeddingTable, capacity: int, options: GpuTableOptions | None = None
    ) -> None:
        options = options or GpuTableOptions()
        self.table = table
        self.static = options.static
        self.policy = EvictionPolicy.NONE if options.static else options.policy
        scored = self.policy is EvictionPolicy.SCORE
        load = ROOMY_LOAD if options.static else options.load
        self.shape: GpuTableShape = plan_table_shape(
            table, capacity, options.host_rows, scored=scored, load=load
        )
        self._allocate()
        self.member = 0
        self.state = TableState({0: table})
        self.clock = TableClock(self.policy, self.shape.capacity, options.ticks, options.epoch_s)
        stream = cupy().cuda.get_current_stream()
        self._clear(stream, 2 if self.shape.roomy else 1)
        stream.synchronize()

    def _allocate(self) -> None:
        """Allocate the arrays and collect the addresses and sizes that kernels take."""
        shape = self.shape
        if shape.bytes > free_bytes():
            raise out_of_memory_error(self.table, shape)
        try:
            self._allocate_on_device()
        except cupy().cuda.memory.OutOfMemoryError as error:
            self.release()
            raise out_of_memory_error(self.table, shape) from error
        self.host = pinned(self.table, shape)
        host = self.host.ptr - shape.device_rows * shape.stride if self.host else 0
        self.pointers = (
            self.lines.data.ptr,
            self.rows.data.ptr,
            host % 2**64,
            self.versions.data.ptr,
        )
        self.slot_scores_at = self.slot_scores.data.ptr if shape.scored else 0
        self.sizes = (shape.buckets, shape.stride, self.table.row_bytes, shape.device_rows)

    def _allocate_on_device(self) -> None:
        cp, shape = cupy(), self.shape
        self.release()
        self.lines = cp.empty(shape.buckets * BUCKET_BYTES, np.uint8)
        self.rows = cp.empty(shape.device_rows * shape.stride, np.uint8)
        self.versions = cp.zeros(shape.rows, np.uint64)
        self.spare = cp.arange(shape.rows - shape.spare, shape.rows, dtype=np.uint32)
        if shape.scored:
            self.slot_scores = cp.zeros(shape.slots, np.uint64)

    def release(self) -> None:
        """Release the arrays. Nothing may read the table on the device, then or later."""
        self.lines = self.rows = self.versions = self.spare = self.slot_scores = self.host = None

    @property
    def hidden(self) -> int:
        """The bits of a word that hide its row from this table."""
        return self.shape.hidden(self.member)

    @property
    def code(self) -> int:
        """The argument ``code`` of fetches."""
        return GPU_CODE | self.hidden

    def share(self, table: EmbeddingTable) -> GpuTable | None:
        """Return another table over the same arrays, empty at first; see README.md.

        None if they can have no further member, or ``table`` has other rows. It has the same clock."""
        own = self.table
        alike = (table.dim, table.row_format, table.key_bits) == (
            own.dim,
            own.row_format,
            own.key_bits,
        )
        if self.static or not self.shape.has_members or not alike:
            return None
        with self.state.lock:
            members = self.state.members
            free = set(range(MOST_MEMBERS)) - members.keys()
            if not free or not members:  # without members, the arrays are about to be freed
                return None
            shared = copy(self)
            shared.table, shared.member = table, min(free)
            members[shared.member] = table
        return shared

    def scan_args(self, **fields: int) -> KernelStruct:
        """Make the arguments of scan.cu's kernels for this table."""
        args = KernelStruct(SCAN_ARGS)
        args["lines"], args["rows"], args["host_rows"], args["row_versions"] = self.pointers
        args["buckets"], args["stride"], args["row_bytes"], args["on_device"] = self.sizes
        args["slot_scores"], args["now"] = self.slot_scores_at, self.clock.now
        args["hidden"] = self.hidden
        for name, value in fields.items():
            args[name] = value
        return args

    def account(self, admitted: int, evicted: int, dropped: int) -> None:
        """Count the result of a write."""
        self.state.evicted += evicted
        self.state.dropped += dropped
        self.clock.admit(admitted)

    @property
    def update_batch(self) -> int:
        """The most keys of one launch of an update, which chooses no slots: as many as are spare rows."""
        shape = self.shape
        return min(MAX_SPARE, shape.rows - self.state.filled) if shape.roomy else shape.batch

    def is_open(self, n: int) -> bool:
        """Return whether ``n`` keys may be written into empty slots: rows for a later batch must remain."""
        shape = self.shape
        return not shape.roomy or shape.rows - self.state.filled >= shape.batch + n

    def clear(self, stream: Any) -> None:
        """Empty every slot, on ``stream``."""
        roomy = self.shape.roomy
        self._clear(stream, 2 if roomy else 0)
        if roomy:
            with stream:
                self.spare[:] = cupy().arange(self.shape.rows, dtype=np.uint32)
            self.state.filled = 0

    def _clear(self, stream: Any, fresh: int) -> None:
        args = self.scan_args(fresh=fresh)
        kernel("clear_kernel").launch(blocks_of(self.shape.slots), args, stream.ptr)

    def count(self, stream: Any) -> tuple[int, int]:
        """Return the numbers of rows and tombstones. Waits for ``stream``."""
        counts = self._scan(stream)
        return int(counts[0]), int(counts[1])

    def ranks(self, stream: Any) -> tuple[KeyArray, NDArray[np.uint64]]:
        """Return host arrays of the resident rows' keys (n,) and eviction ranks (n,), unordered.

        The lowest rank is evicted first. Rows that a concurrent writer changes may be reported in their old
        or new state, or twice. Waits for ``stream``. Thread-safe; takes little device memory.
        """
        with stream:
            pieces = [(keys.get(), scores.get()) for keys, _, scores in self._pieces(stream)]
        found = [np.concatenate(arrays) for arrays in zip(*pieces, strict=True)]
        return found[0], self._ranks(found[1])

    def expired(self, stream: Any, oldest: int) -> Any:
        """Return a device array of the keys (n,) of resident rows with versions below ``oldest``, unordered.

        No other thread may write meanwhile. Waits for ``stream``; takes little device memory besides."""
        before = np.uint64(oldest)
        with stream:
            pieces = [
                keys[self.versions[numbers] < before] for keys, numbers, _ in self._pieces(stream)
            ]
            keys = cupy().concatenate(pieces)
            stream.synchronize()
        return keys

    def _pieces(self, stream: Any) -> Iterator[tuple[Any, Any, Any]]:
        """Yield device arrays of resident rows' keys (n,), numbers (n,) and scores (n,), a million at a time.

        They are valid until the next ones. ``stream`` must be the current one; waits for it."""
        cp, limit = cupy(), min(self.shape.slots, _RANKED_AT_ONCE)
        keys, numbers = cp.empty(limit, np.int64), cp.empty(limit, np.uint32)
        scores = cp.empty(limit, np.uint64)
        to = {"keys": keys.data.ptr, "numbers": numbers.data.ptr, "scores": scores.data.ptr}
        for first in range(0, self.shape.buckets, limit // WAYS):
            buckets = min(limit // WAYS, self.shape.buckets - first)
            at = {"lines": self.lines.data.ptr + first * BUCKET_BYTES, "buckets": buckets}
            if self.shape.scored:
                at["slot_scores"] = self.slot_scores_at + 8 * WAYS * first
            n = int(self._scan(stream, **at, limit=limit, **to)[0])
            yield keys[:n], numbers[:n], scores[:n]

    def _ranks(self, scores: Any) -> Any:
        return scores if self.shape.scored else eviction_ranks(scores, self.clock.now)

    def export(
        self, stream: Any, least: int = 0, *, with_versions: bool = True
    ) -> tuple[Any, Any, Any, Any]:
        """Return device arrays of the resident rows whose score is at least ``least``, unordered.

        Keys (n,), vectors (n, dim), versions (n,) or None, scores (n,) uint64. Waits for ``stream``.
        """
        cp, least = cupy(), least and self._ranks(least)
        with stream:
            limit = int(self._scan(stream, least=least)[0])
            keys, numbers = cp.empty(limit, np.int64), cp.empty(limit, np.uint32)
            scores = cp.empty(limit, np.uint64)
            versions = cp.empty(limit, np.uint64) if with_versions else None
            vectors = cp.empty((limit, self.table.row_width), self.table.row_dtype)
            if limit:
                pointers = {"keys": keys.data.ptr, "numbers": numbers.data.ptr}
                pointers["scores"] = scores.data.ptr
                self._scan(stream, least=least, limit=limit, **pointers)
                self.gather(stream, numbers, vectors, versions)
            stream.synchronize()
        return keys, vectors, versions, scores

    def gather(self, stream: Any, numbers: Any, out: Any, versions: Any = None) -> None:
        """Copy rows by number, ``numbers (n,) uint32``, into ``out (n, dim)`` on ``stream``."""
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
