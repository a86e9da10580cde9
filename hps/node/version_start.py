"""Versions that a node serves from its start: those chosen at run time, else those of the settings."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from hps.config import Configuration, Settings
from hps.errors import ModelError, NotFound
from hps.models.manifest import FILE_NAME
from hps.models.ps_json import ps_json_models, repository_with
from hps.models.repository import ModelVersion
from hps.node.model_opening import version_openers
from hps.node.version_choice import (
    ChoiceFile,
    VersionChoice,
    chosen_beside,
    chosen_by_settings,
    policy_of,
)
from hps.types import Progress

log = logging.getLogger(__name__)


@dataclass(slots=True)
class VersionsAtStart:
    """Opened ``versions``, with the choice of each model's versions.

    ``left_out``: damaged versions chosen at run time, with the reasons, by model. The file of the choices
    keeps them: a later start tries again."""

    versions: list[ModelVersion] = field(default_factory=list)
    choices: dict[str, VersionChoice] = field(default_factory=dict)
    left_out: dict[str, dict[int, str]] = field(default_factory=dict)
    at_run_time: set[str] = field(default_factory=set)
    """Models whose versions were chosen at run time."""

    def leave_out(self, version: ModelVersion, error: ModelError) -> None:
        """Do not serve a version that cannot be opened, or whose rows cannot be loaded.

        Raises ``error`` if it is the current one, or was not chosen at run time."""
        name, choice = version.name, self.choices[version.name]
        if name not in self.at_run_time or choice.current == version.version:
            raise error
        self.add_reason(name, version.version, error)
        self.versions = [each for each in self.versions if each is not version]
        self.choices[name] = choice.without({version.version})

    def add_reason(self, name: str, version: int, error: Exception) -> None:
        """Record and log why a version is left out."""
        why = str(error)  # a log record with the error itself would keep the stores in memory
        log.warning(
            "model %s: version %d, chosen at run time, is not served: %s", name, version, why
        )
        if not isinstance(error, NotFound):
            self.left_out.setdefault(name, {})[version] = why


def versions_at_start(
    configuration: Configuration, file: ChoiceFile, progress: Progress | None = None
) -> VersionsAtStart:
    """Open the versions to serve.

    Versions chosen at run time that the repository has no more are left out, with a warning; so are damaged
    ones, except the current one. Raises as `hps.node.model_opening.open_versions`."""
    openers, recorded = version_openers(configuration, progress=progress), file.choices()
    start = VersionsAtStart()
    for name in {**openers, **recorded}:
        if name in recorded:
            choice = recorded[name]
            found = []
            if choice is not None:
                found = _opened(configuration, name, choice, progress, start)
            if found or choice is None:
                start.versions += found
                start.at_run_time.add(name)
                if choice is not None:
                    start.choices[name] = _of_versions(choice, found)
                continue
            log.warning("model %s: none of the versions chosen at run time can be served", name)
        if name in openers:
            found, start.choices[name] = _configured(configuration, name, progress)
            start.versions += found
    return start


def versions_of_settings(
    configuration: Configuration, progress: Progress | None = None
) -> list[ModelVersion]:
    """Open the versions that the settings choose. Raises as `hps.node.model_opening.open_versions`."""
    openers = version_openers(configuration, progress=progress)
    return [each for name in openers for each in _configured(configuration, name, progress)[0]]


def _configured(
    configuration: Configuration, name: str, progress: Progress | None
) -> tuple[list[ModelVersion], VersionChoice]:
    """The versions of the settings."""
    settings, models = configuration.settings, ps_json_models(configuration)
    repository = repository_with(models, configuration, progress)
    versions, complete = repository.versions(name), repository.complete(name)
    choose: Callable[[Settings, str, list[int]], VersionChoice] = chosen_by_settings
    if (current := models.current().get(name)) is not None:
        choose = partial(chosen_beside, current=current)
    elif not versions:
        version = version_openers(configuration, progress=progress)[name]()
        return [version], VersionChoice(version.version, by_policy=frozenset({version.version}))
    named = {*policy_of(settings, name).specific} & {*versions}
    choice = choose(settings, name, sorted({*complete, *named}))
    for number in sorted(choose(settings, name, versions).versions - choice.versions):
        log.warning(
            "model %s: version %d is not served: %s/%s/%d has no %s, which is written last, so it may be "
            "half copied; version %d is the current one",
            *(name, number, repository.location, name, number, FILE_NAME, choice.current),
        )
    return _opened(configuration, name, choice, progress), choice


def _opened(
    configuration: Configuration,
    name: str,
    choice: VersionChoice,
    progress: Progress | None,
    start: VersionsAtStart | None = None,
) -> list[ModelVersion]:
    """Open the versions of a choice, ascending. With ``start``, leave out those that may be."""
    versions = []
    for number in sorted(choice.versions):
        try:
            versions.append(version_openers(configuration, {name: number}, progress)[name]())
        except (NotFound, ModelError, OSError) as error:
            is_gone = isinstance(error, NotFound)
            if start is None or not (is_gone or number != choice.current):
                raise
            start.add_reason(name, number, error)
    return versions


def _of_versions(choice: VersionChoice, found: list[ModelVersion]) -> VersionChoice:
    """The choice without versions that were not found."""
    there = {each.version for each in found}
    if choice.current not in there:
        choice = replace(choice, current=max(there), switched_at=0.0)
    return choice.without(choice.versions - there)
