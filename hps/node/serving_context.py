"""Serving context: turns tiers and threads into served models, for nodes and attached processes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from hps.cgroups import available_cores
from hps.config import Settings
from hps.config.dense_settings import DenseSettings
from hps.dense.fallback import FallbackModel
from hps.lookup.base import Lookup
from hps.lookup.engine import LookupEngine, Promote
from hps.lookup.gpu.device_lookup import DeviceLookup
from hps.lookup.request_sample import ARM_EVERY_S, RequestSamples
from hps.node.gpu_models import GpuModels
from hps.node.model_opening import OpenedModel
from hps.node.served_versions import ServedModel
from hps.observability import metric_names as m
from hps.observability.meters import DenseMeter, LookupMeter
from hps.observability.metrics import Metrics
from hps.predict.pipeline import DevicePredictor, InferencePipeline, ModelNetwork
from hps.threads import BoundedThreadPool, LookupPools
from hps.tiers.base import Tier
from hps.updates.freshness import Freshness

# Default number of concurrent runs of networks.
_RUNS = 4


@dataclass(frozen=True, slots=True)
class ServingContext:
    """The tiers and thread pools that all models of a process share.

    ``promote`` copies rows from ``stores`` into ``caches``; ``lookups``: threads that ask stores;
    ``runs``: threads that run networks; ``samples``: requests of each model, to warm up its next version."""

    caches: Tier
    stores: Tier
    promote: Promote
    lookups: LookupPools
    runs: BoundedThreadPool
    samples: RequestSamples

    def serve(
        self,
        model: OpenedModel,
        metrics: Metrics,
        gpus: GpuModels,
        freshness: Freshness,
    ) -> ServedModel:
        """Make ``model`` ready to serve."""
        name, version = model.version.name, model.version.version
        for each in model.table_versions:
            metrics.retain(name, each)
        lookups = LookupMeter(metrics, name, version)
        new_engine = partial(
            LookupEngine,
            model.lookup,
            self.caches,
            self.stores,
            self.lookups,
            self.promote,
            lookups,
        )
        device_lookups = gpus.lookups(model, self.lookups, self.promote, lookups)

        def pipeline_of(
            engine: LookupEngine, on_devices: Sequence[DeviceLookup]
        ) -> InferencePipeline | None:
            paths = gpus.paths(model, on_devices, lookups)
            return make_pipeline(model, engine, self.runs, metrics, paths)

        def alone() -> InferencePipeline:
            """Another pipeline, so that the last request on the other one can be seen."""
            on_devices = gpus.lookups(model, self.lookups, self.promote, lookups)
            pipeline = pipeline_of(new_engine(), on_devices)
            assert pipeline is not None
            return pipeline

        engine = new_engine()
        pipeline = pipeline_of(engine, device_lookups)
        engine.sample = sample = self.samples.of(name)
        if pipeline is not None:
            pipeline.sample = sample
            gpus.schedule(model, device_lookups, lookups, (pipeline, alone))
        return ServedModel(
            name,
            version,
            model.spec,
            model.tables,
            engine,
            pipeline,
            tuple(device_lookups),
            freshness,
            sample,
        )

    def publish(self, metrics: Metrics) -> None:
        """Register gauges, which are read at a scrape."""
        metrics.gauge(m.LOOKUP_WAITING, lambda: self.lookups.waiting)
        metrics.gauge(m.DENSE_WAITING, lambda: self.runs.waiting)


def make_pipeline(
    model: OpenedModel,
    lookup: Lookup,
    runs: BoundedThreadPool,
    metrics: Metrics,
    paths: Sequence[DevicePredictor] = (),
) -> InferencePipeline | None:
    """Join a lookup and the model's network; None for a model without one."""
    spec, network = model.spec.dense, model.dense
    if network is None or spec is None:
        return None
    name, version = model.version.name, model.version.version
    meter = DenseMeter(metrics, name, version)
    if isinstance(network, FallbackModel):
        network.count = meter.fell_back
    return InferencePipeline(ModelNetwork(name, spec, network, meter), lookup, runs, paths)


def freshness_of(settings: Settings, model: str, metrics: Metrics) -> Freshness:
    """Make the staleness limit for a version of ``model``."""
    updates = settings.updates
    return Freshness(model, updates.max_staleness_s, updates.on_stale, metrics)


def open_lookup_pools(settings: Settings, resources: ExitStack) -> LookupPools:
    """Threads of lookups, which ``resources`` closes."""
    tiers = settings.tiers
    setting, queued = "tiers.lookup_queue", tiers.lookup_queue
    stores = _workers(resources, "lookup", tiers.lookup_threads, setting, queued)
    # A lookup in memory keeps a core busy, so more threads than cores do not help. This pool submits to the
    # stores' pool, so it must close first.
    threads = min(tiers.lookup_threads, available_cores())
    return LookupPools(_workers(resources, "gather", threads, setting, queued), stores)


def open_samples(settings: Settings, resources: ExitStack) -> RequestSamples:
    """Samples of requests for warm-ups, which ``resources`` ends."""
    return RequestSamples(resources, ARM_EVERY_S if settings.models.warm_up_s else None)


def open_dense_pool(settings: Settings, resources: ExitStack) -> BoundedThreadPool:
    """Threads of networks, which ``resources`` closes.

    Must be opened before the lookups' pools, so that it closes after them: lookups submit to it until
    the end."""
    dense = settings.dense
    return _workers(resources, "dense", dense_concurrency(dense), "dense.queue", dense.queue)


def dense_concurrency(dense: DenseSettings) -> int:
    """Number of concurrent runs of networks; by default no more than cores.

    Runs that share a core are slower: with a network of 0.5 M parameters, a core did 183 predictions
    per second one by one, and 168 four at a time."""
    if dense.runs is not None:
        return dense.runs
    return _RUNS if dense.triton is not None else min(_RUNS, available_cores())


def _workers(
    resources: ExitStack, name: str, threads: int, setting: str, queued: int
) -> BoundedThreadPool:
    workers = BoundedThreadPool(threads, queued, name=name, setting=setting)
    resources.callback(workers.close)
    return workers
