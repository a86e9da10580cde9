"""Runners: how many compute, who waits, and the end."""

from __future__ import annotations

import threading

import pytest

from services.frontend.grpc import runners as module
from services.frontend.grpc.runners import Runners
from tests.support.waiting import until


@pytest.fixture
def runners():
    runners = Runners(2, 6, "test")
    yield runners
    runners.shutdown()


def test_results_and_errors(runners):
    assert [runners.submit(pow, 2, n).result(60) for n in range(5)] == [1, 2, 4, 8, 16]
    assert runners.submit(dict, a=1).result(60) == {"a": 1}
    with pytest.raises(ZeroDivisionError):
        runners.submit(divmod, 1, 0).result(60)


def test_no_more_compute_than_may(runners, monkeypatch):
    monkeypatch.setattr(module, "_STALLED_S", 1e9)
    gate, running, most = threading.Event(), [], []
    lock = threading.Lock()

    def compute():
        with lock:
            running.append(1)
            most.append(len(running))
        assert gate.wait(60)
        with lock:
            running.pop()

    futures = [runners.submit(compute) for _ in range(8)]
    until(lambda: len(running) == 2)
    gate.set()
    for future in futures:
        future.result(60)
    assert max(most) == 2


def test_those_that_wait_make_room_up_to_the_most(runners):
    gate = threading.Event()
    waiting = []

    def wait():
        with runners.waiting():
            waiting.append(1)
            assert gate.wait(60)

    futures = [runners.submit(wait) for _ in range(8)]
    until(lambda: len(waiting) == 6)
    assert not any(future.done() for future in futures)
    gate.set()
    for future in futures:
        future.result(60)
    assert len(waiting) == 8


def test_those_that_stall_hold_up_nobody(runners):
    gate = threading.Event()
    stalled = [runners.submit(gate.wait, 60) for _ in range(5)]
    assert [runners.submit(pow, 2, n).result(60) for n in range(20)] == [2**n for n in range(20)]
    gate.set()
    assert all(future.result(60) for future in stalled)


def test_one_thread_serves_requests_that_come_one_by_one(runners):
    names = set()
    for _ in range(50):
        names.add(runners.submit(lambda: threading.current_thread().name).result(60))
        until(lambda: len(runners._idle) == runners._started)
    assert len(names) == 1


def test_a_waiter_that_fails_counts_again(runners):
    def fail():
        with runners.waiting():
            raise ValueError("gone")

    for _ in range(10):
        with pytest.raises(ValueError, match="gone"):
            runners.submit(fail).result(60)
    assert runners.submit(pow, 3, 2).result(60) == 9
    until(lambda: not runners._begun)


def test_the_end(runners):
    gate, started = threading.Event(), threading.Semaphore(0)

    def work():
        started.release()
        assert gate.wait(60)
        return "done"

    running = [runners.submit(work) for _ in range(2)]
    assert all(started.acquire(timeout=60) for _ in running)
    queued = runners.submit(work)
    runners.shutdown(cancel_futures=True)
    assert queued.cancelled()
    with pytest.raises(RuntimeError):
        runners.submit(work)
    gate.set()
    assert [future.result(60) for future in running] == ["done", "done"]
    until(lambda: not runners._begun)
