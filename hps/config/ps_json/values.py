"""Read a ``ps.json`` by the table of its keys: types, enum names, unknown and ignored keys."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hps.config.checks import Path as KeyPath
from hps.config.config_errors import ConfigProblem, InvalidConfiguration, dotted_path
from hps.config.ps_json.keys import REQUIRED, Kind, PsKey, keys_of
from hps.config.schema_paths import describe_value
from hps.config.yaml_text import read_text
from hps.errors import ConfigError
from hps.suggestions import did_you_mean, name_list

_WORDS: dict[Kind, tuple[str, str]] = {
    "bool": ("true or false", "truth values"),
    "int": ("a whole number from 0", "whole numbers from 0"),
    "float": ("a number", "numbers"),
    "text": ("text", "texts"),
    "path": ("a path", "paths"),
    "object": ("a mapping", "mappings"),
}
_SECRETS = {"password"}
# Top keys of our settings; a JSON file with these is our configuration under the wrong name.
_OURS = {"tiers", "server", "auth", "dense", "updates"}


class PsJsonReader:
    """Collects the problems and warnings of one file while its sections are read."""

    def __init__(self, path: Path) -> None:
        self.file = str(path)
        self.folder = path.absolute().parent
        self.problems: list[ConfigProblem] = []
        # Warnings about ignored and unknown keys -> the paths of these.
        self._notes: dict[str, list[KeyPath]] = {}

    def section(
        self, section: str, data: Mapping[str, Any], path: KeyPath, *kinds: str
    ) -> PsJsonSection:
        """Read the values of ``section``; record errors and ignored keys.

        ``kinds``: the types with which its keys may have an effect (`PsKey.acts_with`)."""
        known = keys_of(section)
        values: dict[str, Any] = {}
        for name, raw in data.items():
            key = known.get(name)
            if key is None:
                hint = did_you_mean(name, known) or "; HPS does not know it either"
                self.note((*path, name), f"unknown key{hint}")
                continue
            value = self._value(key, raw, (*path, name))
            if value is None:
                continue
            if key.ignored and key.acts_with not in kinds:
                self.ignored((*path, name), key.ignored)
            else:
                value = self._clamped(key, value, (*path, name))
            if str(value) in key.ignored_values:
                self.note((*path, f"{name}={raw}"), key.ignored_values[str(value)])
            values[name] = value
        for key in known.values():
            if key.default is REQUIRED and key.name not in data:
                self.wrong((*path, key.name), f"is missing; expected {_expected(key)}")
        return PsJsonSection(known, values)

    def wrong(self, path: KeyPath, message: str) -> None:
        self.problems.append(ConfigProblem(self.file, path, message))

    def ignored(self, path: KeyPath, reason: str) -> None:
        self.note(path, f"has no effect: {reason}")

    def differs(self, path: KeyPath, reason: str) -> None:
        self.note(path, f"not as in HPS: {reason}")

    def inert(
        self, path: KeyPath, section: PsJsonSection, names: Sequence[str], reason: str
    ) -> None:
        """Report those of ``names`` that are set but have no effect because of another key."""
        for name in names:
            if name in section:
                self.ignored((*path, name), reason)

    def done(self) -> None:
        """Raise InvalidConfiguration if there are errors."""
        if self.problems:
            raise InvalidConfiguration(self.problems)

    def warnings(self) -> tuple[str, ...]:
        """One line per reason, with all keys that it applies to."""
        return tuple(
            f"{self.file}: {', '.join(_together(paths))}: {message}"
            for message, paths in self._notes.items()
        )

    def note(self, path: KeyPath, message: str) -> None:
        self._notes.setdefault(message, []).append(path)

    def _clamped(self, key: PsKey, value: Any, path: KeyPath) -> Any:
        """Clamp a number to the bounds of its key; a warning has the original."""
        for bound, word, clamp in ((key.least, "at least", max), (key.most, "at most", min)):
            if bound is not None and clamp(value, bound) != value:
                self.differs(
                    path, f"{value} is out of range, expected {word} {bound}; using {bound}"
                )
                return bound
        return value

    def _value(self, key: PsKey, raw: Any, path: KeyPath) -> Any:
        """The checked value (an enum by its canonical name), or None if it is wrong."""
        if key.kind == "enum":
            if isinstance(raw, str) and raw in key.aliases:
                return key.aliases[raw]
            hint = did_you_mean(raw, key.aliases) if isinstance(raw, str) else ""
            self.wrong(path, f"expected {_expected(key)}, found {describe_value(raw)}{hint}")
            return None
        if key.kind == "list":
            if isinstance(raw, list) and all(_fits(key.items, item) for item in raw):
                return raw
        elif _fits(key.kind, raw):
            return raw
        secret = key.name in _SECRETS
        self.wrong(path, f"expected {_expected(key)}, found {describe_value(raw, secret=secret)}")
        return None


def _together(paths: Sequence[KeyPath]) -> list[str]:
    """Key paths as text; the same key of several models is joined: ``models[0,1].slot_num``."""
    models: dict[tuple[bool, KeyPath], list[str]] = {}
    for path in paths:
        # A model and the top level may have keys of the same name.
        indexed = len(path) > 2 and path[0] == "models"
        found = models.setdefault((indexed, path[2:] if indexed else path), [])
        found += [str(path[1])] if indexed else []
    return [
        f"models[{','.join(indices)}].{dotted_path(path)}" if indexed else dotted_path(path)
        for (indexed, path), indices in models.items()
    ]


class PsJsonSection:
    """The values of one section; a missing key has HPS's default."""

    def __init__(self, known: Mapping[str, PsKey], values: Mapping[str, Any]) -> None:
        self._known = known
        self._values = values

    @property
    def complete(self) -> bool:
        """True if every key without a default is present."""
        return all(k.name in self for k in self._known.values() if k.default is REQUIRED)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __getitem__(self, name: str) -> Any:
        return self._values.get(name, self._known[name].default)


def _fits(kind: Kind, value: Any) -> bool:
    if kind == "bool":
        return isinstance(value, bool)
    if kind == "int":
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return whole and not isinstance(value, bool) and value >= 0
    if kind == "float":
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "object":
        return isinstance(value, dict)
    return isinstance(value, str)


def _expected(key: PsKey) -> str:
    if key.kind == "enum":
        return f"one of {name_list(list(key.aliases), 20)}"
    if key.kind == "list":
        return f"a list of {_WORDS[key.items][1]}"
    return _WORDS[key.kind][0]


def parse_json(path: Path) -> dict[str, Any]:
    """The file's top object. Raises ConfigError with line and column if it is not JSON."""
    text = read_text(path)
    try:
        data = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        place = f"{path}:{error.lineno}:{error.colno}"
        raise ConfigError(f"{place}: not valid JSON: {error.msg}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not valid JSON: nested too deeply") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping, found {describe_value(data)}")
    if _OURS & set(data) or isinstance(data.get("models"), dict):
        raise ConfigError(
            f"{path}: a .json file is read as HPS's ps.json, but this looks like a configuration of "
            "ours; rename it to .yaml (JSON is YAML too)"
        )
    return data


def _no_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {key!r} is duplicate in the same mapping")
        result[key] = value
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"not valid JSON: {name} is no number")
