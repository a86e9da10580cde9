"""GpuCache: the hot rows in device memory."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.cgroups import available_cores
from hps.cuda.fetch import PARTS, DirectFetch, FetchArguments, FetchVariant, FetchWorkspace
from hps.cuda.launch import NUMBERS
from hps.cuda.layout import NO_ROW
from hps.cuda.memory import allocate_buffers
from hps.cuda.miss_fill import Gather, MissReport, MissRows
from hps.cuda.pool import KernelBags, RowBags, pool, pool_rows
from hps.cuda.prepared import FixedBags, FixedRows, PreparedPooling, PreparedRowPooling
from hps.cuda.table import GpuTable
from hps.cuda.table_writer import WrittenRows
from hps.cuda.vector_fetch import VectorFetch
from hps.errors import TierTimeout, Unavailable
from hps.native import WorkerPool, copy_keys
from hps.tiers.base import FetchContext, Part, TierInfo
from hps.tiers.gpu.checks import (
    DevicePooling,
    array_length,
    check_array,
    check_on_device,
    check_part,
    check_pooling,
    check_writable,
    write_arrays,
)
from hps.tiers.gpu.fetch_parts import distribute_misses, fetch_arguments
from hps.tiers.gpu.tables import GpuTables
from hps.types import EmbeddingTable, Pooling, Source, oldest_tombstone

_NUMBERS = FetchVariant(NUMBERS, stamp=False)
_UNSTAMPED = FetchVariant(stamp=False)
_COPY_THREADS = 8
_COPIED_BY_THREADS = 1 << 16
_NOTHING = np.empty(0, np.int64)
_NOTHING.flags.writeable = False
Adapt = Callable[[GpuTable, dict[str, Any]], dict[str, Any]]
_Requests = tuple[list[Part], list[FetchArguments]]


class GpuCache(GpuTables):
    """Keeps the hot rows of each table on one device, up to the table's capacity.

    A part's ``out``, ``versions`` and ``source`` are CuPy arrays on that device; its ``keys`` and
    ``missing`` may be NumPy or CuPy arrays, and ``missing`` is returned as a NumPy array. The mutating
    verbs take either kind. Torch tensors, and any object with ``__cuda_array_interface__`` or
    ``__dlpack__``, work too: their memory is read and filled without a copy.

    ``versions`` and ``source`` may be None. Without versions a fetch takes two thirds of the time, and a
    deleted key is a miss.

    `fetch` runs on the context's stream, else on the thread's current one, and synchronizes that stream
    once. It may be called from many threads in parallel with one writer. Fetches that begin after a write
    has returned see it. At most ``workspaces`` fetches run at a time; a further one waits for a free
    workspace."""

    info = TierInfo("gpu", Source.GPU, memory="cuda", cache=True)

    def __init__(
        self,
        capacities: Mapping[EmbeddingTable, int],
        *,
        device: int = 0,
        workspaces: int = 4,
        clock: Callable[[], float] = time.time,
        threads: WorkerPool | None = None,
    ) -> None:
        """``threads`` copy large arrays of keys to pinned memory; by default one per core, at most 8."""
        super().__init__(device)
        self._clock = clock
        self._threads = threads or WorkerPool(min(_COPY_THREADS, available_cores()))
        self._workspaces: queue.SimpleQueue[FetchWorkspace | None] = queue.SimpleQueue()
        self._miss_rows: queue.SimpleQueue[MissRows] = queue.SimpleQueue()
        self.direct = DirectFetch(self._readers)
        with self._device, allocate_buffers(f"{workspaces} workspaces"):
            for _ in range(workspaces):
                self._workspaces.put(FetchWorkspace(self._copy, self._threads))
        for table, rows in capacities.items():
            self.add_table(table, rows)

    # -- reading ----------------------------------------------------------------------------------

    def fetch(self, parts: Sequence[Part], ctx: FetchContext) -> None:
        plain: _Requests = [], []
        versioned: _Requests = [], []
        device, now = self.space.number, self._clock()
        for part in parts:
            table = self._tables.get(part.table)
            if table is not None:
                check_part(part, device, self.peers)
                if len(part.missing):
                    own = plain if part.versions is None else versioned
                    own[0].append(part)
                    own[1].append(fetch_arguments(part, table, now))
        if not plain[0] and not versioned[0]:
            return
        with self._device.entered():
            stream = ctx.stream or self._cupy.cuda.get_current_stream()
            workspace = self._workspace(ctx)
            try:
                for some, asks in (plain, versioned):
                    for start in range(0, len(some), PARTS):
                        stop = start + PARTS
                        self._fetch_some(workspace, stream, some[start:stop], asks[start:stop])
            finally:
                self._workspaces.put(workspace)

    def _copy(self, to: NDArray[Any], array: NDArray[Any]) -> None:
        if array.dtype == np.int64 and array.size >= _COPIED_BY_THREADS:
            copy_keys([array], to, self._threads)
        else:
            np.copyto(to, array)

    def _fetch_some(
        self,
        workspace: FetchWorkspace,
        stream: Any,
        parts: Sequence[Part],
        asks: Sequence[FetchArguments],
    ) -> None:
        misses = workspace.fetch(self._readers, stream, asks)
        if len(misses):
            distribute_misses(parts, misses)
        else:
            for part in parts:
                part.missing = _NOTHING

    def pool(self, asks: Sequence[DevicePooling], stream: Any = None) -> bool:
        """Pool every table's keys straight into ``out``; see `DevicePooling`.

        Returns False if a key has no row in this cache or is deleted: the outputs are then undefined.
        Counts as a use of the keys. Thread-safe, and synchronizes its stream, like `fetch`."""
        bags = []
        for each in asks:
            table = self._tables.get(each.table)
            ask = check_pooling(each, self._device.id)
            if table is None and len(ask.keys.keys):
                return False
            if table is not None and len(ask.out):
                bags.append(_kernel_bags(table, ask))
            elif len(ask.out):
                ask.out.fill(0)
        with self._device:
            workspace = self._workspace(FetchContext())
            try:
                stream = stream or self._cupy.cuda.get_current_stream()
                return pool(workspace, self._readers, stream, bags) == 0
            finally:
                self._workspaces.put(workspace)

    def contains(self, table: EmbeddingTable, keys: Any) -> Any:
        """Return ``(n,) bool`` on the device: whether the cache has a row for each of ``keys (n,)``.

        Does not count as a use of the keys."""
        return self.row_numbers(table, keys) != np.uint32(NO_ROW)

    def row_numbers(self, table: EmbeddingTable, keys: Any) -> Any:
        """Return ``(n,) uint32`` on the device: each key's row number, `NO_ROW` if it has none.

        The numbers are valid until the table's next write. Runs on the current stream."""
        cp = self._cupy
        keys = check_array(table, "keys", keys, array_length(keys), self._device.id)
        held = self._tables.get(table)
        with self._device:
            out = cp.full(len(keys), NO_ROW, np.uint32)
            if held is not None and len(keys):
                misses = cp.empty(4, np.uint32)
                self.direct.fetch(held, cp.asarray(keys), out, misses, _NUMBERS)
        return out

    def prepare(
        self, asks: Sequence[tuple[EmbeddingTable, int, int, Pooling, Any]]
    ) -> PreparedPooling:
        """Prepare poolings that differ only in their keys.

        ``asks`` has per table: the number of keys, the hotness, the pooling, and ``out``. The tables
        must be in the cache and stay in it."""
        fixed = [
            FixedBags(self.held(table), n, hotness, pooling, out)
            for table, n, hotness, pooling, out in asks
        ]
        with self._device:
            return PreparedPooling(self._readers, fixed)

    def prepare_vectors(
        self,
        asks: Sequence[tuple[EmbeddingTable, int]],
        offsets: Sequence[int],
        on_device: Sequence[bool],
        sources: Any = None,
    ) -> VectorFetch:
        """Prepare fetches that differ only in their keys; ``asks`` has the number of keys per table.

        See `VectorFetch`; ``sources (total,) uint8`` are on the device. The tables must be in the cache and
        stay in it."""
        requests = [(self.held(table), n) for table, n in asks]
        codes = 0 if sources is None else sources.data.ptr
        with self._device:
            return VectorFetch(self._readers, requests, offsets, on_device, codes)

    def fill_misses(self, fetch: VectorFetch, stream: Any, gather: Gather) -> MissReport | None:
        """Wait for ``fetch``, launched on ``stream``, and fill its misses with rows of ``gather``.

        None if there are no misses; else the last rows may still be on their way: wait for ``stream``. The
        cache's device must be the current one. Thread-safe."""
        for first, chunk in enumerate(fetch.chunks):  # noqa: B007 # used below
            if chunk.wait(stream):
                break
        else:
            return None
        try:
            rows = self._miss_rows.get_nowait()
        except queue.Empty:
            rows = MissRows()
        try:
            return rows.fill(fetch, first, stream, gather)
        finally:
            self._miss_rows.put(rows)

    def prepare_rows(self, asks: Sequence[FixedRows]) -> PreparedRowPooling:
        """Prepare poolings of the rows of a prepared fetch."""
        with self._device:
            return PreparedRowPooling(asks)

    def pool_rows(self, asks: Sequence[RowBags], stream: Any) -> None:
        """Pool fetched rows on ``stream`` and wait for it. Thread-safe like `fetch`."""
        with self._device:
            workspace = self._workspace(FetchContext())
            try:
                pool_rows(workspace.staging, stream, asks)
            finally:
                self._workspaces.put(workspace)

    def _workspace(self, ctx: FetchContext) -> FetchWorkspace:
        wait = None if ctx.deadline is None else max(0.0, ctx.deadline - time.monotonic())
        try:
            workspace = self._workspaces.get(timeout=wait)
        except queue.Empty:
            raise TierTimeout(
                self.info.name, "no workspace came free before the deadline"
            ) from None
        if workspace is None:
            self._workspaces.put(None)  # for the next fetch
            raise Unavailable("the GPU cache is closed")
        return workspace

    def close(self) -> None:
        """Free tables and workspaces, after the fetches in flight. Later fetches find nothing."""
        super().close()
        with suppress(queue.Empty):
            while self._workspaces.get_nowait() is not None:
                pass
        self._workspaces.put(None)
        with suppress(queue.Empty):
            while self._miss_rows.get_nowait() is not None:
                pass

    # -- writing ----------------------------------------------------------------------------------

    def insert(
        self,
        table: EmbeddingTable,
        keys: Any,
        vectors: Any,
        versions: Any,
        scores: Any = None,
        *,
        unique: bool = False,
    ) -> None:
        """Like `Tier.insert`.

        ``scores (n,) uint64``: the eviction score of each row, for `EvictionPolicy.SCORE` (default 0;
        resident rows keep theirs). ``unique``: no key occurs twice, which saves the check."""
        self._write(table, write_arrays(keys, vectors, versions, scores), unique=unique)

    def find_or_insert(
        self,
        table: EmbeddingTable,
        keys: Any,
        vectors: Any,
        versions: Any,
        scores: Any = None,
        *,
        unique: bool = False,
    ) -> int:
        """Overwrite ``vectors (n, dim)`` with the resident rows of their keys; insert the others.

        ``vectors`` are on the device. Returns the number of keys that had a row. If a key without a row
        occurs several times, `insert` decides which of its vectors is kept; that one is also written
        over the others in ``vectors``. ``unique`` as for `insert`."""
        check_on_device(table, vectors, array_length(keys), self._device.id)
        held, arrays = self._prepare(table, **write_arrays(keys, vectors, versions, scores))
        if held is None:
            return 0
        cp, n = self._cupy, len(arrays["keys"])
        with self._device:
            misses = cp.zeros(4 + n, np.uint32)
            self.direct.fetch(held, arrays["keys"], arrays["vectors"], misses)
            count = int(misses[0])
            if count:
                new = misses[4 : 4 + count]
                if not unique:
                    new = cp.sort(new)  # among equal versions the last wins
                chosen = {name: array[new] for name, array in arrays.items()}
                self.insert(table, **chosen, unique=unique)
                if not unique:
                    misses = cp.zeros(4 + count, np.uint32)
                    self.direct.fetch(held, chosen["keys"], chosen["vectors"], misses, _UNSTAMPED)
                    arrays["vectors"][new] = chosen["vectors"]
        return n - count

    def update(
        self,
        table: EmbeddingTable,
        keys: Any,
        vectors: Any,
        versions: Any,
        scores: Any = None,
        *,
        unique: bool = False,
    ) -> None:
        """Like `Tier.update`; ``scores`` and ``unique`` as for `insert`."""
        arrays = write_arrays(keys, vectors, versions, scores)
        self._write(table, arrays, update=True, unique=unique)

    def delete(self, table: EmbeddingTable, keys: Any, versions: Any) -> None:
        self._write(table, {"keys": keys, "versions": versions})

    def evict(self, table: EmbeddingTable, keys: Any) -> None:
        held, arrays = self._prepare(table, keys=keys)
        if held is not None:
            with self._device:
                self._writer.evict(held, arrays["keys"])

    def clear(self, table: EmbeddingTable) -> None:
        """Remove every row and tombstone of ``table``."""
        if held := self._tables.get(table):
            check_writable(held)
            with self._device:
                self._writer.clear(held)

    def _write(
        self,
        table: EmbeddingTable,
        arrays: dict[str, Any],
        *,
        update: bool = False,
        unique: bool = False,
    ) -> None:
        """Write rows, or tombstones if ``arrays`` has no vectors."""
        inserts = "vectors" in arrays and not update
        adapt = self._with_members if inserts else self._without_common
        held, arrays = self._prepare(table, adapt, **arrays)
        if held is not None:
            rows = WrittenRows(**arrays)
            oldest = oldest_tombstone(table, self._clock())
            with self._device:
                self._writer.write(held, rows, oldest, update=update, unique=unique)

    def _prepare(
        self, table: EmbeddingTable, adapt: Adapt | None = None, /, **arrays: Any
    ) -> tuple[GpuTable | None, dict[str, Any]]:
        """Check a write's arrays, ``adapt`` them and copy them to the device, ordered before the writer's
        stream.

        The table is None if there is nothing to do."""
        n = array_length(arrays["keys"])
        with self._device:
            for name, array in arrays.items():
                arrays[name] = check_array(table, name, array, n, self._device.id)
            held = self._tables.get(table)
            if held is not None:
                check_writable(held, scored="scores" in arrays)
            if held is None or n == 0:
                return None, arrays
            arrays = arrays if adapt is None else adapt(held, arrays)
            if not len(arrays["keys"]):
                return None, arrays
            on_device = {name: self._cupy.asarray(array) for name, array in arrays.items()}
            self._writer.after(self._cupy.cuda.get_current_stream())
        return held, on_device


def _kernel_bags(table: GpuTable, ask: DevicePooling) -> KernelBags:
    keys = ask.keys
    return KernelBags(
        table, keys.keys, keys.offsets, keys.weights, ask.out, keys.hotness or 0, ask.combiner
    )
