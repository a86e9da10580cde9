"""The composition root: settings in, a running node out. It decides which tiers there are, in which order
they are asked, who guards, meters and closes them, and which threads do what."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from hps import metric_names as m
from hps.cache_plan import eviction_of, planned_rows
from hps.config import Configuration, Settings, as_configuration
from hps.config.cache_settings import CpuCacheSettings
from hps.config.runtime import attachable
from hps.devices import Devices
from hps.errors import ConfigError
from hps.lookup.engine import Promote
from hps.meters import TierMeter
from hps.metrics import Metrics
from hps.model_control import ModelControl
from hps.models.tables import TableFiles
from hps.native import COMPILED, dedup
from hps.node import Node, ServedModel
from hps.opening import OpenedModel, open_model, open_versions, watermarks_of
from hps.serving import Serving, dense_runs, freshness_of, lookup_lanes
from hps.storage import Stores, count_promotion
from hps.streams import Limited, Streams, node_group
from hps.tier_status import TierStatus, publish_tiers
from hps.tiers.base import Tier
from hps.tiers.chain import TierChain
from hps.tiers.cpu_cache import CacheMemory, CpuCache
from hps.tiers.cpu_segments import Segments
from hps.tiers.node import Followers, NodeServer
from hps.tiers.ranking import HotKeys, RankedTogether
from hps.tiers.wrappers import Metered
from hps.types import EmbeddingTable, KeyArray, NoProgress, Progress, Source
from hps.updates.arrivals import LOOK_EVERY_S
from hps.updates.lifting import Lifting
from hps.updates.snapshot import Snapshots, hot_keys_at_start
from hps.updates.warm import Warming, promote_keys
from hps.updates.writer import CacheWriter

__all__ = ["Node", "ServedModel", "open", "open_node"]

log = logging.getLogger(__name__)


def open(config: Path | str | Mapping[str, Any] | Settings | Configuration | None = None) -> Node:
    """A node from a YAML file, a ``ps.json``, a mapping of the YAML's shape, or settings."""
    return open_node(as_configuration(config))


def open_node(configuration: Configuration, progress: Progress | None = None) -> Node:
    """Open the models, the store and the caches, and check that all of it fits together.

    What is cheap to check is checked before rows are loaded, so that a broken configuration ends
    within seconds. Raises ``ConfigError``, ``ModelError`` or ``TierError``; nothing stays open then.
    """
    settings = attachable(configuration.settings)
    if settings.tiers.remote is not None:
        raise ConfigError(
            "tiers.remote is for processes without tiers of their own, which hps.connect opens; a node has "
            "its rows itself: leave it out"
        )
    with ExitStack() as resources:
        versions = open_versions(configuration)
        opened = [open_model(version, settings, resources) for version in versions]
        builder = _Builder(settings, opened, progress or NoProgress(), resources)
        node = builder.node((*configuration.warnings, *(w for v in versions for w in v.warnings)))
        node._resources.push(resources.pop_all())
        return node
    raise AssertionError  # an ExitStack swallows nothing; for the type checker


