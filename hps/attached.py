"""The composition root of a process attached to a node: models that answer from the node's shared CPU cache,
and ask the node for what that lacks. It writes no cache, opens no store and reads no stream.

For servers' workers, for the instances of other servers (Triton's python backend), and for user code:
``hps.attach(config)``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from hps import metric_names as m
from hps.config import Configuration, Settings, as_configuration
from hps.config.store_settings import GuardSettings
from hps.devices import Devices
from hps.errors import ConfigError, TierError, TierMisfit
from hps.meters import TierMeter
from hps.metrics import Metrics
from hps.open_models import OpenModels
from hps.opening import open_model, open_versions
from hps.serving import Serving, dense_runs, freshness_of, lookup_lanes
from hps.tier_status import TierStatus
from hps.tiers.attached_cache import AttachedCache
from hps.tiers.base import Tier
from hps.tiers.chain import TierChain
from hps.tiers.node import Connections, NodeTier
from hps.tiers.node.frames import SOCKET
from hps.tiers.wrappers import Guarded, Metered
from hps.types import EmbeddingTable, NoProgress, Progress, Source
from hps.updates.arrivals import LOOK_EVERY_S
from hps.updates.freshness import Freshness
from hps.workers import Repeated

log = logging.getLogger(__name__)
_LOOK_FOR_NODE_S = 0.05
# What the way to the node and back may take, beside the node's own deadlines.
_WAY_S = 0.25


class Attached(OpenModels):
    """What ``hps.attach`` returns. Any number of threads may call it until ``close``. It goes on from the
    shared cache while the node is away, and finds it again. Answers that lack rows then name the node in
    ``degraded``; those that the cache has whole do not; ``updates.max_staleness_s`` bounds how old
    their rows may be."""

    __slots__ = ("_connections",)

    def __init__(self, connections: Connections, **given: Any) -> None:
        OpenModels.__init__(self, **given)
        self._connections = connections

    def ask_node(self, what: str, timeout_s: float = 5.0, **given: Any) -> Any:
        """What the node's process answers to a question; see `hps.tiers.node.NodeServer`. Raises TierError
        or Unavailable."""
        return self._connections.ask(what, time.monotonic() + timeout_s, **given)


def attach(
    config: Path | str | Mapping[str, Any] | Settings | Configuration | None = None,
    *,
    wait_s: float = 10.0,
    progress: Progress | None = None,
) -> Attached:
    """The models of the node on this machine that was opened with the same configuration, which names the
    folder of its socket, ``server.runtime``. Waits up to ``wait_s`` for a node that is still loading.

    Raises ConfigError, ModelError, or TierError when no node is there.
    """
    configuration = as_configuration(config)
    folder = configuration.settings.server.runtime
    if folder is None:
        raise ConfigError(
            "server.runtime is not set: the folder in which the node has its socket for other processes"
        )
    with ExitStack() as resources:
        path = folder / SOCKET
        told = _find_node(path, wait_s, progress or NoProgress())
        attached = _Attaching(configuration, path, told, resources).attached()
        attached._resources.push(resources.pop_all())
        return attached
    raise AssertionError  # an ExitStack swallows nothing; for the type checker


def _find_node(path: Path, wait_s: float, progress: Progress) -> dict[str, Any]:
    """What the node tells of itself, once it is there."""
    connections, until = Connections(path), time.monotonic() + wait_s
    with progress.task("waiting for the node", 1, "node") as step:
        while True:
            try:
                told: dict[str, Any] = connections.ask("node")
                return told
            except TierMisfit:
                raise  # of another version: waiting does not mend it
            except TierError:
                if time.monotonic() > until:
                    raise
            finally:
                connections.close()
            step(0)
            time.sleep(_LOOK_FOR_NODE_S)
            connections = Connections(path)


class _Attaching:
    """Puts the parts together; ``resources`` closes them in reverse."""

    def __init__(
        self, configuration: Configuration, path: Path, told: dict[str, Any], resources: ExitStack
    ) -> None:
        self._settings = configuration.settings
        self._path, self._told, self._resources = path, told, resources
        self._metrics = Metrics()
        # The node's versions, even when the repository has newer ones by now.
        versions = open_versions(configuration, told["models"])
        self._opened = [open_model(version, self._settings, resources) for version in versions]
        self._tables = [table for model in self._opened for table in model.tables.values()]

    def attached(self) -> Attached:
        settings, metrics = self._settings, self._metrics
        dropped = metrics.counter(m.PROMOTIONS, Source.CPU.name.lower(), "dropped").add
        connections = Connections(self._path, self._tables)
        node = NodeTier(connections, dropped)
        guarded = self._guarded(node)
        tiers = [
            *self._cache(node),
            TierStatus(guarded, _unknown, state=lambda: guarded.state, facts=self._facts),
        ]
        runs = dense_runs(settings, self._resources)
        *caches, stores = [Metered(t.tier, TierMeter(metrics, t.tier.info.name)) for t in tiers]
        serving = Serving(
            TierChain(caches),
            stores,
            node.promote,
            lookup_lanes(settings, self._resources),
            runs,
        )
        serving.publish(metrics)
        devices = Devices(settings, self._opened, metrics, self._resources)  # none is opened
        freshness = self._freshness(connections)
        served = [
            serving.serve(model, metrics, devices, freshness[model.version.name])
            for model in self._opened
        ]
        return Attached(
            connections,
            models={model.name: model for model in served},
            metrics=metrics,
            tiers=tiers,
            workers=serving.lookups,
        )

    def _cache(self, node: NodeTier) -> list[TierStatus]:
        shared = self._told["cache"]
        if shared is None:
            return []
        cache = AttachedCache(
            shared["name"],
            self._tables,
            node.promote,
            folder=Path(shared["folder"]),
            threads=self._settings.tiers.cpu_cache.threads,
        )
        self._resources.callback(cache.close)
        return [TierStatus(cache, cache.size, cache.capacity)]

    def _guarded(self, node: Tier) -> Guarded:
        """The node's own guards keep its answers in time; this one is for a node that does not answer."""
        tiers, default = self._settings.tiers, GuardSettings()
        guards: list[GuardSettings] = [tiers.redis.guard] if tiers.redis is not None else []
        guards += [tiers.rocksdb.guard] if tiers.rocksdb.enabled else []
        guarded = Guarded(
            node,
            sum(guard.deadline_ms for guard in guards) / 1e3 + _WAY_S,
            default.failures_to_open,
            default.retry_after_s,
            threads=tiers.lookup_threads,
            skipped=TierMeter(self._metrics, node.info.name).passed_over,
        )
        self._resources.callback(guarded.close)
        return guarded

    def _freshness(self, connections: Connections) -> dict[str, Freshness]:
        """By model; looked at as often as the node looks. While the node does not tell, rows age."""
        limit_s = self._settings.updates.max_staleness_s
        freshness = {
            model.version.name: freshness_of(self._settings, model.version.name, self._metrics)
            for model in self._opened
        }
        if limit_s is None:
            return freshness
        ages = _Ages(connections)

        def look() -> None:
            told = ages.now()
            for model in self._opened:
                tables = {table: told(table) for table in model.tables.values()}
                freshness[model.version.name].judge(tables)

        look()
        watch = Repeated(look, min(LOOK_EVERY_S, limit_s / 4), "hps-update-age")
        self._resources.callback(watch.close)
        return freshness

    def _facts(self) -> dict[str, Any]:
        return {"socket": str(self._path), "process": self._told["process"]}


class _Ages:
    """How old rows may be, as the node tells; while it does not, since it last did."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._told: dict[str, float] = {}
        self._at = time.monotonic()

    def now(self) -> Any:
        """The age in seconds of a table's rows."""
        try:
            self._told = self._connections.ask("ages", time.monotonic() + LOOK_EVERY_S)
            self._at = time.monotonic()
        except TierError:
            pass
        since = time.monotonic() - self._at
        gone = since if since > 2 * LOOK_EVERY_S else 0.0
        return partial(self._age, gone)

    def _age(self, gone: float, table: EmbeddingTable) -> float:
        return self._told.get(table.id, 0.0) + gone


def _unknown(_table: EmbeddingTable) -> NoReturn:
    raise TierError("node", "only the node knows how many rows it has")
