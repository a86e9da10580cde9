"""Fills a node's caches: before it is ready, in the background after that, and for versions added later."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hps.config import Settings
from hps.models.tables import TableFiles
from hps.native import dedup
from hps.node.gpu_caches import NodeGpus
from hps.node.mapped_memory import MappedMemory, Pending
from hps.node.stores import NodeStores
from hps.node.tier_status import TierStatus
from hps.threads import rest
from hps.types import EmbeddingTable, KeyArray, oldest_row
from hps.updates.background_warmup import FillStep
from hps.updates.cache_warmup import CacheWarmup, FileRows
from hps.updates.gpu_promotion import GpuPromotion

log = logging.getLogger(__name__)
# Rows of mapped tables that fill the caches before the node is ready, in a fraction of a second.
_FIRST_BYTES = 64 << 20
_BLOCK_ROWS = 1 << 16
"""Keys that are read at a time to fill GPU caches."""
_RANKED = 4
"""Where all rows fit, one in so many keys, the hottest, is put into GPU caches after the others."""
_NO_KEYS: KeyArray = np.empty(0, np.int64)

HotKeysOf = Callable[[EmbeddingTable, int], KeyArray]
"""``hot(table, n)``: at most ``n`` keys, the hottest first."""


@dataclass(frozen=True, slots=True)
class CacheFill:
    """Fills ``caches``, fastest first, with rows of ``stores``.

    ``in_memory`` is the CPU cache among them, or None; ``memory`` its mapped tables; ``gpu_promotion``
    copies its rows to the GPUs. One thread at a time may call a method."""

    settings: Settings
    stores: NodeStores
    devices: NodeGpus
    caches: Sequence[TierStatus]
    in_memory: TierStatus | None
    memory: MappedMemory | None
    gpu_promotion: GpuPromotion | None

    def at_start(
        self, warming: CacheWarmup, tables: Mapping[EmbeddingTable, TableFiles], hot: HotKeysOf
    ) -> list[FillStep]:
        """Fill the caches with ``hot`` rows, or else from the start of the files; returns steps for later.

        Of mapped tables, only the first ``_FIRST_BYTES`` are filled so: their size must delay no start, nor
        decide how much memory it takes. Files that fit in memory, and hot rows of the others, are read in
        the background."""
        later_hot: list[FillStep] = []
        later: list[FillStep] = []
        pending: list[Pending] = []
        first = _FIRST_BYTES
        for table, files in tables.items():
            if self._has_expired(table):
                continue
            if table in self.devices.static and not self._fill_static(warming, table, files):
                continue
            keys = table.narrow(hot(table, files.rows))
            if self.memory is not None and self.memory.admit(table):
                first -= self.memory.bytes(table)
                pending += self._map_or_wait(self.memory, table, keys, is_small=first >= 0)
            on_gpu, in_memory = self._wanted_gpu_rows(table), self._wanted_cpu_rows(table)
            rows = min(files.rows, max(on_gpu, in_memory))
            first -= rows * table.row_bytes
            if first < 0 and self.stores.is_mapped(table):
                later_hot += self._hot_steps(table, keys, rows)
                # Otherwise these rows would replace hot ones, which are there earlier.
                if on_gpu >= files.rows or (on_gpu and not len(keys)):
                    later.append(self._gpu_step(table, files, keys, on_gpu))
                continue
            self._fill_table(warming, table, files, rows, keys[:rows])
        if self.memory is not None:
            self.memory.load_later(pending)
        return [*later_hot, *later]

    def added(
        self,
        warming: CacheWarmup,
        tables: Mapping[EmbeddingTable, TableFiles],
        hot: HotKeysOf,
    ) -> None:
        """Fill the caches with ``hot`` rows of ``tables``, or all of them where there is room.

        The CPU cache gets ``_FIRST_BYTES`` of mapped tables, as at a start. Files that are read into memory
        are verified; raises ModelError if one is damaged."""
        mapped_bytes = sum(
            t.row_bytes * files.rows for t, files in tables.items() if self.stores.is_mapped(t)
        )
        for table, files in tables.items():
            if self._has_expired(table):
                continue
            if table in self.devices.static and not self._fill_static(warming, table, files):
                continue
            if self.memory is not None and self.memory.admit(table):
                self.memory.load(table, verify=True)
                rest()
            on_gpu, in_memory = self._wanted_gpu_rows(table), self._wanted_cpu_rows(table)
            if mapped := self.stores.is_mapped(table):
                share = min(1.0, _FIRST_BYTES / max(1, mapped_bytes))
                in_memory = min(in_memory, int(files.rows * share))
            if mapped and on_gpu >= files.rows:
                keys = table.narrow(hot(table, files.rows // _RANKED))
                # Some of them may not be in the files, and must not count as rows of these.
                self._fill_gpus(warming, table, files, keys, files.rows + len(keys))
                self._promote(warming, table, [np.ascontiguousarray(keys[::-1])], len(keys))
                on_gpu = 0
            rows = min(files.rows, max(on_gpu, in_memory))
            keys = hot(table, rows) if rows else _NO_KEYS
            if mapped and on_gpu and not len(keys):
                self._fill_gpus(warming, table, files, _NO_KEYS, on_gpu)
                rows = in_memory
            if len(keys) and rows < files.rows:
                self._fill_hottest(warming, table, keys[:rows], at_start=False)
                continue
            self._fill_first(warming, table, files, rows)
            self._promote_hottest(table, keys[:rows])

    def _has_expired(self, table: EmbeddingTable) -> bool:
        """True if the stores hold only rows that are too old to be served: those of the table's files."""
        if table.ttl_s is None:
            return False
        version = self.stores.version_of_rows(table)
        if version is None or version >= oldest_row(table, time.time()):
            return False
        log.warning(
            "table %s: all rows of its files are older than ttl_s (%g s) and have expired; lookups return "
            "the default until rows are written again. Publish the table anew, or raise ttl_s",
            table.id,
            table.ttl_s,
        )
        return True

    # -- steps -------------------------------------------------------------------------------------

    def _map_or_wait(
        self, memory: MappedMemory, table: EmbeddingTable, hot: KeyArray, *, is_small: bool
    ) -> list[Pending]:
        """Put a table on the fast path if its file is small or in memory; return what is left to read."""
        if is_small:
            memory.load(table)
            return []
        if memory.is_resident(table):
            memory.map(table)
        return [(table, hot if len(hot) else None)]

    def _hot_steps(self, table: EmbeddingTable, hot: KeyArray, rows: int) -> Iterator[FillStep]:
        """Steps that read a mapped table's ``hot`` rows from the disk, and put ``rows`` of them into caches.

        Rows come from the stores, which streams may change meanwhile."""
        if len(hot):
            yield lambda _warming: self.stores.populate(table, hot)
            if rows:
                yield lambda warming: self._fill_hottest(warming, table, hot[:rows])

    def _gpu_step(
        self, table: EmbeddingTable, files: TableFiles, there: KeyArray, rows: int
    ) -> FillStep:
        return lambda warming: self._fill_gpus(warming, table, files, there, rows)

    def _fill_gpus(
        self,
        warming: CacheWarmup,
        table: EmbeddingTable,
        files: TableFiles,
        there: KeyArray,
        rows: int,
    ) -> None:
        """Put rows from the start of the files into the GPU caches, to ``rows`` with the keys ``there``."""
        missing = rows - len(there)
        blocks = self._first_keys(table, files, np.sort(there), missing)
        self._promote(warming, table, blocks, min(missing, files.rows))

    def _first_keys(
        self, table: EmbeddingTable, files: TableFiles, there: KeyArray, missing: int
    ) -> Iterator[KeyArray]:
        """Yield the first ``missing`` keys of the files, without those in ``there``, sorted."""
        for start in range(0, files.rows, _BLOCK_ROWS):
            keys = table.narrow(files.keys(start, min(files.rows, start + _BLOCK_ROWS)))
            if len(there):
                at = np.minimum(np.searchsorted(there, keys), len(there) - 1)
                keys = keys[there[at] != keys]
            keys = keys[:missing]
            missing -= len(keys)
            yield keys
            if not missing:
                return

    def _promote(
        self,
        warming: CacheWarmup,
        table: EmbeddingTable,
        blocks: Iterable[KeyArray],
        total: int,
        *,
        limited: bool = False,
    ) -> bool:
        """Put a mapped table's rows of ``blocks`` of keys, ``total`` in all, into the GPU caches.

        Returns whether the table is still there."""
        read = self._populated(table, blocks)
        warming.promote_into(table, read, total, self.devices.replicas, limited=limited)
        return table in self.stores.tables

    def _populated(self, table: EmbeddingTable, blocks: Iterable[KeyArray]) -> Iterator[KeyArray]:
        """Yield pieces of ``blocks`` while the table is there, after their rows were read from the disk.

        They are read here, so that the thread that writes the caches need not wait."""
        for keys in blocks:
            for start in range(0, len(keys), _BLOCK_ROWS):
                if table not in self.stores.tables:
                    return
                some = keys[start : start + _BLOCK_ROWS]
                self.stores.populate(table, some)
                yield some

    def _fill_table(
        self,
        warming: CacheWarmup,
        table: EmbeddingTable,
        files: TableFiles,
        rows: int,
        hot: KeyArray,
    ) -> None:
        if not len(hot) or (rows == files.rows and self.stores.version_of_rows(table) is not None):
            self._fill_first(warming, table, files, rows)
        if len(hot):
            self._fill_hottest(warming, table, hot)

    def _fill_first(
        self, warming: CacheWarmup, table: EmbeddingTable, files: TableFiles, rows: int
    ) -> None:
        version = self.stores.version_of_rows(table)
        warming.fill(table, files.keys(0, rows), files.vectors, version)

    def _fill_hottest(
        self, warming: CacheWarmup, table: EmbeddingTable, keys: KeyArray, *, at_start: bool = True
    ) -> None:
        """Put ``keys (n,)``, the hottest first, into the caches; ``at_start``: those are there early."""
        replicas, mapped = self.devices.replicas, self.stores.is_mapped(table)
        if not mapped or replicas is None or self._wanted_cpu_rows(table):
            warming.hottest(table, keys, self.caches[0].tier, mapped=mapped)
            self._promote_hottest(table, keys)
            return
        keys = dedup(table.narrow(keys))[0]
        # Keys that are inserted later get higher scores.
        coldest_first = np.ascontiguousarray(keys[::-1])
        if not at_start:
            self._promote(warming, table, [coldest_first], len(keys))
            return
        if not self._promote(warming, table, [keys], len(keys), limited=True):
            return
        if replicas.capacity(table) < self.stores.rows(table):
            hottest = coldest_first[-(len(keys) // 2) :]
            self._promote(warming, table, [hottest], len(hottest), limited=True)

    def _promote_hottest(self, table: EmbeddingTable, keys: KeyArray) -> None:
        """Copy rows of the CPU cache, the hottest first, to the GPUs."""
        if self.gpu_promotion and self.devices.replicas:
            keys = keys[: self.devices.replicas.capacity(table)]
            self.gpu_promotion.promote_now(table, keys)

    def _wanted_gpu_rows(self, table: EmbeddingTable) -> int:
        """Number of rows to put into each GPU cache, at most as many as fit."""
        tiers, replicas = self.settings.tiers, self.devices.replicas
        if replicas is None or not tiers.cpu_cache.warm or table in self.devices.static:
            return 0
        return int(replicas.capacity(table) * tiers.gpu.fill)

    def _wanted_cpu_rows(self, table: EmbeddingTable) -> int:
        """Number of rows to put into the CPU cache; 0 if they are read from a mapped file in memory."""
        if self.in_memory is None or not self.settings.tiers.cpu_cache.warm:
            return 0
        if self.memory is not None and self.memory.admit(table):
            return 0
        return self.in_memory.capacity(table) or 0

    def _fill_static(self, warming: CacheWarmup, table: EmbeddingTable, files: TableFiles) -> bool:
        """Put every row of ``table`` into the GPU caches and seal the table.

        Returns whether the CPU cache remains to be filled: rows that must be read from the stores are put
        into all caches at once."""
        replicas, version = self.devices.replicas, self.stores.version_of_rows(table)
        assert replicas is not None
        keys = table.narrow(files.keys(0, files.rows))
        if version is None:
            warming.promote_all(table, keys)
        else:
            warming.fill_static(FileRows(table, keys, files.vectors, version), replicas)
        if dropped := replicas.seal(table):
            log.warning("%d rows of table %s do not fit the GPU cache", dropped, table.id)
        return version is not None
