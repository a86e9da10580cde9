"""Versions of models on a node's GPUs: their lookups, the lanes of their networks, and common batches.

A lookup asks the cache first that is in the memory where its vectors are needed. With vectors on the
host it asks the CPU cache, then the GPU caches as one tier, then the stores; with vectors on a device the
GPU cache, then, over the bridge, the CPU cache and the stores."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakMethod

from hps import native
from hps.config.schema import Settings
from hps.cuda.memory import release_unused
from hps.dense.lanes import DeviceLanes
from hps.dense.onnx import OnnxModel
from hps.errors import ConfigError, ModelError
from hps.lookup.engine import Promote
from hps.lookup.gpu.device_lookup import DeviceLookup
from hps.lookup.gpu.miss_fill import HostCaches
from hps.native import WorkerPool
from hps.node.gpu_plan import is_kept_out
from hps.node.gpu_scheduler import NodeScheduler
from hps.node.model_opening import OpenedModel
from hps.observability.meters import LookupMeter, TierMeter
from hps.observability.metrics import Metrics
from hps.predict.device_feed import DeviceFeed
from hps.predict.device_path import DevicePath
from hps.predict.pipeline import DevicePredictor, InferencePipeline
from hps.threads import LookupPools
from hps.tiers.base import Tier
from hps.tiers.chain import TierChain
from hps.tiers.fused_lookup import fused_lookup_of
from hps.tiers.gpu.replicas import GpuReplicas
from hps.tiers.wrappers import MeteredTier, PromotingTier

log = logging.getLogger(__name__)

T = TypeVar("T")


class _Unscheduled(NamedTuple):
    """Why a model does not run in common batches; ``is_chosen``: the configuration says so for this model."""

    why: str
    is_chosen: bool = False


class GpuModels:
    """Prepares versions for requests on the GPUs. All results are empty without ``replicas``.

    One thread at a time may prepare or retire versions."""

    def __init__(self, settings: Settings, metrics: Metrics, pool: WorkerPool) -> None:
        """``pool``: threads that copy missing rows from the CPU cache."""
        self._settings = settings
        self._chosen = settings.tiers.gpu
        self._metrics = metrics
        self._pool = pool
        self._bridged: list[tuple[Tier, Tier]] = []
        self._bridges: list[Any] = []
        self._host: list[HostCaches] = []
        # By the id of the opened model: a version may be loaded again while requests use its former load.
        self._lanes: dict[int, list[DeviceLanes]] = {}
        self._lookups: dict[int, list[WeakMethod[Callable[[], None]]]] = {}
        self.replicas: GpuReplicas | None = None
        self.scheduler: NodeScheduler | None = None

    def close(self) -> None:
        """Free everything. Nothing may use the GPUs any more."""
        for of in [*self._lookups]:
            self._close_version(of)
        while self._bridges:
            self._bridges.pop().release()

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
            self._bridges += [*chain[1:], store_bridge]

    def lookups(
        self, model: OpenedModel, workers: LookupPools, promote: Promote, meter: LookupMeter
    ) -> list[DeviceLookup]:
        """The model's lookups, one per device; none if a feature has ``max_norm``, which kernels lack."""
        if self.replicas is None or _has_max_norm(model):
            return []
        lookups = [
            DeviceLookup(cache, host, model.lookup, caches, stores, workers, promote, meter)
            for cache, host, (caches, stores) in zip(
                self.replicas.caches, self._host, self._bridged, strict=True
            )
        ]
        # Weak: the end of a version's last request is seen by its lookups.
        closes = [WeakMethod(lookup.close) for lookup in lookups]
        self._lookups.setdefault(id(model), []).extend(closes)
        return lookups

    def paths(
        self, model: OpenedModel, lookups: Sequence[DeviceLookup], meter: LookupMeter
    ) -> Sequence[DevicePredictor]:
        """Paths on which the model's predictions run without a vector leaving the device, one per device.

        Empty where the network takes no vectors there, or padded ones."""
        network, spec, name = model.dense, model.spec.dense, model.lookup.name
        if self.replicas is None or not lookups or spec is None or network is None:
            return []
        if _pads(model):
            log.info(
                "model %s: a feature has max_length; predictions pad its vectors on the host", name
            )
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
        observe = TierMeter(self._metrics, self.replicas.info.name)
        try:
            lanes = self._lanes_of(model, network, lookups)
        except ModelError as error:
            self._report_lanes(name, error)
            return []
        return [
            DevicePath(lookup, own, feeds, observe, meter)
            for lookup, own in zip(lookups, lanes, strict=True)
        ]

    def _lanes_of(
        self, model: OpenedModel, network: OnnxModel, lookups: Sequence[DeviceLookup]
    ) -> list[DeviceLanes]:
        """Return the version's lanes, one set per device, which are made once. Raises ModelError."""
        spec = model.spec.dense
        assert spec is not None
        sent = frozenset(tensor.name for tensor in spec.inputs)
        # The scheduler has lanes of its own; one is left for requests that it cannot run.
        count = 1 if self.schedules() else self._settings.dense.lanes
        made = self._lanes.setdefault(id(model), [])
        for lookup, device in [*zip(lookups, self._chosen.devices, strict=True)][len(made) :]:
            space = lookup.cache.space
            make = partial(DeviceLanes, network, space, device, sent, count)
            made.append(self._with_memory(make))
        return made

    def _with_memory(self, make: Callable[[], T]) -> T:
        """Call ``make`` again after a failure, with the memory that freed tables have left to CuPy."""
        with suppress(ModelError):
            return make()
        release_unused(self._chosen.devices)
        return make()

    def _report_lanes(self, model: str, error: ModelError) -> None:
        """Log that ``model`` is predicted without lanes; raise ``error`` if the network must use them."""
        workers = self._settings.server.workers
        if self._settings.dense.provider != "auto" or (workers and self._chosen.use == "required"):
            raise error
        log.warning(
            "model %s: a GPU has no memory for the network's lanes (%s); %s. Lower dense.lanes or "
            "tiers.gpu.capacity_bytes",
            model,
            error,
            "each worker predicts from the CPU cache, on the CPU"
            if workers
            else "predictions copy their vectors through the host",
        )

    def schedule(
        self,
        model: OpenedModel,
        lookups: Sequence[DeviceLookup],
        meter: LookupMeter,
        pipelines: tuple[InferencePipeline, Callable[[], InferencePipeline]],
    ) -> None:
        """Run the model's predictions in common batches, if its rows and network are on the GPUs.

        ``pipelines``: the one that uses the batches, and a function that makes another one, for requests
        that cannot run in a batch: the scheduler keeps it until the version is retired."""
        network = model.dense
        if self.replicas is None or model.spec.dense is None:
            return
        if (reason := self._unscheduled_because(model)) is not None:
            if self._settings.server.workers:
                self._report_unscheduled(model.lookup.name, reason)
            return
        assert isinstance(network, OnnxModel)
        assert self.scheduler is not None
        places = list(zip(lookups, self._chosen.devices, strict=True))
        pipeline, make_alone = pipelines
        add = partial(self.scheduler.add, model, network, places, meter, make_alone())
        try:
            pipeline.schedule(self._with_memory(add))
        except ModelError as error:
            self._report_lanes(model.lookup.name, error)

    def _unscheduled_because(self, model: OpenedModel) -> _Unscheduled | None:
        """Return why the scheduler cannot run the model; None if it can."""
        assert self.replicas is not None
        for table in model.tables.values():
            if not self.replicas.capacity(table):
                why = f"table {table.name} has no rows there (gpu_rows, gpu_share, tiers.gpu)"
                return _Unscheduled(why, is_chosen=is_kept_out(self._settings, table))
        if _has_max_norm(model):
            return _Unscheduled("a feature has max_norm", is_chosen=True)
        if _pads(model):
            return _Unscheduled("a feature has max_length", is_chosen=True)
        if not isinstance(model.dense, OnnxModel):
            return _Unscheduled("Triton runs its network (dense.triton)", is_chosen=True)
        if not runs_on_gpu(model.dense):
            is_chosen = self._settings.dense.provider == "cpu"
            return _Unscheduled("its network runs on the CPU", is_chosen=is_chosen)
        if self.schedules():
            return None
        return _Unscheduled("dense.scheduler is off, or the compiled core missing")

    def _report_unscheduled(self, model: str, reason: _Unscheduled) -> None:
        """Warn that workers predict ``model`` without the GPU; an error if the GPU is required."""
        if self._chosen.use == "required" and not reason.is_chosen:
            raise ConfigError(
                f"tiers.gpu.use is required, but workers cannot use the GPU cache for model {model}: "
                f"{reason.why}; correct that, set tiers.gpu.use to auto, or serve without workers"
            )
        log.warning(
            "model %s: workers cannot use the GPU cache: %s; each predicts from the CPU cache, and runs the "
            "network on the CPU if dense.provider is auto",
            model,
            reason.why,
        )

    def schedules(self) -> bool:
        """Return whether predictions run in common batches."""
        return self._settings.dense.scheduler and native.COMPILED

    def retire(self, model: OpenedModel) -> None:
        """End the batches of a version and free what was prepared for it, once nothing requests it."""
        if self.scheduler is not None:
            self.scheduler.remove(model)
        self._close_version(id(model))

    def _close_version(self, of: int) -> None:
        """Free what was prepared for a version's requests; nothing uses it any more."""
        for lanes in self._lanes.pop(of, ()):
            lanes.close()
        for method in self._lookups.pop(of, ()):
            if (close := method()) is not None:
                close()


def bridge_to_device(inner: Tier, device: int, workspaces: int) -> Any:
    """Bridge from parts on ``device`` to ``inner`` in host memory."""
    from hps.tiers.gpu.host_bridge import HostBridge

    return HostBridge(inner, device=device, workspaces=workspaces)


def _has_max_norm(model: OpenedModel) -> bool:
    return any(feature.max_norm is not None for feature in model.lookup.features.values())


def _pads(model: OpenedModel) -> bool:
    """True if vectors are padded for the network, which only the host does."""
    return any(feature.max_length is not None for feature in model.lookup.features.values())


def runs_on_gpu(network: OnnxModel) -> bool:
    return not network.on_host
