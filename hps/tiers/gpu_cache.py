"""GpuCache: the hot rows in device memory."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hps.cuda.fetch import PARTS, Ask, Direct, Workspace
from hps.cuda.loader import cupy
from hps.cuda.readers import Readers
from hps.cuda.table import GpuTable
from hps.cuda.writer import Writer
from hps.errors import BadRequest, ConfigError, TierTimeout
from hps.tiers.base import FetchContext, Part, TierInfo
from hps.tiers.gpu_checks import check_part, checked
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
        self._clock = clock
        self._tables: dict[EmbeddingTable, GpuTable] = {}
        self._workspaces: queue.LifoQueue[Workspace] = queue.LifoQueue()
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

    def add_table(self, table: EmbeddingTable, rows: int) -> None:
        """Begin to keep ``table``, with room for ``rows`` rows (rounded up to whole buckets); 0 keeps it
        out."""
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
            self._tables[table] = GpuTable(table, rows)

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
                    asked.append((part, self._ask(part, table, now)))
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
                    _hand_out([part for part, _ in some], misses)
            finally:
                self._workspaces.put(space)

    def _ask(self, part: Part, table: GpuTable, now: float) -> Ask:
        n = len(part.missing)
        positions = None if n == len(part.keys) else part.missing
        oldest = oldest_tombstone(part.table, now)
        return Ask(table, part.keys, positions, part.out, part.versions, part.source, n, oldest)

    def _workspace(self, ctx: FetchContext) -> Workspace:
        wait = None if ctx.deadline is None else max(0.0, ctx.deadline - time.monotonic())
        try:
            return self._workspaces.get(timeout=wait)
        except queue.Empty:
            raise TierTimeout(_INFO.name, "no workspace came free before the deadline") from None

    # -- writing ----------------------------------------------------------------------------------

    def insert(self, table: EmbeddingTable, keys: Any, vectors: Any, versions: Any) -> None:
        self._write(table, keys, vectors, versions, update=False)

    def update(self, table: EmbeddingTable, keys: Any, vectors: Any, versions: Any) -> None:
        self._write(table, keys, vectors, versions, update=True)

    def delete(self, table: EmbeddingTable, keys: Any, versions: Any) -> None:
        held, arrays = self._prepare(table, keys=keys, versions=versions)
        if held is not None:
            with self._device:
                oldest = oldest_tombstone(table, self._clock())
                self._writer.write(held, arrays["keys"], None, arrays["versions"], oldest)

    def evict(self, table: EmbeddingTable, keys: Any) -> None:
        held, arrays = self._prepare(table, keys=keys)
        if held is not None:
            with self._device:
                self._writer.evict(held, arrays["keys"])

    def clear(self, table: EmbeddingTable) -> None:
        """Drop every row and tombstone of ``table``."""
        if held := self._tables.get(table):
            with self._device:
                self._writer.clear(held)

    def _write(
        self, table: EmbeddingTable, keys: Any, vectors: Any, versions: Any, *, update: bool
    ) -> None:
        held, arrays = self._prepare(table, keys=keys, vectors=vectors, versions=versions)
        if held is None:
            return
        with self._device:
            oldest = oldest_tombstone(table, self._clock())
            self._writer.write(
                held, arrays["keys"], arrays["vectors"], arrays["versions"], oldest, update=update
            )

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
            if held is None or n == 0:
                return None, arrays
            here = self._cupy.cuda.get_current_stream()
            on_device = {name: self._cupy.asarray(array) for name, array in arrays.items()}
            self._writer.stream.wait_event(here.record())
        return held, on_device

    # -- what it holds ----------------------------------------------------------------------------

    def contains(self, table: EmbeddingTable, keys: Any) -> Any:
        """``(n,) bool`` on the device: which of ``keys (n,)`` have a row here. Not a use of the keys."""
        return self.row_numbers(table, keys) != np.uint32(2**32 - 1)

    def row_numbers(self, table: EmbeddingTable, keys: Any) -> Any:
        """``(n,) uint32`` on the device: the number of each key's row, `NO_ROW` where there is none. A number
        is good until the next write of the table. Runs on the current stream."""
        cp = self._cupy
        keys = checked(table, "keys", keys, keys.size, self._device.id)
        held = self._tables.get(table)
        with self._device:
            out = cp.full(len(keys), 2**32 - 1, np.uint32)
            if held is not None and len(keys):
                misses = cp.empty(4, np.uint32)
                self.direct.fetch(held, cp.asarray(keys), out, misses, form=2, stamp=False)
        return out

    def export(self, table: EmbeddingTable, max_age: int = 63) -> tuple[Any, Any, Any, Any]:
        """Device arrays keys, vectors, versions and ages (in ticks of the table's clock) of the rows that
        were used within ``max_age`` ticks. The writer's to call."""
        with self._device:
            return self.held(table).export(self._writer.stream, max_age)

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


def _hand_out(parts: Sequence[Part], misses: Any) -> None:
    """Give each part its share of ``misses``, ascending positions in the batch of all parts."""
    start = 0
    ends = np.cumsum([len(part.missing) for part in parts])
    cuts = np.searchsorted(misses, ends)
    first = 0
    for part, end, cut in zip(parts, ends.tolist(), cuts.tolist(), strict=True):
        left: KeyArray = misses[first:cut].astype(np.int64) - start
        if len(part.keys) != len(part.missing):
            missing = part.missing if isinstance(part.missing, np.ndarray) else part.missing.get()
            left = missing[left]
        part.missing = left
        start, first = end, cut
