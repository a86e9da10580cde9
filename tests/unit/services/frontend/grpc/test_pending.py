"""Pending answers: each ends once, by its result, its deadline or its cancellation."""

from __future__ import annotations

import time
import weakref
from concurrent.futures import Future

import pytest

from hps.errors import DeadlineExceeded
from services.frontend.errors import REFUSED, RequestCancelled, status_of
from services.frontend.grpc.pending import PendingAnswers
from tests.support.waiting import until


class Reply:
    def waits_for(self, future):
        self.future = future


def pending(allowed_s, end=None):
    """A future, what its answer ended with, and the reply."""
    future, ended, reply = Future(), [], Reply()
    WAITING.add(future, time.monotonic() + allowed_s, reply, end or ended.append)
    return future, ended, reply


WAITING = PendingAnswers()


def test_result_is_delivered_once():
    future, ended, _ = pending(60)
    future.set_result(1)
    assert [each.result() for each in ended] == [1]


def test_cancelled_call_is_not_counted_as_rejected():
    future, ended, reply = pending(60)
    reply.future.cancel()
    with pytest.raises(RequestCancelled) as caught:
        ended[0].result()
    assert status_of(caught.value).grpc == "CANCELLED"
    assert status_of(caught.value).http not in REFUSED
    assert len(ended) == 1
    assert future.cancelled()


def test_call_cancelled_after_its_deadline_has_exceeded_it():
    _, ended, reply = pending(0)
    reply.future.cancel()
    with pytest.raises(DeadlineExceeded):
        ended[0].result()


def test_deadlines_hold_although_a_callback_fails():
    pending(0, lambda future: 1 / 0)
    future, ended, _ = pending(0.05)
    until(lambda: ended)
    with pytest.raises(DeadlineExceeded, match=r"server\.request_timeout_ms"):
        ended[0].result()
    assert future.cancelled()


def test_ended_answer_is_freed_immediately():
    _, late, _ = pending(0.05)
    future, ended, reply = pending(60)
    until(lambda: late)  # both were checked, the second after the first
    future.set_result(1)
    gone = weakref.ref(future)
    del future, ended, reply
    until(lambda: gone() is None)
