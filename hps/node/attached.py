"""Composition root of an attached process, which reads a node's shared CPU cache.

It asks the node for rows that the cache misses. It writes no cache, opens no store and reads no stream;
the node decides which versions it serves.

Used by servers' workers, by instances of other servers (Triton's Python backend), and by user code:
``hps.attach(config)``."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from hps.config import Configuration, Settings, as_configuration
from hps.config.ps_json.legacy import LegacyModel
from hps.config.store_settings import GuardSettings
from hps.errors import ConfigError, ModelError, TierError, TierMisfit
from hps.models.ps_json import PsJsonModels
from hps.models.repository import ModelVersion
from hps.native import WorkerPool
from hps.node.gpu_models import GpuModels
from hps.node.model_opening import OpenedModel, open_model, tables_of, version_openers
from hps.node.scheduler_client import NodeSchedulerClient
from hps.node.serving_context import (
    ServingContext,
    freshness_of,
    open_dense_pool,
    open_lookup_pools,
    open_samples,
)
from hps.node.tier_status import TierStatus
from hps.node.version_sync import SYNC_EVERY_S, OpenedVersion, SyncedModels, VersionSync
from hps.node.warm_up import WarmUp
from hps.observability import metric_names as m
from hps.observability.meters import TierMeter
from hps.observability.metrics import Metrics
from hps.periodic import PeriodicThread
from hps.threads import rest
from hps.tiers.base import Tier
from hps.tiers.chain import TierChain
from hps.tiers.cpu.attached_cache import AttachedCache
from hps.tiers.node import NodeConnectionPool, NodeTier
from hps.tiers.node.frames import SOCKET
from hps.tiers.wrappers import GuardedTier, MeteredTier
from hps.types import EmbeddingTable, NoProgress, Progress, Source
from hps.updates.arrival_times import POLL_EVERY_S

log = logging.getLogger(__name__)
_RETRY_S = 0.05
# Time for a call to the node and back, added to the node's deadlines.
_ROUND_TRIP_S = 0.25


class Attached(SyncedModels):
    """Models served from a node's shared cache: the result of ``hps.attach``.

    Any number of threads may call it until ``close``. While the node is unavailable it continues from
    the shared cache, and it reconnects by itself. Answers with missing rows then name the node in
    ``degraded``. Answers that are complete in the cache do not; ``updates.max_staleness_s`` bounds the
    age of their rows. ``models`` changes when the node's models do."""

    __slots__ = ("_connections", "_scheduler")

    def __init__(
        self,
        connections: NodeConnectionPool,
        sync: VersionSync,
        scheduler: NodeSchedulerClient,
        **options: Any,
    ) -> None:
        SyncedModels.__init__(self, sync, **options)
        self._connections = connections
        self._scheduler = scheduler

    def complete_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """See `OpenModels.complete_on`."""
        self._scheduler.complete_on(loop)

    def ask_node(self, what: str, timeout_s: float = 5.0, **fields: Any) -> Any:
        """Send a query to the node's process; see `hps.tiers.node.NodeServer`.

        Raises TierError or Unavailable."""
        return self._connections.ask(what, time.monotonic() + timeout_s, **fields)


def attach(
    config: Path | str | Mapping[str, Any] | Settings | Configuration | None = None,
    *,
    wait_s: float = 10.0,
    progress: Progress | None = None,
) -> Attached:
    """Attach to the node on this machine that was opened with the same configuration.

    It names the folder of the node's socket, ``server.runtime``. Waits up to ``wait_s`` for a node that
    is still loading. Raises ConfigError, ModelError, or TierError when no node responds."""
    configuration = as_configuration(config)
    folder = configuration.settings.server.runtime
    if folder is None:
        raise ConfigError(
            "server.runtime is not set; set it to the folder in which the node has its socket"
        )
    with ExitStack() as resources:
        path = folder / SOCKET
        description = _find_node(path, wait_s, progress or NoProgress())
        attached = _AttachBuilder(configuration, path, description, resources).attached()
        attached._resources.push(resources.pop_all())
        return attached
    raise AssertionError  # unreachable: an ExitStack swallows nothing; for the type checker


