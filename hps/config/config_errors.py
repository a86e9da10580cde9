"""Convert errors of pydantic and of the checks to one line each.

A line reads ``<where>: <key path>: expected …, found …``; where is a file with its line, an
environment variable or ``--set``. Secrets are never quoted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from hps.config.checks import ConfigFinding
from hps.config.checks import Path as KeyPath
from hps.config.schema_paths import SchemaSlot, describe, describe_value, is_secret, walk
from hps.config.units import unit_hint
from hps.errors import ConfigError
from hps.suggestions import did_you_mean, hint_for

Model = TypeVar("Model", bound=BaseModel)
Where = Callable[[KeyPath], str]
_ABSENT = object()
_NO_CHOICE = "gRPC has one transport, on the event loop"
# Settings of former releases by their paths, with the reason of their removal.
_REMOVED = {"server.grpc.calls": _NO_CHOICE, "server.grpc.admin.calls": _NO_CHOICE}
# User and password of a URL in a message.
_USER = re.compile(r"(?<=://)[^/\s@]+(?=@)")


@dataclass(frozen=True)
class ConfigProblem:
    """One error: its source, the key path, and the remedy."""

    where: str
    path: KeyPath
    message: str

    def __str__(self) -> str:
        parts = [self.where, dotted_path(self.path), _USER.sub("********", self.message)]
        return ": ".join(part for part in parts if part)


class InvalidConfiguration(ConfigError):
    """A ConfigError with all problems of the input, one line each."""

    def __init__(self, problems: Sequence[ConfigProblem]) -> None:
        super().__init__("\n".join(str(p) for p in problems))
        self.problems = tuple(problems)


def dotted_path(path: KeyPath) -> str:
    """``("models", "serve", "m", "tables", 0)`` as ``models.serve.m.tables[0]``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def validate(
    model: type[Model], data: Any, where: Where, faults: Sequence[ConfigProblem] = ()
) -> Model:
    """Build ``model`` from plain ``data``.

    Raises InvalidConfiguration with all problems, including the parser's ``faults``."""
    try:
        built = model.model_validate(data)
    except ValidationError as error:
        problems, wrong = _translate(model, data, error, where)
    else:
        if faults:
            raise InvalidConfiguration(faults)
        return built
    # Rules that span several fields run only if each field is valid. Remove the invalid ones and validate
    # again, so that one run reports every problem.
    try:
        model.model_validate(_without(data, wrong))
    except ValidationError as error:
        more, _ = _translate(model, data, error, where, ignore=wrong)
        problems += more
    raise InvalidConfiguration(sorted([*faults, *problems], key=_line))


def _line(problem: ConfigProblem) -> float:
    """Sort key: the line in the file; problems of other sources come last."""
    line = re.search(r":(\d+)(:\d+)?$", problem.where)
    return float(line[1]) if line else float("inf")


def _translate(
    model: type[BaseModel],
    data: Any,
    error: ValidationError,
    where: Where,
    ignore: Sequence[KeyPath] = (),
) -> tuple[list[ConfigProblem], list[KeyPath]]:
    """Problems in the order of the file, and the paths of the invalid values."""
    problems: dict[KeyPath, ConfigProblem] = {}
    for detail in error.errors(include_url=False):
        slot, path = walk(model, detail["loc"])
        findings: list[ConfigFinding] = detail.get("ctx", {}).get("findings", [])
        if detail["type"] != "inconsistent":
            if not ignore:
                problems.setdefault(path, _problem(slot, path, data, detail, where))
            continue
        for finding in findings:
            at = (*path, *finding.path)
            involved = [at, *((*path, *other) for other in finding.also)]
            if not any(_overlap(p, bad) for p in involved for bad in ignore):
                # Report the first of these paths that the input contains.
                present = next((p for p in involved if has_path(data, p)), at)
                problems.setdefault(at, ConfigProblem(where(present), at, finding.message))
    return list(problems.values()), list(problems)


def _problem(
    slot: SchemaSlot, path: KeyPath, data: Any, detail: Any, where: Where
) -> ConfigProblem:
    value = _at(data, path)
    if detail["type"] == "extra_forbidden":
        if (reason := _REMOVED.get(".".join(map(str, path)))) is not None:
            return ConfigProblem(where(path), path, f"the setting was removed: {reason}; delete it")
        parent, _ = walk(slot.root, path[:-1])
        names = list(parent.fields)
        hint = hint_for(path[-1], names, "the keys are")
        return ConfigProblem(where(path), path, f"unknown key{hint}")
    if detail["type"] == "missing" or value is _ABSENT:
        return ConfigProblem(where(path), path, f"is missing; expected {describe(slot)}")
    if detail["loc"] and detail["loc"][-1] == "[key]":
        message = f"the name {path[-1]!r} must be 1 to 120 of the characters a-z A-Z 0-9 _ -"
        return ConfigProblem(where(path), path, message)
    if detail["type"] == "remote_path":
        return ConfigProblem(where(path), path, detail["msg"])
    shown = describe_value(value, secret=is_secret(slot))
    hint = ""
    if isinstance(value, str):
        hint = did_you_mean(value, slot.choices) or unit_hint(str(path[-1]), value)
    return ConfigProblem(where(path), path, f"expected {describe(slot)}, found {shown}{hint}")


def _overlap(a: KeyPath, b: KeyPath) -> bool:
    short = min(len(a), len(b))
    return a[:short] == b[:short]


def _at(data: Any, path: KeyPath) -> Any:
    for part in path:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return _ABSENT
    return data


def has_path(data: Any, path: KeyPath) -> bool:
    """True if plain data has a value at ``path``."""
    return _at(data, path) is not _ABSENT


def _without(data: Any, paths: Sequence[KeyPath]) -> Any:
    """Copy ``data`` without the values at ``paths``; list items stay in place."""
    copy = _copied(data)
    for path in paths:
        parent = _at(copy, path[:-1]) if path else None
        if isinstance(parent, dict):
            parent.pop(path[-1], None)
    return copy


def _copied(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _copied(value) for key, value in data.items()}
    return [_copied(value) for value in data] if isinstance(data, list) else data


def leaf_values(data: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """All values that are not mappings, with their paths."""
    if isinstance(data, dict) and (data or not path):
        for key, value in data.items():
            yield from leaf_values(value, (*path, key))
    else:
        yield path, data
