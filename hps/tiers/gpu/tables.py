"""GpuTables: the tables on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.cuda.device import CudaDevice
from hps.cuda.layout import EvictionPolicy
from hps.cuda.loader import cupy
from hps.cuda.memory import allocate_buffers
from hps.cuda.reader_events import ReaderEvents
from hps.cuda.table import GpuTable, GpuTableOptions
from hps.cuda.table_writer import GpuTableWriter
from hps.errors import BadRequest, ConfigError
from hps.tiers.base import is_poolable
from hps.tiers.gpu.device_space import DeviceSpace
from hps.tiers.ranking import hottest
from hps.types import EmbeddingTable, KeyArray

CommonRows = Callable[[EmbeddingTable, KeyArray], tuple[NDArray[np.bool_], int]]
"""``common_rows(table, keys (n,))``: of which keys the stores have the row that all tables with the same base
have, unless they have one of their own; and the version of these rows in ``table``, 0 if it has none."""


class GpuTables:
    """Adds, removes, measures and exports tables.

    `drop_table`, `expire`, `export` and `size` belong to the writer's thread. `add_table` may be called from
    any thread before the table is used; the other methods are thread-safe."""

    def __init__(self, device: int) -> None:
        self._cupy = cupy()
        self._device = CudaDevice(device)
        self.space = DeviceSpace(device)
        self.peers: frozenset[int] = frozenset()
        """Other devices whose arrays fetches take: kernels have peer access to their memory."""
        self._tables: dict[EmbeddingTable, GpuTable] = {}
        self._common_rows: CommonRows | None = None
        with self._device, allocate_buffers("its writer"):
            self._readers = ReaderEvents()
            self._writer = GpuTableWriter(self._readers)

    def add_readers(self, hold_back: Callable[[int], object]) -> None:
        """Let writes wait for readers outside this object: ``hold_back`` makes later work on a stream, by
        its address, wait for them."""
        self._readers.others.append(hold_back)

    def publish_now(self) -> None:
        """Publish the scores of hits to prepared steps, for epochs that end by time. Thread-safe."""
        for table in list(self._tables.values()):
            table.clock.publish()

    def add_table(
        self,
        table: EmbeddingTable,
        rows: int,
        *,
        policy: EvictionPolicy = EvictionPolicy.LRU,
        host_rows: int = 0,
        static: bool = False,
        **options: Any,
    ) -> None:
        """Add ``table`` with a capacity of ``rows`` rows (rounded up to whole buckets); 0 removes it.

        ``host_rows`` of them are in pinned host memory. ``options``: ``load``, ``ticks`` and ``epoch_s`` of
        `GpuTableOptions`. A ``static`` table keeps all of its ``rows``: insert each key once, then `seal` it.
        It must not be read before that, and can't be changed afterwards."""
        if rows < 0:
            raise ConfigError(
                f"the GPU cache of table {table.id} can't have {rows} rows; 0 is none"
            )
        if not is_poolable(table):
            raise ConfigError(
                f"table {table.id} has rows of {table.row_format.name} and vectors of {table.dtype}; the GPU "
                "cache takes vectors of float32 and float16"
            )
        if rows == 0:
            self.drop_table(table)
            return
        with self._device:
            self._tables[table] = GpuTable(
                table, rows, GpuTableOptions(policy, host_rows, static, **options)
            )

    def share_table(
        self, table: EmbeddingTable, base: EmbeddingTable, common_rows: CommonRows
    ) -> bool:
        """Add ``table``, empty, to the arrays of ``base``: they share capacity, and rows that are common.

        Returns False if it is not possible: see `GpuTable.share`."""
        shared = self.held(base).share(table)
        if shared is not None:
            self._common_rows = common_rows
            self._tables[table] = shared
        return shared is not None

    def _without_common(self, held: GpuTable, arrays: dict[str, Any]) -> dict[str, Any]:
        """Leave out changes of common rows: those that the stores, which are written first, rejected as older
        than the table's files. A common row may have an older version than these, that of another table."""
        state = held.state
        if self._common_rows is None or (state.common_version is None and len(state.members) < 2):
            return arrays
        common = self._common_rows(held.table, _on_host(arrays["keys"]))[0]
        if not common.any():
            return arrays
        kept = np.flatnonzero(~common)
        there = self._cupy.asarray(kept)
        return {
            name: array[kept if isinstance(array, np.ndarray) else there]
            for name, array in arrays.items()
        }

    def _with_members(self, held: GpuTable, arrays: dict[str, Any]) -> dict[str, Any]:
        """Add ``members (n,) uint8``: the members that have the same row, a bit each.

        Common rows get the lowest version that they had in any member: so every change of one is newer. For
        the writer's thread, like `share_table` and `drop_table` once there is one."""
        state, members = held.state, list(held.state.members.items())
        if self._common_rows is None or (state.common_version is None and len(members) < 2):
            return arrays
        keys, versions = _on_host(arrays["keys"]), np.array(_on_host(arrays["versions"]))
        common, version = self._common_rows(held.table, keys)
        own, known = np.flatnonzero(common), [version, state.common_version or 0]
        bits = np.zeros(len(keys), np.uint8)
        for number, table in members:
            if table is not held.table:
                also, version = self._common_rows(table, keys[own])
                bits[own[also]] |= np.uint8(1 << number)
                known.append(version)
        lowest = min(
            (each for each in known if each), default=0
        )  # 0: of a table without a mapped file
        if lowest:
            state.common_version = lowest
            versions[own] = lowest
        return {**arrays, "versions": versions, "members": bits}

    def seal(self, table: EmbeddingTable) -> int:
        """Finish the filling of a static table; return the number of keys without a slot.

        It is almost always 0."""
        held = self.held(table)
        held.state.sealed = True
        return held.state.dropped

    def sealed(self, table: EmbeddingTable) -> bool:
        """Return whether ``table`` is static and filled."""
        held = self._tables.get(table)
        return held is not None and held.state.sealed

    def drop_table(self, table: EmbeddingTable) -> None:
        """Remove ``table``; its memory is freed once the fetches in flight have ended.

        Tables that share its arrays keep their rows, and the memory."""
        held = self._tables.pop(
            table, None
        )  # keeps the memory alive until the device no longer reads it
        if held is not None:
            with self._device:
                self._writer.leave(held)
                self._writer.finish()
                self._device.synchronize()

    def held(self, table: EmbeddingTable) -> GpuTable:
        """Return the arrays of ``table``. Raises BadRequest if it is not in the cache."""
        if table not in self._tables:
            raise BadRequest(f"table {table.id} is not in the GPU cache")
        return self._tables[table]

    def capacity(self, table: EmbeddingTable) -> int:
        """Return the most rows that the cache keeps of ``table``; 0 if it is kept out."""
        held = self._tables.get(table)
        return held.shape.capacity if held else 0

    def size(self, table: EmbeddingTable) -> int:
        """Return the number of rows of ``table``, without tombstones. Waits for the device."""
        held = self._tables.get(table)
        if held is None:
            return 0
        with self._device:
            return held.count(self._writer.stream)[0]

    def expire(self, table: EmbeddingTable, oldest: int) -> int:
        """Evict the rows with versions below ``oldest``; return their number. For the writer's thread.

        A row that several tables share has the lowest of its versions in these. Static tables keep theirs."""
        held = self._tables.get(table)
        if held is None or held.static:
            return 0
        with self._device:
            keys = held.expired(self._writer.stream, oldest)
            if len(keys):
                self._writer.evict(held, keys)
        return len(keys)

    def top_k(self, table: EmbeddingTable, n: int) -> tuple[KeyArray, NDArray[np.uint8]]:
        """Like `CpuCache.top_k`, with scores by the table's eviction policy.

        The policy's score is: ticks since the last use, uses in the epoch, or the caller's score."""
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
        """Return keys, vectors, versions (or None) and scores of the rows with a score >= ``least``.

        All arrays are on the device; scores are uint64, see `EvictionPolicy`."""
        with self._device:
            stream = self._writer.stream
            return self.held(table).export(stream, least, with_versions=with_versions)

    def close(self) -> None:
        """Free the tables' memory, after the fetches in flight. What was prepared for them must not run."""
        if self._tables:
            with self._device:
                self._device.synchronize()
        for held in self._tables.values():
            held.release()
        self._tables.clear()
        with self._device:
            self._writer.release()


def _on_host(array: Any) -> NDArray[Any]:
    host: NDArray[Any] = array if isinstance(array, np.ndarray) else array.get()
    return host
