"""Bounded threads: refuse instead of block, fail alone, and futures that were born done."""

import asyncio
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, as_completed, wait

import pytest

from hps.errors import DeadlineExceeded, Unavailable
from hps.lookup.workers import Done, Workers


@pytest.fixture
def workers():
    made = Workers(1, 2, name="test", setting="tiers.lookup_queue")
    yield made
    made.close()


@pytest.fixture
def busy(workers):
    """One thread, occupied until the event is set."""
    leave, begun = threading.Event(), threading.Event()

    def work():
        begun.set()
        leave.wait(10)

    workers.submit(work)
    assert begun.wait(5)
    yield leave
    leave.set()


def test_result_and_error_reach_the_future(workers):
    assert workers.submit(lambda: 42).result(5) == 42
    with pytest.raises(ZeroDivisionError):
        workers.submit(lambda: 1 // 0).result(5)
    assert workers.submit(lambda: "the thread lives on").result(5) == "the thread lives on"


def test_a_full_queue_refuses_at_once(workers, busy):
    accepted = [workers.submit(lambda: 1), workers.submit(lambda: 2)]
    assert workers.waiting == 2
    start = time.monotonic()
    with pytest.raises(
        Unavailable, match=r"overloaded: Exceeds maximum queue size \(2 .*lookup_queue"
    ):
        workers.submit(lambda: 3)
    assert time.monotonic() - start < 1
    busy.set()
    assert [future.result(5) for future in accepted] == [1, 2]


def test_deadline_passed_in_the_queue(workers, busy):
    ran = []
    late = workers.submit(lambda: ran.append(1), deadline=time.monotonic() + 0.02)
    time.sleep(0.05)
    busy.set()
    with pytest.raises(DeadlineExceeded, match=r"waited \d+ ms for a thread"):
        late.result(5)
    assert not ran


def test_a_cancelled_job_is_not_run(workers, busy):
    ran = []
    future = workers.submit(lambda: ran.append(1))
    assert future.cancel()
    after = workers.submit(lambda: ran.append(2))
    busy.set()
    after.result(5)
    assert ran == [2]


def test_close_finishes_what_was_accepted_and_refuses_more(workers, busy):
    accepted = workers.submit(lambda: 1)
    threading.Timer(0.05, busy.set).start()
    workers.close()
    workers.close()
    assert accepted.result(0) == 1
    with pytest.raises(Unavailable, match="shutting down"):
        workers.submit(lambda: 2)


def test_done_is_a_future_for_everyone():
    done = Done("x")
    assert isinstance(done, Future)
    assert done.done()
    assert not done.running()
    assert not done.cancelled()
    assert not done.cancel()
    assert done.result() == "x"
    assert done.exception() is None
    called = []
    done.add_done_callback(called.append)
    assert called == [done]
    assert wait([done], return_when=FIRST_COMPLETED).done == {done}
    assert next(iter(as_completed([Done(1)], timeout=1))).result() == 1

    async def awaited():
        return await asyncio.wrap_future(Done("y"))

    assert asyncio.run(awaited()) == "y"
    with pytest.raises(AttributeError):
        _ = done.nonsense
