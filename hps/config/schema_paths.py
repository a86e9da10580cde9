"""Describe the expected value at a key path, for error messages, overrides and docs."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types as limits
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hps.config.checks import Path as KeyPath
from hps.config.download_settings import PEER_PATTERN
from hps.config.model_schema import NAME_PATTERN
from hps.config.repository_uri import RepositoryUri
from hps.config.server_settings import KEY_PATTERN
from hps.config.store_settings import ADDRESS_PATTERN

_UNION = (Union, types.UnionType)


@dataclass(frozen=True)
class SchemaSlot:
    """A position in the schema: its type, its limits and its field."""

    root: type[BaseModel]
    annotation: Any
    info: FieldInfo | None = None
    metadata: tuple[Any, ...] = field(default=())

    @property
    def options(self) -> tuple[Any, ...]:
        """The allowed types, without null."""
        if get_origin(self.annotation) in _UNION:
            return tuple(a for a in get_args(self.annotation) if a is not type(None))
        return (self.annotation,)

    @property
    def optional(self) -> bool:
        return type(None) in get_args(self.annotation) and get_origin(self.annotation) in _UNION

    @property
    def model(self) -> type[BaseModel] | None:
        """The mapping with fixed keys at this position, or None."""
        for option in self.options:
            if isinstance(option, type) and issubclass(option, BaseModel):
                return option
        return None

    @property
    def fields(self) -> dict[str, FieldInfo]:
        return dict(self.model.model_fields) if self.model else {}

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(
            str(value)
            for option in self.options
            if get_origin(option) is Literal
            for value in get_args(option)
        )

    @property
    def takes_text(self) -> bool:
        """True if plain text is used literally, not parsed as YAML."""
        return all(
            _plain(o) in (str, Path, RepositoryUri) or get_origin(o) is Literal
            for o in self.options
        )

    def below(self, part: str | int) -> SchemaSlot | None:
        """The position under ``part`` (a field, a mapping's key or a list's index)."""
        if self.model is not None:
            info = self.model.model_fields.get(str(part))
            if info is None or isinstance(part, int):
                return None
            return SchemaSlot(self.root, info.annotation, info, tuple(info.metadata))
        for option in self.options:
            origin, args = get_origin(option), get_args(option)
            if origin is dict and isinstance(part, str):
                return _slot(self, args[1])
            if origin is list and isinstance(part, int):
                return _slot(self, args[0])
        return None


def _slot(parent: SchemaSlot, annotation: Any) -> SchemaSlot:
    if get_origin(annotation) is Annotated:
        base, *metadata = get_args(annotation)
        return SchemaSlot(parent.root, base, parent.info, tuple(metadata))
    return SchemaSlot(parent.root, annotation, parent.info)


def _plain(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def walk(root: type[BaseModel], loc: KeyPath) -> tuple[SchemaSlot, KeyPath]:
    """The deepest position that ``loc`` leads to, and its real path.

    pydantic puts union members and ``[key]`` into its locations; these are dropped. An unknown key
    ends the walk and stays the last part of the path."""
    slot = SchemaSlot(root, root)
    path: KeyPath = ()
    for part in loc:
        if part == "[key]":
            break
        below = slot.below(part)
        if below is None:
            if slot.model is not None:
                return slot, (*path, part)
            break
        slot, path = below, (*path, part)
    return slot, path


def is_secret(slot: SchemaSlot) -> bool:
    """True if the value is, or may contain, a secret."""
    if slot.info is not None and slot.info.repr is False:
        return True
    return any(is_secret(child) for _, child in children(slot))


def children(slot: SchemaSlot) -> Iterator[tuple[str, SchemaSlot]]:
    """The positions directly below: fields, ``*`` for a mapping's values, ``[]`` for a list's items."""
    for name in slot.fields:
        below = slot.below(name)
        if below is not None:
            yield name, below
    for option in () if slot.model else slot.options:
        origin = get_origin(option)
        if origin in (dict, list):
            yield "*" if origin is dict else "[]", _slot(slot, get_args(option)[-1])


def settings_of(
    root: type[BaseModel], closed: tuple[type[BaseModel], ...] = ()
) -> Iterator[tuple[str, SchemaSlot]]:
    """All settings of ``root`` by dotted key, in the order of the schema.

    ``*`` stands for a name in a mapping, ``[]`` for an item of a list. An optional section precedes its
    settings. The sections ``closed`` are described separately, and are not entered."""

    def visit(key: str, slot: SchemaSlot) -> Iterator[tuple[str, SchemaSlot]]:
        below = [
            (name, child) for name, child in children(slot) if name.isidentifier() or child.model
        ]
        if not below or slot.model in closed:
            yield key, slot
            return
        if key and not key.endswith(("*", "[]")) and (slot.optional or slot.model is None):
            yield key, slot
        for name, child in below:
            yield from visit(key + name if name == "[]" or not key else f"{key}.{name}", child)

    return visit("", SchemaSlot(root, root))


def describe(slot: SchemaSlot) -> str:
    """Describe the expected value, as in `a whole number from 0 to 65535`."""
    words: list[str] = []
    for option in slot.options:
        if get_origin(option) is Literal:
            words += [str(value) for value in get_args(option)]
        else:
            words.append(_describe_one(_plain(option), (*slot.metadata, *_extra(option))))
    if slot.optional:
        words.append("null")
    *most, last = dict.fromkeys(words)
    return f"{', '.join(most)} or {last}" if most else last


def _extra(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()


def _describe_one(annotation: Any, metadata: tuple[Any, ...]) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is list:
        return f"a list of {_plural(args[0])}"
    if origin is dict:
        return f"a mapping from {_plural(args[0])} to {_plural(args[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a mapping with {', '.join(list(annotation.model_fields)[:6])}"
    if annotation is bool:
        return "true or false"
    if annotation in (int, float):
        kind = "a whole number" if annotation is int else "a number"
        return kind + _range(metadata)
    if annotation is Path:
        return "a path"
    if annotation is RepositoryUri:
        return "a URI"
    return "text" + _text_rule(metadata)


def _plural(annotation: Any) -> str:
    inner = _plain(annotation)
    if isinstance(inner, type) and issubclass(inner, BaseModel):
        return f"mappings with {', '.join(list(inner.model_fields)[:6])}"
    names = {int: "whole numbers", float: "numbers", str: "names", Path: "paths", Any: "values"}
    return names.get(inner, "values")


def _range(metadata: tuple[Any, ...]) -> str:
    low = high = ""
    for rule in _single(metadata):
        if isinstance(rule, limits.Ge):
            low = f" from {_number(rule.ge)}"
        elif isinstance(rule, limits.Gt):
            low = f" above {_number(rule.gt)}"
        elif isinstance(rule, limits.Le):
            high = (
                f" to {_number(rule.le)}"
                if low.startswith(" from")
                else f" up to {_number(rule.le)}"
            )
    return low + high


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _single(metadata: tuple[Any, ...]) -> Iterator[Any]:
    """The single rules; a `Field` has several."""
    for rule in metadata:
        yield from getattr(rule, "metadata", (rule,))


def _text_rule(metadata: tuple[Any, ...]) -> str:
    for rule in _single(metadata):
        pattern = getattr(rule, "pattern", None)
        if pattern == ADDRESS_PATTERN:
            return " like host:port, without a scheme or a user"
        if pattern == PEER_PATTERN:
            return " like http://host:port, without a path or a user"
        if pattern == NAME_PATTERN:
            return " of 1 to 120 of the characters a-z A-Z 0-9 _ -"
        if pattern == KEY_PATTERN:
            return " of 16 to 512 printable ASCII characters without spaces"
        if pattern:
            return f" that matches {pattern}"
    return ""


def describe_value(value: Any, secret: bool = False) -> str:
    """Describe a value briefly; of a secret, only its type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list):
        kind = f"a list of {len(value)}"
        text = str(value)
        return kind if secret or len(text) > 60 else text
    if secret:
        return f"{'text' if isinstance(value, str) else 'a number'} (not shown: it may be a secret)"
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