class _Builder:
    """Puts the parts of one node together, in order; ``resources`` closes them in reverse."""

    def __init__(
        self,
        settings: Settings,
        opened: list[OpenedModel],
        progress: Progress,
        resources: ExitStack,
    ) -> None:
        self._settings = settings
        self._opened = opened
        self._progress = progress
        self._resources = resources
        self._metrics = Metrics()
        self._stores = Stores(settings, opened, self._metrics, resources)
        self._devices = Devices(settings, opened, self._metrics, resources)
        self._hot: dict[str, HotKeys] = {}
        self._tables = [table for model in opened for table in model.tables.values()]

    def node(self, warnings: tuple[str, ...]) -> Node:
        tiers = self._settings.tiers
        later = self._resources.enter_context(ExitStack())
        # Both fastest first; every tier that is asked, promoted into or reported on stands in them.
        stores = self._stores
        on_gpu = self._devices.open()  # cheap to check, so before rows are loaded
        stores.open(self._progress)
        in_memory = [self._make_cpu_cache()] if tiers.cpu_cache.enabled else []
        caches = [*in_memory, *([on_gpu] if on_gpu else [])]
        writer = CacheWriter(
            # The CPU cache first, so that what is lifted from it is never behind the GPUs'.
            TierChain([cache.tier for cache in reversed(caches)]),
            stores.tiers,
            self._settings.updates.promote_queue_keys,
            partial(count_promotion, self._metrics, Source.CPU.name.lower()),
            stores.lacked,
        )
        self._resources.callback(writer.close)
        lifting = self._lifting(in_memory, on_gpu, writer)
        self._fill(caches, writer, lifting)
        # Two pools: a slow store never holds up a network whose rows are there.
        runs = dense_runs(self._settings, self._resources)
        serving = Serving(
            TierChain([Metered(c.tier, self._meter(c.tier)) for c in caches]),
            stores.asked(),
            _promote_to(caches, writer),
            lookup_lanes(self._settings, self._resources),
            runs,
        )
        metered = [Metered(c.tier, self._meter(c.tier)) for c in in_memory]
        lift = lifting.lift if lifting else serving.promote
        self._devices.bridge(metered, serving.stores, lift, serving.promote)
        served = [
            serving.serve(
                model,
                self._metrics,
                self._devices,
                freshness_of(self._settings, model.version.name, self._metrics),
            )
            for model in self._opened
        ]
        node = Node(
            models={model.name: model for model in served},
            metrics=self._metrics,
            tiers=[*caches, *stores.statuses],
            workers=serving.lookups,
            warnings=(*warnings, *stores.warnings),
            writer=writer,
            streams=Streams(
                self._tables, self._metrics, self._resources, watermarks_of(self._opened)
            ),
            promotions_into_stores=lambda: stores.promotions_waiting,
        )
        self._publish(node, serving)
        self._read_updates(node, writer)
        followers = Followers({model.name: model.version for model in served})
        node.socket = self._let_attach(node, serving, followers)
        node.control = ModelControl(
            self._settings,
            node,
            followers,
            serving,
            stores,
            in_memory[0] if in_memory else None,
            self._devices,
            self._opened,
            self._tables,
            later,
        )
        self._resources.callback(node.control.close)
        return node

    def _let_attach(self, node: Node, serving: Serving, followers: Followers) -> NodeServer | None:
        """The socket for other processes, which may read the CPU cache themselves if that is shared."""
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
            serving.caches,
            serving.stores,
            serving.lookups.stores,
            serving.promote,
            followers,
            {
                "node": lambda _given: about,
                "ages": lambda _given: {t.id: node.streams.age_s(t) for t in self._tables},
            },
        )
        self._resources.callback(socket.close)
        return socket

    def _read_updates(self, node: Node, writer: CacheWriter) -> None:
        """Last, when everything is filled: from here on the caches change."""
        streams = node.streams
        both = [*self._stores.fed(shared=False), *self._stores.fed(shared=True)]
        streams.write_directly(both, writer, self._devices.static)
        directory, kafka = self._settings.updates.directory, self._settings.updates.kafka
        if directory is not None:
            streams.read_folder(directory, both, writer)
        if kafka is not None:
            streams.read_kafka(kafka, node_group(kafka), self._stores.fed(shared=False), writer)
            shared = self._stores.fed(shared=True)
            if kafka.shared_writer == "nodes" and shared:
                streams.read_kafka(kafka, kafka.shared_group, shared, None)
        limit_s = self._settings.updates.max_staleness_s

        def limited() -> list[Limited]:
            models = node.models.values() if limit_s is not None else ()
            return [(model.freshness, model.tables.values()) for model in models]

        streams.watch(limited, min(LOOK_EVERY_S, (limit_s or math.inf) / 4))

    def _make_cpu_cache(self) -> TierStatus:
        """The CPU cache, its memory shared out over the tables; overrides by table come first."""
        chosen = self._settings.tiers.cpu_cache
        settings = self._settings
        evictions = {table: eviction_of(settings, table) for table in self._tables}
        cache = CpuCache(
            planned_rows(settings, {table: self._stores.rows(table) for table in self._tables}),
            eviction=chosen.eviction,
            evictions={table: given for table, given in evictions.items() if given},
            memory=cache_memory(chosen),
            threads=chosen.threads,
        )
        self._resources.callback(cache.close)
        if chosen.snapshot.path is not None:
            self._hot = hot_keys_at_start(chosen.snapshot.path)
            on_gpu = self._devices.replicas
            snapshots = Snapshots(
                RankedTogether([on_gpu, cache]) if on_gpu else cache,
                self._tables,
                chosen.snapshot.path,
                interval_s=chosen.snapshot.interval_s,
                most=chosen.snapshot.keys,
                bytes_per_s=chosen.snapshot.bytes_per_s,
            )
            self._resources.callback(snapshots.close)
        return TierStatus(cache, cache.size, cache.capacity, facts=cache.facts)

    def _lifting(
        self, in_memory: list[TierStatus], on_gpu: TierStatus | None, writer: CacheWriter
    ) -> Lifting | None:
        """What copies rows from the CPU cache to the GPUs; None where there is only one of them."""
        if not in_memory or on_gpu is None:
            return None
        lifting = Lifting(
            writer,
            in_memory[0].tier,
            on_gpu.tier,
            self._settings.updates.promote_queue_keys,
            partial(count_promotion, self._metrics, Source.GPU.name.lower()),
        )
        self._resources.callback(lifting.close)
        return lifting

    def _fill(self, caches: list[TierStatus], writer: CacheWriter, lifting: Lifting | None) -> None:
        """Fill the caches with what was hot, or else from the start of the files, as far as they reach."""
        warming = Warming(writer, self._progress)
        for model in self._opened:
            for name, table in model.tables.items():
                files = model.version.tables[name]
                if table in self._devices.static:
                    self._fill_static(table, files, writer)
                    continue
                rows = min(files.rows, max((self._wanted(c, table) for c in caches), default=0))
                if rows and (hot := self._hot.get(table.id)) is not None and len(hot[0]):
                    warming.hottest(table, hot[0][:rows], caches[0].tier)
                    if lifting and self._devices.replicas:
                        lifting.now(table, hot[0][: self._devices.replicas.capacity(table)])
                    continue
                version = self._stores.version_of_rows(table)
                warming.fill(table, files.keys(0, rows), files.vectors, version)

    def _wanted(self, cache: TierStatus, table: EmbeddingTable) -> int:
        """Rows of ``table`` that are put into ``cache`` before the node is ready."""
        tiers, capacity = self._settings.tiers, cache.capacity(table) or 0
        if not tiers.cpu_cache.warm:
            return 0
        return int(capacity * tiers.gpu.fill) if cache.tier is self._devices.replicas else capacity

    def _fill_static(self, table: EmbeddingTable, files: TableFiles, writer: CacheWriter) -> None:
        """Put every row of ``table`` into the GPU caches, as the stores have it, and end its filling."""
        keys = dedup(table.narrow(files.keys(0, files.rows)))[0]
        with self._progress.task(f"filling {table.name}", len(keys)) as step:
            promote_keys(writer, table, keys, step, math.inf)
        assert self._devices.replicas is not None
        if dropped := self._devices.replicas.seal(table):
            log.warning("%d rows of table %s found no place on the GPU", dropped, table.id)

    def _meter(self, tier: Tier) -> TierMeter:
        return TierMeter(self._metrics, tier.info.name)

    def _publish(self, node: Node, serving: Serving) -> None:
        """Gauges that are read when metrics are asked for."""
        from hps import __version__

        metrics, opened = self._metrics, time.monotonic()
        metrics.gauge(m.BUILD_INFO, lambda: 1, __version__, "on" if COMPILED else "off")
        metrics.gauge(m.UPTIME, lambda: time.monotonic() - opened)
        metrics.gauges(
            m.PROMOTE_QUEUE,
            lambda: [((tier,), keys) for tier, keys in node.promotions_waiting().items()],
        )
        serving.publish(metrics)
        metrics.gauges(
            m.MODEL_VERSION,
            lambda: [((model.name,), model.version) for model in node.models.values()],
        )
        publish_tiers(
            metrics,
            node.tiers,
            lambda: [table for model in node.models.values() for table in model.tables.values()],
        )


def _promote_to(caches: list[TierStatus], writer: CacheWriter) -> Promote:
    """Promotion of tables that have room in a cache; of others there is nothing to do."""

    def promote(table: EmbeddingTable, keys: KeyArray) -> None:
        if any(cache.capacity(table) for cache in caches):
            writer.promote(table, keys)

    return promote


def cache_memory(chosen: CpuCacheSettings) -> CacheMemory:
    """Where the CPU cache is to lie."""
    segments, shared = None, chosen.shared
    if shared.name is not None:
        segments = Segments(shared.name, shared.folder, take_over=shared.take_over)
    return CacheMemory(segments, chosen.huge_pages, chosen.numa_node)
