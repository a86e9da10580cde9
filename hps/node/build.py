"""Composition root of a node: settings in, a running node out.

It decides which tiers exist, their order, guards and meters, who closes them, and which threads there are."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from hps.config import Configuration, Settings, as_configuration
from hps.config.runtime_folder import with_shared_cache
from hps.errors import ConfigError, ModelError
from hps.models.ps_json import ps_json_models, repository_with
from hps.models.remote import CancelOn
from hps.node.caches import NodeCaches
from hps.node.dense_skew import publish_dense_skew
from hps.node.gpu_caches import NodeGpus
from hps.node.gpu_sharing import common_rows
from hps.node.model_control import ModelControl
from hps.node.model_opening import (
    OpenedModel,
    OpenedTables,
    open_model,
    tables_of,
    watermarks_of,
)
from hps.node.node import Node
from hps.node.repository_watch import RepositoryWatch
from hps.node.served_versions import ServedModel, ServedModels
from hps.node.serving_context import (
    ServingContext,
    freshness_of,
    open_dense_pool,
    open_lookup_pools,
    open_samples,
)
from hps.node.stores import NodeStores
from hps.node.streams import Limited, UpdateStreams
from hps.node.tier_status import publish_process, publish_tiers
from hps.node.version_choice import ChoiceFile
from hps.node.version_loader import NodeParts, made_at, network_limits
from hps.node.version_start import VersionsAtStart, versions_at_start
from hps.node.version_switcher import VersionSwitcher
from hps.observability import metric_names as m
from hps.observability.meters import TierMeter
from hps.observability.metrics import Metrics
from hps.tiers.base import Tier
from hps.tiers.chain import TierChain
from hps.tiers.node import AttachedProcesses, NodeServer, ServedTiers
from hps.tiers.wrappers import MeteredTier
from hps.types import NoProgress, Progress
from hps.updates.arrival_times import POLL_EVERY_S
from hps.updates.cache_writer import CacheWriter

__all__ = ["Node", "ServedModel", "open", "open_node"]


def open(config: Path | str | Mapping[str, Any] | Settings | Configuration | None = None) -> Node:
    """Open a node from a YAML file, a ``ps.json``, a mapping of the YAML's shape, or settings."""
    return open_node(as_configuration(config))


def open_node(configuration: Configuration, progress: Progress | None = None) -> Node:
    """Open the models, the stores and the caches, and check that they fit together.

    Cheap checks come before rows are loaded, so that a broken configuration ends within seconds. Raises
    ``ConfigError``, ``ModelError`` or ``TierError``; nothing stays open then."""
    settings = with_shared_cache(configuration.settings)
    if settings.server.role == "frontend":
        raise ConfigError(
            "server.role is frontend: a front end holds no rows; open it with hps.connect"
        )
    if settings.server.role == "ingest":
        raise ConfigError(
            "server.role is ingest, which answers no lookups; start it by `hps ingest`"
        )
    with ExitStack() as resources:
        file = ChoiceFile(settings)
        start = versions_at_start(configuration, file, progress)
        opened: list[OpenedModel] = []
        for version in start.versions:
            try:
                opened.append(open_model(version, settings, resources, reuse=tables_of(opened)))
            except ModelError as error:
                start.leave_out(version, error)
        builder = _NodeBuilder(
            configuration, opened, (start, file), progress or NoProgress(), resources
        )
        warnings = (w for version in start.versions for w in version.warnings)
        node = builder.node((*configuration.warnings, *warnings))
        node._resources.push(resources.pop_all())
        return node
    raise AssertionError  # unreachable: an ExitStack swallows nothing; for the type checker


