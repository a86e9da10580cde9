"""A thread that looks at things while there are any."""

from __future__ import annotations

import threading

import pytest

from services.frontend import periodic_sweeper as module
from services.frontend.periodic_sweeper import PeriodicSweeper
from tests.support.waiting import until


@pytest.fixture
def left(monkeypatch):
    """What there is to be looked at: each look takes one."""
    monkeypatch.setattr(module, "_IDLE_LOOKS", 3)
    return []


def running(name):
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_one_thread_looks_until_nothing_is_left_and_another_when_there_is_again(monkeypatch):
    monkeypatch.setattr(module, "_IDLE_LOOKS", 3)
    anything = threading.Event()
    looks = PeriodicSweeper(anything.is_set, lambda: 0.001, "first")
    for _ in range(2):
        anything.set()
        for _ in range(10):
            looks.begin()
        assert len(running("first")) == 1
        anything.clear()
        until(lambda: not running("first"))


def test_what_is_added_as_the_thread_goes_is_looked_at(left):
    def look():
        if left:
            left.pop()
        return bool(left)

    looks = PeriodicSweeper(look, lambda: 0.001, "second")
    for _ in range(300):
        left.append(1)
        looks.begin()
        until(lambda: not left)


def test_a_look_that_fails_is_not_the_last(left, monkeypatch):
    failed = []
    monkeypatch.setattr(threading, "excepthook", failed.append)

    def look():
        if left:
            left.pop()
            raise ValueError
        return False

    looks = PeriodicSweeper(look, lambda: 0.001, "third")
    for _ in range(2):
        left.append(1)
        looks.begin()
        until(lambda: not running("third"))
    assert len(failed) == 2


def test_without_a_thread_what_is_added_next_tries_again(left, monkeypatch, caplog):
    def look():
        left.clear()
        return False

    def none(_thread):
        raise RuntimeError("can't start new thread")

    looks = PeriodicSweeper(look, lambda: 0.001, "fourth")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none)
        left.append(1)
        looks.begin()
        looks.begin()
    assert caplog.text.count("failed to start thread fourth: can't start new thread") == 1
    assert left
    looks.begin()
    until(lambda: not left)
