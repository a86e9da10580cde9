"""Tests of command output: tables, JSON, one-line errors, progress of slow work."""

from __future__ import annotations

import io
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from hps.cli import main, progress, tables
from hps.cli.main import COMMANDS, app, exit_code
from hps.cli.progress import ConsoleProgress
from hps.errors import BadRequest, ConfigError, ModelError, NotFound, TierError, Unavailable
from hps.tools import output
from tests.support.waiting import until

run = CliRunner().invoke


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_help_is_quick_and_lists_every_command() -> None:
    """CPU time, which other work on the machine does not stretch."""
    best = 9.0
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-m", "hps.cli.main", "--help"],
            capture_output=True,
            text=True,
            check=True,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        best = min(best, took)
    for name in COMMANDS:
        assert f"  {name} " in done.stdout
    assert best < 0.5, f"hps --help took {best:.2f} s"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_with_an_example(name: str) -> None:
    """And every option says what it is for."""
    loaded = main._load(name)
    sub = [[name, each] for each in loaded.commands] if COMMANDS[name].group else [[name]]
    for words in sub:
        result = run(app, [*words, "--help"])
        assert result.exit_code == 0, result.output
        assert "--install-completion" not in result.output
        assert f"hps {' '.join(words)}" in result.output.split("Options:")[1], words
        command = loaded.commands[words[1]] if COMMANDS[name].group else loaded
        command.get_help(typer.Context(command))
        for option in command.params:
            documented = option.param_type_name == "argument" or option.hidden or option.help
            assert documented, (words, option.opts)


@pytest.mark.parametrize("words", [[], *([name] for name in COMMANDS if COMMANDS[name].group)])
def test_command_lists_are_complete(words: list[str]) -> None:
    assert "..." not in run(app, [*words, "--help"]).output.replace("[ARGS]...", "")


def test_mistyped_command_gets_a_suggestion() -> None:
    result = run(app, ["lokup"])
    assert result.exit_code == 2
    assert "Did you mean 'lookup'?" in result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (ModelError("x"), 2),
        (NotFound("x"), 2),
        (TierError("rocksdb", "x"), 2),
        (Unavailable("x"), 1),
        (BadRequest("x"), 1),
    ],
)
def test_exit_codes(error, code) -> None:
    assert exit_code(error) == code


def test_an_error_is_one_line_on_stderr() -> None:
    result = run(app, ["predict", "m"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: give one of a file")
    assert result.stderr.count("\n") == 1
    with pytest.raises(ConfigError):
        run(app, ["--debug", "predict", "m"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["bench", "--rate", "many"], "hps bench: Invalid value for '--rate'"),
        (["bench", "--duration", "inf"], "hps bench: Invalid value for '--duration'"),
        (["top", "--interval", "nan"], "hps top: Invalid value for '--interval'"),
        (["predict"], "hps predict: Missing argument"),
        (["model", "impotr"], "hps model: No such command 'impotr'"),
        (["--nothing"], "hps: No such option: --nothing; see hps --help"),
    ],
)
def test_invalid_command_line_is_one_line(words: list[str], says: str) -> None:
    result = run(app, words)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "; see hps" in result.stderr
    assert result.stderr.count("\n") == 1


def test_every_configuration_mistake_has_a_line(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("sever: {}\nserver:\n  drain_s: 1\n  drain_s: 2\n")
    result = run(app, ["serve", "--config", str(path)])
    assert result.exit_code == 2
    assert [line.split(": ")[1:3] for line in result.stderr.splitlines()] == [
        [f"{path}:1", "sever"],
        [f"{path}:4:3", "duplicate key 'drain_s', also on line 3"],
    ]
    result = run(app, ["doctor", "--config", str(path), "--output", "json"])
    assert [c["found"].startswith(str(path)) for c in json.loads(result.stdout)[-2:]] == [True] * 2


def test_json_output(capsys: pytest.CaptureFixture[str]) -> None:
    data = {"a": np.arange(2), "b": np.float32(0.5), "c": Path("x"), "d": 2**64 - 1, 5: None}
    output.print_json(data)
    text = capsys.readouterr().out
    assert json.loads(text) == {"a": [0, 1], "b": 0.5, "c": "x", "d": 2**64 - 1, "5": None}
    assert text.count("\n") == 1


def test_piped_tables_are_not_folded_or_coloured(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table(("name", "rows"), [("x" * 300, output.count(5)), ("y", output.count(12345))])
    lines = capsys.readouterr().out.splitlines()
    assert [len(line.rstrip()) for line in lines[1:]] == [len(lines[1].rstrip())] * 2
    assert lines[2].rstrip().endswith("12,345")
    assert "\x1b" not in "".join(lines)


def printed(width: int, print_it: Callable[[], None]) -> list[str]:
    """The lines on a terminal of ``width`` columns."""
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "console", lambda: console)
        print_it()
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (80, ["table", "bytes", "kind", "state"]),
        (60, ["table", "bytes", "kind"]),
        (40, ["table", "bytes"]),
    ],
)
def test_narrow_terminal_drops_optional_columns(width: int, shown: list[str]) -> None:
    rows = [("t" * 20, output.size(1_234), "x" * 20, "y" * 20)] * 2
    columns = ("table", "bytes", "kind", "state")
    lines = printed(width, lambda: output.print_table(columns, rows, optional=("state", "kind")))
    assert lines[0].split() == shown
    assert len(lines) == 3


