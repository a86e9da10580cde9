"""How the overload benchmark judges a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.common import Report
from benchmarks.open_loop import Seen
from benchmarks.overload import BARS, record

WATCH: Any = SimpleNamespace(growth=1.0, health_s=[0.001], rss=[1])


def seen(answers: int, refusals: int = 0, latency: float = 0.01) -> Seen:
    """In one second."""
    count = answers + refusals
    return Seen([200] * answers + [503] * refusals, [latency] * count, [0.0] * count, 1.0)


def judged(before: Seen, after: Seen, run: Seen) -> dict[str, str]:
    report = Report()
    record(report, "rest", before, after, run, WATCH)
    return {bar.name: bar.verdict(report.values[bar.name]) for bar in BARS if "rest" in bar.name}


def test_a_run_is_judged_by_the_capacity_around_it() -> None:
    assert set(judged(seen(100), seen(100), seen(95, 305)).values()) == {"met"}
    assert set(judged(seen(100), seen(90), seen(86, 314)).values()) == {
        "met"
    }  # the machine's drift
    assert judged(seen(100), seen(120), seen(95, 305))["goodput_rest"] == "MISSED"
    slower = judged(seen(100), seen(80), seen(85, 315))  # 0.94 of the mean
    assert slower["recovery_rest"] == "MISSED"
    late = judged(seen(100), seen(100, latency=0.1), seen(95, 305, latency=0.03))
    assert late["p99_rest"] == "MISSED"


def test_a_run_that_was_asked_for_less_fails() -> None:
    judged(seen(100), seen(100), seen(95, 286))
    with pytest.raises(RuntimeError, match=r"3\.79 times of 100"):
        judged(seen(100), seen(100), seen(95, 284))
