"""Requests in flight: each ends once, with its result, its cancellation or its deadline."""

from __future__ import annotations

import asyncio
import time
import weakref
from concurrent.futures import Future

import pytest

from hps.errors import DeadlineExceeded
from services.frontend.errors import REFUSED, RequestCancelled, status_of
from services.frontend.pending import PendingRequests
from tests.support.waiting import until

PENDING = PendingRequests()


def add(allowed_s, end=None):
    """Add a request; return its future and the list of what it ends with."""
    future, ended = Future(), []
    PENDING.add(future, time.monotonic() + allowed_s, end or ended.append)
    return future, ended


def test_request_ends_once_with_its_result():
    future, ended = add(60)
    future.set_result(1)
    assert [each.result() for each in ended] == [1]


def test_request_that_is_done_already_ends_immediately():
    future, ended = Future(), []
    future.set_result(1)
    PENDING.add(future, time.monotonic() - 1, ended.append)
    assert ended == [future]


def test_cancelled_request_is_not_a_rejection():
    future, ended = add(60)
    future.cancel()
    with pytest.raises(RequestCancelled) as caught:
        ended[0].result()
    assert status_of(caught.value).grpc == "CANCELLED"
    assert status_of(caught.value).http not in REFUSED
    assert len(ended) == 1


def test_request_cancelled_at_its_deadline_exceeds_it():
    future, ended = add(0)
    future.cancel()
    with pytest.raises(DeadlineExceeded):
        ended[0].result()


def test_near_deadline_is_kept_beside_far_ones():
    """The sweep that a far deadline is left to comes a quarter of a second later."""
    pending, ended = PendingRequests(), []
    far, near = Future(), Future()
    pending.add(far, time.monotonic() + 60, lambda _: None)
    time.sleep(0.05)
    started = time.monotonic()
    pending.add(near, started + 0.05, ended.append)
    until(lambda: ended)
    assert 0.05 <= time.monotonic() - started < 0.2
    assert isinstance(ended[0].exception(), DeadlineExceeded)
    far.cancel()


def test_short_requests_are_swept_rarely():
    """Each sweep delays a request: at 100 Hz that was the slowest percent of one caller's."""
    sweeps = []

    class CountedRequests(PendingRequests):
        def _sweep(self):
            sweeps.append(1)
            return super()._sweep()

    pending, end = CountedRequests(), time.monotonic() + 0.5
    while time.monotonic() < end:
        future = Future()
        pending.add(future, time.monotonic() + 60, lambda _: None)
        time.sleep(0.0005)
        future.set_result(1)
    assert 1 <= len(sweeps) <= 4


def test_failing_callback_does_not_delay_other_deadlines():
    add(0, lambda future: 1 / 0)
    future, ended = add(0.05)
    until(lambda: ended)
    with pytest.raises(DeadlineExceeded, match=r"server\.request_timeout_ms"):
        ended[0].result()
    assert future.cancelled()


def test_ended_request_is_freed_while_no_other_is_in_flight():
    _, late = add(0.05)
    future, ended = add(60)
    until(lambda: late)  # both have been checked, the second after the first
    future.set_result(1)
    gone = weakref.ref(future)
    del future, ended
    until(lambda: gone() is None)


def test_event_loop_gets_the_result_and_the_deadline():
    async def wait():
        future, late = Future(), Future()
        asyncio.get_running_loop().call_later(0.01, future.set_result, 1)
        assert await PENDING.result(future, time.monotonic() + 60) == 1
        with pytest.raises(DeadlineExceeded):
            await PENDING.result(late, time.monotonic() + 0.05)
        assert late.cancelled()

    asyncio.run(wait())


def test_cancelled_task_cancels_its_request():
    async def wait():
        future = Future()
        task = asyncio.create_task(PENDING.result(future, time.monotonic() + 60))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert future.cancelled()

    asyncio.run(wait())
