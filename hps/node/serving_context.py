"""Tiers and threads in, models that answer out: what a node and a process attached to one do alike."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from hps.cgroups import available_cores
from hps.config import Settings
from hps.config.dense_settings import DenseSettings
from hps.dense.fallback import FallbackModel
from hps.lookup.engine import LookupEngine, Promote
from hps.node.gpu_caches import NodeGpus
from hps.node.model_opening import OpenedModel
from hps.node.served_models import ServedModel
from hps.observability import metric_names as m
from hps.observability.meters import DenseMeter, LookupMeter
from hps.observability.metrics import Metrics
from hps.predict.pipeline import InferencePipeline
from hps.threads import BoundedThreadPool, LookupPools
from hps.tiers.base import Tier
from hps.updates.freshness import Freshness

# Runs of networks at a time, by default.
_RUNS = 4


@dataclass(frozen=True, slots=True)
class ServingContext:
    """What all models of a process share: the two stages of tiers and how rows get from the second to the
    first, the threads of ``lookups`` that ask a store, and those of the ``runs`` of networks."""

    caches: Tier
    stores: Tier
    promote: Promote
    lookups: LookupPools
    runs: BoundedThreadPool

    def serve(
        self,
        model: OpenedModel,
        metrics: Metrics,
        devices: NodeGpus,
        freshness: Freshness,
    ) -> ServedModel:
        """``model``, ready to be asked."""
        name, version = model.version.name, model.version.version
        metrics.hold(name, version)
        lookups = LookupMeter(metrics, name, version)
        engine = LookupEngine(
            model.lookup, self.caches, self.stores, self.lookups, self.promote, lookups
        )
        there = devices.lookups(model, self.lookups, self.promote, lookups)
        pipeline = None
        if model.dense is not None and model.spec.dense is not None:
            meter = DenseMeter(metrics, name, version)
            if isinstance(model.dense, FallbackModel):
                model.dense.count = meter.fell_back
            paths = devices.paths(model, there, lookups)
            pipeline = InferencePipeline(
                name, model.spec.dense, engine, model.dense, self.runs, meter, paths
            )
        return ServedModel(
            name,
            version,
            model.spec,
            model.tables,
            engine,
            pipeline,
            tuple(there),
            freshness,
        )

    def publish(self, metrics: Metrics) -> None:
        """Gauges that are read when metrics are asked for."""
        metrics.gauge(m.LOOKUP_WAITING, lambda: self.lookups.waiting)
        metrics.gauge(m.DENSE_WAITING, lambda: self.runs.waiting)


def freshness_of(settings: Settings, model: str, metrics: Metrics) -> Freshness:
    """What says how fresh a version of ``model`` is: one for each that is served."""
    updates = settings.updates
    return Freshness(model, updates.max_staleness_s, updates.on_stale, metrics)


def open_lookup_pools(settings: Settings, resources: ExitStack) -> LookupPools:
    """The threads of lookups, which ``resources`` closes."""
    tiers = settings.tiers
    setting, queued = "tiers.lookup_queue", tiers.lookup_queue
    stores = _workers(resources, "lookup", tiers.lookup_threads, setting, queued)
    # What memory answers keeps a core busy. Its lane hands on to the other one, so closes before.
    threads = min(tiers.lookup_threads, available_cores())
    return LookupPools(_workers(resources, "gather", threads, setting, queued), stores)


def open_dense_pool(settings: Settings, resources: ExitStack) -> BoundedThreadPool:
    """The threads of networks. What a lookup hands on to a network must find them at the end: to be made
    before the lookups', so that they close last."""
    dense = settings.dense
    return _workers(resources, "dense", dense_concurrency(dense), "dense.queue", dense.queue)


def dense_concurrency(dense: DenseSettings) -> int:
    """Number of runs of networks at a time. More than there are cores take turns on them, which
    costs: of predictions by 0.5 M parameters, a core did 168 a second four at a time, 183 one by one."""
    if dense.runs is not None:
        return dense.runs
    return _RUNS if dense.triton is not None else min(_RUNS, available_cores())


def _workers(
    resources: ExitStack, name: str, threads: int, setting: str, queued: int
) -> BoundedThreadPool:
    workers = BoundedThreadPool(threads, queued, name=name, setting=setting)
    resources.callback(workers.close)
    return workers
