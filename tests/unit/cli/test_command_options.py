"""Dataclasses of options become a command's signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from hps.cli.command_options import CommandApp, argument, expand_options, option


@dataclass(frozen=True, kw_only=True)
class Server:
    url: Annotated[str, typer.Option("--server", "-s", metavar="URL")] = "localhost"
    key: Annotated[str | None, typer.Option("--key", envvar="TEST_KEY")] = None


@dataclass(frozen=True, kw_only=True)
class Target:
    server: Server
    batch: Annotated[int, typer.Option(min=1)] = 1


@dataclass(frozen=True, kw_only=True)
class Declared:
    name: str = argument()
    """Name of the
    model."""
    batch_size: int = option(1, min=1)
    """Samples."""
    dry_run: bool = option(False)
    """Send nothing."""
    kind: str = option("a", "--kind", "-k", help="An explicit help.")
    """Not the help."""


def declared(options: Declared) -> None:
    """Ask a server."""
    print(options)


def annotated(
    name: Annotated[str, typer.Argument(help="Name of the model.")],
    batch_size: Annotated[int, typer.Option(min=1, help="Samples.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Send nothing.")] = False,
    kind: Annotated[str, typer.Option("--kind", "-k", help="An explicit help.")] = "a",
) -> None:
    """Ask a server."""


@dataclass(frozen=True, kw_only=True)
class Derived(Declared):
    file: str = argument()
    """A file."""
    limit: int = option(2)
    """Rows."""
    kind: str = option("b", "--kind", "-k")
    """Replaces the option of the base class."""


def derived(options: Derived) -> None:
    """Ask a server."""


def run(function: Callable[..., None], *words: str, **environment: str) -> tuple[int, str]:
    app = CommandApp(add_completion=False, rich_markup_mode=None)
    app.command()(function)
    done = CliRunner().invoke(app, words, env=environment)
    return done.exit_code, done.output


def ask(
    name: Annotated[str, typer.Argument()],
    *,
    target: Target,
    count: Annotated[int, typer.Option()] = 2,
) -> None:
    """Ask a server."""
    print(name, target, count)


def plain(
    name: Annotated[str, typer.Argument()],
    url: Annotated[str, typer.Option("--server", "-s", metavar="URL")] = "localhost",
    key: Annotated[str | None, typer.Option("--key", envvar="TEST_KEY")] = None,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    count: Annotated[int, typer.Option()] = 2,
) -> None:
    """Ask a server."""


def test_nested_fields_get_their_values() -> None:
    code, output = run(ask, "m", "-s", "a:1", "--batch", "3", TEST_KEY="secret")
    assert code == 0
    assert output == f"m {Target(server=Server(url='a:1', key='secret'), batch=3)} 2\n"


def test_defaults_are_those_of_the_fields() -> None:
    assert run(ask, "m") == (0, f"m {Target(server=Server())} 2\n")


@pytest.mark.parametrize("words", [("--help",), ("m", "--batch", "0"), (), ("m", "--nope")])
def test_help_and_errors_equal_those_of_a_plain_signature(words: tuple[str, ...]) -> None:
    plain.__name__ = ask.__name__  # which the usage line shows
    assert run(ask, *words) == run(plain, *words)


@pytest.mark.parametrize(
    "words", [("--help",), (), ("m", "--no-dry-run"), ("m", "--batch-size", "0")]
)
def test_declared_fields_have_their_names_as_flags_and_docstrings_as_help(
    words: tuple[str, ...],
) -> None:
    annotated.__name__ = declared.__name__
    assert run(declared, *words) == run(annotated, *words)


def test_declared_fields_get_their_values() -> None:
    assert run(declared, "m", "--dry-run", "-k", "b") == (
        0,
        f"{Declared(name='m', batch_size=1, dry_run=True, kind='b')}\n",
    )


def test_inherited_arguments_come_first_and_inherited_options_last() -> None:
    names = list(inspect.signature(expand_options(derived)).parameters)
    assert names == ["name", "file", "kind", "limit", "batch_size", "dry_run"]
    assert "Replaces the option" in run(derived, "--help")[1]


def test_two_fields_of_one_name_are_rejected() -> None:
    def twice(first: Server, second: Server) -> None: ...

    twice.__annotations__ = {"first": Server, "second": Server}
    with pytest.raises(ValueError, match="duplicate parameter name"):
        expand_options(twice)