def test_numbers_are_not_split_over_lines() -> None:
    rows = [("x" * 40, output.FormattedNumber("1,537 (203.2 kB)"))]
    lines = printed(30, lambda: output.print_table(("name", "rows"), rows))
    assert "1,537 (203.2 kB)" in lines[1]
    assert max(map(len, lines)) <= 30


def test_tables_with_a_shared_tier_fit_80_columns() -> None:
    row = {
        "model": "ctr", "version": 12, "table": "description", "dim": 128, "row_format": "float32",
        "rows": 123_456_789, "rows_approximate": True, "bytes": 234_567_890_123,
        "cached_rows": 123_456_789, "miss_policy": "wait",
        "shared": {
            "redis": {"rows": 12_345_678, "rows_approximate": True, "bytes": 123_456_789}
        },
    }  # fmt: skip
    lines = printed(80, lambda: tables.show([row, row]))
    assert len(lines) == 3, lines
    assert "~12,345,678 (123.5 MB)" in lines[1]


def test_colours_on_a_terminal_and_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stderr", Terminal())
    output.print_problem("broken\nvery")
    assert "\x1b[" in sys.stderr.getvalue()
    assert "broken; very" in sys.stderr.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stderr", Terminal())
    output.print_problem("broken")
    assert "\x1b[31" not in sys.stderr.getvalue()


def test_readable_numbers() -> None:
    assert output.size(999) == "999 B"
    assert output.size(1_234) == "1.2 kB"
    assert output.size(999_960) == "1.0 MB"
    assert output.size(None) == "-"
    assert output.count(1234567) == "1,234,567"
    assert output.plural(1, "table") == "1 table"
    assert output.plural(1234, "key") == "1,234 keys"
    assert output.percentage(1, 3) == "33.3 %"
    assert output.percentage(0, 0) == "-"
    assert output.age(12.9) == "12 s"
    assert output.age(184) == "3 min 4 s"
    assert output.age(7_800) == "2 h 10 min"
    assert output.age(5 * 86_400 + 3 * 3_600) == "5 d 3 h"


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_quick_work_shows_no_progress(stream) -> None:
    out = stream()
    with ConsoleProgress(out, delay_s=60).task("Loading", 10) as advance:
        advance(10)
    assert out.getvalue() == ""


def test_slow_work_in_a_pipe_prints_periodic_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    out, now = io.StringIO(), 0.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now))
    with ConsoleProgress(out, delay_s=2, every_s=5).task("Loading t", 3000) as advance:
        for _ in range(30):
            now += 1
            advance(100)
    lines = out.getvalue().splitlines()
    assert 2 <= len(lines) <= 8
    assert lines[0].startswith("Loading t: ")
    assert lines[0].endswith(" of 3,000 rows")
    assert lines[-1] == "Loading t: 3,000 of 3,000 rows in 30 s"


def test_progress_bar_appears_before_the_first_step_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    progress = ConsoleProgress(out, delay_s=0.02)
    with progress.task("Loading", 2_000, "bytes") as advance, progress.task("Other", 1):
        until(lambda: "0 B of 2.0 kB" in out.getvalue())
        advance(2_000)
        until(lambda: "2.0 kB of 2.0 kB" in out.getvalue())
        until(lambda: "Other" in out.getvalue())
    assert "Loading" in out.getvalue()


def test_errors_in_the_work_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    for out in (Terminal(), io.StringIO()):
        with pytest.raises(StopIteration), ConsoleProgress(out, delay_s=0).task("L", 1):
            next(iter(()))
