"""Work repeated on a thread."""

from __future__ import annotations

import logging
import threading

import pytest

from hps.periodic import PeriodicThread
from tests.support.waiting import until


@pytest.fixture
def left():
    """Things to sweep: each round takes one."""
    return []


def running(name):
    return [thread for thread in threading.enumerate() if thread.name == name]


def sweeper(work, name):
    return PeriodicThread(work, 0.001, name, idle_rounds=3)


def test_thread_exits_when_idle_and_restarts(left):
    anything = threading.Event()
    swept = sweeper(anything.is_set, "first")
    for _ in range(2):
        anything.set()
        for _ in range(10):
            swept.start()
        assert len(running("first")) == 1
        anything.clear()
        until(lambda: not running("first"))


def test_item_added_while_the_thread_exits_is_swept(left):
    def work():
        if left:
            left.pop()
        return bool(left)

    swept = sweeper(work, "second")
    for _ in range(300):
        left.append(1)
        swept.start()
        until(lambda: not left)


def test_failed_round_does_not_end_the_thread(left, caplog):
    def work():
        if left:
            left.pop()
            raise ValueError
        return False

    swept = sweeper(work, "third")
    for _ in range(2):
        left.append(1)
        swept.start()
        until(lambda: not running("third"))
        assert not left
    assert [each.levelno for each in caplog.records] == [logging.ERROR]  # the second one is DEBUG


def test_start_tries_again_when_no_thread_was_available(left, monkeypatch, caplog):
    def work():
        left.clear()
        return False

    def none(_thread):
        raise RuntimeError("can't start new thread")

    swept = sweeper(work, "fourth")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none)
        left.append(1)
        swept.start()
        swept.start()
    assert caplog.text.count("fourth could not start: can't start new thread") == 1
    assert left
    swept.start()
    until(lambda: not left)


def test_endless_thread_that_cannot_start_raises(monkeypatch):
    def none(_thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none)
    with pytest.raises(RuntimeError, match="can't start"):
        PeriodicThread(lambda: None, 1, "fifth").start()


def test_retry_runs_until_work_returns_false():
    tries = []

    def work():
        tries.append(1)
        return len(tries) < 4

    retry = PeriodicThread(work, 0.001, "sixth", idle_rounds=1)
    retry.start()
    until(lambda: not running("sixth"))
    assert len(tries) == 4


def test_wake_runs_the_next_round_now():
    rounds = []
    thread = PeriodicThread(lambda: rounds.append(1), 1000, "eighth")
    thread.start()
    for expected in (1, 2):
        thread.wake()
        until(lambda expected=expected: len(rounds) == expected)
    thread.close()
    assert not running("eighth")


def test_close_ends_the_thread_and_forbids_another():
    rounds = []
    thread = PeriodicThread(lambda: rounds.append(1), 0.001, "seventh")
    thread.start(0)
    until(lambda: rounds)
    thread.close()
    assert not running("seventh")
    before = len(rounds)
    thread.start(0)
    until(lambda: not running("seventh"))
    assert len(rounds) == before
