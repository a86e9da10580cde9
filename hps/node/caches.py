"""A node's caches: the CPU cache, its capacity per table, the GPU caches, their writer and warm-up."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, suppress
from functools import partial

import numpy as np

from hps.config import Settings
from hps.errors import Unavailable
from hps.lookup.engine import Promote
from hps.models.tables import TableFiles
from hps.native import dedup
from hps.node.cpu_cache_plan import (
    cache_memory,
    eviction_of,
    plan_rows,
    plan_rows_for_new_model,
)
from hps.node.gpu_caches import NodeGpus
from hps.node.mapped_memory import MappedMemory, Pending, memory_budget
from hps.node.model_opening import OpenedModel, tables_of
from hps.node.stores import NodeStores
from hps.node.tier_status import TierStatus
from hps.observability.meters import count_promotion
from hps.observability.metrics import Metrics
from hps.tiers.chain import TierChain
from hps.tiers.cpu.cache import CpuCache
from hps.tiers.ranking import HotKeys, MergedRanking, RankedCache
from hps.types import EmbeddingTable, KeyArray, Progress, Source
from hps.updates.background_warmup import BackgroundWarmup, FillStep
from hps.updates.cache_warmup import CacheWarmup, FileRows
from hps.updates.cache_writer import CacheWriter
from hps.updates.gpu_promotion import GpuPromotion
from hps.updates.hot_key_snapshot import HotKeySnapshots, hot_keys_at_start

log = logging.getLogger(__name__)
# Rows of mapped tables that fill the caches before the node is ready, in a fraction of a second.
_FIRST_BYTES = 64 << 20
_BLOCK_ROWS = 1 << 16
"""Keys that are read at a time to fill GPU caches."""


class NodeCaches:
    """Caches of a node: call `open`, then `fill`; ``resources`` closes them.

    ``statuses`` lists them fastest first; ``in_memory`` is the CPU cache, or None. The owner of
    ``opened`` keeps it up to date."""

    def __init__(
        self,
        settings: Settings,
        opened: Sequence[OpenedModel],
        stores: NodeStores,
        devices: NodeGpus,
        metrics: Metrics,
        resources: ExitStack,
    ) -> None:
        self._settings = settings
        self._opened = opened
        self._stores = stores
        self._devices = devices
        self._metrics = metrics
        self._resources = resources
        self._hot: dict[str, HotKeys] = {}
        self._gpu_promotion: GpuPromotion | None = None
        self._writer: CacheWriter
        self._cpu_cache: CpuCache | None = None
        self._memory: MappedMemory | None = None
        self.in_memory: TierStatus | None = None
        self.statuses: list[TierStatus] = []

    def _tables(self) -> list[EmbeddingTable]:
        return tables_of(self._opened)

    def open(self, on_gpu: TierStatus | None) -> CacheWriter:
        """Make the CPU cache, and the writer of it and of the GPU caches."""
        if self._settings.tiers.cpu_cache.enabled:
            self.in_memory = self._make_cpu_cache()
            self.statuses.append(self.in_memory)
        if on_gpu is not None:
            self.statuses.append(on_gpu)
        self._writer = CacheWriter(
            # The CPU cache first, so that a row promoted from it is never older than the GPUs' row.
            TierChain([cache.tier for cache in reversed(self.statuses)]),
            self._stores.promotion_sources,
            self._settings.updates.promote_queue_keys,
            partial(count_promotion, self._metrics, Source.CPU.name.lower()),
            self._stores.promote_missing,
            lambda table: table in self._stores.tables,
        )
        self._resources.callback(self._writer.close)
        if self._cpu_cache is not None:
            self._cpu_cache.on_replaced = self._writer.promote
        if self.in_memory is not None and on_gpu is not None:
            self._gpu_promotion = GpuPromotion(
                self._writer,
                self.in_memory.tier,
                on_gpu.tier,
                self._settings.updates.promote_queue_keys,
                partial(count_promotion, self._metrics, Source.GPU.name.lower()),
            )
            self._resources.callback(self._gpu_promotion.close)
        return self._writer

    def promote(self, table: EmbeddingTable, keys: KeyArray) -> None:
        """Queue rows of a store for promotion. Does nothing for a table without capacity in any cache."""
        if any(cache.capacity(table) for cache in self.statuses):
            self._writer.promote(table, keys)

    @property
    def promote_to_gpu(self) -> Promote:
        """Function that queues rows of the CPU cache for promotion into the GPU caches."""
        return self._gpu_promotion.promote if self._gpu_promotion else self.promote

    def _make_cpu_cache(self) -> TierStatus:
        """Make the CPU cache and share its memory out over the tables; overrides come first."""
        chosen = self._settings.tiers.cpu_cache
        settings = self._settings
        evictions = {table: eviction_of(settings, table) for table in self._tables()}
        cache = CpuCache(
            plan_rows(settings, {table: self._stores.rows(table) for table in self._tables()}),
            eviction=chosen.eviction,
            evictions={table: eviction for table, eviction in evictions.items() if eviction},
            memory=cache_memory(chosen),
            threads=chosen.threads,
        )
        self._resources.callback(cache.close)
        self._cpu_cache = cache
        self._memory = MappedMemory(cache, self._stores.direct_file, memory_budget(settings))
        self._resources.callback(self._memory.close)
        if chosen.snapshot.path is not None:
            self._hot = hot_keys_at_start(chosen.snapshot.path)
            snapshots = HotKeySnapshots(
                self._ranking(),
                self._tables,
                chosen.snapshot.path,
                interval_s=chosen.snapshot.interval_s,
                most=chosen.snapshot.keys,
                bytes_per_s=chosen.snapshot.bytes_per_s,
            )
            self._resources.callback(snapshots.close)
        return TierStatus(cache, cache.size, cache.capacity, facts=cache.status)

    # -- before the node is ready ------------------------------------------------------------------

    def fill(self, progress: Progress) -> None:
        """Fill the caches from the hot key snapshot, or else from the start of the files.

        Of mapped tables, only the first ``_FIRST_BYTES`` are filled so: their size must delay no start, nor
        decide how much memory it takes. Files that fit in memory, and hot rows of the others, are read in
        the background."""
        warming = CacheWarmup(self._writer, progress)
        later_hot: list[FillStep] = []
        later: list[FillStep] = []
        pending: list[Pending] = []
        first = _FIRST_BYTES
        files_of = {t: m.version.tables[t.name] for m in self._opened for t in m.tables.values()}
        for table, files in files_of.items():
            if table in self._devices.static and not self._fill_static(warming, table, files):
                continue
            if self._memory is not None and self._memory.admit(table):
                first -= self._memory.bytes(table)
                pending += self._map_or_wait(table, first >= 0)
            rows = min(files.rows, max((self._wanted(c, table) for c in self.statuses), default=0))
            first -= rows * table.row_bytes
            if first < 0 and self._stores.is_mapped(table):
                hot, others = self._fill_later(table, files, rows)
                later_hot, later = [*later_hot, *hot], [*later, *others]
                continue
            self._fill_table(warming, table, files, rows)
        if self._memory is not None:
            self._memory.load_later(pending)
        if later_hot or later:
            steps = [*later_hot, *later]
            self._resources.callback(BackgroundWarmup(self._writer, steps).close)

    def _map_or_wait(self, table: EmbeddingTable, is_small: bool) -> list[Pending]:
        """Put a table on the fast path if its file is small or in memory; return what is left to read."""
        assert self._memory is not None
        if is_small:
            self._memory.load(table)
            return []
        if self._memory.is_resident(table):
            self._memory.map(table)
        hot = self._hot.get(table.id)
        return [(table, None if hot is None else table.narrow(hot[0]))]

    def _fill_later(
        self, table: EmbeddingTable, files: TableFiles, rows: int
    ) -> tuple[list[FillStep], list[FillStep]]:
        """Return the steps that fill a mapped table with its hot rows, which are read from the disk first,
        and those that fill GPU caches with the other rows, if they have room for all.

        Rows come from the stores, which streams may change meanwhile."""
        hot = table.narrow(self._hot.get(table.id, (np.empty(0, np.int64),))[0])
        first: list[FillStep] = []
        if len(hot):
            first.append(lambda _warming: self._stores.populate(table, hot))
            if rows:
                first.append(lambda warming: self._fill_hottest(warming, table, hot[:rows]))
        replicas = self._devices.replicas
        on_gpu = sum(self._wanted(c, table) for c in self.statuses if c.tier is replicas)
        # Otherwise these rows would replace hot ones, which are there earlier.
        if on_gpu >= files.rows or (on_gpu and not len(hot)):
            return first, [lambda warming: self._fill_gpus(warming, table, files, hot, on_gpu)]
        return first, []

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
        for start in range(0, files.rows, _BLOCK_ROWS):
            keys = table.narrow(files.keys(start, min(files.rows, start + _BLOCK_ROWS)))
            keys = keys[~np.isin(keys, there)][:missing]
            missing -= len(keys)
            self._stores.populate(table, keys)
            warming.promote_into(table, keys, self._devices.replicas)
            if not missing or table not in self._stores.tables:
                return

    def _fill_table(
        self, warming: CacheWarmup, table: EmbeddingTable, files: TableFiles, rows: int
    ) -> None:
        version = self._stores.version_of_rows(table)
        hot = self._hot.get(table.id) if rows else None
        if hot is None or not len(hot[0]) or (version is not None and rows == files.rows):
            warming.fill(table, files.keys(0, rows), files.vectors, version)
        if hot is not None and len(hot[0]):
            self._fill_hottest(warming, table, hot[0][:rows])

    def _fill_hottest(self, warming: CacheWarmup, table: EmbeddingTable, keys: KeyArray) -> None:
        replicas, mapped = self._devices.replicas, self._stores.is_mapped(table)
        others = (self._wanted(c, table) for c in self.statuses if c.tier is not replicas)
        if mapped and replicas is not None and not any(others):
            keys = dedup(table.narrow(keys))[0]
            warming.promote_into(table, keys, replicas, limited=True)
            # The keys inserted first now have the lowest scores: the hottest half again, the hottest last.
            if replicas.capacity(table) < self._stores.rows(table):
                warming.promote_into(table, keys[: len(keys) // 2][::-1], replicas, limited=True)
            return
        warming.hottest(table, keys, self.statuses[0].tier, mapped=mapped)
        self._promote_hottest(table, keys)

    def _promote_hottest(self, table: EmbeddingTable, keys: KeyArray) -> None:
        """Copy rows of the CPU cache, the hottest first, to the GPUs."""
        if self._gpu_promotion and self._devices.replicas:
            keys = keys[: self._devices.replicas.capacity(table)]
            self._gpu_promotion.promote_now(table, keys)

    def _wanted(self, cache: TierStatus, table: EmbeddingTable) -> int:
        """Number of rows of ``table`` to put into ``cache`` before the node is ready."""
        tiers, capacity = self._settings.tiers, cache.capacity(table) or 0
        on_gpu = cache.tier is self._devices.replicas
        if not tiers.cpu_cache.warm or (on_gpu and table in self._devices.static):
            return 0
        if self._memory is not None and not on_gpu and self._memory.admit(table):
            return 0
        return int(capacity * tiers.gpu.fill) if on_gpu else capacity

    def _fill_static(self, warming: CacheWarmup, table: EmbeddingTable, files: TableFiles) -> bool:
        """Put every row of ``table`` into the GPU caches and seal the table.

        Returns whether the CPU cache remains to be filled: rows that must be read from the stores are put
        into all caches at once."""
        replicas, version = self._devices.replicas, self._stores.version_of_rows(table)
        assert replicas is not None
        keys = table.narrow(files.keys(0, files.rows))
        if version is None:
            warming.promote_all(table, keys)
        else:
            warming.fill_static(FileRows(table, keys, files.vectors, version), replicas)
        if dropped := replicas.seal(table):
            log.warning("%d rows of table %s do not fit the GPU cache", dropped, table.id)
        return version is not None

    # -- while it serves ---------------------------------------------------------------------------

    def add(
        self,
        model: OpenedModel,
        old: OpenedModel | None,
        kept: Sequence[OpenedModel],
        progress: Progress,
    ) -> str:
        """Add a version's tables to the caches, next to those of the ``kept`` versions.

        They are filled with the rows that are hot in the ``old`` version, the CPU cache with ``_FIRST_BYTES``
        of mapped tables, as at a start. Tables that it shares with another version are there already. Returns
        a warning or ""."""
        others = tables_of(kept)
        warnings = [self._add_to_cpu_cache(model, others), self._add_to_gpus(model, kept)]
        warming = CacheWarmup(self._writer, progress)
        new = self._stores.unshared_tables(model)
        mapped_bytes = sum(
            t.row_bytes * self._stores.rows(t) for t in new if self._stores.is_mapped(t)
        )
        for table in new:
            before = None if old is None else old.tables.get(table.name)
            files = model.version.tables[table.name]
            most = files.rows
            if self._stores.is_mapped(table):
                most = int(files.rows * min(1.0, _FIRST_BYTES / max(1, mapped_bytes)))
            self._warm_added(warming, table, files, before, most)
        return "; ".join(filter(None, warnings))

    def _add_to_gpus(self, model: OpenedModel, kept: Sequence[OpenedModel]) -> str:
        """On the writer's thread: others write and drop the tables whose memory the new ones share."""
        try:
            return self._writer.run(partial(self._devices.add, model, kept)).result()
        except CancelledError:
            raise Unavailable("the node is being closed; ask another replica") from None

    def _add_to_cpu_cache(self, model: OpenedModel, other_tables: Sequence[EmbeddingTable]) -> str:
        cache = self._cpu_cache
        if cache is None:
            return ""
        new = self._stores.unshared_tables(model)
        other_tables = [*dict.fromkeys([*other_tables, *model.tables.values()]).keys() - set(new)]
        plan, warning = plan_rows_for_new_model(
            self._settings,
            {table: self._stores.rows(table) for table in (*other_tables, *new)},
            new,
            {table: cache.capacity(table) for table in other_tables},
        )
        for table in new:
            cache.add_table(table, plan[table], eviction_of(self._settings, table))
        return warning

    def _warm_added(
        self,
        warming: CacheWarmup,
        table: EmbeddingTable,
        files: TableFiles,
        old: EmbeddingTable | None,
        most: int,
    ) -> None:
        """Fill the caches of an added table with the rows that are hot in the ``old`` one.

        The CPU cache gets at most ``most`` rows, unless a GPU cache takes more."""
        if table in self._devices.static and not self._fill_static(warming, table, files):
            return
        if self._memory is not None and self._memory.admit(table):
            self._memory.load(table)
        wanted = (
            min(most, n) if c is self.in_memory else n
            for c in self.statuses
            if (n := self._wanted(c, table))
        )
        rows = min(files.rows, max(wanted, default=0))
        hot = None if old is None or not rows else self._ranking().top_k(old, rows)[0]
        if hot is not None and len(hot) and rows < files.rows:
            self._fill_hottest(warming, table, hot)
            return
        version = self._stores.version_of_rows(table)
        warming.fill(table, files.keys(0, rows), files.vectors, version)
        if hot is not None and len(hot):
            self._promote_hottest(table, hot)

    def _ranking(self) -> RankedCache:
        """The caches' hot keys, of the faster cache first."""
        caches: list[RankedCache] = []
        if self._devices.replicas is not None:
            caches.append(self._devices.replicas)
        if self._cpu_cache is not None:
            caches.append(self._cpu_cache)
        return caches[0] if len(caches) == 1 else MergedRanking(caches)

    def drop(self, model: OpenedModel) -> None:
        """Free a version's tables that no other one shares, and what was prepared on GPUs for its requests.

        Call it before the version leaves the stores."""
        tables = self._stores.unshared_tables(model)
        self._devices.models.retire(model)
        with suppress(CancelledError):  # the writer is closed; the caches are closed next
            drop = partial(self._devices.drop_tables, tables)
            self._writer.run(drop).result()
        if self._cpu_cache is not None:
            for table in tables:
                self._cpu_cache.drop_table(table)
                if self._memory is not None:
                    self._memory.release(table)
