"""Answers that others work at: each is ended once, by whatever comes first."""

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


def test_a_result_is_given_once():
    future, ended, _ = pending(60)
    future.set_result(1)
    assert [each.result() for each in ended] == [1]


def test_a_client_that_left_was_not_refused():
    future, ended, reply = pending(60)
    reply.future.cancel()
    with pytest.raises(RequestCancelled) as caught:
        ended[0].result()
    assert status_of(caught.value).grpc == "CANCELLED"
    assert status_of(caught.value).http not in REFUSED
    assert len(ended) == 1
    assert future.cancelled()


def test_a_client_that_left_when_its_time_was_up():
    _, ended, reply = pending(0)
    reply.future.cancel()
    with pytest.raises(DeadlineExceeded):
        ended[0].result()


def test_deadlines_are_kept_whatever_an_end_does():
    pending(0, lambda future: 1 / 0)
    future, ended, _ = pending(0.05)
    until(lambda: ended)
    with pytest.raises(DeadlineExceeded, match=r"server\.request_timeout_ms"):
        ended[0].result()
    assert future.cancelled()


def test_what_has_ended_is_not_held_until_something_else_waits():
    _, late, _ = pending(0.05)
    future, ended, reply = pending(60)
    until(lambda: late)  # they have been looked at, the second after the first
    future.set_result(1)
    gone = weakref.ref(future)
    del future, ended, reply
    until(lambda: gone() is None)
