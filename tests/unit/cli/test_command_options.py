"""Dataclasses of options become a command's signature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from hps.cli.command_options import expand_options


@dataclass(frozen=True, kw_only=True)
class Server:
    url: Annotated[str, typer.Option("--server", "-s", metavar="URL")] = "localhost"
    key: Annotated[str | None, typer.Option("--key", envvar="TEST_KEY")] = None


@dataclass(frozen=True, kw_only=True)
class Target:
    server: Server
    batch: Annotated[int, typer.Option(min=1)] = 1


def run(function: object, *words: str, **environment: str) -> tuple[int, str]:
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(function)  # type: ignore[type-var]
    done = CliRunner().invoke(app, words, env=environment)
    return done.exit_code, done.output


@expand_options
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


def test_two_fields_of_one_name_are_refused() -> None:
    def twice(first: Server, second: Server) -> None: ...

    twice.__annotations__ = {"first": Server, "second": Server}
    with pytest.raises(ValueError, match="duplicate parameter name"):
        expand_options(twice)
