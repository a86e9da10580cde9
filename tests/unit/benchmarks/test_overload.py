"""How the overload benchmark judges a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import overload_defaults
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
    bars = {bar.name: bar for bar in BARS}
    return {name: bars[name].verdict(value) for name, value in report.values.items()}


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


class Default:
    """A load on a server whose capacity is 100. Below, it refuses one request in 100; above, it answers 95 a
    second in time and 5 late, and refuses the others."""

    def capacity(self, seconds: float) -> Seen:
        return Seen([200] * 100, [0.01] * 100, [0.0] * 100, 1.0)

    def open(self, arrivals: list[float]) -> Seen:
        if len(arrivals) < 2_000:
            return seen(99, 1)
        seconds = 8
        statuses = ([200] * 100 + [503] * 300) * seconds
        latencies = ([0.1] * 95 + [0.6] * 5 + [0.001] * 300) * seconds
        ends = [second + 0.5 for second in range(seconds) for _ in range(400)]
        return Seen(statuses, latencies, [0.0] * len(statuses), float(seconds), ends)


def test_answers_in_time_are_counted_from_an_overloads_third_second_on() -> None:
    load: Any = Default()
    turns = overload_defaults.in_turns(load, 2, 8.0)
    assert turns.refused == pytest.approx(0.01)
    assert turns.goodput == pytest.approx(0.95)


def test_a_generator_that_has_not_kept_up_fails() -> None:
    load: Any = Default()
    load.open = lambda arrivals: Seen([200], [0.7], [0.6], 1.0, [1.0])
    with pytest.raises(RuntimeError, match=r"sent 0\.60 s late"):
        overload_defaults.in_turns(load, 1, 8.0)


def test_two_runs_as_one_have_their_ends_one_after_the_other() -> None:
    one = Seen([200], [0.1], [0.0], 2.0, [1.5])
    assert (one + one).ends == [1.5, 3.5]
