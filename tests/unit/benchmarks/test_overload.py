"""Tests of the overload benchmark's verdicts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import overload_defaults
from benchmarks.common import Report
from benchmarks.open_loop import LoadResult
from benchmarks.overload import BARS, OverloadRuns, alternate_with_capacity, record

SAMPLER: Any = SimpleNamespace(growth=1.0, health_s=[0.001], rss=[1])


def load_result(answers: int, rejected: int = 0, latency: float = 0.01) -> LoadResult:
    """A run of one second."""
    count = answers + rejected
    return LoadResult([200] * answers + [503] * rejected, [latency] * count, [0.0] * count, 1.0)


def verdicts(
    before: LoadResult, after: LoadResult, minute: LoadResult, alternating: LoadResult | None = None
) -> dict[str, str]:
    report = Report()
    record(report, "rest", OverloadRuns(before, alternating or minute, minute, after), SAMPLER)
    bars = {bar.name: bar for bar in BARS}
    return {name: bars[name].verdict(value) for name, value in report.values.items()}


def test_verdicts_compare_a_run_with_capacity() -> None:
    assert set(verdicts(load_result(100), load_result(100), load_result(95, 305)).values()) == {
        "met"
    }
    # The machine may be slower during the minute.
    drifted = verdicts(
        load_result(100), load_result(90), load_result(80, 320), load_result(91, 309)
    )
    assert set(drifted.values()) == {"met"}
    assert (
        verdicts(load_result(100), load_result(100), load_result(95, 305), load_result(89, 311))[
            "goodput_rest"
        ]
        == "MISSED"
    )
    assert (
        verdicts(load_result(100), load_result(80), load_result(95, 305))["recovery_rest"]
        == "MISSED"
    )
    late = verdicts(
        load_result(100), load_result(100, latency=0.1), load_result(95, 305, latency=0.03)
    )
    assert late["p99_rest"] == "MISSED"
    wrong = load_result(95, 305)
    wrong.statuses[-1] = 500
    assert (
        verdicts(load_result(100), load_result(100), load_result(95, 305), wrong)["codes_rest"]
        == "MISSED"
    )


class Server:
    """A server whose capacity alternates between 100 and 50; under overload it answers 68 a second."""

    def __init__(self) -> None:
        self.request_counts: list[int] = []
        self.measured = 0

    def capacity(self, seconds: float) -> LoadResult:
        self.measured += 1
        return load_result(100 if self.measured % 2 else 50) if seconds else LoadResult()

    def open(self, arrivals: list[float]) -> LoadResult:
        self.request_counts.append(len(arrivals))
        return load_result(68, 200)


def test_overload_is_four_times_the_last_measured_capacity() -> None:
    server: Any = Server()
    capacity, overload = alternate_with_capacity(server, 4, 2.0)
    assert [round(count / 200) for count in server.request_counts] == [4, 2, 4, 2]
    assert (capacity.goodput, overload.goodput) == (80, 68)


def test_record_fails_when_the_load_was_below_3_8_times_capacity() -> None:
    verdicts(load_result(100), load_result(100), load_result(95, 286))
    with pytest.raises(RuntimeError, match=r"3\.79 times the capacity of 100"):
        verdicts(load_result(100), load_result(100), load_result(95, 284))


class DefaultLoad:
    """A server whose capacity is 100. Below it, one request in 100 is rejected; above it, 95 a second are
    answered in time, 5 late, and the others are rejected."""

    def capacity(self, seconds: float) -> LoadResult:
        return LoadResult([200] * 100, [0.01] * 100, [0.0] * 100, 1.0)

    def open(self, arrivals: list[float]) -> LoadResult:
        if len(arrivals) < 2_000:
            return load_result(99, 1)
        seconds = 8
        statuses = ([200] * 100 + [503] * 300) * seconds
        latencies = ([0.1] * 95 + [0.6] * 5 + [0.001] * 300) * seconds
        ends = [second + 0.5 for second in range(seconds) for _ in range(400)]
        return LoadResult(statuses, latencies, [0.0] * len(statuses), float(seconds), ends)


def test_goodput_counts_answers_in_time_after_two_seconds_of_overload() -> None:
    load: Any = DefaultLoad()
    result = overload_defaults.alternate_with_capacity(load, 2, 8.0)
    assert result.rejected_share == pytest.approx(0.01)
    assert result.goodput == pytest.approx(0.95)


def test_default_load_fails_when_the_generator_falls_behind() -> None:
    load: Any = DefaultLoad()
    load.open = lambda arrivals: LoadResult([200], [0.7], [0.6], 1.0, [1.0])
    with pytest.raises(RuntimeError, match=r"sent 0\.60 s late"):
        overload_defaults.alternate_with_capacity(load, 1, 8.0)


def test_sum_of_two_results_appends_the_ends_of_the_second() -> None:
    one = LoadResult([200], [0.1], [0.0], 2.0, [1.5])
    assert (one + one).ends == [1.5, 3.5]
