"""Caches that are filled while a node serves: steps in order, failures, the end."""

import threading

import pytest

from hps.errors import TierError
from hps.updates.background_warmup import BackgroundWarmup
from tests.support.waiting import until


@pytest.mark.parametrize("error", [TierError("rocksdb", "no such file"), KeyError("no such file")])
def test_a_failed_step_does_not_end_the_others(caplog, error):
    done = []

    def fail(_warming):
        raise error

    warmup = BackgroundWarmup(None, [fail, lambda _warming: done.append("second")])
    until(lambda: done == ["second"])
    warmup.close()
    assert "a step of the warm-up in the background failed" in caplog.text
    assert "no such file" in caplog.text


def test_steps_have_no_time_limit(monkeypatch):
    """The keys of later tables would be left out."""
    monkeypatch.setattr("hps.updates.cache_warmup.WARM_SECONDS", -1.0)
    limits = []
    warmup = BackgroundWarmup(None, [lambda warming: limits.append(warming._until)])
    until(lambda: limits)
    warmup.close()
    assert limits == [float("inf")]


def test_close_ends_the_work_after_its_step():
    started, go_on, done = threading.Event(), threading.Event(), []

    def work(warming):
        with warming._progress.task("rows", 2) as step:
            started.set()
            go_on.wait(60)
            step(1)
            done.append("never")

    warmup = BackgroundWarmup(None, [work])
    assert started.wait(60)
    closing = threading.Thread(target=warmup.close)
    closing.start()
    until(lambda: warmup._closed.is_set())
    go_on.set()
    closing.join(60)
    assert done == []
