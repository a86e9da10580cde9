"""Bounded threads: refuse instead of block, fail alone, and futures that were born done."""

import asyncio
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, as_completed, wait

import pytest

from hps import threads
from hps.errors import DeadlineExceeded, Unavailable
from hps.threads import BoundedThreadPool, CompletedFuture, chain_future


@pytest.fixture
def workers():
    made = BoundedThreadPool(1, 2, name="test", setting="tiers.lookup_queue")
    yield made
    made.close()


@pytest.fixture
def busy(workers):
    """One thread, occupied until the event is set."""
    leave, begun = threading.Event(), threading.Event()

    def work():
        begun.set()
        leave.wait(60)

    workers.submit(work)
    assert begun.wait(60)
    yield leave
    leave.set()


def test_result_and_error_reach_the_future(workers):
    assert workers.submit(lambda: 42).result(60) == 42
    with pytest.raises(ZeroDivisionError):
        workers.submit(lambda: 1 // 0).result(60)
    assert workers.submit(lambda: "the thread lives on").result(60) == "the thread lives on"


def test_a_full_queue_refuses_at_once(workers, busy):
    accepted = [workers.submit(lambda: 1), workers.submit(lambda: 2)]
    assert workers.waiting == 2
    start = time.monotonic()
    with pytest.raises(
        Unavailable, match=r"overloaded: Exceeds maximum queue size \(2 .*lookup_queue"
    ):
        workers.submit(lambda: 3)
    assert time.monotonic() - start < 10
    busy.set()
    assert [future.result(60) for future in accepted] == [1, 2]


def test_deadline_passed_in_the_queue(workers, busy):
    ran = []
    late = workers.submit(lambda: ran.append(1), deadline=time.monotonic() + 0.02)
    time.sleep(0.05)
    busy.set()
    with pytest.raises(DeadlineExceeded, match=r"waited \d+ ms for a thread"):
        late.result(60)
    assert not ran


def test_a_cancelled_job_is_not_run(workers, busy):
    ran = []
    future = workers.submit(lambda: ran.append(1))
    assert future.cancel()
    after = workers.submit(lambda: ran.append(2))
    busy.set()
    after.result(60)
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
    done = CompletedFuture("x")
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
    assert next(iter(as_completed([CompletedFuture(1)], timeout=1))).result() == 1

    async def awaited():
        return await asyncio.wrap_future(CompletedFuture("y"))

    assert asyncio.run(awaited()) == "y"
    with pytest.raises(AttributeError):
        _ = done.nonsense


# -- threads ---------------------------------------------------------------------------------------


def named(name):
    return [t for t in threading.enumerate() if t.name.startswith(f"hps-{name}-")]


def test_no_more_threads_than_allowed_and_none_without_need():
    workers, gate = BoundedThreadPool(3, 100, name="few"), threading.Event()
    assert not named("few")
    for _ in range(5):
        workers.submit(lambda: None).result(60)
        while not workers._idle._value:  # until the thread waits for work again
            time.sleep(0.001)
    assert len(named("few")) == 1
    assert named("few")[0].daemon
    calls = [workers.submit(lambda: gate.wait(60)) for _ in range(20)]
    assert len(named("few")) == 3
    gate.set()
    assert all(call.result(60) for call in calls)
    workers.close()
    assert not named("few")


def test_the_queue_is_bounded_beside_many_callers():
    workers, gate = BoundedThreadPool(1, 5, name="bound"), threading.Event()
    accepted, refused = [], []

    def call():
        try:
            accepted.append(workers.submit(lambda: gate.wait(60)))
        except Unavailable:
            refused.append(1)

    accepted.append(workers.submit(lambda: gate.wait(60)))
    while workers.waiting:
        time.sleep(0.001)
    callers = [threading.Thread(target=call) for _ in range(20)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    gate.set()
    assert (len(accepted), len(refused)) == (6, 15)
    workers.close()


def test_close_runs_the_last_work_once_and_after_all_others():
    workers, gate, order = BoundedThreadPool(2, 9, name="test"), threading.Event(), []
    ended = threading.Event()

    def slow():
        gate.wait(60)
        order.append("slow")

    def last():
        order.append("last")
        ended.set()

    workers.submit(slow)
    workers.close(0.01, last)
    assert order == []
    workers.close(0.01, lambda: order.append("never"))
    gate.set()
    assert ended.wait(60)
    assert order == ["slow", "last"]


def test_close_without_any_thread_runs_the_last_work_in_place():
    order = []
    BoundedThreadPool(2, 9, name="test").close(
        None, lambda: order.append(threading.current_thread())
    )
    assert order == [threading.current_thread()]


# -- then ------------------------------------------------------------------------------------------


def test_then_goes_on_with_the_result(workers):
    answer = chain_future(workers.submit(lambda: 20), lambda n: workers.submit(lambda: n + 1))
    assert answer.result(60) == 21
    assert chain_future(CompletedFuture(1), lambda n: CompletedFuture(n + 1)).done()


@pytest.mark.parametrize("fails", ["first", "between", "second"])
def test_then_hands_on_every_error(workers, fails):
    def step(name):
        if name == fails:
            raise KeyError(name)
        return name

    def go_on(_result):
        step("between")
        return workers.submit(lambda: step("second"))

    with pytest.raises(KeyError, match=fails):
        chain_future(workers.submit(lambda: step("first")), go_on).result(60)


def test_then_cancels_a_first_stage_that_waits_for_a_thread(workers, busy):
    started = []
    answer = chain_future(workers.submit(lambda: started.append(1)), lambda _: started.append(2))
    assert answer.cancel()
    assert answer.cancelled()
    assert wait([answer], 0).done == {answer}
    busy.set()
    workers.submit(lambda: None).result(60)
    assert started == []


def test_then_is_cancelled_when_the_first_stage_that_runs_has_ended(workers):
    gate, begun, started = threading.Event(), threading.Event(), []

    def first():
        begun.set()
        gate.wait(60)

    answer = chain_future(workers.submit(first), lambda _: started.append(1))
    assert begun.wait(60)
    assert not answer.cancel()
    assert not answer.done()
    gate.set()
    assert wait([answer], 60).done == {answer}
    assert answer.cancelled()
    assert answer.cancel()
    assert started == []


def test_then_cancels_a_second_stage_that_waits_for_a_thread(workers, busy):
    answer = chain_future(CompletedFuture(1), lambda n: workers.submit(lambda: n))
    assert answer.cancel()
    assert answer.cancelled()


def test_then_answers_when_a_second_stage_that_runs_is_cancelled(workers):
    gate, begun = threading.Event(), threading.Event()

    def second():
        begun.set()
        gate.wait(60)
        return 2

    answer = chain_future(CompletedFuture(1), lambda _: workers.submit(second))
    assert begun.wait(60)
    assert not answer.cancel()
    gate.set()
    assert answer.result(60) == 2
    assert not answer.cancel()


def test_paced_thread_sleeps_in_proportion_to_its_work(monkeypatch):
    slept, worked = [], [0.0]
    monkeypatch.setattr(threads.time, "sleep", slept.append)
    monkeypatch.setattr(threads.time, "thread_time", lambda: worked[0])
    with threads.paced(0.2):
        worked[0] += 2e-6
        threads.rest()  # too short to sleep: it is added to the next one
        worked[0] += 2e-3
        threads.rest()
        worked[0] += 0.1
        threads.rest(without_lock=True)
        for step in (10.0, 2e-3):
            worked[0] += step
            threads.rest()
    assert slept == pytest.approx([49 * 2.002e-3, 4 * 0.1, 0.5, 4 * 2e-3])  # thinner at first


def test_other_threads_do_not_rest(monkeypatch):
    monkeypatch.setattr(threads.time, "sleep", lambda _s: pytest.fail("slept"))
    threads.rest()
    with threads.paced(0.5):
        other = threading.Thread(target=threads.rest)
        other.start()
        other.join()
    threads.rest()
