"""How the overload benchmark judges a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.common import Report
from benchmarks.open_loop import Seen
from benchmarks.overload import BARS, in_turns, record

WATCH: Any = SimpleNamespace(growth=1.0, health_s=[0.001], rss=[1])


def seen(answers: int, refusals: int = 0, latency: float = 0.01) -> Seen:
    """In one second."""
    count = answers + refusals
    return Seen([200] * answers + [503] * refusals, [latency] * count, [0.0] * count, 1.0)


def judged(before: Seen, after: Seen, minute: Seen, by_turns: Seen | None = None) -> dict[str, str]:
    report = Report()
    record(report, "rest", before, by_turns or minute, minute, after, WATCH)
    return {bar.name: bar.verdict(report.values[bar.name]) for bar in BARS if "rest" in bar.name}


def test_a_run_is_judged_by_capacity() -> None:
    assert set(judged(seen(100), seen(100), seen(95, 305)).values()) == {"met"}
    # In the minute itself the machine may be slower.
    drifted = judged(seen(100), seen(90), seen(80, 320), seen(91, 309))
    assert set(drifted.values()) == {"met"}
    assert judged(seen(100), seen(100), seen(95, 305), seen(89, 311))["goodput_rest"] == "MISSED"
    assert judged(seen(100), seen(80), seen(95, 305))["recovery_rest"] == "MISSED"
    late = judged(seen(100), seen(100, latency=0.1), seen(95, 305, latency=0.03))
    assert late["p99_rest"] == "MISSED"
    wrong = seen(95, 305)
    wrong.statuses[-1] = 500
    assert judged(seen(100), seen(100), seen(95, 305), wrong)["codes_rest"] == "MISSED"


class Server:
    """A load on a server whose capacity is 100 and 50 by turns, and which answers 90 of what it can."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.measured = 0

    def capacity(self, seconds: float) -> Seen:
        self.measured += 1
        return seen(100 if self.measured % 2 else 50) if seconds else Seen()

    def open(self, arrivals: list[float]) -> Seen:
        self.asked.append(len(arrivals))
        return seen(68, 200)


def test_overload_asks_for_four_times_of_the_last_capacity() -> None:
    server: Any = Server()
    able, asked = in_turns(server, 4, 2.0)
    assert [round(count / 200) for count in server.asked] == [4, 2, 4, 2]
    assert (able.goodput, asked.goodput) == (80, 68)


def test_a_run_that_was_asked_for_less_fails() -> None:
    judged(seen(100), seen(100), seen(95, 286))
    with pytest.raises(RuntimeError, match=r"3\.79 times of 100"):
        judged(seen(100), seen(100), seen(95, 284))
