"""Versions that a node serves from its start: those chosen at run time, else those of the settings."""

from __future__ import annotations

import logging
from dataclasses import replace

from hps.config import Configuration, Settings
from hps.errors import ConfigError, NotFound
from hps.models.remote import repository_of
from hps.models.repository import ModelVersion
from hps.node.model_opening import version_openers
from hps.node.version_choice import ChoiceFile, VersionChoice, chosen_by_settings
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
    legacy = {each.spec.name for each in configuration.legacy}
    for name in {**openers, **recorded}:
        if name in recorded and name not in legacy:
            choice = recorded[name]
            found = [] if choice is None else _recorded(configuration, name, choice, progress)
            if found or choice is None:
                versions += found
                if choice is not None:
                    choices[name] = _of_versions(choice, found)
                continue
            log.warning(
                "model %s: none of the versions chosen at run time is in the repository", name
            )
        if name in openers:
            found, choices[name] = _configured(configuration, name, name in legacy, progress)
            versions += found
    return versions, choices


def _configured(
    configuration: Configuration, name: str, is_legacy: bool, progress: Progress | None
) -> tuple[list[ModelVersion], VersionChoice]:
    """The versions of the settings."""
    models = configuration.settings.models
    if not is_legacy:
        repository = repository_of(models, progress)
        if available := repository.versions(name):
            choice = chosen_by_settings(configuration.settings, name, available)
            if len(choice.versions) > 1 and (
                reason := single_version_reason(configuration.settings)
            ):
                raise ConfigError(f"models.versions chooses several of model '{name}': {reason}")
            return _opened(configuration, name, choice, progress), choice
    version = version_openers(configuration, progress=progress)[name]()
    return [version], VersionChoice(version.version, by_policy=frozenset({version.version}))


def _recorded(
    configuration: Configuration, name: str, choice: VersionChoice, progress: Progress | None
) -> list[ModelVersion]:
    if (reason := single_version_reason(configuration.settings)) and len(choice.versions) > 1:
        log.warning("model %s: only version %d is served: %s", name, choice.current, reason)
        choice = VersionChoice(choice.current)
    return _opened(configuration, name, choice, progress, skip_missing=True)


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
        choice = replace(choice, current=max(there))
    return choice.without(choice.versions - there)


def single_version_reason(settings: Settings) -> str:
    """Reason why a node serves one version of each model; empty if it may serve several.

    GPU caches are another one, known once they are open."""
    if "hps" in layouts(settings):
        return "rows in the layout 'hps' have no version, so that two cannot be side by side"
    return ""


def layouts(settings: Settings) -> list[str]:
    """The layouts of the stores."""
    tiers = settings.tiers
    found: list[str] = []
    if tiers.rocksdb.enabled:
        found.append(tiers.rocksdb.layout)
    if tiers.redis is not None:
        found.append(tiers.redis.layout)
    return found
