"""Load, replace and unload models while a node serves; rows and network change together.

A new version is made ready in parallel to the served one, so that no request sees a part of it and a
failure changes nothing:

1. Check its files and open its network.
2. Load its rows into the stores.
3. Add its tables to the CPU cache, filled with the keys that are hot in the served version.
4. Let the update streams feed its tables, from where its files end, until they have caught up.
5. Have attached processes open it.
6. When all have, send requests to it, in all processes.

Requests in flight finish on the version on which they started. When nothing refers to its lookups any
more, in any process, its caches and network are freed. Its rows stay in RocksDB, so that going back
needs no load, until the next version replaces it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product

from hps.config import Settings
from hps.errors import HpsError, NotFound, Unavailable, Unsupported
from hps.models.remote import CancelOn, repository_of
from hps.models.repository import ModelVersion, check_unchanged
from hps.node.caches import NodeCaches
from hps.node.gpu_caches import NodeGpus
from hps.node.model_opening import OpenedModel, open_model, watermarks_of
from hps.node.node import Node, ServedModel
from hps.node.serving_context import ServingContext, freshness_of
from hps.node.stores import NodeStores
from hps.node.version_retirement import LastRequest, ReplacedVersion, VersionRetirement
from hps.observability import metric_names as m
from hps.tiers.node import AttachedProcesses, LoadedVersion
from hps.types import EmbeddingTable, NoProgress, Progress

log = logging.getLogger(__name__)

_CHECK_EVERY_S = 0.05


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


class ModelControl:
    """Loads, replaces and unloads the models of one open node.

    Any thread may call it; changes run one at a time."""

    def __init__(
        self, parts: NodeParts, node: Node, attached: AttachedProcesses, resources: ExitStack
    ) -> None:
        """``resources`` close the networks of versions loaded later; after all threads of the node."""
        self._settings = settings = parts.settings
        self._serving, self._stores = parts.serving, parts.stores
        self._caches, self._devices = parts.caches, parts.devices
        self._opened, self._tables = parts.opened, parts.tables
        self._node = node
        self._attached = attached
        self._closed = threading.Event()
        models, cancel = settings.models, CancelOn(self._closed)
        self._repository = repository_of(models, cancel)
        root = self._repository.root
        self._legacy = {
            m.version.name for m in parts.opened if root not in m.version.folder.parents
        }
        self._changing = threading.Lock()
        self._to_close = resources
        self._resources: dict[str, ExitStack] = {}  # of versions loaded later, by model
        self._retirement = VersionRetirement(
            parts.stores, self._free_caches, self._version_of, self._changing
        )
        self.loading: dict[str, int] = {}
        """Versions being loaded, by model."""
        self.warnings: dict[str, str] = {}
        """Warnings about loaded versions, by model."""
        for served in node.models:
            self._create_load_counter(served)

    def available(self) -> dict[str, list[int]]:
        """The versions in the repository, by model."""
        return {name: self._repository.versions(name) for name in self._repository.names()}

    def opened_version(self, name: str, version: int) -> ModelVersion:
        """A served version with its files. Raises ``NotFound``."""
        for each in [*self._opened]:
            if (each.version.name, each.version.version) == (name, version):
                return each.version
        raise NotFound(f"version {version} of model '{name}' is not served here")

    def load(self, name: str, version: int | None = None, progress: Progress | None = None) -> int:
        """Serve ``version`` of a model, by default the configured one, else the highest; returns it.

        Does nothing if that version is served already, from the same files. Raises ``NotFound``,
        ``ModelError`` for files that are damaged or were changed after they were loaded,
        ``ConfigError``, ``TierError``, ``Unsupported`` where models cannot change, or ``Unavailable``
        when the update streams do not catch up, here or in a Redis that other processes feed; nothing
        has changed then."""
        with self._change(), self._count_failures(name):
            found = self._open_version(name, version)
            self._require_possible(name)
            served = self._node.models.get(name)
            if served is not None and served.version == found.version:
                check_unchanged(self._opened_model(served).version, found)
                return found.version
            if served is not None:
                self._require_replayable_updates(name)
            self.loading = {**self.loading, name: found.version}
            try:
                self._serve(found, served, progress or NoProgress())
            finally:
                self.loading = {n: v for n, v in self.loading.items() if n != name}
            return found.version

    def _open_version(self, name: str, version: int | None) -> ModelVersion:
        """The version in the repository; errors do not contain its folder."""
        override = (self._settings.models.serve or {}).get(name)
        try:
            return self._repository.open(name, version, override)
        except NotFound as error:
            root = str(self._repository.location)
            raise NotFound(str(error).replace(root, "the model repository")) from None

    def unload(self, name: str) -> None:
        """Stop serving a model. Its rows stay in the stores. Raises ``NotFound`` and ``Unsupported``."""
        with self._change():
            self._require_possible(name)
            served = self._node.models.get(name)
            if served is None:
                raise NotFound(f"Request for unknown model: '{name}' is not found")
            old = self._opened_model(served)
            self._node.models = {n: m for n, m in self._node.models.items() if n != name}
            remote = self._attached.drop(name)
            self._warn(name, "")
            self._set_opened([each for each in self._opened if each is not old])
            self._set_stream_tables(self._opened)
            self._retire(old, self._resources.pop(name, None), served, remote)
            self._attached.settle(self._require_open)

    def close(self) -> None:
        """Wait for a running change, then reject others; does not wait for requests.

        Called when the node is closed."""
        self._closed.set()
        with self._changing:
            pass
        self._retirement.close()

    @contextmanager
    def _change(self) -> Iterator[None]:
        with self._changing:
            self._require_open()
            yield

    @contextmanager
    def _count_failures(self, name: str) -> Iterator[None]:
        """Count a failed load; not of unknown models, of which there could be any number."""
        try:
            yield
        except NotFound:
            raise
        except HpsError:
            self._node.metrics.counter(m.MODEL_LOADS, name, "failed").add()
            raise

    def _create_load_counter(self, served: str) -> None:
        """Create the counter at the start: an alert would miss the first increment otherwise."""
        self._node.metrics.counter(m.MODEL_LOADS, served, "failed")

    def _require_open(self) -> None:
        if self._closed.is_set():
            raise Unavailable("the node is being closed; ask another replica")

    def _require_possible(self, name: str) -> None:
        reason = ""
        if self._devices.replicas is not None:
            reason = "a node with GPU caches (tiers.gpu.use) serves the models it was started with"
        elif "hps" in self._layouts():
            reason = "rows in the layout 'hps' have no version, so that two cannot be side by side"
        elif name in self._legacy:
            reason = f"'{name}' is a model of a ps.json, which has no versions"
        if reason:
            raise Unsupported(f"{reason}; start the server again, one replica after the other")

    def _require_replayable_updates(self, name: str) -> None:
        """Raise Unsupported if a new version could not read the updates that the served one has."""
        directory = self._settings.updates.directory
        if directory is not None and directory.takes(name):
            raise Unsupported(
                f"'{name}' is updated from files (updates.directory), and applied files are not "
                "read again: another version would miss their rows; unload the model, load the version, and "
                f"move the files it needs from {directory.path / 'applied'} back to {directory.path}"
            )

    def _layouts(self) -> list[str]:
        tiers = self._settings.tiers
        layouts: list[str] = []
        if tiers.rocksdb.enabled:
            layouts.append(tiers.rocksdb.layout)
        if tiers.redis is not None:
            layouts.append(tiers.redis.layout)
        return layouts

    def _opened_model(self, served: ServedModel) -> OpenedModel:
        return next(each for each in self._opened if each.version.name == served.name)

    # -- load a version ----------------------------------------------------------------------------

    def _serve(self, found: ModelVersion, served: ServedModel | None, progress: Progress) -> None:
        started, node = time.monotonic(), self._node
        old = None if served is None else self._opened_model(served)
        with ExitStack() as undo:
            own = undo.enter_context(ExitStack())
            model = open_model(found, self._settings, own)
            undo.callback(self._stores.remove, model)
            self._stores.add(model, progress)
            self._require_open()
            undo.callback(self._caches.drop, model)
            others = [each for each in self._opened if each is not old]
            other_tables = [table for each in others for table in each.tables.values()]
            warning = self._caches.add(model, old, other_tables, progress)
            undo.callback(self._set_stream_tables, self._opened)
            self._set_stream_tables([*others, model])
            self._catch_up(model)
            self._require_fed(model)
            freshness = freshness_of(self._settings, found.name, node.metrics)
            ready = self._serving.serve(model, node.metrics, self._devices, freshness)
            undo.callback(node.metrics.release, found.name, found.version)
            undo.callback(self._attached.withdraw)
            self._attached.fingerprints[found.key] = found.fingerprint
            self._attached.open(found.name, found.version, self._require_open)
            node.models = {**node.models, found.name: ready}
            remote = self._attached.switch()
            self._set_opened([*others, model])
            before = self._resources.pop(found.name, None)
            self._resources[found.name] = self._to_close.enter_context(own.pop_all())
            undo.pop_all()
        self._report_load(found, warning, time.monotonic() - started)
        if old is not None and served is not None and remote is not None:
            self._retire(old, before, served, remote)
        self._attached.settle(self._require_open)

    def _report_load(self, version: ModelVersion, warning: str, seconds: float) -> None:
        name = version.name
        self._warn(name, warning)
        self._node.metrics.counter(m.MODEL_LOADS, name, "served").add()
        self._create_load_counter(name)
        log.info("model %s: version %d is served after %.1f s", name, version.version, seconds)

    def _retire(
        self,
        old: OpenedModel,
        resources: ExitStack | None,
        served: ServedModel,
        remote: LoadedVersion,
    ) -> None:
        """Free ``served`` once no request uses it, in this process or a remote one."""
        is_used = partial(self._attached.uses, remote)
        last = LastRequest(served.engine)
        self._retirement.retire(ReplacedVersion(old, resources, last, is_used))

    def _warn(self, name: str, warning: str) -> None:
        others = {model: text for model, text in self.warnings.items() if model != name}
        self.warnings = others | ({name: warning} if warning else {})
        if warning:
            log.warning("model %s: %s", name, warning)

    def _set_opened(self, opened: list[OpenedModel]) -> None:
        self._opened[:] = opened
        self._tables[:] = [table for each in opened for table in each.tables.values()]

    def _set_stream_tables(self, opened: list[OpenedModel]) -> None:
        if self._closed.is_set():
            return
        tables = [table for each in opened for table in each.tables.values()]
        self._node.streams.set_tables(tables, watermarks_of(opened))

    def _catch_up(self, model: OpenedModel) -> None:
        tables, wait_s = list(model.tables.values()), self._settings.models.catch_up_s
        until = time.monotonic() + wait_s
        while behind := self._node.streams.behind(tables):
            if time.monotonic() > until:
                raise Unavailable(
                    f"model '{model.version.name}' version {model.version.version} was not brought up to "
                    f"date within {wait_s:g} s (models.catch_up_s): {behind}; the version served stays"
                )
            self._closed.wait(_CHECK_EVERY_S)
            self._require_open()

    def _require_fed(self, model: OpenedModel) -> None:
        """Wait until a Redis fed by `hps ingest` has the updates of the version that this node has read."""
        kafka = self._settings.updates.kafka
        if kafka is None or kafka.shared_writer != "ingest":
            return
        contained = watermarks_of([model])
        until = time.monotonic() + self._settings.models.catch_up_s
        for store, table in product(
            self._stores.update_targets(shared=True), model.tables.values()
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
                            "behind; start one for it beside the other (docs/updates.md), wait until "
                            "its lag is 0, and load again; nothing was changed"
                        )
                    self._closed.wait(_CHECK_EVERY_S)
                    self._require_open()

    # -- retire a version --------------------------------------------------------------------------

    def _free_caches(self, model: OpenedModel) -> None:
        self._caches.drop(model)
        self._node.metrics.release(model.version.name, model.version.version)

    def _version_of(self, name: str) -> int | None:
        served = self._node.models.get(name)
        return None if served is None else served.version
