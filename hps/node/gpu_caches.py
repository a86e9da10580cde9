"""GPU caches of a node, one per device: opened, planned, and changed with the served versions."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from hps.cgroups import available_cores, free_host_bytes
from hps.config.cache_settings import GpuCacheSettings
from hps.config.schema import Settings
from hps.cuda.layout import EvictionPolicy
from hps.cuda.loader import device_count, has_gpu, missing_device, missing_requirement
from hps.cuda.memory import free_bytes_on, release_unused
from hps.errors import ConfigError, GpuUnavailable
from hps.models.tables import TableFiles
from hps.native import WorkerPool
from hps.node.gpu_models import GpuModels
from hps.node.gpu_plan import check_memory, plan_added_tables
from hps.node.gpu_scheduler import NodeScheduler
from hps.node.gpu_sharing import (
    Joins,
    can_join,
    find_joins,
    may_share,
    plan_shared,
    with_joins,
    without,
)
from hps.node.model_opening import OpenedModel
from hps.node.tier_status import TierStatus
from hps.observability.metrics import Metrics
from hps.tiers.background_refresh import BackgroundValue
from hps.tiers.gpu.memory import publish_memory
from hps.tiers.gpu.plan import Plan, device_bytes, host_bytes_of
from hps.tiers.gpu.replicas import GpuReplicas
from hps.tiers.gpu.tables import CommonRows
from hps.types import EmbeddingTable

log = logging.getLogger(__name__)
_COUNT_AGAIN_S = 5.0
_SWITCH_S = 5e-5
_MISS_THREADS = 16


class NodeGpus:
    """The GPU caches: call `open`; ``resources`` closes them. All results are empty without a GPU.

    ``static``: the tables that must be filled completely and then sealed. ``common_rows``: see
    `GpuTables.share_table`. One thread at a time may change the tables or prepare versions."""

    def __init__(
        self,
        settings: Settings,
        opened: Sequence[OpenedModel],
        metrics: Metrics,
        resources: ExitStack,
        common_rows: CommonRows,
    ) -> None:
        self._settings = settings
        self._common_rows = common_rows
        self._chosen = settings.tiers.gpu
        self._opened = opened
        self._metrics = metrics
        self._resources = resources
        self._held: Plan = {}
        threads = settings.tiers.gpu.miss_threads or min(_MISS_THREADS, available_cores())
        self._pool = WorkerPool(threads)
        self.models = GpuModels(settings, metrics, self._pool)
        self.replicas: GpuReplicas | None = None
        self.static: list[EmbeddingTable] = []

    def open(self) -> TierStatus | None:
        """Allocate the caches in the sizes of the settings; None without a GPU.

        Raises ConfigError, before it allocates anything, for GPUs that do not exist or have too little
        memory. With ``use: auto``, a warning is logged instead."""
        if self._chosen.use == "off" or not self._is_available():
            return None
        # After it waited for a device, a thread must not wait that long again for the interpreter lock.
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
        try:
            plan = self._plan()
            caches = self._open_caches(plan)
        except GpuUnavailable as error:
            if self._chosen.use == "required":
                raise
            log.warning("no GPU cache: %s; rows are served from the CPU cache", error)
            return None
        self.replicas = self.models.replicas = GpuReplicas(caches, by_version(plan))
        self._note(plan)
        self._resources.callback(self._close)
        if self.models.schedules():
            resources = self._metrics, self._resources
            self.models.scheduler = NodeScheduler(self._settings, caches, *resources)
        publish_memory(self._metrics, self._chosen.devices, self._resources)
        return self._status(self.replicas)

    def _note(self, plan: Plan) -> None:
        self._held = self._held | plan
        self.static += [table for table, planned in plan.items() if planned.static]

    def _close(self) -> None:
        """Give all memory back, though others may still refer to the caches, lookups and paths.

        Runs after the threads that use them have ended, since it was registered before these started."""
        self.models.close()
        assert self.replicas is not None
        self.replicas.close()
        release_unused(self._chosen.devices)

    def _status(self, replicas: GpuReplicas) -> TierStatus:
        def counted() -> dict[EmbeddingTable, int]:
            return {table: replicas.rows(table) for table, p in [*self._held.items()] if p.rows}

        rows = BackgroundValue(counted, _COUNT_AGAIN_S, "gpu-rows")
        self._resources.callback(rows.close)
        return TierStatus(
            replicas,
            lambda table: (rows.value or {}).get(table, 0),
            replicas.capacity,
            facts=self._facts,
        )

    def _facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "devices": self._chosen.devices,
            "bytes": device_bytes(self._held),
            "pinned_host_bytes": host_bytes_of(self._held),
            "static_tables": len(self.static),
        }
        scheduler = self.models.scheduler
        return facts if scheduler is None else facts | {"scheduler": scheduler.status()}

    # -- versions while the node serves --------------------------------------------------------------

    def add(self, model: OpenedModel, others: Sequence[OpenedModel]) -> str:
        """Add a version's tables, empty, to the caches; returns a warning or "".

        For the thread that writes the caches. ``others``: the versions that stay. Raises GpuUnavailable if
        `use` is required and too little memory is left; else the version is served from the CPU cache, with
        a warning."""
        if self.replicas is None:
            return ""
        held = self._held
        rows = table_rows(others)
        stay = without(held, [table for table in held if table not in rows])
        kept = {t: rows[t] for t, planned in stay.items() if not planned.shared_with}
        files = files_of([*self._opened, model])
        files = {t: f for t, f in files.items() if t in held or t in model.tables.values()}
        joins = {
            t: owner
            for t, owner in self._find_joins(files).items()
            if can_join(held, owner) and self._is_mapped(t) and self._is_mapped(owner)
        }
        try:
            free = {device: free_bytes_on(device) for device in self._chosen.devices}
            new = {t: n for t, n in table_rows([model]).items() if t not in held and t not in joins}
            least = min(free.values())
            plan, warning = plan_added_tables(self._settings, (new, kept), (held, stay), least)
            check_memory(plan, free, free_host_bytes())
            plan = with_joins(plan, joins, held)
            self._add_tables(plan)
        except ConfigError as error:
            if self._chosen.use == "required":
                raise
            return f"the version is served from the CPU cache: {error}"
        self.replicas.add_by_version(by_version(plan))
        self._note(plan)
        return warning

    def _add_tables(self, plan: Plan) -> None:
        """Add tables to all caches, or to none. Nothing uses them yet."""
        assert self.replicas is not None
        try:
            for cache in self.replicas.caches:
                self._fill_cache(cache, plan)
        except BaseException:
            for table in plan:
                self.replicas.drop_table(table)
            raise

    def drop_tables(self, tables: Collection[EmbeddingTable]) -> None:
        """Free tables. For the thread that writes the caches, after nothing uses them."""
        self._held = without(self._held, tables)
        self.static[:] = [table for table in self.static if table not in tables]
        if self.replicas is not None:
            for table in tables:
                self.replicas.drop_table(table)

    # -- opening -----------------------------------------------------------------------------------

    def _is_available(self) -> bool:
        chosen = self._chosen
        why = missing_requirement() or missing_device(chosen.devices, device_count())
        if why is None:
            return True
        if chosen.use == "required":
            raise ConfigError(
                f"tiers.gpu.use is required, but {why}. Set it to auto to serve from the CPU cache"
            )
        report_unused(chosen, why)
        return False

    def check(self) -> None:
        """Raise ConfigError early, before rows are loaded, if `use` is required and `open` would fail."""
        if self._chosen.use == "required" and self._is_available():
            self._plan(loaded=False)

    def _plan(self, *, loaded: bool = True) -> Plan:
        """Plan all tables; before they are ``loaded``, it is not known which ones are mapped."""
        files = files_of(self._opened)
        free = {device: free_bytes_on(device) for device in self._chosen.devices}
        joins = {
            t: owner
            for t, owner in self._find_joins(files).items()
            if not loaded or (self._is_mapped(t) and self._is_mapped(owner))
        }
        plan = plan_shared(self._settings, files, joins, min(free.values()))
        check_memory(plan, free, free_host_bytes())
        return plan

    def _is_mapped(self, table: EmbeddingTable) -> bool:
        return self._common_rows(table, np.empty(0, np.int64))[1] != 0

    def _find_joins(self, files: Mapping[EmbeddingTable, TableFiles]) -> Joins:
        return find_joins(files, self._held) if may_share(self._settings) else {}

    def _open_caches(self, plan: Plan) -> list[Any]:
        """Open a cache on each device; if one fails, close the others."""
        with ExitStack() as opened:
            opened.callback(release_unused, self._chosen.devices)
            caches = [self._cache(device, plan, opened) for device in self._chosen.devices]
            opened.pop_all()
            return caches
        raise AssertionError  # unreachable: an ExitStack swallows nothing; for the type checker

    def _cache(self, device: int, plan: Plan, opened: ExitStack) -> Any:
        cache = open_cache(device, self._chosen.workspaces, self._pool)
        opened.callback(cache.close)
        self._fill_cache(cache, plan)
        return cache

    def _fill_cache(self, cache: Any, plan: Plan) -> None:
        for table, planned in plan.items():
            if planned.shared_with is not None:
                if not cache.share_table(table, planned.shared_with, self._common_rows):
                    raise ConfigError(
                        f"table {table.id} cannot use the GPU memory of {planned.shared_with.id}"
                    )
                continue
            cache.add_table(
                table,
                planned.rows,
                policy=planned.policy,
                host_rows=planned.host_rows,
                static=planned.static,
                load=planned.load,
                ticks=self._chosen.clock_ticks,
                epoch_s=self._chosen.epoch_s,
            )


def files_of(models: Sequence[OpenedModel]) -> dict[EmbeddingTable, TableFiles]:
    """The files of each of the models' tables."""
    return {t: model.version.tables[name] for model in models for name, t in model.tables.items()}


def table_rows(models: Sequence[OpenedModel]) -> dict[EmbeddingTable, int]:
    """The number of rows in the files of each of the models' tables."""
    return {table: files.rows for table, files in files_of(models).items()}


def by_version(plan: Plan) -> list[EmbeddingTable]:
    """The tables whose rows are evicted by their versions."""
    return [t for t, p in plan.items() if p.policy is EvictionPolicy.SCORE and not p.static]


def open_cache(device: int, workspaces: int, threads: WorkerPool) -> Any:
    """An empty cache on ``device``."""
    from hps.tiers.gpu.cache import GpuCache

    return GpuCache({}, device=device, workspaces=workspaces, threads=threads)


def is_gpu_expected(chosen: GpuCacheSettings) -> bool:
    """Return whether this machine has a GPU, usable or not, or the settings describe a GPU cache."""
    return chosen.use != "off" and bool(has_gpu() or chosen.model_fields_set - {"use"})


def report_unused(chosen: GpuCacheSettings, why: str) -> None:
    """Log why ``use: auto`` opens no GPU cache: as a warning if a GPU is expected."""
    level = logging.WARNING if is_gpu_expected(chosen) else logging.INFO
    log.log(level, "no GPU cache: %s; rows are served from the CPU cache", why)
