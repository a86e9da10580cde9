"""Versions that a node serves from its start: those chosen at run time, else those of the settings."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from hps.config import Configuration, Settings
from hps.errors import NotFound
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


def versions_at_start(
    configuration: Configuration, file: ChoiceFile, progress: Progress | None = None
) -> tuple[list[ModelVersion], dict[str, VersionChoice]]:
    """Open the versions to serve; also returns the choice of each model's versions.

    Chosen versions that the repository has no more are left out, with a warning. Raises as
    `hps.node.model_opening.open_versions`."""
    openers, recorded = version_openers(configuration, progress=progress), file.choices()
    versions: list[ModelVersion] = []
    choices: dict[str, VersionChoice] = {}
    for name in {**openers, **recorded}:
        if name in recorded:
            choice = recorded[name]
            found = []
            if choice is not None:
                found = _opened(configuration, name, choice, progress, skip_missing=True)
            if found or choice is None:
                versions += found
                if choice is not None:
                    choices[name] = _of_versions(choice, found)
                continue
            log.warning(
                "model %s: none of the versions chosen at run time is in the repository", name
            )
        if name in openers:
            found, choices[name] = _configured(configuration, name, progress)
            versions += found
    return versions, choices


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
    *,
    skip_missing: bool = False,
) -> list[ModelVersion]:
    """Open the versions of a choice, ascending."""
    versions = []
    for number in sorted(choice.versions):
        try:
            versions.append(version_openers(configuration, {name: number}, progress)[name]())
        except NotFound as error:
            if not skip_missing:
                raise
            log.warning(
                "model %s: version %d, chosen at run time, is not served: %s", name, number, error
            )
    return versions


def _of_versions(choice: VersionChoice, found: list[ModelVersion]) -> VersionChoice:
    """The choice without versions that were not found."""
    there = {each.version for each in found}
    if choice.current not in there:
        choice = replace(choice, current=max(there), switched_at=0.0)
    return choice.without(choice.versions - there)
