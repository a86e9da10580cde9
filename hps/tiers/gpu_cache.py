"""GpuCache: the hot rows in device memory."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.cuda.fetch import PARTS, Direct, Workspace
from hps.cuda.layout import NO_ROW, Policy
from hps.cuda.loader import cupy
from hps.cuda.pool import RowBags, pool, pool_rows
from hps.cuda.prepared import FixedBags, FixedRows, Prepared, PreparedFetch, PreparedRows
from hps.cuda.readers import Readers
from hps.cuda.refill import PreparedRefill
from hps.cuda.table import GpuTable
from hps.cuda.writer import Writer
from hps.errors import BadRequest, ConfigError, TierTimeout
from hps.tiers.base import FetchContext, Part, TierInfo
from hps.tiers.gpu_asks import ask_of, bags_of, hand_out
from hps.tiers.gpu_checks import Pooling, check_part, check_pooling, checked
from hps.tiers.gpu_space import DeviceSpace
from hps.tiers.ranking import hottest
from hps.types import EmbeddingTable, KeyArray, Source, oldest_tombstone

_INFO = TierInfo("gpu", Source.GPU, memory="cuda", cache=True)
_DTYPES = (np.dtype(np.float32), np.dtype(np.float16))


class GpuCache:
    """Keeps the most recently used rows of each table on one device, up to its capacity.

    A part's ``out``, ``versions`` and ``source`` are CuPy arrays on that device; its ``keys`` and ``missing``
    may be NumPy or CuPy arrays, and ``missing`` comes back as a NumPy array. The mutating verbs take either
    kind; anything with ``__cuda_array_interface__`` will do for the device's.

    `fetch` runs on the context's stream, else on the thread's current one, and may be called from many
    threads beside the one that writes; it waits for its stream once. A write returns when every fetch
    begun afterwards sees it. ``workspaces`` bounds the fetches under way; one more waits for its turn.
    """

    def __init__(
        self,
        capacities: Mapping[EmbeddingTable, int],
        *,
        device: int = 0,
        workspaces: int = 4,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._cupy = cupy()
        self._device = self._cupy.cuda.Device(device)
        self.space = DeviceSpace(device)
        self._clock = clock
        self._tables: dict[EmbeddingTable, GpuTable] = {}
        self._workspaces: queue.SimpleQueue[Workspace] = queue.SimpleQueue()
        with self._device:
            self._readers = Readers()
            self._writer = Writer(self._readers)
            self.direct = Direct(self._readers)
            for _ in range(workspaces):
                self._workspaces.put(Workspace())
        for table, rows in capacities.items():
            self.add_table(table, rows)

    @property
    def info(self) -> TierInfo:
        return _INFO

    def add_table(
        self,
        table: EmbeddingTable,
        rows: int,
        *,
        policy: Policy = Policy.LRU,
        host_rows: int = 0,
        static: bool = False,
        **clock: Any,
    ) -> None:
        """Begin to keep ``table``, with room for ``rows`` rows (rounded up to whole buckets), ``host_rows``
        of them in pinned host memory; 0 rows keep it out. ``clock``: ``ticks`` and ``epoch_s`` of `GpuTable`.

        A ``static`` table keeps all of its ``rows``: insert each key once, then `seal` it; until then
        it must not be read, and afterwards it can't be changed.
        """
        if rows < 0:
            raise ConfigError(
                f"the GPU cache of table {table.id} can't have {rows} rows; 0 is none"
            )
        if table.dtype not in _DTYPES:
            raise ConfigError(
                f"table {table.id} has dtype {table.dtype}; the GPU cache takes float32 and float16"
            )
        if rows == 0:
            self.drop_table(table)
            return
        with self._device:
            self._tables[table] = GpuTable(table, rows, policy, host_rows, static=static, **clock)

    def seal(self, table: EmbeddingTable) -> int:
        """End the filling of a static table; returns how many keys found no slot (next to never any)."""
        held = self.held(table)
        held.sealed = True
        return held.dropped

    def sealed(self, table: EmbeddingTable) -> bool:
        """Whether ``table`` is static and filled."""
        held = self._tables.get(table)
        return held is not None and held.sealed

    def drop_table(self, table: EmbeddingTable) -> None:
        """Forget ``table``; its memory is free once the fetches under way have ended."""
        if self._tables.pop(table, None):
            with self._device:
                self._writer.finish()
                self._device.synchronize()

    # -- reading ----------------------------------------------------------------------------------

    def fetch(self, parts: Sequence[Part], ctx: FetchContext) -> None:
        asked, now = [], self._clock()
        for part in parts:
            table = self._tables.get(part.table)
            if table is not None:
                check_part(part, self._device.id)
                if len(part.missing):
                    asked.append((part, ask_of(part, table, now)))
        if not asked:
            return
        with self._device:
            stream = ctx.stream or self._cupy.cuda.get_current_stream()
            space = self._workspace(ctx)
            try:
                for start in range(0, len(asked), PARTS):
                    some = asked[start : start + PARTS]
                    misses = space.fetch(
                        self._readers, stream, [ask for _, ask in some], int(Source.GPU)
                    )
                    hand_out([part for part, _ in some], misses)
            finally:
                self._workspaces.put(space)

    def pool(self, asks: Sequence[Pooling], stream: Any = None) -> bool:
        """Pool every table's keys straight into ``out``; see `Pooling`. False when a key has no row here, be
        it deleted: what is in the outs has no meaning then. Counts as a use of the keys. Thread-safe as
        `fetch`, and waits for its stream as that does."""
        bags = []
        for ask in asks:
            table = self._tables.get(ask.table)
            check_pooling(ask, self._device.id)
            if table is None and len(ask.keys.keys):
                return False
            if table is not None and len(ask.out):
                bags.append(bags_of(table, ask))
            elif len(ask.out):
                ask.out.fill(0)
        with self._device:
            space = self._workspace(FetchContext())
            try:
                stream = stream or self._cupy.cuda.get_current_stream()
                return pool(space, self._readers, stream, bags) == 0
            finally:
                self._workspaces.put(space)

    def prepare(self, asks: Sequence[tuple[EmbeddingTable, int, int, bool, Any]]) -> Prepared:
        """Poolings to be repeated with other keys: per table how many keys, how many a bag, whether their
        mean is wanted, and ``out``. Of tables that are kept here, and stay."""
        fixed = [
            FixedBags(self.held(table), n, hotness, mean, out)
            for table, n, hotness, mean, out in asks
        ]
        with self._device:
            return Prepared(self._readers, fixed)

    def prepare_fetch(self, asks: Sequence[tuple[EmbeddingTable, int]]) -> PreparedFetch:
        """Fetches to be repeated with other keys: per table how many. Of tables as for `prepare`."""
        with self._device:
            return PreparedFetch(self._readers, [(self.held(table), n) for table, n in asks])

    def prepare_refill(
        self, fetch: PreparedFetch, tables: Sequence[EmbeddingTable], source: Source
    ) -> PreparedRefill:
        """Rows from the host for what a prepared fetch of ``tables`` lacked."""
        with self._device:
            return PreparedRefill(fetch, tables, int(source))

    def prepare_rows(self, asks: Sequence[FixedRows]) -> PreparedRows:
        """Poolings of what a prepared fetch found."""
        with self._device:
            return PreparedRows(asks)

    def pool_rows(self, asks: Sequence[RowBags], stream: Any) -> None:
        """Pool rows that were fetched, on ``stream``; waits for it. Thread-safe as `fetch`."""
        with self._device:
            space = self._workspace(FetchContext())
            try:
                pool_rows(space.staging, stream, asks)
            finally:
                self._workspaces.put(space)

    def _workspace(self, ctx: FetchContext) -> Workspace:
        wait = None if ctx.deadline is None else max(0.0, ctx.deadline - time.monotonic())
        try:
            return self._workspaces.get(timeout=wait)
        except queue.Empty:
            raise TierTimeout(_INFO.name, "no workspace came free before the deadline") from None

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
        """As `Tier.insert`; ``scores (n,) uint32`` say how much each row is worth where the caller does
        (`Policy.SCORE`); ``unique`` that no key stands twice, which saves looking for that."""
        self._write(table, keys, vectors, versions, scores, unique=unique)

    def find_or_insert(
        self, table: EmbeddingTable, keys: Any, vectors: Any, versions: Any, scores: Any = None
    ) -> int:
        """Replace those of ``vectors (n, dim)``, on the device, whose key has a row by that row; insert the
        others. Returns how many had one. ``keys (n,)`` must be unique. The writer's to call."""
        held, given = self._prepare(table, keys=keys, vectors=vectors, versions=versions)
        if held is None:
            return 0
        cp, n = self._cupy, len(given["keys"])
        with self._device:
            misses = cp.zeros(4 + n, np.uint32)
            self.direct.fetch(held, given["keys"], given["vectors"], misses)
            count = int(misses[0])
            if count:
                new = misses[4 : 4 + count]
                chosen = {name: array[new] for name, array in given.items()}
                if scores is not None:
                    chosen["scores"] = cp.asarray(scores)[new]
                self.insert(table, **chosen, unique=True)
        return n - count

    def update(
        self,
        table: EmbeddingTable,
        keys: Any,
        vectors: Any,
        versions: Any,
        *,
        unique: bool = False,
    ) -> None:
        """As `Tier.update`; ``unique`` as for `insert`."""
        self._write(table, keys, vectors, versions, update=True, unique=unique)

    def delete(self, table: EmbeddingTable, keys: Any, versions: Any) -> None:
        held, arrays = self._prepare(table, keys=keys, versions=versions)
        if held is not None:
            with self._device:
                oldest = oldest_tombstone(table, self._clock())
                self._writer.write(held, vectors=None, **arrays, oldest_tombstone=oldest)

    def evict(self, table: EmbeddingTable, keys: Any) -> None:
        held, arrays = self._prepare(table, keys=keys)
        if held is not None:
            with self._device:
                self._writer.evict(held, arrays["keys"])

    def clear(self, table: EmbeddingTable) -> None:
        """Drop every row and tombstone of ``table``."""
        if held := self._tables.get(table):
            _refuse_sealed(held)
            with self._device:
                self._writer.clear(held)

    def _write(
        self,
        table: EmbeddingTable,
        keys: Any,
        vectors: Any,
        versions: Any,
        scores: Any = None,
        *,
        update: bool = False,
        unique: bool = False,
    ) -> None:
        given = {"keys": keys, "vectors": vectors, "versions": versions}
        if scores is not None:
            given["scores"] = scores
        held, arrays = self._prepare(table, **given)
        if held is not None:
            with self._device:
                oldest = oldest_tombstone(table, self._clock())
                how = {"update": update, "unique": unique}
                self._writer.write(held, **arrays, oldest_tombstone=oldest, **how)

    def _prepare(
        self, table: EmbeddingTable, **arrays: Any
    ) -> tuple[GpuTable | None, dict[str, Any]]:
        """Check the arrays of a write and bring them to the device, ordered before the writer's stream.

        The table is None when there is nothing to do.
        """
        n = arrays["keys"].size if hasattr(arrays["keys"], "size") else 0
        with self._device:
            for name, array in arrays.items():
                arrays[name] = checked(table, name, array, n, self._device.id)
            held = self._tables.get(table)
            if held is not None:
                _refuse_sealed(held)
            if held is None or n == 0:
                return None, arrays
            on_device = {name: self._cupy.asarray(array) for name, array in arrays.items()}
            self._writer.after(self._cupy.cuda.get_current_stream())
        return held, on_device

    # -- what it holds ----------------------------------------------------------------------------

    def contains(self, table: EmbeddingTable, keys: Any) -> Any:
        """``(n,) bool`` on the device: which of ``keys (n,)`` have a row here. Not a use of the keys."""
        return self.row_numbers(table, keys) != np.uint32(NO_ROW)

    def row_numbers(self, table: EmbeddingTable, keys: Any) -> Any:
        """``(n,) uint32`` on the device: the number of each key's row, `NO_ROW` where there is none. A number
        is good until the next write of the table. Runs on the current stream."""
        cp = self._cupy
        keys = checked(table, "keys", keys, keys.size, self._device.id)
        held = self._tables.get(table)
        with self._device:
            out = cp.full(len(keys), NO_ROW, np.uint32)
            if held is not None and len(keys):
                misses = cp.empty(4, np.uint32)
                self.direct.fetch(held, cp.asarray(keys), out, misses, form=2, stamp=False)
        return out

    def top_k(self, table: EmbeddingTable, n: int) -> tuple[KeyArray, NDArray[np.uint8]]:
        """As `CpuCache.top_k`, by the policy's own score: how many ticks ago a row was used, how often in the
        epoch, or what the caller said. From any thread."""
        held = self._tables.get(table)
        if held is None or not n:
            return np.empty(0, np.int64), np.empty(0, np.uint8)
        with self._device:
            stream = self.space.take_stream()
            keys, scores = held.ranks(stream)
            self.space.give_back(stream)
        return hottest(keys, scores, n)

    def export(
        self, table: EmbeddingTable, least: int = 0, *, with_versions: bool = True
    ) -> tuple[Any, Any, Any, Any]:
        """Device arrays keys, vectors, versions (or None) and scores of the rows with a score of at least
        ``least`` (see `Policy`). The writer's to call."""
        with self._device:
            stream = self._writer.stream
            return self.held(table).export(stream, least, with_versions=with_versions)

    def size(self, table: EmbeddingTable) -> int:
        """Rows held of ``table``, tombstones not counted. The writer's to call: it waits for the device."""
        if table not in self._tables:
            return 0
        with self._device:
            return self._tables[table].count(self._writer.stream)[0]

    def capacity(self, table: EmbeddingTable) -> int:
        """The most rows the cache keeps of ``table``; 0 when it is kept out."""
        held = self._tables.get(table)
        return held.shape.capacity if held else 0

    def held(self, table: EmbeddingTable) -> GpuTable:
        """The arrays of ``table``. Raises BadRequest when it is kept out."""
        if table not in self._tables:
            raise BadRequest(f"table {table.id} is not in the GPU cache")
        return self._tables[table]

    def close(self) -> None:
        if self._tables:
            with self._device:
                self._device.synchronize()
        self._tables.clear()


def _refuse_sealed(held: GpuTable) -> None:
    if held.sealed:
        raise BadRequest(f"table {held.table.id} is static in the GPU cache: it can't be changed")
