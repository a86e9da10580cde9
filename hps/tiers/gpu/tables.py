"""GpuTables: the tables that one device holds."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.cuda.layout import EvictionPolicy
from hps.cuda.loader import cupy
from hps.cuda.memory import allocate_buffers
from hps.cuda.reader_events import ReaderEvents
from hps.cuda.table import GpuTable
from hps.cuda.table_writer import GpuTableWriter
from hps.errors import BadRequest, ConfigError
from hps.tiers.gpu.device_space import DeviceSpace
from hps.tiers.ranking import hottest
from hps.types import EmbeddingTable, KeyArray

_DTYPES = (np.dtype(np.float32), np.dtype(np.float16))


class GpuTables:
    """Which tables are there, how large they are and what they hold. `drop_table`, `export` and `size` are
    the writer's to call, `add_table` anybody's before the table is used, the others any thread's."""

    def __init__(self, device: int) -> None:
        self._cupy = cupy()
        self._device = self._cupy.cuda.Device(device)
        self.space = DeviceSpace(device)
        self._tables: dict[EmbeddingTable, GpuTable] = {}
        with self._device, allocate_buffers("its writer"):
            self._readers = ReaderEvents()
            self._writer = GpuTableWriter(self._readers)

    def add_table(
        self,
        table: EmbeddingTable,
        rows: int,
        *,
        policy: EvictionPolicy = EvictionPolicy.LRU,
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
        held = self._tables.pop(table, None)  # until the device no longer reads it
        if held is not None:
            with self._device:
                self._writer.finish()
                self._device.synchronize()

    def held(self, table: EmbeddingTable) -> GpuTable:
        """The arrays of ``table``. Raises BadRequest when it is kept out."""
        if table not in self._tables:
            raise BadRequest(f"table {table.id} is not in the GPU cache")
        return self._tables[table]

    def capacity(self, table: EmbeddingTable) -> int:
        """The most rows the cache keeps of ``table``; 0 when it is kept out."""
        held = self._tables.get(table)
        return held.shape.capacity if held else 0

    def size(self, table: EmbeddingTable) -> int:
        """Rows held of ``table``, tombstones not counted. Waits for the device."""
        if table not in self._tables:
            return 0
        with self._device:
            return self._tables[table].count(self._writer.stream)[0]

    def top_k(self, table: EmbeddingTable, n: int) -> tuple[KeyArray, NDArray[np.uint8]]:
        """As `CpuCache.top_k`, by the policy's own score: how many ticks ago a row was used, how often in the
        epoch, or what the caller said."""
        held = self._tables.get(table)
        if held is None or not n:
            return np.empty(0, np.int64), np.empty(0, np.uint8)
        with self._device:
            stream = self.space.take_stream()
            keys, ranks = held.ranks(stream)
            self.space.give_back(stream)
        return hottest(keys, ranks, n)

    def export(
        self, table: EmbeddingTable, least: int = 0, *, with_versions: bool = True
    ) -> tuple[Any, Any, Any, Any]:
        """Device arrays keys, vectors, versions (or None) and scores (uint64) of the rows with a score of at
        least ``least`` (see `EvictionPolicy`)."""
        with self._device:
            stream = self._writer.stream
            return self.held(table).export(stream, least, with_versions=with_versions)

    def close(self) -> None:
        if self._tables:
            with self._device:
                self._device.synchronize()
        self._tables.clear()
