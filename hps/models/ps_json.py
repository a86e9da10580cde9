"""Versions of models that a `ps.json` describes, beside those of the model repository."""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hps.config import Configuration
from hps.config.model_file import apply_override
from hps.config.model_schema import ModelSpec
from hps.config.ps_json.legacy import LegacyModel
from hps.config.schema import ModelOverride
from hps.errors import ModelError, NotFound
from hps.models.remote import repository_of
from hps.models.repository import ModelVersion, Repository, open_legacy
from hps.types import Progress


class PsJsonModels:
    """The model versions that a `ps.json` has had since the start. Thread-safe."""

    def __init__(self, models: Iterable[LegacyModel], path: Path | None = None) -> None:
        """``path``: the file, which is read again when it has changed; None: it does not change."""
        self._path = path
        self._lock = threading.Lock()
        self._stamp = self._stamp_now()
        self._current: dict[str, int] = {}
        self._known: dict[str, dict[int, LegacyModel]] = {}
        self._take(models)

    def refresh(self) -> None:
        """Read the file again if it has changed. Raises ConfigError; what was read before stays."""
        from hps.config.ps_json.converter import read_ps_json

        with self._lock:
            stamp = self._stamp_now()
            if self._path is None or stamp == self._stamp:
                return
            self._take(read_ps_json(self._path).models)
            self._stamp = stamp

    def _take(self, models: Iterable[LegacyModel]) -> None:
        models = [*models]
        for each in models:
            name = each.spec.name
            self._known[name] = {**self._known.get(name, {}), each.version: each}
        self._current = {each.spec.name: each.version for each in models}

    def _stamp_now(self) -> Hashable:
        with suppress(OSError):
            stat = None if self._path is None else self._path.stat()
            return None if stat is None else (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        return None

    def current(self) -> Mapping[str, int]:
        """The version of each model that is in the file now."""
        return self._current

    def versions(self, name: str) -> Mapping[int, LegacyModel]:
        """The versions of a model that the file has had."""
        return self._known.get(name, {})

    def as_json(self) -> list[dict[str, Any]]:
        """For other processes; see `from_json`."""
        return [
            {
                "version": each.version,
                "spec": each.spec.model_dump(mode="json"),
                "directories": {n: [*map(str, paths)] for n, paths in each.directories.items()},
            }
            for versions in list(self._known.values())
            for each in versions.values()
        ]

    @staticmethod
    def from_json(described: Iterable[Mapping[str, Any]]) -> tuple[LegacyModel, ...]:
        """The model versions of `as_json`."""
        return tuple(
            LegacyModel(
                ModelSpec.model_validate(each["spec"]),
                {n: tuple(map(Path, paths)) for n, paths in each["directories"].items()},
                each["version"],
            )
            for each in described
        )


class RepositoryWithPsJson(Repository):
    """A model repository with the models of a `ps.json`, whose versions come before its own.

    Thread-safe, as both are."""

    def __init__(self, inner: Repository, models: PsJsonModels) -> None:
        super().__init__(inner.root)
        self.location = inner.location
        self._inner, self._models = inner, models

    def names(self) -> list[str]:
        own = self._models.current()
        try:
            return sorted({*own, *self._inner.names()})
        except ModelError:
            if not own:
                raise
            return sorted(own)  # there is no repository

    def versions(self, name: str) -> list[int]:
        return sorted({*self._models.versions(name), *self._published_beside(name)})

    def complete(self, name: str) -> list[int]:
        """See `Repository.complete`; versions of the `ps.json` have no manifest and are complete."""
        beside = self._inner.complete(name) if self._published_beside(name) else []
        return sorted({*self._models.versions(name), *beside})

    def published(self, name: str) -> dict[int, Hashable]:
        """See `Repository.published`; of the `ps.json`, the version that it has now. Raises ConfigError."""
        self._models.refresh()
        own = self._models.current()
        found = self._inner.published(name) if self._published_beside(name) else {}
        return found | ({own[name]: "ps.json"} if name in own else {})

    def spec(self, name: str) -> ModelSpec:
        own = self._models.versions(name)
        return own[max(own)].spec if own else self._inner.spec(name)

    def open(
        self, name: str, version: int | None = None, override: ModelOverride | None = None
    ) -> ModelVersion:
        version = self.choose(name, version, override)
        legacy = self._models.versions(name).get(version)
        if legacy is None:
            return self._inner.open(name, version, override)
        return _with_override(open_legacy(legacy), override)

    def choose(
        self, name: str, version: int | None = None, override: ModelOverride | None = None
    ) -> int:
        """The version that `open` opens: by default the override's, else that of the `ps.json`.

        Raises ModelError, NotFound, or ConfigError for a `ps.json` that has become invalid."""
        self._models.refresh()
        if version is None and override is not None:
            version = override.version
        if version is None:
            version = self._models.current().get(name)
        if not self._models.versions(name):
            return self._inner.choose(name, version, override)
        if version is None:
            return self.complete(name)[-1]
        if version not in self.versions(name):
            raise NotFound(
                f"model '{name}' has no version {version}: the ps.json has version "
                f"{self._models.current().get(name, 'none')}, {self.location} has "
                f"{', '.join(map(str, self._published_beside(name))) or 'none'}"
            )
        return version

    def require_complete(
        self,
        name: str,
        version: int | None = None,
        override: ModelOverride | None = None,
        *,
        exempt: Collection[int] = (),
    ) -> None:
        """See `Repository.require_complete`; versions of the `ps.json` are complete."""
        self._models.refresh()
        if self._models.versions(name):
            version = self.choose(name, version, override)
            exempt = {*exempt, *self._models.versions(name)}
        if version not in exempt:
            self._inner.require_complete(name, version, override, exempt=exempt)

    def without_rows(
        self, name: str, version: int, override: ModelOverride | None = None
    ) -> ModelVersion:
        legacy = self._models.versions(name).get(version)
        if legacy is None:
            return self._inner.without_rows(name, version, override)
        return _with_override(open_legacy(legacy), override)

    def _published_beside(self, name: str) -> list[int]:
        try:
            return self._inner.versions(name)
        except (ModelError, NotFound):
            if not self._models.versions(name):
                raise
            return []


def _with_override(version: ModelVersion, override: ModelOverride | None) -> ModelVersion:
    return replace(version, spec=apply_override(version.spec, override))


def repository_with(
    models: PsJsonModels, configuration: Configuration, progress: Progress | None = None
) -> Repository:
    """The model repository of a configuration, with the ``models`` of its `ps.json`."""
    inner = repository_of(configuration.settings.models, progress)
    return RepositoryWithPsJson(inner, models) if configuration.legacy else inner


def ps_json_models(configuration: Configuration) -> PsJsonModels:
    """The models of a configuration's `ps.json`; none if it is another file."""
    path = configuration.path if configuration.legacy else None
    return PsJsonModels(configuration.legacy, path)
