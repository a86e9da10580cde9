"""Every command that connects to a server takes --server; deprecated forms still work."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from hps.cli.main import app
from hps.cli.options import former_target, former_urls
from hps.errors import ConfigError

NOWHERE = "http://127.0.0.1:1"
ADMIN_COMMANDS = [
    ["tables"],
    ["status"],
    ["hotkeys"],
    ["lookup", "m", "t", "1"],
    ["updates", "status"],
    ["updates", "pause"],
    ["updates", "resume"],
    ["updates", "seek", "t", "0", "0"],
    ["store", "checkpoint"],
]
OTHERS = [["predict", "m", "--json", "{}"], ["bench", "m"], ["profile", "m"], ["conformance"]]


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, [*words])
    return done.exit_code, done.stderr


@pytest.mark.parametrize("flag", ["--server", "-s"])
@pytest.mark.parametrize("words", [*ADMIN_COMMANDS, *OTHERS], ids=" ".join)
def test_command_connects_to_the_given_server(words: list[str], flag: str) -> None:
    code, stderr = run(*words, flag, NOWHERE)
    assert (code, NOWHERE.removeprefix("http://") in stderr) == (1, True), stderr
    assert "deprecated" not in stderr


@pytest.mark.parametrize("flag", ["--admin", "-a"])
@pytest.mark.parametrize("words", ADMIN_COMMANDS, ids=" ".join)
def test_deprecated_admin_option_works_with_a_warning(words: list[str], flag: str) -> None:
    code, stderr = run(*words, flag, NOWHERE)
    assert (code, NOWHERE in stderr) == (1, True), stderr
    assert "warning: --admin URL is deprecated; give --server URL instead" in stderr


@pytest.mark.parametrize(
    "words",
    [
        ["top", NOWHERE, "--once", "--interval", "0.1"],
        ["bench", NOWHERE, "m"],
        ["profile", NOWHERE, "m"],
        ["conformance", NOWHERE],
    ],
    ids=lambda words: words[0],
)
def test_deprecated_address_argument_works_with_a_warning(words: list[str]) -> None:
    code, stderr = run(*words)
    assert code == 1
    assert f"the argument {NOWHERE} is deprecated; give --server URL instead" in stderr


@pytest.mark.parametrize("words", [*ADMIN_COMMANDS, *OTHERS, ["top"], ["doctor"]], ids=" ".join)
def test_help_shows_no_deprecated_option(words: list[str]) -> None:
    names = words[:2] if words[0] in ("updates", "store") else words[:1]
    shown = CliRunner().invoke(app, [*names, "--help"]).stdout
    assert "--server" in shown
    assert "--admin" not in shown
    assert "[SECOND]" not in shown
    assert "[URLS]" not in shown


def test_argument_that_looks_like_an_address_or_a_file_is_a_target() -> None:
    assert former_target(None, None) == (None, None)
    assert former_target("clicks.lookup", None) == (None, "clicks.lookup")
    assert former_target("localhost:8000", "m") == ("localhost:8000", "m")
    assert former_target("config.yaml", None) == ("config.yaml", None)
    with pytest.raises(ConfigError, match="expected one model"):
        former_target("m", "n")


def test_addresses_of_both_spellings_are_joined() -> None:
    assert former_urls(None, None) == []
    assert former_urls(["a"], ["b"]) == ["a", "b"]
