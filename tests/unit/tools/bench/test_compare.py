"""Tests of the comparison of two runs by their slices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from hps.cli.main import app
from hps.errors import ConfigError
from hps.tools.bench.compare import compare, unlike
from hps.tools.bench.histogram import LatencyHistogram
from hps.tools.bench.report import report, save
from hps.tools.bench.run import SLICES, BenchResult

OPTIONS = {
    "model": "m",
    "url": "http://x:1",
    "server": "hps",
    "batch": 1,
    "keys": "zipf",
    "concurrency": 8,
}
OPTIONS |= {"rate": None, "arrivals": None, "warmup_s": 0, "connections": None}
OPTIONS |= {"different_requests": 256, "different_keys": 1000}


def a_run(
    seed: int,
    scale: float = 1.0,
    tail: float = 1.0,
    pause: int = -1,
    seconds: float = 10.0,
    reached: int = SLICES,
    **options: Any,
) -> Any:
    """A thousand requests in each slice; ``tail``: how much longer the slowest of them are; ``pause``: a
    slice in which every tenth took ten times as long; ``reached``: slices that there were."""
    random = np.random.default_rng(seed)
    spans = [seconds / SLICES] * reached + [0.0] * (SLICES - reached)
    outcome = BenchResult(seconds=sum(spans), spans=spans, answered=1000 * reached)
    for number in range(reached):
        values = random.lognormal(13, 0.3, 1000) * scale
        values[values > np.quantile(values, 0.98)] *= tail
        if number == pause:
            values[::10] *= 10
        for value in values.astype(int).tolist():
            outcome.slices[number].record(value)
    return report(outcome, {**OPTIONS, **options})


def verdicts(before: Any, after: Any) -> dict[str, str]:
    return {each.name: each.verdict for each in compare(before, after)}


@pytest.mark.parametrize("seed", range(5))
def test_equal_runs_do_not_differ(seed: int) -> None:
    assert set(verdicts(a_run(2 * seed), a_run(2 * seed + 1)).values()) == {"none"}


def test_slower_and_faster_runs_differ_at_every_quantile() -> None:
    times = ["p50", "p90", "p95", "p99", "p99.9"]
    slower, faster = verdicts(a_run(1), a_run(2, 1.3)), verdicts(a_run(1), a_run(2, 0.7))
    assert {slower[name] for name in times} == {"slower"}
    assert {faster[name] for name in times} == {"faster"}


def test_longer_tail_is_reported_at_its_quantile() -> None:
    verdict_of = verdicts(a_run(1), a_run(2, tail=1.5))
    assert (verdict_of["p50"], verdict_of["p99"]) == ("none", "slower")


def test_single_pause_is_not_significant() -> None:
    """For single requests it would be one: there are a hundred of them."""
    assert verdicts(a_run(1), a_run(2, pause=7))["p99.9"] == "none"


def test_throughput_is_compared_only_for_closed_loops() -> None:
    before, after = a_run(1), a_run(2)
    for each in after["histograms"]["slices"]:
        each[:] = [(number, 2 * count) for number, count in each]
    after["requests_per_s"] *= 2
    assert verdicts(before, after)["requests/s"] == "faster"
    assert "requests/s" not in verdicts(a_run(1, rate=100.0), a_run(2, rate=100.0))


def test_longer_run_is_not_faster() -> None:
    """Twice as many requests in twice the time."""
    before, after = a_run(1), a_run(2, seconds=20.0)
    for each in after["histograms"]["slices"]:
        each[:] = [(number, 2 * count) for number, count in each]
    after["requests_per_s"] = before["requests_per_s"]
    assert verdicts(before, after)["requests/s"] == "none"


def test_stalled_server_is_slower() -> None:
    """Half of the slices have no answer at all."""
    before, after = a_run(1), a_run(2)
    for number in range(0, SLICES, 2):
        after["histograms"]["slices"][number] = []
    after["requests_per_s"] /= 2
    assert verdicts(before, after)["requests/s"] == "slower"


def test_too_short_run_is_rejected() -> None:
    with pytest.raises(ConfigError, match="answers in 3 of its 3 parts"):
        compare(a_run(1), a_run(2, reached=3))


def test_run_interrupted_late_is_compared() -> None:
    assert set(verdicts(a_run(1), a_run(2, reached=15)).values()) == {"none"}


def test_different_settings_are_reported() -> None:
    assert unlike(a_run(1), a_run(2, batch=64)) == ["batch was 1, is 64"]


def test_run_without_answers_is_rejected() -> None:
    with pytest.raises(ConfigError, match="without an answer"):
        compare(a_run(1), report(BenchResult(), OPTIONS))
    assert LatencyHistogram().counts == {}


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[str, Any], str]:
    def keep(name: str, data: Any) -> str:
        save(tmp_path / name, data)
        return str(tmp_path / name)

    return keep


def test_command_prints_a_line_per_quantile(saved: Callable[[str, Any], str]) -> None:
    files = saved("a.json", a_run(1)), saved("b.json", a_run(2, 1.1, batch=2))
    result = CliRunner().invoke(app, ["bench", "--compare", *files])
    assert result.exit_code == 0, result.stderr
    assert "95 % for all lines together (Bonferroni), by a block bootstrap of 20 and 20 slices" in (
        result.stdout
    )
    (p99,) = [line for line in result.stdout.splitlines() if line.startswith("p99 ")]
    assert p99.split()[-1] == "slower"
    assert "not alike: batch was 1, is 2" in result.stderr


@pytest.mark.parametrize("text", ["", "{}", '{"format": "hps-bench-9"}'])
def test_invalid_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    files = [str(tmp_path / "a.json")] * 2
    result = CliRunner().invoke(app, ["bench", "--compare", *files])
    assert result.exit_code == 2
    assert "a.json" in result.stderr
    assert len(result.stderr.splitlines()) == 1
