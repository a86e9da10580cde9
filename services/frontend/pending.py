"""Requests in flight, ended when their futures are done or their deadlines have passed."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from hps.errors import DeadlineExceeded
from hps.periodic import SWEEP_IDLE_ROUNDS, PeriodicThread
from services.frontend.errors import RequestCancelled

log = logging.getLogger(__name__)

# Time between sweeps: the least and the most. Each sweep takes the interpreter lock from a request, so that
# 100 of them in a second are the slowest percent of one caller's.
_SWEEP_S, _RARELY_S = 0.01, 0.25

End = Callable[["Future[Any]"], None]
"""Called once with a future that is done, on any thread."""


class _PendingRequest:
    """A request in flight: see the arguments of `PendingRequests.add`."""

    __slots__ = ("deadline", "end")

    def __init__(self, deadline: float, end: End) -> None:
        self.deadline = deadline
        self.end = end


class PendingRequests:
    """Ends requests in flight, of all protocols. Thread-safe.

    A request costs two changes of a dictionary; one thread checks the deadlines while any request is in
    flight, when the first of them passes.
    """

    def __init__(self) -> None:
        self._waiting: dict[Future[Any], _PendingRequest] = {}
        self._next_sweep = math.inf  # an instant of ``time.monotonic``
        self._sweeper = PeriodicThread(
            self._sweep, self._until_sweep_s, "hps-deadlines", idle_rounds=SWEEP_IDLE_ROUNDS
        )

    def add(self, future: Future[Any], deadline: float, end: End) -> None:
        """Call ``end`` with ``future`` when it is done, which may be now.

        At ``deadline`` (``time.monotonic``), ``future`` is cancelled, and ``end`` gets a future that failed
        with ``DeadlineExceeded``; if ``future`` is cancelled earlier, with ``RequestCancelled``.
        """
        if future.done() and not future.cancelled():
            end(future)  # the caller gets its exception, if any
            return
        self._waiting[future] = _PendingRequest(deadline, end)
        self._sweeper.start()
        if deadline < self._next_sweep:
            self._sweeper.wake()
        future.add_done_callback(self._done)

    async def result(self, future: Future[Any], deadline: float) -> Any:
        """Wait for the result on an event loop; cancel ``future`` if the waiting task is cancelled.

        Raises ``DeadlineExceeded`` at ``deadline``.
        """
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Future[Any]] = loop.create_future()

        def end(outcome: Future[Any]) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(_settle, ended, outcome)

        self.add(future, deadline, end)
        try:
            outcome = await ended
        except asyncio.CancelledError:
            future.cancel()
            raise
        return outcome.result()

    def _done(self, future: Future[Any]) -> None:
        waiting = self._waiting.pop(future, None)
        if waiting is None:
            return
        end = waiting.end
        if not future.cancelled():
            _call(end, future)
        elif time.monotonic() < waiting.deadline - _SWEEP_S:
            _call(end, failed_future(RequestCancelled("the request was cancelled")))
        else:
            _call(end, failed_future(DeadlineExceeded(_LATE)))

    def _until_sweep_s(self) -> float:
        """Seconds until the next sweep: until a deadline is due."""
        self._next_sweep = math.inf  # wakes this thread for requests that are added from here on
        now = time.monotonic()
        due = now + _RARELY_S
        for waiting in list(self._waiting.values()):
            due = min(due, waiting.deadline)
        self._next_sweep = due = max(due, now + _SWEEP_S)
        return due - now

    def _sweep(self) -> bool:
        now = time.monotonic()
        for future, waiting in self._waiting.copy().items():
            if waiting.deadline <= now:
                self._time_out(future)
        return bool(self._waiting)

    def _time_out(self, future: Future[Any]) -> None:
        waiting = self._waiting.pop(future, None)
        if waiting is not None:
            future.cancel()
            _call(waiting.end, failed_future(DeadlineExceeded(_LATE)))


def failed_future(error: BaseException) -> Future[Any]:
    """Return a future that failed with ``error``."""
    failed: Future[Any] = Future()
    failed.set_exception(error)
    return failed


def _call(function: Callable[..., object], *arguments: object) -> None:
    try:
        function(*arguments)
    except Exception:  # must not prevent the end of other requests
        log.exception("failed to answer a request")


def _settle(ended: asyncio.Future[Future[Any]], outcome: Future[Any]) -> None:
    if not ended.done():
        ended.set_result(outcome)


_LATE = (
    "deadline exceeded: no answer within the request's time; set a later deadline, parameter "
    "'timeout' (microseconds) or server.request_timeout_ms"
)
