"""State of the front end: its phase, and the names that it serves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from hps.config import Settings
from hps.config.traffic_settings import TrafficRule
from hps.errors import Unavailable
from hps.lookup.base import Lookup
from hps.node.served_models import OpenModels
from hps.node.served_versions import (
    CURRENT,
    LATEST,
    ServedModel,
    VersionNames,
    addresses,
    find_version,
)
from hps.node.serving_context import dense_concurrency
from hps.node.traffic_split import TrafficSplit
from hps.node.version_choice import policy_of
from hps.observability import metric_names as m
from hps.observability.metric_traffic import ROLLBACK_REASONS
from hps.observability.metric_triton import TRITON
from hps.observability.metrics import Metrics
from services.frontend.admission.controller import AdmissionController
from services.frontend.admission.queue import AdmissionQueue
from services.frontend.batching import endpoints
from services.frontend.logs import log
from services.frontend.metadata import ModelInfo
from services.frontend.pending import PendingRequests
from services.frontend.request_observer import RequestObserver
from services.frontend.shadow import Shadow, ShadowThread
from services.frontend.shared_memory import SharedMemoryRegistry
from services.frontend.statistics import Statistics
from services.frontend.triton_metric_values import triton_numbers
from services.frontend.version_watch import VersionWatch
from services.server_state import ServerState

# Limit on concurrent requests with dynamic batching; requests that wait for their batch count.
_MAX_BATCHED = 64
# The same per process for predictions in a GPU's common batches: enough for full batches of small requests.
# More would let an overload's requests wait where they cannot be rejected.
_MAX_SCHEDULED = 32
# Limits on concurrent changes of models: of loads one that runs, and one that waits; of others, which take a
# moment unless they wait for rows or a load.
_MAX_MODEL_LOADS, _MAX_MODEL_CHANGES = 2, 4

StatisticsSource = Callable[[], Mapping[str, dict[str, Any]] | None]
"""The numbers of `Statistics` of all processes together, by `ServedEndpoint.statistics_key`; None when this
one is alone."""


class ServedEndpoint:
    """One name (``<m>`` or ``<m>.lookup``) with its endpoint and its statistics, for all protocols.

    Each protocol keeps its own state."""

    def __init__(
        self, served: ServedModel, endpoint: AdmissionQueue, info: ModelInfo, lookup: Lookup
    ) -> None:
        self.served = served
        self.lookup = lookup
        """The model's lookup, with dynamic batching if it is enabled."""
        self.endpoint = endpoint
        self.info = info
        self.freshness = served.freshness
        self.name = endpoint.name
        self.version = endpoint.version
        self.statistics_key = f"{self.name}/{self.version}"
        """Key of its statistics between processes."""
        self.statistics = Statistics()
        self.watch: VersionWatch | None = None
        """Counts for an automatic rollback; None: the model's traffic rule has no bounds."""
        self.shadow: Shadow | None = None
        """Mirrors its requests to another version; None for most."""


