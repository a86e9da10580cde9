import threading
import time

import pytest

from hps.errors import TierError
from hps.tiers.workers import Workers


def test_work_is_done_and_errors_are_kept():
    workers, done = Workers("test", 2), []
    assert workers.submit(lambda: done.append(1)).wait(10)
    call = workers.submit(lambda: 1 // 0)
    assert call.wait(10)
    assert isinstance(call.error, ZeroDivisionError)
    assert done == [1]


def test_no_more_threads_than_allowed_and_none_without_need():
    workers, gate = Workers("few", 3), threading.Event()
    for _ in range(5):
        assert workers.submit(lambda: None).wait(10)
        while not workers._idle._value:  # until the worker waits for work again
            time.sleep(0.001)
    few = [t for t in threading.enumerate() if t.name.startswith("hps-few-")]
    assert len(few) == 1
    assert few[0].daemon
    calls = [workers.submit(lambda: gate.wait(10)) for _ in range(20)]
    assert len([t for t in threading.enumerate() if t.name.startswith("hps-few-")]) <= 3
    gate.set()
    assert all(call.wait(10) for call in calls)


def test_a_call_given_up_in_the_queue_never_begins():
    workers, gate, begun = Workers("test", 1), threading.Event(), []
    blocking = workers.submit(lambda: gate.wait(10))
    waiting = workers.submit(lambda: begun.append("given up"))
    assert not waiting.wait(0.01)
    waiting.give_up()
    later = workers.submit(lambda: begun.append("later"))
    gate.set()
    assert later.wait(10)
    assert blocking.wait(10)
    assert begun == ["later"]
    assert not waiting.running


def test_close_runs_the_last_work_once_and_after_all_others():
    workers, gate, order = Workers("test", 2), threading.Event(), []

    def slow():
        gate.wait(10)
        order.append("slow")

    workers.submit(slow)
    last = workers.close(lambda: order.append("last"))
    assert not last.wait(0.01)
    gate.set()
    assert workers.close(lambda: order.append("never")).wait(10)
    assert order == ["slow", "last"]
    with pytest.raises(TierError, match="closed"):
        workers.submit(lambda: None)


def test_close_without_any_thread_runs_the_last_work_in_place():
    order = []
    assert Workers("test", 2).close(lambda: order.append("last")).wait(0)
    assert order == ["last"]
