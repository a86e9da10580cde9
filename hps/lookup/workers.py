"""Threads for work that may wait: bounded, refusing instead of blocking, and futures already done."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from hps.errors import DeadlineExceeded, Unavailable

T = TypeVar("T")
_STATE_DONE = "FINISHED"  # concurrent.futures' own word, read by asyncio and by wait()


class Done(Future[T], Generic[T]):
    """A future that was born with its result.

    A quarter of the cost of ``Future()`` plus ``set_result``, which are a condition variable and two
    lock round trips: worth it, because most lookups are answered from memory.
    """

    _state = _STATE_DONE

    def __init__(self, result: T) -> None:
        self._result: T = result
        self._exception = None

    def result(self, timeout: float | None = None) -> T:
        return self._result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return None

    def cancel(self) -> bool:
        return False

    def cancelled(self) -> bool:
        return False

    def running(self) -> bool:
        return False

    def done(self) -> bool:
        return True

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        fn(self)

    def __getattr__(self, name: str) -> Any:
        # concurrent.futures.wait() and as_completed() lock every future they are given.
        if name == "_condition":
            self._condition = threading.Condition()
            self._waiters: list[Any] = []
            return self._condition
        raise AttributeError(name)


class Workers:
    """``threads`` daemon threads behind a queue of at most ``queued`` waiting jobs.

    ``submit`` never waits. ``setting`` is the name of the bound in the configuration, for messages.
    """

    def __init__(self, threads: int, queued: int, *, name: str, setting: str) -> None:
        self._queue: queue.Queue[_Job[Any] | None] = queue.Queue(queued)
        self._limit = queued
        self._setting = setting
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"hps-{name}-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """Jobs that no thread has taken yet."""
        return self._queue.qsize()

    def submit(self, work: Callable[[], T], deadline: float | None = None) -> Future[T]:
        """Run ``work`` on a thread. ``deadline`` (``time.monotonic()``): the future fails with
        ``DeadlineExceeded`` when no thread was free before it. A cancelled future is not run."""
        if self._closed:
            raise Unavailable("the server is shutting down; ask another replica")
        future: Future[T] = Future()
        try:
            self._queue.put_nowait(_Job(future, work, deadline))
        except queue.Full:
            raise Unavailable(
                f"overloaded: Exceeds maximum queue size ({self._limit} requests wait already, "
                f"{self._setting}); retry later"
            ) from None
        return future

    def close(self) -> None:
        """Finish what was accepted, then end the threads. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            job.run()
            del job  # a result must not live until the next job comes


class _Job(Generic[T]):
    __slots__ = ("_deadline", "_future", "_queued_at", "_work")

    def __init__(self, future: Future[T], work: Callable[[], T], deadline: float | None) -> None:
        self._future = future
        self._work = work
        self._deadline = deadline
        self._queued_at = time.monotonic()

    def run(self) -> None:
        if not self._future.set_running_or_notify_cancel():
            return
        try:
            now = time.monotonic()
            if self._deadline is not None and now > self._deadline:
                waited = (now - self._queued_at) * 1e3
                raise DeadlineExceeded(
                    f"the deadline passed while the request waited {waited:.0f} ms for a thread"
                )
            result = self._work()
        except BaseException as error:  # whatever it was, the caller must hear of it
            with contextlib.suppress(Exception):
                self._future.set_exception(error)
        else:
            self._future.set_result(result)
