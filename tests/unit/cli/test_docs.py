"""docs/command-line.md names every command."""

from __future__ import annotations

from pathlib import Path

from hps.cli.main import COMMANDS

PAGE = Path(__file__).parents[3] / "docs" / "command-line.md"


def test_every_command_is_in_the_page() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `hps ")]
    assert [row.split("`")[1].removeprefix("hps ") for row in rows] == list(COMMANDS)
