"""Options of a command as frozen dataclasses: one command's, or a group that several commands share.

Typer reads a command's options from the signature of a function, one parameter per option."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints


def expand_options(function: Callable[..., None]) -> Callable[..., None]:
    """Replace parameters that are dataclasses by their fields, in the order of declaration.

    A field is ``Annotated[..., typer.Option(...)]`` or another dataclass. Field names must be unique in the
    command, since Typer derives option names and metavars from them; raises ValueError otherwise."""
    hints = get_type_hints(function, include_extras=True)
    given = inspect.signature(function).parameters
    parameters = [
        parameter
        for name in given
        for parameter in _parameters(name, hints[name], given[name].default)
    ]

    @functools.wraps(function)
    def command(**values: Any) -> None:
        function(**{name: _value(name, hints[name], values) for name in given})

    expanded: Any = command
    expanded.__signature__ = inspect.Signature(parameters)
    expanded.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def _parameters(name: str, hint: Any, default: Any) -> Iterator[inspect.Parameter]:
    if not is_dataclass(hint):
        yield inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint
        )
        return
    hints = get_type_hints(hint, include_extras=True)
    for field in fields(hint):
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        yield from _parameters(field.name, hints[field.name], default)


def _value(name: str, hint: Any, values: Mapping[str, Any]) -> Any:
    if not is_dataclass(hint):
        return values[name]
    hints = get_type_hints(hint, include_extras=True)
    made: Any = hint
    return made(
        **{field.name: _value(field.name, hints[field.name], values) for field in fields(hint)}
    )
