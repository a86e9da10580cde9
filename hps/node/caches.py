"""A node's caches: the CPU cache, its capacity per table, the GPU caches, their writer and warm-up."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, suppress
from functools import partial

import numpy as np

from hps.cgroups import free_host_bytes
from hps.config import Settings
from hps.errors import Unavailable
from hps.lookup.engine import Promote
from hps.node.cache_fill import CacheFill
from hps.node.cpu_cache_plan import (
    admit_after,
    cache_memory,
    check_host_memory,
    eviction_of,
    is_cached,
    plan_rows,
    plan_rows_for_new_model,
)
from hps.node.expiry import NodeExpiry
from hps.node.gpu_caches import NodeGpus, files_of
from hps.node.mapped_memory import MappedMemory, memory_budget
from hps.node.model_opening import OpenedModel, tables_of
from hps.node.stores import NodeStores
from hps.node.tier_status import TierStatus
from hps.observability.meters import count_promotion
from hps.observability.metrics import Metrics
from hps.threads import rest
from hps.tiers.chain import TierChain
from hps.tiers.cpu.cache import CpuCache
from hps.tiers.ranking import HotKeys, MergedRanking, RankedCache
from hps.types import EmbeddingTable, KeyArray, Progress, Source
from hps.updates.admission import Admission
from hps.updates.background_warmup import BackgroundWarmup
from hps.updates.cache_warmup import CacheWarmup
from hps.updates.cache_writer import CacheWriter
from hps.updates.gpu_promotion import GpuPromotion
from hps.updates.hot_key_snapshot import HotKeySnapshots, hot_keys_at_start

log = logging.getLogger(__name__)


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
        self._expiry: NodeExpiry
        self._filling: CacheFill
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
        settings = self._settings
        admission = Admission(partial(admit_after, settings), self._capacity, self._is_served)
        self._writer = CacheWriter(
            # The CPU cache first, so that a row promoted from it is never older than the GPUs' row.
            TierChain([cache.tier for cache in reversed(self.statuses)]),
            self._stores.promotion_sources,
            self._settings.updates.promote_queue_keys,
            partial(count_promotion, self._metrics, Source.CPU.name.lower()),
            self._stores.promote_missing,
            self._is_served,
            admission,
        )
        self._resources.callback(self._writer.close)
        if self.in_memory is not None and on_gpu is not None:
            self._gpu_promotion = GpuPromotion(
                self._writer,
                self.in_memory.tier,
                on_gpu.tier,
                self._settings.updates.promote_queue_keys,
                partial(count_promotion, self._metrics, Source.GPU.name.lower()),
                admission,
            )
            self._resources.callback(self._gpu_promotion.close)
        caches = self._cpu_cache, self._devices.replicas
        self._expiry = NodeExpiry(self._stores, caches, self._writer, self._metrics)
        self._resources.callback(self._expiry.close)
        self._filling = CacheFill(
            self._settings,
            self._stores,
            self._devices,
            self.statuses,
            self.in_memory,
            self._memory,
            self._gpu_promotion,
        )
        return self._writer

    def promote(self, table: EmbeddingTable, keys: KeyArray) -> None:
        """Queue rows of a store for promotion. Does nothing for a table without capacity in any cache."""
        if any(cache.capacity(table) for cache in self.statuses):
            self._writer.promote(table, keys)

    def _is_served(self, table: EmbeddingTable) -> bool:
        return table in self._stores.tables

    def _capacity(self, table: EmbeddingTable) -> int:
        return max((cache.capacity(table) or 0 for cache in self.statuses), default=0)

    @property
    def promote_to_gpu(self) -> Promote:
        """Function that queues rows of the CPU cache for promotion into the GPU caches."""
        return self._gpu_promotion.promote if self._gpu_promotion else self.promote

    def _make_cpu_cache(self) -> TierStatus:
        """Make the CPU cache and share its memory out over the tables; overrides come first."""
        chosen = self._settings.tiers.cpu_cache
        settings = self._settings
        cache = CpuCache(
            {},
            eviction=chosen.eviction,
            memory=cache_memory(chosen),
            threads=chosen.threads,
            on_left_out=partial(count_promotion, self._metrics, "cpu", "not_admitted"),
        )
        self._resources.callback(cache.close)
        self._cpu_cache = cache
        self._memory = MappedMemory(
            cache, self._stores.direct_file, memory_budget(settings), self._stores.verified_files
        )
        self._resources.callback(self._memory.close)
        tables = {table: self._stores.rows(table) for table in self._tables()}
        in_memory = self._in_memory(tables)
        for table, rows in plan_rows(settings, tables, in_memory).items():
            self._add_table(cache, table, rows, on_demand=table in in_memory)
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

    def _add_table(
        self, cache: CpuCache, table: EmbeddingTable, rows: int, *, on_demand: bool
    ) -> None:
        eviction = eviction_of(self._settings, table)
        used_only = admit_after(self._settings, table) > 1
        cache.add_table(table, rows, eviction, on_demand=on_demand, used_only=used_only)

    def _in_memory(self, tables: Iterable[EmbeddingTable]) -> set[EmbeddingTable]:
        """Those of ``tables`` whose files lookups will read from memory."""
        static = self._devices.static
        chosen = (t for t in tables if is_cached(self._settings, t) and t not in static)
        return set() if self._memory is None else self._memory.fitting(chosen)

    # -- rows --------------------------------------------------------------------------------------

    def fill(self, progress: Progress) -> None:
        """Fill the caches before the node is ready, and then in the background."""

        def hot(table: EmbeddingTable, rows: int) -> KeyArray:
            keys = self._hot.get(table.id)
            return np.empty(0, np.int64) if keys is None else keys[0][:rows]

        tables = files_of(self._opened)
        if later := self._filling.at_start(CacheWarmup(self._writer, progress), tables, hot):
            self._resources.callback(BackgroundWarmup(self._writer, later).close)
        self._expiry.start()

    def add(
        self,
        model: OpenedModel,
        old: OpenedModel | None,
        kept: Sequence[OpenedModel],
        progress: Progress,
    ) -> str:
        """Add a version's tables to the caches, next to those of the ``kept`` versions.

        They are filled with the rows that are hot in the ``old`` version, or with all where there is room.
        Tables that it shares with another version are there already. Returns a warning or "". Raises
        ModelError for a damaged mapped file."""
        others = tables_of(kept)
        warnings = [self._add_to_cpu_cache(model, others), self._add_to_gpus(model, kept)]
        tables = {
            table: model.version.tables[table.name] for table in self._stores.unshared_tables(model)
        }

        def hot(table: EmbeddingTable, rows: int) -> KeyArray:
            before = None if old is None else old.tables.get(table.name)
            return (
                np.empty(0, np.int64) if before is None else self._ranking().top_k(before, rows)[0]
            )

        self._filling.added(CacheWarmup(self._writer, progress), tables, hot)
        self._expiry.start()
        warnings.append(self._waiting_for_memory(tables))
        return "; ".join(filter(None, warnings))

    def _waiting_for_memory(self, tables: Iterable[EmbeddingTable]) -> str:
        """A warning about mapped tables that are not on the fast path yet, or ""."""
        waiting = [] if self._memory is None else self._memory.waiting(tables)
        if not waiting:
            return ""
        return (
            f"the mapped files of {', '.join(sorted(table.id for table in waiting))} do not fit "
            "tiers.mapped.memory_bytes beside those of other versions: these tables are read through the "
            "stores until other versions are freed"
        )

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
        in_memory = self._in_memory(new)
        plan, warning = plan_rows_for_new_model(
            self._settings,
            {table: self._stores.rows(table) for table in (*other_tables, *new)},
            new,
            {table: cache.capacity(table) for table in other_tables},
            in_memory,
        )
        check_host_memory(plan, free_host_bytes())
        for table in new:
            self._add_table(cache, table, plan[table], on_demand=table in in_memory)
            rest()
        return warning

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
        if self._memory is not None:
            self._memory.release(tables)
        if self._cpu_cache is not None:
            for table in tables:
                self._cpu_cache.drop_table(table)