class FrontendState(ServerState[OpenModels]):
    """The server's phase, its models and the names that it serves."""

    def __init__(self, role: str = "node", settings: Settings | None = None) -> None:
        settings = settings or Settings()
        self.entries: dict[str, ServedEndpoint] = {}
        """Current versions of the served names."""
        self.addresses: dict[str, dict[str, ServedEndpoint]] = {}
        """By name and what requests may give as the version (`hps.node.served_versions.addresses`)."""
        self.all_entries: list[ServedEndpoint] = []
        """All versions of the served names, by name and number."""
        self.splits: dict[str, TrafficSplit] = {}
        """By name: chooses the version of requests that name none; by default the current one."""
        self.names: dict[str, VersionNames] = {}
        """By model: the names of its versions, without shares that this process has withdrawn."""
        self._withdrawn: dict[str, tuple[TrafficRule | None, dict[int, str]]] = {}
        self._statistics_source: StatisticsSource = lambda: None
        super().__init__(role, settings)
        self.admission = AdmissionController(settings.server.admission)
        self.pending = PendingRequests()
        server = settings.server
        self.regions = SharedMemoryRegistry(
            on=server.shared_memory, most_bytes=server.max_body_bytes
        )
        self.control_on_data_port = settings.models.control == "all"
        """True if every port may load and unload models, not only those of administration."""
        self.linger_s = settings.models.linger_s
        self.model_loads = threading.BoundedSemaphore(_MAX_MODEL_LOADS)
        """Held while a version is loaded, also for a rollback."""
        self.model_changes = threading.BoundedSemaphore(_MAX_MODEL_CHANGES)
        """Held during other changes of the served versions."""
        self.observer = RequestObserver(settings.server.access_log)
        self._shadow_thread = ShadowThread()
        self._model_watchers: list[Callable[[], None]] = []
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop, which alone changes the entries while it runs."""

    def serve(self, node: OpenModels) -> None:
        """Serve the node's current models from now on; the server is never ready without a model.

        Call it again after a change: names of unchanged models keep their entries."""
        if node.metrics is not self.metrics:
            self._publish(node.metrics)
        models, known = node.models, self.all_entries
        by_name: dict[str, dict[int, ServedEndpoint]] = {}
        for served in models.versions:
            unchanged = [entry for entry in known if entry.served is served]
            for entry in unchanged or self._new_entries(served, node.metrics):
                by_name.setdefault(entry.name, {})[served.version] = entry
        self.addresses = {
            name: addresses(found, models.names[_any(found).served.name])
            for name, found in by_name.items()
        }
        self.all_entries = [each for found in by_name.values() for _, each in sorted(found.items())]
        self.entries = {name: found[CURRENT] for name, found in self.addresses.items()}
        self.names = {name: self._names_of(name, of) for name, of in models.names.items()}
        splits = {
            name: TrafficSplit(name, of.traffic)
            for name, of in self.names.items()
            if of.traffic is not None and of.traffic.splits
        }
        self.splits = {
            name: splits[entry.served.name]
            for name, entry in self.entries.items()
            if entry.served.name in splits
        }
        for entry in self.all_entries:
            rule = self.names[entry.served.name].traffic
            is_watched = rule is not None and rule.rollback is not None
            entry.watch = (entry.watch or _watch_of(entry)) if is_watched else None
            entry.shadow = self._shadow_of(entry, rule)
            if is_watched:  # an alert would miss the first increment of a new counter
                for reason in ROLLBACK_REASONS:
                    node.metrics.counter(m.MODEL_AUTOMATIC_ROLLBACKS, entry.served.name, reason)
        self.admission.retain([entry.endpoint for entry in self.all_entries])
        self.node = node
        for changed in self._model_watchers:
            changed()
        if self.phase != "stopping":
            self.phase = "ready" if node.models else "empty"

    def _publish(self, metrics: Metrics) -> None:
        super()._publish(metrics)
        if self._settings.server.metrics.triton_names:
            metrics.expose(
                TRITON,
                lambda found: triton_numbers(
                    found,
                    {e.statistics_key: (e.name, e.version) for e in self.all_entries},
                    lambda: self._statistics_source() or self.own_statistics(),
                ),
            )

    def refresh_models(self) -> None:
        """Serve the node's current models. The event loop does the work: call it on another thread."""
        done: Future[None] = Future()

        def now() -> None:
            try:
                self.serve(self.require_node())
            except BaseException as error:  # any error must reach the caller
                done.set_exception(error)
            else:
                done.set_result(None)

        if self.loop is None:
            now()
        else:
            self.loop.call_soon_threadsafe(now)
        done.result()

    def call_later(self, seconds: float, work: Callable[[], None]) -> None:
        """Run ``work`` on the event loop after ``seconds``; immediately if there is none."""
        if self.loop is None:
            work()
        else:
            self.loop.call_soon_threadsafe(self.loop.call_later, seconds, work)

    def on_models_changed(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` now and after each change of ``entries``, before the server is ready."""
        self._model_watchers.append(changed)
        changed()

    def versions(self, name: str) -> list[ServedEndpoint]:
        """The served versions of a name, ascending. Raises ``NotFound``."""
        current = self.entry(name)
        return [each for each in self.all_entries if each.name == current.name]

    def selected(self, name: str, version: str | None = None) -> list[ServedEndpoint]:
        """One version of a name, without ``version`` all of them; of all names if ``name`` is empty.

        Raises ``NotFound``."""
        if not name:
            self.require_node()
            return self.all_entries
        return [self.entry(name, version)] if version else self.versions(name)

    def metadata(self, name: str, version: str | None = None) -> dict[str, Any]:
        """``GET /v2/models/<m>``, with all served versions of the name. Raises ``NotFound``."""
        versions = [each.version for each in self.versions(name)]
        return self.entry(name, version).info.metadata() | {"versions": versions}

    def config(self, name: str, version: str | None = None) -> dict[str, Any]:
        """``GET /v2/models/<m>/config``: Triton's ModelConfig. Raises ``NotFound``."""
        entry = self.entry(name, version)
        return entry.info.config() | {"version_policy": self._version_policy(entry.served.name)}

    def _version_policy(self, name: str) -> dict[str, Any]:
        policy = policy_of(self._settings, name)
        if policy.all:
            return {"all": {}}
        if policy.specific:
            return {"specific": {"versions": policy.specific}}
        return {"latest": {"num_versions": policy.latest}}

    def labels(self, entry: ServedEndpoint) -> list[str]:
        """The labels of an entry's version."""
        found = self.addresses[entry.name]
        return sorted(
            each
            for each, of in found.items()
            if of is entry and each not in (CURRENT, LATEST) and not each.isdigit()
        )

    def withdraw(self, name: str, version: int, reason: str, detail: str) -> int | None:
        """Take a version's share of the requests to this process, until its nodes have another rule.

        For front ends, which follow the rules of their lookup nodes. Returns the current version; None if
        ``version`` is that one. Call it on another thread than the event loop's."""
        names = self.require_node().models.names[name]
        if version == names.current:
            return None
        rule, versions = self._withdrawn.get(name, (None, {}))
        known = versions if rule == names.traffic else {}
        self._withdrawn[name] = names.traffic, {**known, version: detail}
        self.metrics.counter(m.MODEL_AUTOMATIC_ROLLBACKS, name, reason).add()
        log.warning(
            "model %s: version %d rolled back automatically in this front end, version %d answers its "
            "requests: %s",
            name,
            version,
            names.current,
            detail,
        )
        self.refresh_models()
        return names.current

    def _names_of(self, name: str, names: VersionNames) -> VersionNames:
        rule, versions = self._withdrawn.get(name, (None, {}))
        if rule is None or rule != names.traffic:
            self._withdrawn.pop(name, None)
            return names
        references = {*map(str, versions), *(x for x, n in names.labels.items() if n in versions)}
        left = rule.without(references)
        return replace(names, traffic=left, rolled_back={**names.rolled_back, **versions})

    def _shadow_of(self, entry: ServedEndpoint, rule: TrafficRule | None) -> Shadow | None:
        """The shadow of a current version; its own one if that has not changed."""
        if rule is None or rule.shadow is None or self.entries[entry.name] is not entry:
            return None
        target = self.addresses[entry.name].get(rule.shadow.version, entry)
        if target is entry:
            return None
        known = entry.shadow
        if known and (known.target, known.settings) == (target.endpoint, rule.shadow):
            return known
        return Shadow(
            entry.endpoint, target.endpoint, rule.shadow, self._shadow_thread, self.metrics
        )

    def _new_entries(self, served: ServedModel, metrics: Metrics) -> list[ServedEndpoint]:
        """The names of a model, each behind its queue."""
        settings = self._settings
        threads = max(settings.tiers.lookup_threads, dense_concurrency(settings.dense))
        running = threads if settings.server.batching is None else max(threads, _MAX_BATCHED)
        found, lookup = endpoints(served, settings.server, metrics)
        limits = [running] * len(found)
        if served.pipeline is not None and served.pipeline.is_scheduled:
            limits[0] = max(running, _MAX_SCHEDULED)  # of the predictions
        return [
            ServedEndpoint(served, self.admission.add_queue(endpoint, most, metrics), info, lookup)
            for (endpoint, info), most in zip(found, limits, strict=True)
        ]

    def own_statistics(self) -> dict[str, dict[str, Any]]:
        """Values of this process's `Statistics`, by `ServedEndpoint.statistics_key`."""
        return {entry.statistics_key: entry.statistics.numbers() for entry in self.all_entries}

    def take_watched(self) -> dict[str, dict[str, Any]]:
        """Counts of watched versions since the last call, by `ServedEndpoint.statistics_key`."""
        return {
            entry.statistics_key: entry.watch.take().as_json()
            for entry in self.all_entries
            if entry.watch is not None
        }

    def set_statistics_source(self, source: StatisticsSource) -> None:
        """Make `statistics` cover all processes; ``source`` returns their values and may wait."""
        self._statistics_source = source

    def statistics(self, entries: Iterable[ServedEndpoint]) -> list[dict[str, Any]]:
        """``model_stats`` of ``entries``, over all processes; may wait for the other processes."""
        sums = self._statistics_source() or {}
        model_stats = []
        for entry in entries:
            counted = entry.statistics
            if entry.statistics_key in sums:
                counted = Statistics()
                counted.add(sums[entry.statistics_key])
            model_stats.append(counted.as_json(entry.name, entry.version))
        return model_stats

    def entry(self, name: str, version: str | None = None) -> ServedEndpoint:
        """The entry of a name; ``version``: a number or a label, None or "": the current version.

        Raises ``NotFound`` for a name or version that is not served."""
        self.require_node()
        if not self.entries and self.not_ready_reason():
            raise Unavailable(self.reason)
        return find_version(self.addresses, name, version)


def _watch_of(entry: ServedEndpoint) -> VersionWatch:
    dense = entry.served.spec.dense
    if dense is None or entry.name != entry.served.name:
        return VersionWatch(None)
    return VersionWatch(dense.ranking_output or dense.outputs[0].name)


def _any(found: Mapping[int, ServedEndpoint]) -> ServedEndpoint:
    return next(iter(found.values()))
