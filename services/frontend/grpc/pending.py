"""Requests in flight, answered when their futures are done or their deadlines have passed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from hps.errors import DeadlineExceeded, HpsError
from hps.periodic import SWEEP_IDLE_ROUNDS, PeriodicThread
from services.frontend.errors import RequestCancelled
from services.frontend.grpc.responders import CallContext, UnaryResponder

log = logging.getLogger(__name__)

_SWEEP_S = 0.01  # period of the sweep while any request is in flight

End = Callable[["Future[Any]"], None]


def call_deadline(context: CallContext, allowed_s: float) -> float:
    """Return a ``time.monotonic`` instant: the client's deadline, at most ``allowed_s`` from now."""
    remaining_s = context.time_remaining()
    if remaining_s is not None and remaining_s < allowed_s:
        allowed_s = remaining_s
    return time.monotonic() + allowed_s


class PendingAnswers:
    """Ends requests in flight. Thread-safe.

    A request costs two changes of a dictionary; one thread checks the deadlines while any request is in
    flight.
    """

    def __init__(self) -> None:
        self._waiting: dict[Future[Any], tuple[float, End]] = {}
        self._sweeper = PeriodicThread(
            self._sweep, _SWEEP_S, "grpc-late", idle_rounds=SWEEP_IDLE_ROUNDS
        )

    def add(self, future: Future[Any], deadline: float, reply: UnaryResponder, end: End) -> None:
        """Call ``end`` once: with ``future`` when it is done, which may be now, or at the deadline with a
        future that failed (``DeadlineExceeded``). ``future`` is cancelled then, and when the client is gone.
        """
        if future.done():
            end(future)
            return
        self._waiting[future] = (deadline, end)
        self._sweeper.start()
        reply.waits_for(future)
        future.add_done_callback(self._done)

    def _done(self, future: Future[Any]) -> None:
        waiting = self._waiting.pop(future, None)
        if waiting is None:
            return
        deadline, end = waiting
        if not future.cancelled():
            _call(end, future)
        elif time.monotonic() < deadline - _SWEEP_S:
            _call(end, _failed(RequestCancelled("the request was cancelled")))
        else:
            _call(end, _failed(DeadlineExceeded(_LATE)))

    def _sweep(self) -> bool:
        now = time.monotonic()
        for future, (deadline, _) in self._waiting.copy().items():
            if deadline <= now:
                self._time_out(future)
        return bool(self._waiting)

    def _time_out(self, future: Future[Any]) -> None:
        waiting = self._waiting.pop(future, None)
        if waiting is not None:
            future.cancel()
            _call(waiting[1], _failed(DeadlineExceeded(_LATE)))


def _call(end: End, future: Future[Any]) -> None:
    try:
        end(future)
    except Exception:  # must not prevent the end of other requests
        log.exception("failed to answer a request")


def _failed(error: HpsError) -> Future[Any]:
    failed: Future[Any] = Future()
    failed.set_exception(error)
    return failed


_LATE = (
    "deadline exceeded: no answer within the request's time; set a later deadline, parameter "
    "'timeout' (microseconds) or server.request_timeout_ms"
)
