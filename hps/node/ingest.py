"""Composition root of `hps ingest`: settings in, a running reader of the streams out.

It feeds the stores that all nodes share, serves no lookups and keeps no state; any number of such processes
share the partitions. It feeds the versions that the settings choose, follows a watched repository, and takes
requests to load and unload others.

The models are opened for their tables alone. The share of their rows that Redis gets is loaded as nodes
load it: the first process does it, and streamed rows are written over it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from hps.config import Configuration, Settings
from hps.config.update_settings import KafkaSettings
from hps.errors import ConfigError
from hps.models.repository import ModelVersion
from hps.node.ingest_versions import IngestVersions
from hps.node.model_opening import OpenedTables, open_tables, tables_of, watermarks_of
from hps.node.repository_watch import RepositoryWatch
from hps.node.stores import NodeStores
from hps.node.streams import UpdateStreams
from hps.node.tier_status import TierStatus, describe_table, publish_process, publish_tiers
from hps.node.version_start import versions_of_settings
from hps.observability.metrics import Metrics
from hps.types import NoProgress, Progress


@dataclass(slots=True, repr=False)
class IngestNode:
    """An open ingest process; its opener must `close` it. Thread-safe."""

    versions: IngestVersions
    metrics: Metrics
    tiers: Sequence[TierStatus]
    streams: UpdateStreams
    opening_warnings: tuple[str, ...] = ()
    _resources: ExitStack = field(default_factory=ExitStack)
    _opened: float = field(default_factory=time.monotonic)

    @property
    def models(self) -> Sequence[OpenedTables]:
        """The versions that it feeds."""
        return self.versions.opened

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings of the opening, and problems of a watched repository."""
        problems = (f"model {name}: {text}" for name, text in self.versions.problems.items())
        return (*self.opening_warnings, *problems)

    def status(self) -> dict[str, Any]:
        """The stores that it feeds and its progress, ready for JSON."""
        from hps import __version__

        return {
            "version": __version__,
            "uptime_s": round(time.monotonic() - self._opened, 3),
            "models": [self._model_status(model) for model in self.models],
            "tiers": [entry.describe() for entry in self.tiers],
            "updates": self.streams.status(),
            "warnings": list(self.warnings),
        }

    def _model_status(self, model: OpenedTables) -> dict[str, Any]:
        tables = [describe_table(table, self.tiers) for table in model.tables.values()]
        return {"name": model.version.name, "version": model.version.version, "tables": tables}

    def close(self) -> None:
        """Finish the current batch, record the stores' positions, leave the group. Idempotent."""
        self._resources.close()


def open_ingest(configuration: Configuration, progress: Progress | None = None) -> IngestNode:
    """Open the models' tables and the shared stores, and start reading.

    Raises ConfigError, ModelError or TierError; never because Kafka or Redis is unavailable."""
    settings = configuration.settings
    kafka = check_role(settings)
    with ExitStack() as resources:
        versions = versions_of_settings(configuration, progress)
        opened = open_tables(versions)
        tables = tables_of(opened)
        if not any(kafka.takes(table.model) for table in tables):
            names = ", ".join(sorted({table.model for table in tables}))
            raise ConfigError(
                f"updates.kafka.models: {kafka.models} matches none of the models ({names}), so nothing "
                "would be read"
            )
        metrics = Metrics()
        stores = NodeStores(settings, opened, metrics, resources)
        stores.open(progress or NoProgress(), shared_only=True)
        streams = UpdateStreams(tables, metrics, resources, watermarks_of(opened))
        warnings = (*configuration.warnings, *(w for v in versions for w in v.warnings))
        fed = IngestVersions(configuration, kafka, opened, stores, streams, metrics)
        ingest = IngestNode(fed, metrics, stores.statuses, streams, (*warnings, *stores.warnings))
        _publish(ingest)
        streams.share_kafka(kafka, stores.update_targets(shared=True))
        streams.watch()
        RepositoryWatch(settings, fed.repository, fed, resources)
        resources.callback(fed.close)  # before the watch ends, which may wait for a load
        ingest._resources.push(resources.pop_all())
        return ingest
    raise AssertionError  # unreachable: an ExitStack swallows nothing; for the type checker


def check_role(settings: Settings) -> KafkaSettings:
    """Settings of the stream to read.

    Raises ConfigError if there is none, no shared store, or if the nodes write that store."""
    kafka = settings.updates.kafka
    if settings.tiers.redis is None:
        raise ConfigError(
            "tiers.redis: no Redis is configured, so there is no store that nodes share: each node "
            "feeds its own from the stream, and `hps ingest` has nothing to do"
        )
    if kafka is None:
        raise ConfigError(
            "updates.kafka: no Kafka is configured, so there is no stream to read; set "
            "updates.kafka.brokers. Files in a folder are applied by the node that has them"
        )
    if kafka.shared_writer != "ingest":
        raise ConfigError(
            f"updates.kafka.shared_writer: is {kafka.shared_writer}, so the nodes write Redis themselves; "
            "set it to ingest in the configuration of the nodes and of `hps ingest` alike"
        )
    return kafka


def _publish(ingest: IngestNode) -> None:
    """Register gauges, which are read at a scrape."""

    def highest() -> list[ModelVersion]:
        ascending = sorted(ingest.models, key=lambda model: model.version.version)
        return [*{model.version.name: model.version for model in ascending}.values()]

    publish_process(ingest.metrics, highest)
    publish_tiers(ingest.metrics, ingest.tiers, lambda: tables_of(ingest.models))
