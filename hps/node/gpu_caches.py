"""GPU caches of a node: one per device, their bridges to host memory, and lookups that stay there.

A lookup asks the cache first that is in the memory where its vectors are needed. With vectors on the
host it asks the CPU cache, then the GPU caches as one tier, then the stores; with vectors on a device the
GPU cache, then, over the bridge, the CPU cache and the stores."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from hps import native
from hps.cgroups import available_cores
from hps.config.cache_settings import GpuCacheSettings
from hps.config.schema import Settings
from hps.cuda.layout import EvictionPolicy
from hps.cuda.loader import device_count, has_gpu, missing_device, missing_requirement
from hps.cuda.memory import free_bytes_on, free_host_bytes, release_unused
from hps.dense.lanes import DeviceLanes
from hps.dense.onnx import OnnxModel
from hps.errors import ConfigError, GpuUnavailable, ModelError
from hps.lookup.engine import Promote
from hps.lookup.gpu.device_lookup import DeviceLookup
from hps.lookup.gpu.miss_fill import HostCaches
from hps.native import WorkerPool
from hps.node.gpu_plan import check_memory, plan_of_settings
from hps.node.gpu_scheduler import NodeScheduler
from hps.node.model_opening import OpenedModel
from hps.node.tier_status import TierStatus
from hps.observability.meters import LookupMeter, TierMeter
from hps.observability.metrics import Metrics
from hps.predict.device_feed import DeviceFeed
from hps.predict.device_path import DevicePath
from hps.predict.pipeline import DevicePredictor, InferencePipeline
from hps.threads import LookupPools
from hps.tiers.background_refresh import BackgroundValue
from hps.tiers.base import Tier
from hps.tiers.chain import TierChain
from hps.tiers.fused_lookup import fused_lookup_of
from hps.tiers.gpu.memory import publish_memory
from hps.tiers.gpu.plan import Plan, device_bytes, host_bytes_of
from hps.tiers.gpu.replicas import GpuReplicas
from hps.tiers.wrappers import MeteredTier, PromotingTier
from hps.types import EmbeddingTable

log = logging.getLogger(__name__)
_COUNT_AGAIN_S = 5.0
_SWITCH_S = 5e-5
_MISS_THREADS = 16


class NodeGpus:
    """The GPU caches: call `open`; ``resources`` closes them. All results are empty without a GPU.

    ``static``: the tables that must be filled completely and then sealed."""

    def __init__(
        self,
        settings: Settings,
        opened: Sequence[OpenedModel],
        metrics: Metrics,
        resources: ExitStack,
    ) -> None:
        self._settings = settings
        self._chosen = settings.tiers.gpu
        self._opened = opened
        self._metrics = metrics
        self._resources = resources
        self._bridged: list[tuple[Tier, Tier]] = []
        self._closed_last: list[Callable[[], None]] = []
        self._host: list[HostCaches] = []
        threads = settings.tiers.gpu.miss_threads or min(_MISS_THREADS, available_cores())
        self._pool = WorkerPool(threads)
        self.replicas: GpuReplicas | None = None
        self.scheduler: NodeScheduler | None = None
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
        self.static = [table for table, planned in plan.items() if planned.static]
        by_version = [
            table
            for table, planned in plan.items()
            if planned.policy is EvictionPolicy.SCORE and not planned.static
        ]
        self.replicas = GpuReplicas(caches, by_version)
        self._resources.callback(self._close)
        publish_memory(self._metrics, self._chosen.devices, self._resources)
        return self._status(self.replicas, plan)

    def _close(self) -> None:
        """Give all memory back, though others may still refer to the caches, lookups and paths.

        Runs after the threads that use them have ended, since it was registered before these started."""
        while self._closed_last:
            self._closed_last.pop()()
        assert self.replicas is not None
        self.replicas.close()
        release_unused(self._chosen.devices)

    def _status(self, replicas: GpuReplicas, plan: Plan) -> TierStatus:
        tables = [table for table, planned in plan.items() if planned.rows]
        rows = BackgroundValue(
            lambda: {table: replicas.rows(table) for table in tables}, _COUNT_AGAIN_S, "gpu-rows"
        )
        self._resources.callback(rows.close)
        facts: dict[str, Any] = {
            "devices": self._chosen.devices,
            "bytes": device_bytes(plan),
            "pinned_host_bytes": host_bytes_of(plan),
            "static_tables": len(self.static),
        }
        return TierStatus(
            replicas,
            lambda table: (rows.value or {}).get(table, 0),
            replicas.capacity,
            facts=lambda: facts | self._scheduler_facts(),
        )

    def _scheduler_facts(self) -> dict[str, Any]:
        return {} if self.scheduler is None else {"scheduler": self.scheduler.status()}

    def bridge(
        self, caches: Sequence[Tier], stores: Tier, promote_to_gpu: Promote, promote: Promote
    ) -> None:
        """Let each device fetch its misses from ``caches``, in host memory, and ``stores``.

        ``promote_to_gpu`` and ``promote`` are called with keys found in ``caches`` and in ``stores``."""
        if self.replicas is None:
            return
        for cache, device in zip(self.replicas.caches, self._chosen.devices, strict=True):
            chain: list[Any] = [MeteredTier(cache, TierMeter(self._metrics, cache.info.name))]
            if caches:
                on_host = TierChain(caches)
                inner = PromotingTier(on_host, promote_to_gpu, "")
                chain.append(bridge_to_device(inner, device, self._chosen.workspaces))
                memory = fused_lookup_of(on_host)
                self._host.append(HostCaches(memory, chain[1], promote_to_gpu, self._pool))
            else:
                self._host.append(HostCaches())
            threads = self._settings.tiers.lookup_threads
            store_bridge = bridge_to_device(PromotingTier(stores, promote, ""), device, threads)
            self._bridged.append((TierChain(chain), store_bridge))
            self._closed_last += [bridge.release for bridge in (*chain[1:], store_bridge)]

    def lookups(
        self, model: OpenedModel, workers: LookupPools, promote: Promote, meter: LookupMeter
    ) -> list[DeviceLookup]:
        """The model's lookups, one per device."""
        if self.replicas is None:
            return []
        lookups = [
            DeviceLookup(cache, host, model.lookup, caches, stores, workers, promote, meter)
            for cache, host, (caches, stores) in zip(
                self.replicas.caches, self._host, self._bridged, strict=True
            )
        ]
        self._closed_last += [lookup.close for lookup in lookups]
        return lookups

    def paths(
        self, model: OpenedModel, lookups: Sequence[DeviceLookup], meter: LookupMeter
    ) -> Sequence[DevicePredictor]:
        """Paths on which the model's predictions run without a vector leaving the device, one per device.

        Empty where the network takes no vectors there."""
        network, spec, name = model.dense, model.spec.dense, model.lookup.name
        if self.replicas is None or spec is None or network is None:
            return []
        feeds = [
            (feature, spec.embeddings.get(feature.name, feature.name))
            for feature in model.lookup.features.values()
        ]
        if network.takes_device_arrays:
            return [DeviceFeed(lookup, network, feeds) for lookup in lookups]
        if not isinstance(network, OnnxModel):
            return []
        if not runs_on_gpu(network):
            level = logging.INFO if self._settings.dense.provider == "cpu" else logging.WARNING
            text = "model %s: its network runs on the CPU; predictions use the CPU cache"
            log.log(level, text, name)
            return []
        sent = frozenset(tensor.name for tensor in spec.inputs)
        observe = TierMeter(self._metrics, self.replicas.info.name)
        # The scheduler has lanes of its own; one is left for requests that it cannot run.
        paths, count = [], 1 if self._schedules() else self._settings.dense.lanes
        for lookup, device in zip(lookups, self._chosen.devices, strict=True):
            try:
                lanes = DeviceLanes(network, lookup.cache.space, device, sent, count)
            except ModelError as error:
                self._report_lanes(name, error)
                return []
            self._closed_last.append(lanes.close)
            paths.append(DevicePath(lookup, lanes, feeds, observe, meter))
        return paths

    def _report_lanes(self, model: str, error: ModelError) -> None:
        """Log that ``model`` is predicted without lanes; raise ``error`` if the network must use them."""
        if self._settings.dense.provider != "auto":
            raise error
        log.warning(
            "model %s: a GPU has no memory for the network's lanes (%s); predictions copy their vectors "
            "through the host. Lower dense.lanes or tiers.gpu.capacity_bytes",
            model,
            error,
        )

    def schedule(
        self,
        model: OpenedModel,
        lookups: Sequence[DeviceLookup],
        meter: LookupMeter,
        pipeline: InferencePipeline,
    ) -> None:
        """Run the model's predictions in common batches, if its rows and network are on the GPUs."""
        network = model.dense
        if self.replicas is None or model.spec.dense is None:
            return
        if (why := self._unscheduled_because(model)) is not None:
            if self._settings.server.workers:
                log.warning(
                    "model %s: workers cannot use the GPU cache: %s; each predicts from the CPU cache",
                    model.lookup.name,
                    why,
                )
            return
        assert isinstance(network, OnnxModel)
        if self.scheduler is None:
            self.scheduler = NodeScheduler(self._settings, self._metrics, self._resources)
        places = list(zip(lookups, self._chosen.devices, strict=True))
        try:
            self.scheduler.add(model, network, places, meter, pipeline)
        except ModelError as error:
            self._report_lanes(model.lookup.name, error)

    def _unscheduled_because(self, model: OpenedModel) -> str | None:
        """Return why the scheduler cannot run the model; None if it can."""
        assert self.replicas is not None
        for table in model.tables.values():
            if not self.replicas.capacity(table):
                return f"table {table.name} has no rows there (gpu_rows, gpu_share, tiers.gpu)"
        if not isinstance(model.dense, OnnxModel):
            return "Triton runs its network (dense.triton)"
        if not runs_on_gpu(model.dense):
            return "its network runs on the CPU"
        return None if self._schedules() else "dense.scheduler is off, or the compiled core missing"

    def _schedules(self) -> bool:
        return self._settings.dense.scheduler and native.COMPILED

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

    def _plan(self) -> Plan:
        rows = {
            table: model.version.tables[name].rows
            for model in self._opened
            for name, table in model.tables.items()
        }
        free = {device: free_bytes_on(device) for device in self._chosen.devices}
        plan = plan_of_settings(self._settings, rows, min(free.values()))
        check_memory(plan, free, free_host_bytes())
        return plan

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
        for table, planned in plan.items():
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
        return cache


def open_cache(device: int, workspaces: int, threads: WorkerPool) -> Any:
    """An empty cache on ``device``."""
    from hps.tiers.gpu.cache import GpuCache

    return GpuCache({}, device=device, workspaces=workspaces, threads=threads)


def bridge_to_device(inner: Tier, device: int, workspaces: int) -> Any:
    """Bridge from parts on ``device`` to ``inner`` in host memory."""
    from hps.tiers.gpu.host_bridge import HostBridge

    return HostBridge(inner, device=device, workspaces=workspaces)


def runs_on_gpu(network: OnnxModel) -> bool:
    return not network.on_host


def is_gpu_expected(chosen: GpuCacheSettings) -> bool:
    """Return whether this machine has a GPU, usable or not, or the settings describe a GPU cache."""
    return chosen.use != "off" and bool(has_gpu() or chosen.model_fields_set - {"use"})


def report_unused(chosen: GpuCacheSettings, why: str) -> None:
    """Log why ``use: auto`` opens no GPU cache: as a warning if a GPU is expected."""
    level = logging.WARNING if is_gpu_expected(chosen) else logging.INFO
    log.log(level, "no GPU cache: %s; rows are served from the CPU cache", why)
