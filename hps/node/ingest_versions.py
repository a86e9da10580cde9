"""Model versions that an ingest process feeds: loaded and unloaded on request, or as a repository changes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping, Sequence

from hps.config import Configuration
from hps.config.update_settings import KafkaSettings
from hps.errors import BadRequest, HpsError, NotFound, Unavailable
from hps.models.ps_json import ps_json_models, repository_with
from hps.models.remote import CancelOn
from hps.models.repository import check_unchanged
from hps.node.model_opening import OpenedTables, tables_of, watermarks_of
from hps.node.stores import NodeStores
from hps.node.streams import UpdateStreams
from hps.node.version_choice import chosen_by_settings
from hps.observability.metrics import Metrics
from hps.types import NoProgress, Progress

log = logging.getLogger(__name__)


class IngestVersions:
    """The versions of one ingest process. Any thread may call it; changes run one at a time.

    A version is fed from where its files end. The others are fed meanwhile."""

    def __init__(
        self,
        configuration: Configuration,
        kafka: KafkaSettings,
        opened: Sequence[OpenedTables],
        stores: NodeStores,
        streams: UpdateStreams,
        metrics: Metrics,
    ) -> None:
        """``opened``: those at the start, which the stores and the streams have."""
        self._settings, self._kafka = configuration.settings, kafka
        self._stores, self._streams, self._metrics = stores, streams, metrics
        self._turn, self._closed = threading.Lock(), threading.Event()
        described, until_closed = ps_json_models(configuration), CancelOn(self._closed)
        self.repository = repository_with(described, configuration, until_closed)
        self.opened: Sequence[OpenedTables] = tuple(opened)
        """The versions that are fed; replaced by changes."""
        self.problems: Mapping[str, str] = {}
        """Versions of a watched repository that could not be loaded, by model."""
        self._pinned: set[tuple[str, int]] = set()  # loaded on request
        # By model: versions that the settings chose before those that they choose now.
        self._former: dict[str, set[int]] = {}
        self._chosen: dict[str, set[int]] = {}
        for each in self.opened:
            self._chosen.setdefault(each.version.name, set()).add(each.version.version)
            self._retain(each)

    def close(self) -> None:
        """Wait for a running change, then reject others."""
        self._closed.set()
        with self._turn:
            pass

    def load(self, name: str, version: int | None = None, progress: Progress | None = None) -> int:
        """Feed a version of a model, by default the configured one, else the highest; returns it.

        Returns before the streams have caught up. Raises NotFound, ModelError, ConfigError, TierError,
        BadRequest for a model that the stream does not update, or Unavailable while the process is closed."""
        with self._turn:
            number = self._load(name, version, progress)
            self._pinned.add((name, number))
            return number

    def unload(self, name: str, version: int | None = None) -> None:
        """Feed a version of a model, None: the model, no longer. Its rows stay. Raises NotFound."""
        with self._turn:
            gone = [
                each
                for each in self.opened
                if each.version.name == name and version in (None, each.version.version)
            ]
            if not gone:
                which = "" if version is None else f" version {version}"
                raise NotFound(f"model '{name}'{which} is not fed here")
            self._remove(gone)

    def follow(self, name: str, published: Sequence[int]) -> None:
        """Feed what the settings choose of ``published``, the complete versions, which ascend.

        The versions that were chosen before stay: nodes may serve them until they have switched, and go back
        to them. Those before these end, and those that the repository has no more, but never the last one.
        Each version that could not be loaded is a problem of the model."""
        problems = []
        with self._turn:
            if not published or not self._kafka.takes(name):
                return
            chosen = {*chosen_by_settings(self._settings, name, [*published]).versions}
            for version in sorted(chosen - self._numbers(name), reverse=True):
                try:
                    self._load(name, version, None)
                except HpsError as error:
                    problems.append(f"version {version} of the repository is not fed: {error}")
            fed = self._numbers(name)
            if (current := chosen & fed) and current != self._chosen.get(name):
                self._former[name] = self._chosen.get(name, set())
                self._chosen[name] = current
            pinned = {number for of, number in self._pinned if of == name}
            kept = self._chosen.get(name, set()) | self._former.get(name, set()) | pinned
            kept &= {*published}
            if kept:
                self._remove([e for e in self._of(name) if e.version.version not in kept])
        self.set_problem(name, "; ".join(problems))

    def set_problem(self, name: str, problem: str) -> None:
        """Record why versions of a watched model are not fed, and log it once; empty: all are."""
        if problem and self.problems.get(name) != problem:
            log.warning("model %s: %s", name, problem)
        others = {model: text for model, text in self.problems.items() if model != name}
        self.problems = others | ({name: problem} if problem else {})

    def _load(self, name: str, version: int | None, progress: Progress | None) -> int:
        if self._closed.is_set():
            raise Unavailable("the process is being closed; ask another one")
        if not self._kafka.takes(name):
            raise BadRequest(
                f"updates.kafka.models does not name '{name}', so its tables are not fed"
            )
        override = (self._settings.models.serve or {}).get(name)
        found = self.repository.open(name, version, override)
        for each in self._of(name):
            if each.version.version == found.version:
                check_unchanged(each.version, found)
                return found.version
        model = OpenedTables(found, found.embedding_tables(tables_of(self.opened)))
        self._stores.add(model, progress or NoProgress())
        self._retain(model)
        self._feed([*self.opened, model])
        log.info("model %s: version %d is fed", name, found.version)
        return found.version

    def _remove(self, gone: Collection[OpenedTables]) -> None:
        if not gone:
            return
        self._feed([each for each in self.opened if not any(each is one for one in gone)])
        for each in gone:
            name, number = each.version.name, each.version.version
            self._stores.remove(each)
            for version in each.table_versions:
                self._metrics.release(name, version)
            self._pinned.discard((name, number))
            log.info("model %s: version %d is not fed any more", name, number)

    def _feed(self, opened: Sequence[OpenedTables]) -> None:
        self._streams.set_tables(tables_of(opened), watermarks_of(opened))
        self.opened = tuple(opened)

    def _retain(self, model: OpenedTables) -> None:
        for version in model.table_versions:
            self._metrics.retain(model.version.name, version)

    def _of(self, name: str) -> list[OpenedTables]:
        return [each for each in self.opened if each.version.name == name]

    def _numbers(self, name: str) -> set[int]:
        return {each.version.version for each in self._of(name)}