class _NodeBuilder:
    """Builds one node part by part; ``resources`` closes the parts in reverse.

    ``chosen``: what is served of each model at the start, and the file that records changes."""

    def __init__(
        self,
        configuration: Configuration,
        opened: list[OpenedModel],
        chosen: tuple[VersionsAtStart, ChoiceFile],
        progress: Progress,
        resources: ExitStack,
    ) -> None:
        self._configuration = configuration
        self._settings = settings = with_shared_cache(configuration.settings)
        self._ps_json = ps_json_models(configuration)
        self._opened = opened
        start, self._file = chosen
        self._start, self._choices = start, start.choices
        self._progress = progress
        self._resources = resources
        self._metrics = Metrics()
        self._stores = NodeStores(settings, opened, self._metrics, resources)
        common = partial(common_rows, self._stores)
        self._devices = NodeGpus(settings, opened, self._metrics, resources, common)
        self._tables = tables_of(opened)
        parts = self._stores, self._devices, self._metrics, resources
        self._caches = NodeCaches(settings, opened, *parts)

    def node(self, warnings: tuple[str, ...]) -> Node:
        # Closes the networks of versions loaded later, after all threads of the node.
        later = self._resources.enter_context(ExitStack())
        stores, caches = self._stores, self._caches
        self._devices.check()  # cheap, so before rows are loaded
        stores.open(self._progress, leave_out=self._leave_out)
        writer = caches.open(self._devices.open())
        caches.fill(self._progress)
        serving = self._serving_context()
        served = [self._serve(serving, model) for model in self._opened]
        node = Node(
            models=ServedModels(served, {n: each.names() for n, each in self._choices.items()}),
            metrics=self._metrics,
            tiers=[*caches.statuses, *stores.statuses],
            workers=serving.lookups,
            warnings=(*warnings, *stores.warnings),
            writer=writer,
            streams=self._open_streams(),
            promotions_into_stores=lambda: stores.promotions_waiting,
            damage=stores.damage,
            not_ready_reason=stores.not_ready_reason,
            on_damage=stores.on_damage,
        )
        self._publish(node, serving)
        self._read_updates(node, writer)
        names = {name: each.as_json() for name, each in node.models.names.items()}
        attached = AttachedProcesses([(each.name, each.version) for each in served], names)
        attached.fingerprints.update((m.version.key, m.version.fingerprint) for m in self._opened)
        node.socket = self._open_socket(node, serving, attached)
        parts = NodeParts(
            self._settings, serving, stores, caches, self._devices, self._opened, self._tables
        )
        switcher = VersionSwitcher(parts, node, attached, later, self._file, self._choices)
        self._resources.callback(switcher.close)
        until_closed = CancelOn(switcher.closed)
        repository = repository_with(self._ps_json, self._configuration, until_closed)
        control = ModelControl(parts, node, switcher, repository, self._start.left_out)
        node.control = control
        described = self._ps_json.current
        RepositoryWatch(self._settings, repository, control, self._resources, described)
        self._resources.callback(
            switcher.closed.set
        )  # before the watch ends, which may wait for a load
        node.checkpoints = stores.checkpoints
        node.scheduler = self._devices.models.scheduler
        return node

    def _leave_out(self, model: OpenedTables, error: ModelError) -> None:
        """Do not serve a version whose rows cannot be loaded; see `VersionsAtStart.leave_out`."""
        self._start.leave_out(model.version, error)
        for each in self._opened:
            if each.version is model.version and each.dense is not None:
                each.dense.close()  # frees its memory on a GPU
        self._opened[:] = [each for each in self._opened if each.version is not model.version]
        self._tables[:] = tables_of(self._opened)

    def _open_streams(self) -> UpdateStreams:
        """The update streams, at first of the current versions; the others catch up beside them."""
        current = [
            each
            for each in self._opened
            if self._choices[each.version.name].current == each.version.version
        ]
        tables = tables_of(current)
        updates = self._settings.updates
        hold_s = updates.hold_at_most_s if updates.hold_for_dense else None
        return UpdateStreams(tables, self._metrics, self._resources, watermarks_of(current), hold_s)

    def _serving_context(self) -> ServingContext:
        """Meter the tiers, open the thread pools and bridge the GPU caches to host memory."""
        stores, caches = self._stores, self._caches
        # A separate pool: slow stores never delay networks whose rows are ready.
        runs = open_dense_pool(self._settings, self._resources)
        serving = ServingContext(
            TierChain([self._metered(each.tier) for each in caches.statuses]),
            stores.lookup_tier(),
            caches.promote,
            open_lookup_pools(self._settings, self._resources),
            runs,
            open_samples(self._settings, self._resources),
        )
        in_memory = [self._metered(caches.in_memory.tier)] if caches.in_memory else []
        self._devices.models.bridge(
            in_memory, serving.stores, caches.promote_to_gpu, caches.promote
        )
        return serving

    def _serve(self, serving: ServingContext, model: OpenedModel) -> ServedModel:
        freshness = freshness_of(self._settings, model.version.name, self._metrics)
        return serving.serve(model, self._metrics, self._devices.models, freshness)

    def _open_socket(
        self, node: Node, serving: ServingContext, attached: AttachedProcesses
    ) -> NodeServer | None:
        """The socket for other processes, which may read the CPU cache directly if it is shared."""
        folder, cache = self._settings.server.runtime, self._settings.tiers.cpu_cache
        if folder is None:
            return None
        shared = cache.shared
        on = cache.enabled and shared.name is not None
        from hps import __version__

        about = {
            "version": __version__,
            "process": os.getpid(),
            "cache": {"name": shared.name, "folder": str(shared.folder)} if on else None,
        }
        socket = NodeServer(
            folder,
            lambda: self._stores.tables,
            ServedTiers(serving.caches, serving.stores, serving.lookups.stores, serving.promote),
            attached,
            {
                "node": lambda _question: about,
                "versions": lambda _question: attached.fingerprints,
                "ps_json": lambda _question: self._ps_json.as_json(),
                "ages": lambda _question: {t.id: node.streams.age_s(t) for t in self._tables},
            },
        )
        self._resources.callback(socket.close)
        if (scheduler := self._devices.models.scheduler) is not None:
            scheduler.listen(folder)
            socket.answers["scheduler"] = lambda _question: scheduler.describe()
        return socket

    def _read_updates(self, node: Node, writer: CacheWriter) -> None:
        """Start the update streams. Comes last, when the caches are filled: from now on they change."""
        streams = node.streams
        own = self._stores.update_targets(shared=False)
        shared = self._stores.update_targets(shared=True)
        both = [*own, *shared]
        streams.write_directly(both, writer, self._devices.static)
        current = {name: each.version for name, each in node.models.items()}
        streams.limit_networks(network_limits(self._opened, current))
        publish_dense_skew(self._metrics, streams, self._opened)
        directory, kafka = self._settings.updates.directory, self._settings.updates.kafka
        if directory is not None:
            streams.read_folder(directory, both, writer)
            streams.replay_files_later(made_at(self._opened))
        if kafka is not None:
            streams.read_kafka(kafka, own, writer, self._stores.followed)
            if kafka.shared_writer == "nodes" and shared:
                streams.share_kafka(kafka, shared)
        streams.set_tables(self._tables, watermarks_of(self._opened))
        limit_s = self._settings.updates.max_staleness_s

        def limited() -> list[Limited]:
            models = node.models.versions if limit_s is not None else ()
            return [(model.freshness, model.tables.values()) for model in models]

        streams.watch(limited, min(POLL_EVERY_S, (limit_s or math.inf) / 4))

    def _metered(self, tier: Tier) -> MeteredTier:
        return MeteredTier(tier, TierMeter(self._metrics, tier.info.name))

    def _publish(self, node: Node, serving: ServingContext) -> None:
        """Register gauges, which are read at a scrape."""
        metrics = self._metrics
        publish_process(metrics, lambda: node.models.values())
        metrics.gauges(
            m.PROMOTE_QUEUE,
            lambda: [((tier,), keys) for tier, keys in node.promotions_waiting().items()],
        )
        serving.publish(metrics)
        publish_tiers(
            metrics,
            node.tiers,
            lambda: dict.fromkeys(t for each in node.models.versions for t in each.tables.values()),
        )
