"""The composition root: settings in, a running node out. The only place that news things up."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hps import metrics as m
from hps.config import Configuration, Settings, configuration_from, load_config
from hps.config.model_schema import FeatureSpec, ModelSpec
from hps.config.schema import ModelOverride
from hps.dense.base import check_network
from hps.dense.onnx import OnnxModel
from hps.errors import ConfigError
from hps.lookup.base import Feature, LookupModel
from hps.lookup.engine import LookupEngine
from hps.lookup.workers import Workers
from hps.metrics import Metrics
from hps.models.loader import load_tables
from hps.models.repository import ModelVersion, Repository, apply_override, open_legacy
from hps.native import COMPILED
from hps.node import Node, ServedModel, TierStatus
from hps.pipeline import InferencePipeline, fed_tensors, served_tensors
from hps.tiers.base import Tier
from hps.tiers.chain import TierChain
from hps.tiers.wrappers import Guarded, Metered
from hps.types import EmbeddingTable, NoProgress, Progress
from hps.updates.writer import CacheWriter

if TYPE_CHECKING:
    from hps.tiers.rocksdb import RocksDbTier

__all__ = ["Node", "ServedModel", "open", "open_node"]


def open(config: Path | str | Mapping[str, Any] | Settings | Configuration | None = None) -> Node:
    """A node from a YAML file, a ``ps.json``, a mapping of the YAML's shape, or settings."""
    if isinstance(config, Settings):
        return open_node(Configuration(settings=config))
    if isinstance(config, Configuration):
        return open_node(config)
    if isinstance(config, Mapping):
        return open_node(configuration_from(config))
    return open_node(load_config(None if config is None else Path(config)))


def open_node(configuration: Configuration, progress: Progress | None = None) -> Node:
    """Open the models, the store and the caches, and check that all of it fits together.

    What is cheap to check is checked before rows are loaded, so that a broken configuration ends
    within seconds. Raises ``ConfigError``, ``ModelError`` or ``TierError``; nothing stays open then.
    """
    settings = configuration.settings
    with ExitStack() as resources:
        versions = _open_versions(configuration)
        opened = [_Opened(version, settings, resources) for version in versions]
        builder = _Builder(settings, opened, progress or NoProgress(), resources)
        node = builder.node((*configuration.warnings, *(w for v in versions for w in v.warnings)))
        node._resources.push(resources.pop_all())
        return node
    raise AssertionError  # an ExitStack swallows nothing; for the type checker


def _open_versions(configuration: Configuration) -> list[ModelVersion]:
    """The versions to serve: those of ``ps.json`` and those of the repository."""
    settings = configuration.settings.models
    overrides: Mapping[str, ModelOverride] = settings.serve or {}
    versions = []
    for legacy in configuration.legacy:
        version = open_legacy(legacy)
        spec = apply_override(version.spec, overrides.get(version.name))
        versions.append(replace(version, spec=spec))
    taken = {version.name for version in versions}
    if settings.serve is None and not (taken and not settings.repository.is_dir()):
        names = Repository(settings.repository).names()
    else:
        names = list(overrides)
    repository = Repository(settings.repository)
    versions += [repository.open(n, None, overrides.get(n)) for n in names if n not in taken]
    if not versions:
        raise ConfigError(
            f"no model to serve: {settings.repository} holds none; make one with `hps model import` "
            "or set models.repository"
        )
    return versions


class _Opened:
    """A model version, its lookup description and its network: everything checked but no row read."""

    def __init__(self, version: ModelVersion, settings: Settings, resources: ExitStack) -> None:
        self.version = version
        self.spec = version.spec
        self.tables = version.embedding_tables()
        self.lookup = LookupModel(
            version.name,
            version.version,
            self.tables,
            _features(version.spec, self.tables),
            version.spec.max_batch_size,
            settings.server.max_keys,
        )
        self.dense: OnnxModel | None = None
        if version.dense is not None and version.spec.dense is not None:
            chosen = settings.dense
            fed = fed_tensors(version.name, version.spec.dense, self.lookup.features)
            self.dense = OnnxModel(version.dense, chosen.provider, chosen.threads, chosen.inline_us)
            resources.callback(self.dense.close)
            check_network(
                version.name, self.dense, fed.values(), served_tensors(version.spec.dense)
            )
            self.dense.warm_up(fed)


