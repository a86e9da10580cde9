"""Options of a command as frozen dataclasses: one command's, or a group that several commands share.

A field made by `option` or `argument` is a parameter of the command, and the field's docstring is its
help. Typer itself reads options from the signature of a function, one parameter per option."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, field, fields, is_dataclass
from itertools import pairwise
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand

_TYPER = "typer"
Command = TypeVar("Command", bound=Callable[..., Any])


def option(default: Any = MISSING, *flags: str, **attributes: Any) -> Any:
    """A field that is an option: its default, its flags and other arguments of ``typer.Option``.

    The flag defaults to the field's name, for booleans too: ``typer.Option`` would add ``--no-NAME``."""
    return field(default=default, metadata={_TYPER: (typer.Option, flags, attributes)})


def argument(default: Any = MISSING, **attributes: Any) -> Any:
    """A field that is an argument: its default and the arguments of ``typer.Argument``."""
    return field(default=default, metadata={_TYPER: (typer.Argument, (), attributes)})


class CommandApp(typer.Typer):
    """A Typer whose commands may take dataclasses of options; see `expand_options`."""

    def command(self, *names: Any, **attributes: Any) -> Callable[[Command], Command]:
        def register(function: Command) -> Command:
            kind: Any = functools.partial(_DocumentedCommand, function)
            super(CommandApp, self).command(*names, cls=kind, **attributes)(
                expand_options(function)
            )
            return function

        return register


class _DocumentedCommand(TyperCommand):
    """A command that reads its options' help from the fields of ``function`` only to print it.

    Reading parses source files, which takes milliseconds a module."""

    def __init__(self, function: Callable[..., Any], **attributes: Any) -> None:
        super().__init__(**attributes)
        self._function = function

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._read_help()
        super().format_help(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        self._read_help()
        return super().shell_complete(ctx, incomplete)

    def _read_help(self) -> None:
        docs = dict(_option_docs(get_type_hints(self._function).values()))
        for each in self.params:
            parameter: Any = each
            if parameter.help is None:
                parameter.help = docs.get(parameter.name)


def expand_options(function: Callable[..., None]) -> Callable[..., None]:
    """Replace parameters that are dataclasses by their fields, in the order of declaration.

    The arguments of a base class come first, its options last.
    Other fields than those of `option` and `argument` are ``Annotated[..., typer.Option(...)]`` or another
    dataclass. Field names must be unique in the command, since Typer derives option names and metavars
    from them; raises ValueError otherwise."""
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
    for each in sorted(fields(hint), key=lambda each: _rank(hint, each)):
        default = inspect.Parameter.empty if each.default is MISSING else each.default
        yield from _parameters(each.name, _annotation(hint, each, hints[each.name]), default)


def _rank(owner: Any, each: Field[Any]) -> int:
    """Sort key: 0 for arguments, then options, those of base classes last."""
    kind, _, _ = each.metadata.get(_TYPER, (None, (), {}))
    if kind is typer.Argument:
        return 0
    return next(
        i
        for i, base in enumerate(owner.__mro__, 1)
        if each.name in vars(base).get("__annotations__", {})
    )


def _annotation(owner: Any, each: Field[Any], hint: Any) -> Any:
    """The field's type with Typer's description of the parameter."""
    if _TYPER not in each.metadata:
        return hint
    kind, flags, attributes = each.metadata[_TYPER]
    if kind is typer.Option and not flags:
        flags = (f"--{each.name.replace('_', '-')}",)
    return Annotated[hint, kind(*flags, **attributes)]


def _option_docs(hints: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Names and docstrings of the fields of dataclasses and of their groups; derived classes last."""
    owners: list[Any] = [hint for hint in hints if is_dataclass(hint)]
    for owner in owners:
        yield from _option_docs(get_type_hints(owner).values())
        for base in reversed(owner.__mro__[:-1]):
            yield from _field_docs(base.__module__).get(base.__name__, {}).items()


@functools.cache
def _field_docs(module: str) -> Mapping[str, Mapping[str, str]]:
    """Docstrings of the fields of a module's classes, on one line each; empty without its source."""
    source = sys.modules[module]
    tree = ast.parse("".join(linecache.getlines(source.__file__ or "", vars(source))))
    return {
        node.name: {
            each.target.id: " ".join(doc.value.value.split())
            for each, doc in pairwise(node.body)
            if isinstance(each, ast.AnnAssign)
            and isinstance(each.target, ast.Name)
            and isinstance(doc, ast.Expr)
            and isinstance(doc.value, ast.Constant)
            and isinstance(doc.value.value, str)
        }
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


def _value(name: str, hint: Any, values: Mapping[str, Any]) -> Any:
    if not is_dataclass(hint):
        return values[name]
    hints = get_type_hints(hint, include_extras=True)
    made: Any = hint
    return made(**{each.name: _value(each.name, hints[each.name], values) for each in fields(hint)})
