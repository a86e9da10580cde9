"""Version loader: make a version of a model ready next to those that a node serves.

1. Check its files and open its network.
2. Load its rows into the stores.
3. Add its tables to the CPU cache, filled with the keys that are hot in the current version; verify its
   mapped files that were not read into memory, with `tiers.mapped.verify`.
4. Let the update streams feed its tables beside the others', from where its files end, until they have
   caught up.

A failure undoes all steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product

from hps.config import Settings
from hps.errors import ConfigError, Unavailable
from hps.models.loader import row_version
from hps.models.repository import ModelVersion
from hps.node.caches import NodeCaches
from hps.node.gpu_caches import NodeGpus
from hps.node.mapped_files import VerificationPace, verify_before_switch
from hps.node.model_opening import OpenedModel, open_model, tables_of, watermarks_of
from hps.node.node import Node
from hps.node.phase_times import PhaseTimes
from hps.node.served_versions import ServedModel
from hps.node.serving_context import ServingContext, freshness_of
from hps.node.stores import NodeStores
from hps.node.warm_up import WarmUp
from hps.threads import rest
from hps.types import EmbeddingTable, NoProgress, Progress, version_unix_ms

_CHECK_EVERY_S = 0.05

CurrentTables = Callable[[], Collection[EmbeddingTable]]
"""The tables of a model's current version at this moment. Raises an error if the wait for it is to end."""


