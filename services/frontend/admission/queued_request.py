"""Queued requests and their timeout."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any
from weakref import ReferenceType, ref

from hps.errors import Unavailable
from hps.periodic import SWEEP_IDLE_ROUNDS, PeriodicThread
from services.frontend.logs import log
from services.frontend.statistics import execution_samples, queued_ns

# Shortest interval between sweeps.
_LEAST_S = 0.001


class QueuedRequest(Future[Any]):
    """A request in a queue, and the future of its answer."""

    def __init__(
        self,
        expire: Callable[[QueuedRequest], None],
        start: Callable[[], Future[Any]],
        deadline: float,
        size: int,
    ) -> None:
        """``expire`` removes it from its queue and fails it."""
        super().__init__()
        self.queued_ns = 0  # for the statistics, like `execution`
        self.execution: Iterator[int] | None = None
        self.start = start
        self.deadline = deadline
        self.size = size
        self.since = time.monotonic()
        self.work: Future[Any] | None = None
        self._expire = expire

    @property
    def has_ended(self) -> bool:
        """True if it is no longer queued."""
        return self.running() or self.done()

    def expire(self) -> None:
        """Fail: its wait has timed out."""
        self._expire(self)

    def cancel(self) -> bool:
        """Leave the queue, or cancel the work if it can still be cancelled."""
        return super().cancel() if self.work is None else self.work.cancel()

    def copy(self, work: Future[Any]) -> None:
        """Take over the result of ``work``."""
        self.work = None  # it refers to this future
        self.queued_ns += queued_ns(work)
        self.execution = execution_samples(work)
        try:
            if (error := work.exception()) is not None:
                self.set_exception(error)
            else:
                self.set_result(work.result())
        except CancelledError:
            self.set_exception(Unavailable("the request was cancelled"))


class QueueTimeout:
    """Expires requests that have waited for ``after_s``. Thread-safe.

    It refers to them weakly: a request that ends earlier is freed, and so are its inputs."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._requests: deque[ReferenceType[QueuedRequest]] = deque()
        # A request that is added while the thread sleeps is not due before it wakes: `add` does not wake it.
        self._sweeper = PeriodicThread(
            self._expire_due, self._next_s, "hps-expiry", idle_rounds=SWEEP_IDLE_ROUNDS
        )

    def add(self, request: QueuedRequest) -> None:
        """Start the timeout of ``request``."""
        self._requests.append(ref(request))
        self._sweeper.start()

    def _next_s(self) -> float:
        """Seconds until the first request is due."""
        if not self._requests:
            return self._after_s
        found = self._requests[0]()
        left_s = 0.0 if found is None else found.since + self._after_s - time.monotonic()
        return max(_LEAST_S, left_s)

    def _expire_due(self) -> bool:
        # While one thread ends, two may sweep at the same time: each has the requests that it took.
        while self._requests:
            try:
                first = self._requests.popleft()
            except IndexError:
                break
            found = first()
            if found is None or found.has_ended:
                continue
            if found.since + self._after_s > time.monotonic():
                self._requests.appendleft(first)
                return True
            try:
                found.expire()
            except Exception:  # the other requests must still expire
                log.exception("failed to reject a request that waited too long")
        return False
