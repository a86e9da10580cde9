"""Composition root of a front end: networks run here, lookups at other nodes.

It has the model repository's descriptions and networks, but no tables, tiers or streams; the nodes decide
which versions it serves.

For front ends (`server.role: frontend`) and for user code: ``hps.connect(config)``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from hps.config import Configuration, Settings, as_configuration
from hps.config.certificates import ClientCertificates
from hps.config.lookup_settings import LookupSettings
from hps.config.secrets import Secret
from hps.errors import ConfigError, TierError
from hps.lookup.remote import (
    Candidates,
    ClientTls,
    LookupNode,
    NodePicker,
    NodeRegistry,
    OutlierEjection,
    RemoteLookup,
    RemoteLookupLimits,
    RetryBudget,
)
from hps.lookup.remote.version_vote import VersionVote
from hps.models.remote import repository_of
from hps.node.model_opening import OpenedModel, open_model
from hps.node.served_models import OpenModels
from hps.node.served_versions import ServedModel
from hps.node.serving_context import (
    make_pipeline,
    open_dense_pool,
    open_lookup_pools,
    open_samples,
)
from hps.node.tier_status import publish_process
from hps.node.version_sync import SYNC_EVERY_S, OpenedVersion, SyncedModels, VersionSync
from hps.node.warm_up import WarmUp
from hps.observability import metric_names as m
from hps.observability.meters import LookupMeter
from hps.observability.metrics import Metrics
from hps.periodic import PeriodicThread
from hps.types import NoProgress, Progress

_RETRY_S = 0.05


class Connected(SyncedModels):
    """Models of a front end, whose lookups other nodes answer: the result of ``hps.connect``.

    Any number of threads may call it until ``close``. ``models`` changes when the nodes' models do."""

    __slots__ = ("_nodes", "_outliers")

    def __init__(
        self, nodes: NodeRegistry, outliers: OutlierEjection, sync: VersionSync, **options: Any
    ) -> None:
        SyncedModels.__init__(self, sync, **options)
        self._nodes, self._outliers = nodes, outliers

    @property
    def problem(self) -> str:
        """Reason why no request can be answered; empty if some can."""
        if unreachable := self._nodes.problem:
            return f"no lookup node is ready (lookup.nodes): {unreachable}"
        of = [(model.name, model.version) for model in self.models.versions]
        if any(one in node.models for node in self._ready() for one in of):
            return ""
        failed = "; ".join(f"{token}: {problem}" for token, problem in self._sync.problems.items())
        return failed or "the lookup nodes serve no model"

    def watch_nodes(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` on a separate thread when a node has changed."""
        self._nodes.watch(changed)

    def status(self) -> dict[str, Any]:
        """Status of this process as of any other, and of its lookup nodes; ready for JSON."""
        nodes = [self._node_status(target) for target in self._nodes.all]
        return {**OpenModels.status(self), "lookup_nodes": nodes}

    def _node_status(self, target: LookupNode) -> dict[str, Any]:
        current = {
            name: n
            for (name, n), served in target.models.items()
            if not (served.former or served.beside)
        }
        return {
            "address": target.address,
            "name": target.name,
            "state": "ejected" if self._outliers.is_out(target) else target.standing,
            "problem": target.problem,
            "in_flight": target.in_flight,
            "models": current,
        }

    def _ready(self) -> list[LookupNode]:
        return [target for target in self._nodes.all if target.may_serve]


def connect(
    config: Path | str | Mapping[str, Any] | Settings | Configuration | None = None,
    *,
    wait_s: float | None = 10.0,
    progress: Progress | None = None,
    picker: NodePicker | None = None,
) -> Connected:
    """Connect to the nodes of ``lookup.nodes``: lookups are sent to them, networks run here.

    Waits up to ``wait_s`` for one node to report its versions; None: does not wait, and models appear
    when nodes do. ``picker`` chooses among the healthy nodes. Raises ConfigError, ModelError
    (model.yaml differs between here and the nodes), or TierError when no node responds."""
    configuration = as_configuration(config)
    settings = configuration.settings
    if not settings.lookup.nodes:
        raise ConfigError("lookup.nodes is empty; set it to the nodes that answer lookups")
    repository_of(settings.models).names()
    with ExitStack() as resources:
        connecting = _ConnectBuilder(settings, picker, resources)
        connecting.wait(wait_s, progress or NoProgress())
        connected = connecting.connected()
        connected._resources.push(resources.pop_all())
        return connected
    raise AssertionError  # unreachable: an ExitStack swallows nothing; for the type checker


class _ConnectBuilder:
    """Builds a connected process; ``resources`` closes its parts in reverse."""

    def __init__(self, settings: Settings, picker: NodePicker | None, resources: ExitStack) -> None:
        self._settings, self._resources = settings, resources
        lookup = self._lookup = settings.lookup
        self._metrics = Metrics()
        self._nodes = nodes = NodeRegistry(
            lookup.nodes,
            certificates(lookup),
            Secret(None, lookup.api_key_file, "lookup.api_key_file", api_key=True),
            resolve_s=lookup.resolve_s,
        )
        resources.callback(nodes.close)
        ejection = lookup.ejection
        self._outliers = OutlierEjection(
            lambda: nodes.all,
            picker,
            failures=ejection.failures,
            base_s=ejection.base_s,
            most_s=ejection.most_s,
        )
        self._budget = RetryBudget(lookup.in_flight)
        chosen = settings.models.serve
        stated = None if chosen is None else {name: each.version for name, each in chosen.items()}
        self._sync = VersionSync(VersionVote(nodes, stated), self._open)
        resources.callback(self._sync.close)  # after the last lookup has finished
        self._runs = open_dense_pool(settings, resources)
        self._lanes = open_lookup_pools(settings, resources)
        self._samples = open_samples(settings, resources)
        # Nodes answer the former version for `linger_s` only; the rest is for the poll and the network.
        limit_s = min(settings.models.warm_up_s, settings.models.linger_s / 2)
        self._warm_up = WarmUp(limit_s, self._metrics)

    def wait(self, wait_s: float | None, progress: Progress) -> None:
        """Wait for a model to serve; None: check once.

        Raises TierError, or the error with which the model could not be opened."""
        if wait_s is None:
            self._sync.sync()
            return
        until = time.monotonic() + wait_s
        with progress.task("waiting for lookup nodes", 1, "node") as step:
            while True:
                self._sync.start()
                if self._sync.models:
                    return
                if time.monotonic() > until:
                    why = self._nodes.problem or "they serve none of the models"
                    raise TierError("lookup nodes", why)
                step(0)
                time.sleep(_RETRY_S)

    def connected(self) -> Connected:
        connected = Connected(
            self._nodes,
            self._outliers,
            self._sync,
            metrics=self._metrics,
            tiers=[],
            workers=self._lanes,
        )
        self._publish(connected)
        thread = PeriodicThread(self._sync.sync, SYNC_EVERY_S, "hps-version-sync")
        thread.start(0)
        self._resources.callback(thread.close)
        return connected

    def _open(self, name: str, number: int) -> OpenedVersion:
        """Open the version that the nodes serve, even when the repository has a newer one."""
        with ExitStack() as own:
            override = (self._settings.models.serve or {}).get(name)
            models = self._settings.models
            repository = repository_of(models)
            model = open_model(repository.without_rows(name, number, override), self._settings, own)
            candidates = Candidates(model.lookup, self._nodes)
            own.callback(candidates.close)
            self._metrics.retain(name, number)
            own.callback(self._metrics.release, name, number)
            served = self._served(model, candidates)
            if self._may_warm_up(name, number):
                self._warm_up.run(served)
            return OpenedVersion(served, own.pop_all().close)
        raise AssertionError  # unreachable: an ExitStack swallows nothing; for the type checker

    def _may_warm_up(self, name: str, number: int) -> bool:
        """True if a version is newer than the served one, and a node still answers that one.

        A rollback must be immediate, and requests that no node answers cannot wait."""
        served = self._sync.models.get(name)
        if served is None or number < served.version:
            return False
        of = name, served.version
        return any(of in node.models for node in self._nodes.all if node.may_serve)

    def _served(self, model: OpenedModel, candidates: Candidates) -> ServedModel:
        settings, of = self._lookup, (model.version.name, model.version.version)
        lookup = RemoteLookup(
            candidates,
            self._outliers,
            RemoteLookupLimits(
                settings.in_flight,
                settings.retries,
                settings.timeout_ms / 1e3,
                settings.attempt_ms / 1e3,
            ),
            budget=self._budget,
            meter=LookupMeter(self._metrics, *of),
        )
        pipeline = make_pipeline(model, lookup, self._runs, self._metrics)
        lookup.sample = sample = self._samples.of(of[0])
        if pipeline is not None:
            pipeline.sample = sample
        return ServedModel(*of, model.spec, model.tables, lookup, pipeline, sample=sample)

    def _publish(self, connected: Connected) -> None:
        """Register gauges, which are read at a scrape; a removed node's counters end with it."""
        metrics, out = self._metrics, self._outliers
        publish_process(metrics, lambda: connected.models.values())
        metrics.gauge(m.DENSE_WAITING, lambda: self._runs.waiting)
        by_node: dict[str, Callable[[LookupNode], float]] = {
            m.LOOKUP_NODE_UP: lambda each: each.standing == "ready" and not out.is_out(each),
            m.LOOKUP_NODE_RUNNING: lambda each: each.in_flight,
            m.LOOKUP_NODE_RETRIES: lambda each: each.retries,
            m.LOOKUP_NODE_EJECTIONS: out.ejections,
        }
        for name, read in by_node.items():
            metrics.gauges(name, partial(self._by_node, read))
        metrics.gauges(
            m.LOOKUP_NODE_REQUESTS,
            lambda: [
                ((each.address, code), count)
                for each in self._nodes.all
                for code, count in dict(each.answers).items()
            ],
        )

    def _by_node(self, read: Callable[[LookupNode], float]) -> list[tuple[tuple[str, ...], float]]:
        return [((each.address,), float(read(each))) for each in self._nodes.all]


def certificates(lookup: LookupSettings) -> Callable[[], ClientTls] | None:
    """Function that reads the settings' certificates; None: plain text."""
    tls = lookup.tls
    if tls is None:
        return None
    files = ClientCertificates("lookup.tls", tls.ca_file, tls.certificate_file, tls.key_file)

    def now() -> ClientTls:
        roots, chain, key = files.now()
        return ClientTls(roots, key, chain)

    return now
