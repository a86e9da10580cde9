"""Load a configuration from a file, the environment and overrides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hps.config.config_errors import (
    ConfigProblem,
    InvalidConfiguration,
    dotted_path,
    leaf_values,
    validate,
)
from hps.config.layers import (
    ConfigLayer,
    command_line_secrets,
    from_environment,
    from_overrides,
    merge_layers,
    nearest_origin,
    origin,
    resolve_paths,
    without_empty_sections,
)
from hps.config.model_file import place
from hps.config.ps_json.legacy import LegacyModel
from hps.config.schema import Settings
from hps.config.schema_paths import describe_value
from hps.config.yaml_text import read_yaml
from hps.environment import near_misses, setting_variables
from hps.errors import ConfigError


@dataclass(frozen=True)
class Configuration:
    """All that a node needs to start.

    ``legacy`` models are those of a ``ps.json``, served in addition to those of the repository;
    ``settings.models.serve`` has their overrides, too, by name. A ``ps.json`` alone serves only its own
    models (``serve`` then names no other). ``warnings`` are logged at start. ``origins`` maps dotted keys
    to the locations of their values."""

    settings: Settings = field(default_factory=Settings)
    legacy: tuple[LegacyModel, ...] = ()
    warnings: tuple[str, ...] = ()
    path: Path | None = None
    origins: Mapping[str, str] = field(default_factory=dict)


def load_config(
    path: Path | str | None,
    overrides: Sequence[str] = (),
    *,
    environ: Mapping[str, str] | None = None,
) -> Configuration:
    """Read a YAML file, or HPS's ``ps.json`` (``*.json``); None means defaults.

    ``overrides`` are ``a.b=value``. Precedence: overrides, environment, file, defaults. Raises
    InvalidConfiguration, a ConfigError with all problems."""
    if path is None:
        return _configuration(_ConfigSource(), overrides, environ)
    path = Path(path)
    if path.suffix.lower() == ".json":
        from hps.config.ps_json.converter import read_ps_json

        legacy = read_ps_json(path)
        layer = ConfigLayer(legacy.settings, legacy.where)
        source = _ConfigSource((layer,), path, legacy.models, legacy.warnings)
        return _configuration(source, overrides, environ)
    document = read_yaml(path)
    data = {} if document.data is None else document.data
    if not isinstance(data, dict):
        message = f"expected a mapping with {', '.join(Settings.model_fields)}"
        raise ConfigError(f"{path}: {message}, found {describe_value(data)}")
    lines = document.lines
    data = resolve_paths(without_empty_sections(data), path.absolute().parent)
    file = ConfigLayer(data, lambda key: place(str(path), lines, key))
    source = _ConfigSource((file,), path, faults=tuple(document.faults))
    return _configuration(source, overrides, environ)


def configuration_from(
    data: Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    environ: Mapping[str, str] | None = None,
) -> Configuration:
    """Build a configuration from plain data; relative paths start at the working folder."""
    source = _ConfigSource((ConfigLayer(dict(data), lambda key: ""),))
    return _configuration(source, overrides, environ)


def as_configuration(
    config: Path | str | Mapping[str, Any] | Settings | Configuration | None,
) -> Configuration:
    """Convert any accepted form of a configuration. Raises ConfigError."""
    if isinstance(config, Settings):
        return Configuration(settings=config)
    if isinstance(config, Configuration):
        return config
    if isinstance(config, Mapping):
        return configuration_from(config)
    return load_config(config)


@dataclass(frozen=True)
class _ConfigSource:
    """The base of a configuration, which the environment and overrides change."""

    layers: tuple[ConfigLayer, ...] = ()
    path: Path | None = None
    legacy: tuple[LegacyModel, ...] = ()
    warnings: tuple[str, ...] = ()
    faults: tuple[ConfigProblem, ...] = ()


def _configuration(
    source: _ConfigSource, overrides: Sequence[str], environ: Mapping[str, str] | None
) -> Configuration:
    variables, wrong_variables = from_environment(setting_variables(environ))
    flags, wrong_flags = from_overrides(overrides)
    layers = [*source.layers, variables, flags]
    problems = [*wrong_variables, *wrong_flags]
    try:
        settings = validate(
            Settings, merge_layers(layers), lambda key: nearest_origin(layers, key), source.faults
        )
    except InvalidConfiguration as error:
        raise InvalidConfiguration([*error.problems, *problems]) from None
    if problems:
        raise InvalidConfiguration(problems)
    return Configuration(
        settings=settings,
        legacy=source.legacy,
        warnings=(*source.warnings, *near_misses(environ), *command_line_secrets(flags)),
        path=source.path,
        origins={
            dotted_path(key): origin(layers, key) for key, _ in leaf_values(settings.model_dump())
        },
    )