def _find_node(path: Path, wait_s: float, progress: Progress) -> dict[str, Any]:
    """The node's description of itself, once it responds."""
    connections, until = NodeConnectionPool(path), time.monotonic() + wait_s
    with progress.task("waiting for the node", 1, "node") as step:
        while True:
            try:
                description: dict[str, Any] = connections.ask("node")
                return description
            except TierMisfit:
                raise  # another version: waiting does not help
            except TierError:
                if time.monotonic() > until:
                    raise
            finally:
                connections.close()
            step(0)
            time.sleep(_RETRY_S)
            connections = NodeConnectionPool(path)


def _without_gpu(settings: Settings) -> Settings:
    """The settings for networks that an attached process runs itself, since the node's GPU does not.

    Each such process would take a CUDA context, some hundred MB of the GPU's memory."""
    dense = settings.dense
    if settings.tiers.gpu.use == "off" or dense.provider != "auto" or dense.precision != "float32":
        return settings
    return settings.model_copy(update={"dense": dense.model_copy(update={"provider": "cpu"})})


class _AttachBuilder:
    """Builds an attached process; ``resources`` closes its parts in reverse."""

    def __init__(
        self,
        configuration: Configuration,
        path: Path,
        description: dict[str, Any],
        resources: ExitStack,
    ) -> None:
        self._configuration, self._settings = configuration, configuration.settings
        self._for_networks = _without_gpu(self._settings)
        self._path, self._description, self._resources = path, description, resources
        self._metrics = metrics = Metrics()
        self._opened: list[OpenedModel] = []
        self._sync = VersionSync(NodeConnectionPool(path), self._open)
        resources.callback(self._sync.close)  # after the last lookup has finished
        dropped = metrics.counter(m.PROMOTIONS, Source.CPU.name.lower(), "dropped").add
        self._node = NodeTier(dropped=dropped)
        guarded = self._guarded(self._node)
        self._cache = self._open_cache(self._node)
        self._tiers = [
            *([TierStatus(c, c.size, c.capacity)] if (c := self._cache) else []),
            TierStatus(guarded, _unknown, state=lambda: guarded.state, facts=self._facts),
        ]
        runs = open_dense_pool(self._settings, resources)
        *caches, stores = [
            MeteredTier(t.tier, TierMeter(metrics, t.tier.info.name)) for t in self._tiers
        ]
        lanes = open_lookup_pools(self._settings, resources)
        samples = open_samples(self._settings, resources)
        self._serving = ServingContext(
            TierChain(caches), stores, self._node.promote, lanes, runs, samples
        )
        self._serving.publish(metrics)
        self._devices = GpuModels(self._settings, metrics, WorkerPool(1))  # no GPU is opened
        self._scheduler = NodeSchedulerClient(path, metrics, resources)

    def attached(self) -> Attached:
        connections, sync = NodeConnectionPool(self._path), self._sync
        self._resources.callback(connections.close)
        sync.start()
        attached = Attached(
            connections,
            sync,
            self._scheduler,
            metrics=self._metrics,
            tiers=self._tiers,
            workers=self._serving.lookups,
        )
        self._watch_ages(attached)
        thread = PeriodicThread(sync.sync, SYNC_EVERY_S, "hps-version-sync")
        self._resources.callback(thread.close)
        thread.start(0)
        return attached

    def _open(self, name: str, number: int) -> OpenedVersion:
        """Open the version that the node serves, even when the repository has a newer one."""
        with ExitStack() as own:
            configuration = replace(self._configuration, legacy=self._ps_json_models(), path=None)
            version = version_openers(configuration, {name: number})[name]()
            self._require_same(version)
            rest()
            scheduled = self._scheduler.find(name, number)
            network = None if scheduled is None else scheduled.network
            others = [each for each in self._opened if each.version.version != number]
            model = open_model(version, self._for_networks, own, network, tables_of(others))
            self._opened.append(model)
            own.callback(self._closed, model)
            rest()
            tables = list(model.tables.values())
            connections = NodeConnectionPool(self._path, tables)
            self._node.add(connections)
            own.callback(self._node.remove, connections)
            if self._cache is not None:
                self._cache.add_tables(tables)
                own.callback(self._cache.remove_tables, tables)
            rest()
            freshness = freshness_of(self._settings, name, self._metrics)
            served = self._serving.serve(model, self._metrics, self._devices, freshness)
            if scheduled is not None and served.pipeline is not None:
                scheduled.use(model.lookup, served.spec, served.pipeline)
            for each in model.table_versions:
                own.callback(self._metrics.release, name, each)
            WarmUp(self._settings.models.warm_up_s, self._metrics).run(served)
            return OpenedVersion(served, own.pop_all().close)
        raise AssertionError  # unreachable: an ExitStack swallows nothing; for the type checker

    def _closed(self, model: OpenedModel) -> None:
        self._opened = [each for each in self._opened if each is not model]

    def _ps_json_models(self) -> tuple[LegacyModel, ...]:
        """The versions of a `ps.json` that the node knows; the file may have others by now."""
        if not self._configuration.legacy:
            return ()
        with closing(NodeConnectionPool(self._path)) as connections:
            return PsJsonModels.from_json(connections.ask("ps_json"))

    def _require_same(self, version: ModelVersion) -> None:
        """Raise ModelError when the version's files are not those that the node has loaded."""
        with closing(NodeConnectionPool(self._path)) as connections:
            loaded = connections.ask("versions").get(version.key)
        if loaded != version.fingerprint:
            raise ModelError(
                f"{version.folder}: the files, or model.yaml, were changed after the node had loaded version "
                f"{version.version} of model '{version.name}'; publish them as a new version and load that, "
                "or put the former ones back"
            )

    def _open_cache(self, node: NodeTier) -> AttachedCache | None:
        shared = self._description["cache"]
        if shared is None:
            return None
        cache = AttachedCache(
            shared["name"],
            (),
            node.promote,
            folder=Path(shared["folder"]),
            threads=self._settings.tiers.cpu_cache.threads,
        )
        self._resources.callback(cache.close)
        return cache

    def _guarded(self, node: Tier) -> GuardedTier:
        """Guard ``node`` in case it does not respond; while it does, its own guards keep the deadlines."""
        tiers, default = self._settings.tiers, GuardSettings()
        guards: list[GuardSettings] = [tiers.redis.guard] if tiers.redis is not None else []
        guards += [tiers.rocksdb.guard] if tiers.rocksdb.enabled or tiers.redis is None else []
        guarded = GuardedTier(
            node,
            sum(guard.deadline_ms for guard in guards) / 1e3 + _ROUND_TRIP_S,
            default.failures_to_open,
            default.retry_after_s,
            threads=tiers.lookup_threads,
            on_skip=TierMeter(self._metrics, node.info.name).passed_over,
        )
        self._resources.callback(guarded.close)
        return guarded

    def _watch_ages(self, attached: Attached) -> None:
        """Poll the ages of rows as often as the node does; they grow while the node does not respond."""
        limit_s = self._settings.updates.max_staleness_s
        if limit_s is None:
            return
        ages_s: dict[str, float] = {}
        answered = time.monotonic()

        def poll_ages() -> None:
            nonlocal ages_s, answered
            with suppress(TierError):
                ages_s = attached.ask_node("ages", POLL_EVERY_S)
                answered = time.monotonic()
            silent_s = time.monotonic() - answered
            more_s = silent_s if silent_s > 2 * POLL_EVERY_S else 0.0
            for model in attached.models.versions:
                tables = model.tables.values()
                model.freshness.judge({each: ages_s.get(each.id, 0.0) + more_s for each in tables})

        poll_ages()
        watch = PeriodicThread(poll_ages, min(POLL_EVERY_S, limit_s / 4), "hps-update-age")
        watch.start()
        self._resources.callback(watch.close)

    def _facts(self) -> dict[str, Any]:
        return {"socket": str(self._path), "process": self._description["process"]}


def _unknown(_table: EmbeddingTable) -> NoReturn:
    raise TierError("node", "only the node knows how many rows it has")