def _features(spec: ModelSpec, tables: Mapping[str, EmbeddingTable]) -> dict[str, Feature]:
    """The features of ``model.yaml``; without any, one per table with the table's name."""
    specs = spec.features or [FeatureSpec(name=t.name, table=t.name) for t in spec.tables]
    return {
        f.name: Feature(f.name, tables[f.table], f.key_offset, f.pooling, f.hotness, f.context)
        for f in specs
    }


class _Builder:
    """Puts the parts of one node together, in order; ``resources`` closes them in reverse."""

    def __init__(
        self,
        settings: Settings,
        opened: list[_Opened],
        progress: Progress,
        resources: ExitStack,
    ) -> None:
        self._settings = settings
        self._opened = opened
        self._progress = progress
        self._resources = resources
        self._metrics = Metrics()
        self._tables = [table for model in opened for table in model.tables.values()]

    def node(self, warnings: tuple[str, ...]) -> Node:
        tiers = self._settings.tiers
        store = self._open_store()
        guard = tiers.guard
        guarded = Guarded(
            store, guard.deadline_ms / 1e3, guard.failures_to_open, guard.retry_after_s
        )
        self._resources.callback(guarded.close)
        status = [TierStatus(store, store.rows, state=lambda: guarded.state)]
        caches = TierChain([])
        writer = CacheWriter(
            caches, [guarded], self._settings.updates.promote_queue_keys, self._count_promotion
        )
        self._resources.callback(writer.close)
        workers = Workers(
            tiers.lookup_threads, tiers.lookup_queue, name="lookup", setting="tiers.lookup_queue"
        )
        self._resources.callback(workers.close)
        stores = TierChain([self._metered(guarded)])
        models = {
            model.version.name: self._serve(model, caches, stores, workers, writer)
            for model in self._opened
        }
        node = Node(models, self._metrics, status, writer, workers, warnings)
        self._publish(node)
        return node

    def _open_store(self) -> RocksDbTier:
        from hps.tiers.rocksdb import RocksDbTier

        chosen = self._settings.tiers.rocksdb
        store = RocksDbTier(
            chosen.path,
            layout=chosen.layout,
            block_cache_bytes=chosen.block_cache_bytes,
            block_size=chosen.block_size,
            threads=chosen.threads,
            read_only=chosen.read_only,
        )
        self._resources.callback(store.close)
        store.open_tables(self._tables)
        for model in self._opened:
            load_tables(model.version, model.tables, store, self._progress)
        return store

    def _serve(
        self,
        model: _Opened,
        caches: Tier,
        stores: Tier,
        workers: Workers,
        writer: CacheWriter,
    ) -> ServedModel:
        name = model.version.name
        engine = LookupEngine(
            model.lookup,
            caches,
            stores,
            workers,
            writer.promote,
            m.LookupMeter(self._metrics, name),
        )
        pipeline = None
        if model.dense is not None and model.spec.dense is not None:
            pipeline = InferencePipeline(
                name,
                model.spec.dense,
                engine,
                model.dense,
                workers,
                m.DenseMeter(self._metrics, name),
            )
        return ServedModel(name, model.version.version, model.spec, model.tables, engine, pipeline)

    def _metered(self, tier: Tier) -> Tier:
        return Metered(tier, m.TierMeter(self._metrics, tier.info.source.name.lower()))

    def _count_promotion(self, result: str, keys: int) -> None:
        self._metrics.counter(m.PROMOTIONS, result).add(keys)

    def _publish(self, node: Node) -> None:
        """Gauges that are read when metrics are asked for."""
        from hps import __version__

        metrics, opened = self._metrics, time.monotonic()
        metrics.gauge(m.BUILD_INFO, lambda: 1, __version__, "on" if COMPILED else "off")
        metrics.gauge(m.UPTIME, lambda: time.monotonic() - opened)
        metrics.gauge(m.PROMOTE_QUEUE, lambda: node.writer.waiting_keys)
        metrics.gauge(m.LOOKUP_WAITING, lambda: node.workers.waiting)
        metrics.gauges(
            m.MODEL_VERSION,
            lambda: [((model.name,), model.version) for model in node.models.values()],
        )
        metrics.gauges(m.TABLE_ROWS, lambda: _rows(node))


def _rows(node: Node) -> Iterator[tuple[tuple[str, ...], float]]:
    for entry in node.tiers:
        tier = entry.tier.info.source.name.lower()
        for model in node.models.values():
            for table in model.tables.values():
                yield (tier, table.model, table.name), entry.rows(table)
