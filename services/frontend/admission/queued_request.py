"""A queued request, as the future of its answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

from hps.errors import Unavailable
from services.frontend.statistics import execution_samples, queued_ns


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
