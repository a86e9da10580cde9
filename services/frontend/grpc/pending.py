"""Answers that others still work at: ended when those are done, or when their time is up."""

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

_LOOK_S = 0.01  # between looks at the time while anything waits

End = Callable[["Future[Any]"], None]


def call_deadline(context: CallContext, allowed_s: float) -> float:
    """An instant of ``time.monotonic``: the client's deadline, and no later than ``allowed_s`` from now."""
    remaining_s = context.time_remaining()
    if remaining_s is not None and remaining_s < allowed_s:
        allowed_s = remaining_s
    return time.monotonic() + allowed_s


class PendingAnswers:
    """Any thread may call it. A request costs two changes of a dictionary; one thread looks at the time while
    anything waits."""

    def __init__(self) -> None:
        self._waiting: dict[Future[Any], tuple[float, End]] = {}
        self._looking = PeriodicThread(
            self._end_late, _LOOK_S, "grpc-late", idle_rounds=SWEEP_IDLE_ROUNDS
        )

    def add(self, future: Future[Any], deadline: float, reply: UnaryResponder, end: End) -> None:
        """Call ``end`` once: with ``future`` when it is done, as it may be already, else at its deadline with
        one that failed (``DeadlineExceeded``). ``future`` is cancelled then, and when the client is gone."""
        if future.done():
            end(future)
            return
        self._waiting[future] = (deadline, end)
        self._looking.start()
        reply.waits_for(future)
        future.add_done_callback(self._done)

    def _done(self, future: Future[Any]) -> None:
        found = self._waiting.pop(future, None)
        if found is None:
            return
        deadline, end = found
        if not future.cancelled():
            _call(end, future)
        elif time.monotonic() < deadline - _LOOK_S:
            _call(end, _failed(RequestCancelled("the request was cancelled")))
        else:
            _call(end, _failed(DeadlineExceeded(_LATE)))

    def _end_late(self) -> bool:
        now = time.monotonic()
        for future, (deadline, _) in self._waiting.copy().items():
            if deadline <= now:
                self._too_late(future)
        return bool(self._waiting)

    def _too_late(self, future: Future[Any]) -> None:
        found = self._waiting.pop(future, None)
        if found is not None:
            future.cancel()
            _call(found[1], _failed(DeadlineExceeded(_LATE)))


def _call(end: End, future: Future[Any]) -> None:
    try:
        end(future)
    except Exception:  # which must not keep others from being ended
        log.exception("an answer could not be given")


def _failed(error: HpsError) -> Future[Any]:
    failed: Future[Any] = Future()
    failed.set_exception(error)
    return failed


_LATE = (
    "no answer within the request's time; a later deadline, parameter 'timeout' (microseconds) or "
    "server.request_timeout_ms allow more"
)
