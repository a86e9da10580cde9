"""The admission queue's bound on waits, in an overload and without one."""

from __future__ import annotations

import heapq
import random
import time
from types import SimpleNamespace

import pytest

from hps.config.admission_settings import AdmissionSettings
from hps.observability.metrics import Metrics
from services.frontend.admission import queue as queue_module
from services.frontend.admission import queued_request as queued_request_module
from services.frontend.admission import wait_bound
from services.frontend.admission.controller import AdmissionController
from services.frontend.admission.wait_bound import WaitBound, WaitEstimate
from services.frontend.errors import Overloaded
from tests.unit.services.frontend.admission.test_controller import Works, call

# Duration of a request, and of the arrivals, in seconds.
WORK_S, LASTS_S = 0.01, 20.0
FAR_S = 1e6


@pytest.fixture
def bound():
    estimate = WaitEstimate(2)
    estimate.work_s = estimate.turn_s = 0.012
    return WaitBound(1.0, estimate)


SHORT_S = 0.012 + 10 * 0.012 / 2


def test_rejection_shrinks_the_bound_to_the_time_of_ten_requests(bound):
    assert bound.allows(1.0)
    assert not bound.allows(1.1)
    assert bound.now_s == pytest.approx(SHORT_S)
    assert not bound.allows(1.0)


def test_cancellation_after_a_short_wait_does_not_change_the_bound(bound):
    bound.shrink(SHORT_S - 0.001)
    assert bound.now_s == 1.0
    bound.shrink(SHORT_S + 0.001)
    assert bound.now_s == pytest.approx(SHORT_S)


def test_bound_doubles_up_to_its_maximum_while_the_queue_is_empty(bound):
    bound.shrink(1.0)
    bound.relax()
    assert bound.now_s == pytest.approx(2 * SHORT_S)
    for _ in range(3):
        bound.relax()
    assert bound.now_s == 1.0


def test_bound_below_the_time_of_ten_requests_does_not_change():
    estimate = WaitEstimate(1)
    estimate.work_s = estimate.turn_s = 1.0
    bound = WaitBound(0.01, estimate)
    assert not bound.allows(20.0)
    assert bound.now_s == 0.01


class Simulated:
    """Random requests to a queue with one slot, by a simulated clock. Running work cannot be stopped."""

    def __init__(self, monkeypatch):
        self.now = time.monotonic()
        clock = SimpleNamespace(monotonic=lambda: self.now)
        for module in (queue_module, wait_bound, queued_request_module):
            monkeypatch.setattr(module, "time", clock)
        self.works = Works()
        shared = AdmissionController(AdmissionSettings(running=1))
        monkeypatch.setattr(shared.timeout, "add", lambda _: None)  # it uses the real clock
        self.queue = shared.add_queue(self.works, 1, Metrics())
        self._random, self._events = random.Random(1), []

    def run(self, times, patience_s, *, tells):
        """``times`` the capacity for a while, from clients that hang up after ``patience_s``, and send it as
        their deadline if they are such as ``tells``. Parts that are answered in time, of the capacity, and
        refused, of the requests."""
        begins, made, answered, refused = self.now, 0, 0, 0
        at = begins
        while (at := at + self._random.expovariate(times / WORK_S)) < begins + LASTS_S:
            self._at(at, self._ask, patience_s, tells)
            made += 1
        self._answered, self._refused = [], []
        while self._events:
            self.now, _, act, arguments = heapq.heappop(self._events)
            act(*arguments)
            self._start()
        answered, refused = len(self._answered), len(self._refused)
        return answered / (LASTS_S / WORK_S), refused / made

    def _at(self, when, act, *arguments):
        heapq.heappush(self._events, (when, self._random.random(), act, arguments))

    def _ask(self, patience_s, tells):
        deadline = self.now + (patience_s if tells else FAR_S)
        try:
            answer = self.queue.submit(call(), deadline)
        except Overloaded:
            self._refused.append(self.now)
            return
        self._at(self.now + patience_s, self._hang_up, answer)

    def _hang_up(self, answer):
        if answer.done() and not answer.cancelled():
            self._answered.append(self.now)
        else:
            answer.cancel()

    def _start(self):
        for _, work in self.works.begun:
            if not work.running():
                work.set_running_or_notify_cancel()
                self._at(self.now + WORK_S, self.works.end)


@pytest.fixture
def simulated(monkeypatch):
    return Simulated(monkeypatch)


@pytest.mark.parametrize(
    ("patience_s", "tells"),
    [(0.05, True), (0.3, True), (0.3, False), (1.0, True), (1.0, False), (10.0, False)],
)
def test_nine_tenths_of_capacity_is_answered_in_time_at_four_times_the_load(
    simulated, patience_s, tells
):
    answered, _ = simulated.run(4.0, patience_s, tells=tells)
    assert answered > 0.9


def test_few_requests_are_rejected_at_eight_tenths_of_capacity(simulated):
    answered, refused = simulated.run(0.8, 10.0, tells=False)
    assert refused < 0.01
    assert answered > 0.75


def test_few_requests_are_rejected_after_an_overload(simulated):
    simulated.run(4.0, 1.0, tells=False)
    _, refused = simulated.run(0.8, 10.0, tells=False)
    assert refused < 0.01
