"""Closed and open loops, against servers made up here."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from hps.errors import HpsError, Unavailable
from hps.tools.bench.histogram import LatencyHistogram
from hps.tools.bench.report import quantiles
from hps.tools.bench.run import SLICES, BenchPlan, BenchResult, run

pytestmark = pytest.mark.alone


class Served:
    """Answers at once, but for ``stall_s`` at the ``stalls_at``-th request, for which all others wait; every
    ``fails``-th fails."""

    def __init__(self, stalls_at: int = -1, stall_s: float = 0.0, fails: int = 0) -> None:
        self._stalls_at, self._stall_s, self._fails = stalls_at, stall_s, fails
        self._one_at_a_time = asyncio.Lock()
        self.sent: list[Any] = []
        self.most_at_once = self._now = 0

    def message(self, call: Any) -> Any:
        return call

    async def send(self, message: Any, until: float) -> None:
        self.sent.append(message)
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        number = len(self.sent)
        async with self._one_at_a_time:
            await asyncio.sleep(self._stall_s if number == self._stalls_at else 0)
        self._now -= 1
        if self._fails and number % self._fails == 0:
            raise Unavailable(f"full at number {number}")

    async def close(self) -> None:
        self.sent.append("closed")


def outcome_of(
    served: Served, plan: BenchPlan, messages: Sequence[Any] = ("a", "b", "c")
) -> BenchResult:
    return run(lambda: served, lambda _sender: messages, plan)


def measured(outcome: BenchResult) -> LatencyHistogram:
    return LatencyHistogram.summed(outcome.slices)


def test_closed_loop_has_concurrency_callers_and_cycles_messages() -> None:
    served = Served()
    outcome = outcome_of(served, BenchPlan(5.0, 0.0, 3, requests=20))
    assert measured(outcome).total == 20
    assert served.sent[:4] == ["a", "b", "c", "a"]
    assert served.sent[-1] == "closed"
    assert served.most_at_once == 3
    assert (outcome.errors, outcome.interrupted) == ({}, False)


def test_warm_up_is_not_measured() -> None:
    served = Served()
    outcome = outcome_of(served, BenchPlan(0.05, 0.05, 1))
    assert outcome.warmed_up > 0
    assert measured(outcome).total + outcome.warmed_up == len(served.sent) - 1


def test_latency_counts_from_the_due_time_after_a_stall() -> None:
    """Four at a time: without the clock's times, no more than four would be slow."""
    plan = BenchPlan(0.5, 0.0, 4, rate=400.0, arrivals="constant")
    outcome = outcome_of(Served(stalls_at=10, stall_s=0.25), plan)
    slow = sum(n for ns, n in measured(outcome).counts.items() if ns > _bucket(0.05))
    assert measured(outcome).total == 199
    assert slow >= 60
    assert (outcome.late.quantile(1.0) or 0) > 0.05


def _bucket(seconds: float) -> int:
    from hps.tools.bench.histogram import bucket

    return bucket(round(seconds * 1e9))


def test_arrivals_have_the_rate_and_repeat_with_the_seed() -> None:
    plan = BenchPlan(0.2, 0.0, 99, rate=500.0, seed=4)
    counts = [measured(outcome_of(Served(), plan)).total for _ in range(2)]
    assert counts[0] == counts[1]
    assert 60 < counts[0] < 140


def test_open_loop_gives_up_when_the_server_is_far_behind() -> None:
    plan = BenchPlan(0.1, 0.0, 1, rate=1000.0, timeout_s=0.05)
    outcome = outcome_of(Served(stalls_at=2, stall_s=0.3), plan)
    assert outcome.errors["NotSent"][0] > 50


def test_errors_are_counted_by_kind_with_the_first_text() -> None:
    outcome = outcome_of(Served(fails=4), BenchPlan(5.0, 0.0, 1, requests=12))
    assert outcome.errors == {"Unavailable": (3, "full at number 4")}
    assert measured(outcome).total == 9


def test_program_errors_are_raised() -> None:
    class Broken(Served):
        async def send(self, message: Any, until: float) -> None:
            raise ZeroDivisionError

    with pytest.raises(ExceptionGroup) as raised:
        outcome_of(Broken(), BenchPlan(1.0, 0.0, 1))
    assert raised.group_contains(ZeroDivisionError)


def test_interrupt_returns_partial_results() -> None:
    served = Served()

    def interrupt() -> None:
        while len(served.sent) < 5:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    outcome = outcome_of(served, BenchPlan(60.0, 0.0, 2))
    thread.join()
    assert outcome.interrupted
    assert measured(outcome).total >= 3
    assert 0 < outcome.seconds < 60


def test_rejections_are_counted_not_raised() -> None:
    class Away(Served):
        async def send(self, message: Any, until: float) -> None:
            raise HpsError("no server")

    outcome = outcome_of(Away(), BenchPlan(5.0, 0.0, 2, requests=4))
    assert outcome.errors == {"HpsError": (4, "no server")}
    assert len(outcome.slices) == SLICES


def test_quantiles_with_too_few_durations_are_none() -> None:
    few = LatencyHistogram({5: 150})
    assert quantiles(few)["p99"] is not None
    assert quantiles(few)["p99.9"] is None


def test_late_answers_do_not_count_as_throughput() -> None:
    """Ten answers at a time, each after 0.4 s: of the requests sent at 0.4 s, none is answered by 0.5 s."""

    class Slow(Served):
        async def send(self, message: Any, until: float) -> None:
            self.sent.append(message)
            await asyncio.sleep(0.4)

    outcome = outcome_of(Slow(), BenchPlan(0.5, 0.0, 10))
    assert measured(outcome).total >= 10
    assert outcome.answered <= 10
    assert outcome.seconds == pytest.approx(0.5)


def test_limited_requests_are_sliced_by_number() -> None:
    rests = []
    for _ in range(5):
        outcome = outcome_of(Served(), BenchPlan(60.0, 0.0, 2, requests=200))
        assert [each.total for each in outcome.slices] == [10] * SLICES
        assert all(span > 0 for span in outcome.spans)
        rests.append(abs(sum(outcome.spans) - outcome.seconds))
    # The machine may pause for milliseconds after the last request.
    assert min(rests) < 1e-3
    assert outcome.answered == 200
    few = outcome_of(Served(), BenchPlan(60.0, 0.0, 2, requests=3))
    assert sum(each.total for each in few.slices) == 3
    assert sum(span > 0 for span in few.spans) <= 3


def test_unreached_slices_have_no_duration() -> None:
    served = Served()

    def interrupt() -> None:
        while len(served.sent) < 5:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    outcome = outcome_of(served, BenchPlan(600.0, 0.0, 2))
    thread.join()
    assert sum(outcome.spans) == pytest.approx(outcome.seconds, abs=1e-3)
    assert outcome.spans[-1] == 0


def test_requests_beyond_concurrency_are_counted() -> None:
    plan = BenchPlan(0.5, 0.0, 4, rate=400.0, arrivals="constant")
    assert outcome_of(Served(stalls_at=10, stall_s=0.25), plan).full >= 60
    assert outcome_of(Served(), BenchPlan(0.1, 0.0, 1000, rate=100.0)).full == 0
