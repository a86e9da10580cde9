"""Every `hps` command and option that a message, a help text or a page names exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hps.cli.main import COMMANDS, _load, app

ROOT = Path(__file__).parents[3]
CODE = [p for folder in ("hps", "services", "tools", "examples", "benchmarks")
        for p in ROOT.glob(f"{folder}/**/*.py")]  # fmt: skip
PAGES = [
    page
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md", "helm/**/*", "deploy/**/*", "tools/*",
                    "docker-compose.yml", "Makefile", "Dockerfile", ".env.example")
    for page in ROOT.glob(pattern)
    if page.suffix in (".md", ".yaml", ".yml", ".tpl", ".txt", ".sh", ".json", "")
    and page.is_file()
]  # fmt: skip
SPAN = re.compile(r"`+([^`]+)`+")
IN_PROSE = re.compile(r"(?<![\w./@-])hps ([a-z][^\n`]*)")
OF_HPS = {"--help", "-h", "--debug", "--install-completion", "COMMAND"}


def strings(path: Path) -> Iterator[str]:
    """Every string of a program; ``X`` replaces formatted values."""
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts |= {id(part) for part in node.values}
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield "" if id(node) in parts else node.value


def named(text: str) -> Iterator[tuple[str, str]]:
    """Text after each `hps`, and its kind of place: in ``code``, at the beginning of a ``line``, or
    within ``prose``."""
    for span in SPAN.finditer(text):
        if span[1].startswith("hps "):
            yield span[1][4:], "code"
    for line in SPAN.sub(" ` ", text).splitlines():
        line = line.strip().removeprefix("$ ")
        if line.startswith("hps "):
            yield line[4:], "line"
        else:
            yield from ((found[1], "prose") for found in IN_PROSE.finditer(line))


@cache
def command(name: str) -> Any:
    return _load(name)


@cache
def sub_commands() -> set[str]:
    groups = [command(name) for name, entry in COMMANDS.items() if entry.group]
    return {"list", "show", "all", *(sub for group in groups for sub in group.commands)}


def unknown(words: str, where: str) -> str:
    """Parts of a command line that do not exist."""
    first, *rest = (word.strip(".,:;()'\"[]…") for word in words.split())
    if first not in COMMANDS:
        return first if where == "code" and first and first not in OF_HPS else ""
    node = command(first)
    if COMMANDS[first].group:
        if not rest or not re.fullmatch(r"[a-z][a-z|-]*", rest[0]):
            return ""
        chosen = rest.pop(0).split("|")
        absent = [name for name in chosen if name not in node.commands]
        if absent or len(chosen) > 1:
            return f"{first} {absent[0]}" if absent else ""
        node = node.commands[chosen[0]]
    takes = any(each.param_type_name == "argument" for each in node.params)
    if rest and not takes and rest[0] in sub_commands():
        return f"{first} … {rest[0]}"
    options = {each for param in node.params for each in (*param.opts, *param.secondary_opts)}
    own = re.split(r" [|#&>]|  +", words)[0] if where != "prose" else ""
    given = [word.partition("=")[0] for word in own.split() if re.match(r"--[a-z]", word)]
    return next((f"{first} … {each}" for each in given if each not in options | OF_HPS), "")


def test_unknown_commands_and_options_are_found() -> None:
    text = "see `hps stoer ls`, `hps store lst`, `hps serve --worker 2`; hps updates dlq list shows them"
    unknown_names = [unknown(words, where) for words, where in named(text)]
    assert unknown_names == ["stoer", "store lst", "serve … --worker", "updates … list"]


@pytest.mark.parametrize("of", ["code", "pages"])
def test_every_named_command_exists(of: str) -> None:
    files = CODE if of == "code" else PAGES
    count, wrong = 0, []
    for path in files:
        for text in strings(path) if of == "code" else [path.read_text()]:
            for words, where in named(text):
                count += 1
                if missing := unknown(words, where):
                    wrong.append(f"{path.relative_to(ROOT)}: hps {words[:60]}: no {missing}")
    assert wrong == []
    assert count > 100


def commands() -> Iterator[list[str]]:
    for name, entry in COMMANDS.items():
        if entry.group:
            yield from ([name, each] for each in _load(name).commands)
        else:
            yield [name]


def test_help_fits_80_columns_and_shows_no_deprecated_argument() -> None:
    wide, deprecated = [], []
    for words in commands():
        shown = CliRunner(env={"COLUMNS": "80"}).invoke(app, [*words, "--help"]).output
        wide += [(words, line) for line in shown.splitlines() if len(line) > 80]
        deprecated += [words for _ in re.finditer(r"\[(second|urls)\]", shown)]
    assert (wide, deprecated) == ([], [])