@dataclass(frozen=True, slots=True)
class NodeParts:
    """Parts of an open node that a change of its models needs.

    ``opened`` and its ``tables`` are the node's lists, which `ModelControl` keeps up to date.
    """

    settings: Settings
    serving: ServingContext
    stores: NodeStores
    caches: NodeCaches
    devices: NodeGpus
    opened: list[OpenedModel]
    tables: list[EmbeddingTable]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A version that is ready. ``resources`` closes its network; ``warning`` is for the operator."""

    opened: OpenedModel
    served: ServedModel
    resources: ExitStack
    warning: str = ""


class VersionLoader:
    """Loads versions for one node. One thread at a time may `load`, and one `feed` and `limit_networks`; any
    may call the other methods. ``closed`` ends their waits."""

    def __init__(self, parts: NodeParts, node: Node, closed: threading.Event) -> None:
        self._settings = parts.settings
        self._parts = parts
        self._node = node
        self._closed = closed
        limit_s = self._settings.models.warm_up_s
        self.warm_up = WarmUp(limit_s, node.metrics, self.require_open)

    def load(
        self,
        found: ModelVersion,
        current: OpenedModel | None,
        others: tuple[Sequence[OpenedModel], Sequence[OpenedModel]],
        undo: ExitStack,
        times: PhaseTimes,
        progress: Progress | None = None,
    ) -> LoadedModel:
        """Make ``found`` ready; ``undo`` removes it again.

        Its caches are filled after those of ``current``. ``others``: the opened versions, whose tables it may
        share, and those that stay, with which its caches share the memory."""
        parts, progress, node = self._parts, progress or NoProgress(), self._node
        opened, kept = others
        own = undo.enter_context(ExitStack())
        model = open_model(found, self._settings, own, reuse=tables_of(opened))
        times.end("files and network")
        rest()
        undo.callback(parts.stores.remove, model)
        parts.stores.add(model, progress)
        times.end("stores")
        rest()
        self.require_open()
        undo.callback(parts.caches.drop, model)
        warning = parts.caches.add(model, current, kept, progress)
        times.end("caches")
        rest()
        self._verify(model, progress)
        times.end("checksums")
        freshness = freshness_of(self._settings, found.name, node.metrics)
        served = parts.serving.serve(model, node.metrics, parts.devices.models, freshness)
        undo.callback(self._release_metrics, model)
        times.end("request paths")
        rest()
        return LoadedModel(model, served, own, "; ".join(filter(None, (*found.warnings, warning))))

    def _verify(self, model: OpenedModel, progress: Progress) -> None:
        """Verify the version's mapped files, if `tiers.mapped.verify` says so. Raises ModelError."""
        mapped, stores = self._settings.tiers.mapped, self._parts.stores
        if mapped.verify == "before_switch":
            pace = VerificationPace(mapped.verify_bytes_per_s, self.require_open)
            verify_before_switch(model, stores.mapped_file, stores.verified_files, pace, progress)

    def free(self, model: OpenedModel) -> None:
        """Free a version's part of the caches, and its metrics."""
        self._parts.caches.drop(model)
        self._release_metrics(model)

    def _release_metrics(self, model: OpenedModel) -> None:
        for version in model.table_versions:
            self._node.metrics.release(model.version.name, version)

    def feed(self, models: Collection[OpenedModel]) -> None:
        """Let the update streams feed the tables of ``models``, and no others."""
        if self._closed.is_set():
            return
        self.limit_networks(models)
        self._node.streams.set_tables(tables_of(models), watermarks_of(models))

    def limit_networks(self, models: Collection[OpenedModel]) -> None:
        """Let the update streams apply rows up to the networks of ``models``; see `network_limits`."""
        current = {name: each.version for name, each in self._node.models.items()}
        self._node.streams.limit_networks(network_limits(models, current))

    def catch_up(self, model: OpenedModel, current: CurrentTables) -> None:
        """Wait until the update streams have fed ``model`` as far as the ``current`` version.

        Raises Unavailable after `models.catch_up_s`, and the errors of ``current``."""
        # After the live reader began to feed it, so that no file is between the two.
        wait_s = self._settings.models.catch_up_s
        self._node.streams.replay_files(made_at([model]), self._closed, wait_s)
        self._catch_up_here(model, current)
        self._require_fed(model, current)

    def require_kept_updates(self, name: str) -> None:
        """Raise ConfigError if another version could not get the updates that the current one has."""
        directory = self._settings.updates.directory
        if directory is not None and directory.takes(name) and not directory.keep_applied:
            raise ConfigError(
                f"'{name}' is updated from files (updates.directory), and applied files are removed "
                "(keep_applied: false): another version would miss their rows. Set "
                "updates.directory.keep_applied: true; or unload the model, load the version, and move the "
                f"files that it needs to {directory.path} again"
            )

    def require_open(self) -> None:
        """Raise Unavailable while the node is being closed."""
        if self._closed.is_set():
            raise Unavailable("the node is being closed; ask another replica")

    def _catch_up_here(self, model: OpenedModel, current: CurrentTables) -> None:
        tables, wait_s = list(model.tables.values()), self._settings.models.catch_up_s
        until = time.monotonic() + wait_s
        max_lag = self._settings.updates.max_lag_at_switch
        while behind := self._node.streams.behind(tables, current(), max_lag):
            if time.monotonic() > until:
                raise Unavailable(
                    f"model '{model.version.name}' version {model.version.version} was not brought up to "
                    f"date within {wait_s:g} s (models.catch_up_s): {behind}; nothing was changed"
                )
            self._closed.wait(_CHECK_EVERY_S)
            self.require_open()

    def _require_fed(self, model: OpenedModel, current: CurrentTables) -> None:
        """Wait until a Redis fed by `hps ingest` has the updates of the version that this node has read."""
        kafka = self._settings.updates.kafka
        if kafka is None or kafka.shared_writer != "ingest":
            return
        contained = watermarks_of([model])
        until = time.monotonic() + self._settings.models.catch_up_s
        for store, table in product(
            self._parts.stores.update_targets(shared=True), model.tables.values()
        ):
            for (topic, partition), offset in self._node.streams.reached(table).items():
                if contained.get(table, {}).get(topic, {}).get(str(partition), 0) >= offset:
                    continue
                while (at := store.store.applied(table, topic, partition) or 0) < offset:
                    if not at or time.monotonic() > until:
                        raise Unavailable(
                            f"model '{model.version.name}' version {model.version.version}: {store.name} "
                            f"has the updates of table '{table.name}' up to {at} of {topic}/{partition}, "
                            f"this node up to {offset}: no `hps ingest` feeds this version, or it is "
                            f"behind; load it there first (`hps model load {model.version.name} --version "
                            f"{model.version.version} --server` its admin port), and again here once its lag "
                            "is 0; nothing was changed"
                        )
                    self._closed.wait(_CHECK_EVERY_S)
                    self.require_open()
                    current()


def made_at(opened: Iterable[OpenedModel]) -> dict[EmbeddingTable, int]:
    """When each table's files were made, in Unix milliseconds."""
    return {
        table: version_unix_ms(row_version(model.version, model.version.tables[name]))
        for model in opened
        for name, table in model.tables.items()
    }


def network_limits(
    models: Collection[OpenedModel], current: Mapping[str, int]
) -> dict[EmbeddingTable, int]:
    """The newest network, by its version, whose rows each table of the served ``models`` may get.

    The ``current`` version's tables get rows up to its network. Other versions may be ahead of it: their
    tables get those up to the later of both."""
    limits: dict[EmbeddingTable, int] = {}
    for each in models:
        name, number = each.version.name, each.version.version
        for table in each.tables.values():
            limits[table] = max(limits.get(table, 0), number, current.get(name, number))
    for each in models:
        if current.get(each.version.name) == each.version.version:
            limits |= dict.fromkeys(each.tables.values(), each.version.version)
    return limits
