"""Layers of the configuration: file, environment, ``--set``. The last one wins; mappings are merged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hps.config.checks import Path as KeyPath
from hps.config.config_errors import (
    ConfigProblem,
    InvalidConfiguration,
    dotted_path,
    has_path,
    leaf_values,
)
from hps.config.schema import Settings
from hps.config.schema_paths import SchemaSlot, is_secret, walk
from hps.config.yaml_text import parse_yaml
from hps.environment import PREFIX
from hps.errors import ConfigError
from hps.suggestions import hint_for

ROOT = SchemaSlot(Settings, Settings)
DEFAULT = "default"


@dataclass(frozen=True)
class ConfigLayer:
    """One source: its values as nested plain data, and a function from a path to its location."""

    data: dict[str, Any]
    where: Callable[[KeyPath], str]


def merge_layers(layers: Sequence[ConfigLayer]) -> dict[str, Any]:
    """Merge the mappings of all layers; other values of later layers replace those of earlier ones."""
    result: dict[str, Any] = {}
    for layer in layers:
        result = _merge(result, layer.data)
    return result


def origin(layers: Sequence[ConfigLayer], path: KeyPath) -> str:
    """Location of the value that is in effect at ``path``, or ``default``."""
    return next((x.where(path) for x in reversed(layers) if has_path(x.data, path)), DEFAULT)


def nearest_origin(layers: Sequence[ConfigLayer], path: KeyPath) -> str:
    """Location of the value at ``path``, else of the value around it, for error messages."""
    places = (origin(layers, path[:length]) for length in range(len(path), 0, -1))
    return next((place for place in places if place != DEFAULT), "")


def from_environment(variables: Mapping[str, str]) -> tuple[ConfigLayer, list[ConfigProblem]]:
    """``HPS__SERVER__HTTP__PORT=8080`` sets ``server.http.port``; names match in any case.

    Returns the valid values, and the problems of the others."""
    data: dict[str, Any] = {}
    names: dict[KeyPath, str] = {}
    problems: list[ConfigProblem] = []
    # Shorter names first: HPS__TIERS may hold a mapping that HPS__TIERS__… refines.
    for name in sorted(variables, key=lambda n: (n.count("__"), n)):
        try:
            path, slot = _match(name, name[len(PREFIX) :].split("__"), fold=True)
            if path in names:
                raise _wrong(name, path, f"{names[path]} sets the same setting; unset one")
            names[path] = name
            data = _merge(data, _nested(path, _value(slot, path, variables[name], name)))
        except InvalidConfiguration as error:
            problems += error.problems

    def where(path: KeyPath) -> str:
        return f"environment {_longest(names, path)}"

    return ConfigLayer(data, where), problems


def from_overrides(overrides: Sequence[str]) -> tuple[ConfigLayer, list[ConfigProblem]]:
    """``server.http.port=8080``, as passed to ``--set``; the last value of a setting wins.

    Returns the valid values, and the problems of the others."""
    data: dict[str, Any] = {}
    problems: list[ConfigProblem] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        try:
            if not equals or not key.strip():
                raise _wrong("--set", (), f"expected a.b=value, found {key!r}")
            path, slot = _match("--set", key.strip().split("."), fold=False)
            data = _merge(data, _nested(path, _value(slot, path, text, "--set")))
        except InvalidConfiguration as error:
            problems += error.problems
    return ConfigLayer(data, lambda path: "--set"), problems


def command_line_secrets(overrides: ConfigLayer) -> list[str]:
    """Warnings about secrets on the command line."""
    names = [
        dotted_path(path)
        for path, value in leaf_values(overrides.data)
        if value not in (None, []) and is_secret(walk(Settings, path)[0])
    ]
    return [
        f"--set {name}: every user of this machine can read command lines; set it in a file, or as "
        f"{PREFIX}{name.upper().replace('.', '__')}"
        for name in names
    ]


def without_empty_sections(data: dict[str, Any], slot: SchemaSlot = ROOT) -> dict[str, Any]:
    """``data`` without empty sections (``server:`` with nothing below)."""
    result: dict[str, Any] = {}
    for key, value in data.items():
        below = slot.below(key)
        if value is None and below is not None and below.model is not None and not below.optional:
            continue
        nested = isinstance(value, dict) and below is not None
        result[key] = without_empty_sections(value, below) if nested and below else value
    return result


def resolve_paths(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """``data`` with relative paths resolved against ``folder``, and ``~`` as the home folder."""
    for path, value in list(leaf_values(data)):
        slot, reached = walk(Settings, path)
        is_path = Path in slot.options and reached == path
        if is_path and isinstance(value, str) and value and "://" not in value:
            data = _merge(data, _nested(path, str(folder / Path(value).expanduser())))
    return data


def _match(source: str, parts: Sequence[str], *, fold: bool) -> tuple[KeyPath, SchemaSlot]:
    slot = ROOT
    path: KeyPath = ()
    for part in parts:
        name = part
        if fold and slot.model is not None:
            name = next((f for f in slot.fields if f.lower() == part.lower()), part)
        below = slot.below(name) if name else None
        if below is None:
            shown = part.lower() if fold else part
            raise _wrong(source, (*path, shown), _unknown(slot, part))
        slot, path = below, (*path, name)
    return path, slot


def _unknown(slot: SchemaSlot, part: str) -> str:
    names = list(slot.fields)
    if names:
        return f"no such setting{hint_for(part, names, 'the settings are')}"
    return "has no parts; a list is set as a whole, as in [a, b]"


def _value(slot: SchemaSlot, path: KeyPath, text: str, source: str) -> Any:
    if slot.takes_text:
        return None if slot.optional and text in ("", "null", "~") else text
    try:
        return parse_yaml(text, source).data
    except ConfigError as error:
        raise _wrong(source, path, str(error).partition(": ")[2]) from None


def _wrong(source: str, path: KeyPath, message: str) -> InvalidConfiguration:
    return InvalidConfiguration([ConfigProblem(source, path, message)])


def _longest(names: Mapping[KeyPath, str], path: KeyPath) -> str:
    for length in range(len(path), 0, -1):
        if path[:length] in names:
            return names[path[:length]]
    below = (name for known, name in names.items() if known[: len(path)] == path)
    return next(below, dotted_path(path))


def _nested(path: KeyPath, value: Any) -> dict[str, Any]:
    for part in reversed(path):
        value = {part: value}
    return dict(value)


def _merge(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        result[key] = _merge(old, value) if both and isinstance(old, dict) else value
    return result
