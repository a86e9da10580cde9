"""Every command is in the documentation, and every command line in a page or help parses."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from hps.cli.main import COMMANDS, _load, app

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "command-line.md"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
_BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
# A command of ours up to a comment, after a # or two spaces, or up to whatever takes its output.
_LINE = re.compile(r"^(\$ )?(hps .*?)(?:\s+#.*|  .*|\s*[|>&;].*)?$", re.MULTILINE)


def test_every_command_is_in_the_command_line_page() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `hps ")]
    assert [row.split("`")[1].removeprefix("hps ") for row in rows] == list(COMMANDS)


def shown(text: str) -> Iterator[str]:
    """The command lines; in a block with prompts, those after one. Lines with `…` are left out."""
    prompt = re.compile(r"^\$ ", re.MULTILINE)
    for prompted, line in _LINE.findall(re.sub(r" *\\\n *", " ", text)):
        if (prompted or not prompt.search(text)) and "…" not in line and "..." not in line:
            yield line


def parse(line: str) -> None:
    """Parse the line as the command line does, with subcommands, and run nothing."""
    try:
        _parse(typer.main.get_command(app), shlex.split(line)[1:])
    except Exception as error:
        if getattr(error, "exit_code", 2):  # 0: --help
            raise AssertionError(f"{line}: {error}") from None


def _parse(command: Any, words: list[str]) -> None:
    context = command.make_context(command.name, list(words))
    if hasattr(command, "commands") and (rest := [*context._protected_args, *context.args]):
        _, chosen, more = command.resolve_command(context, rest)
        _parse(chosen, more)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_line_of_a_page_parses(page: Path) -> None:
    for block in _BLOCK.findall(page.read_text()):
        for line in shown(block):
            parse(line)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_example_of_a_commands_help_parses(name: str) -> None:
    command = _load(name)
    every = [command, *getattr(command, "commands", {}).values()]
    for each in every:
        for line in shown(re.sub(r"^ +", "", each.epilog or "", flags=re.MULTILINE)):
            parse(line)
