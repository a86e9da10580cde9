"""A few threads for calls that may hang.

Not a ThreadPoolExecutor: Python joins its threads at exit, so one hung disk or network call would keep
the process from ending. These are daemons, and whoever waits for a call may give it up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Semaphore, Thread

from hps.errors import TierError

NOT_YET = float("inf")


class Call:
    """One piece of work on its way through a worker. ``work`` must touch nothing that whoever
    gives the call up still uses."""

    __slots__ = ("_done", "_given_up", "_work", "error", "started")

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._done = Lock()
        self._done.acquire()
        self._given_up = False
        self.started = NOT_YET
        """When a worker took it up (``time.monotonic()``)."""
        self.error: BaseException | None = None

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end; False when it did not come in time."""
        if self._done.acquire(timeout=max(0.0, timeout_s)):
            self._done.release()
            return True
        return False

    def give_up(self) -> None:
        """If no worker has taken the call up yet, none will."""
        self._given_up = True

    @property
    def running(self) -> bool:
        return self.started < NOT_YET and self._done.locked()

    def run(self) -> None:
        if self._given_up:
            return
        self.started = time.monotonic()
        try:
            self._work()
        except BaseException as error:
            self.error = error
        finally:
            self._done.release()


class Workers:
    """At most ``threads`` daemon threads, started when they are first needed."""

    def __init__(self, name: str, threads: int) -> None:
        self._name = name
        self._threads = threads
        self._queue: SimpleQueue[Call | None] = SimpleQueue()
        self._idle = Semaphore(0)
        self._lock = Lock()
        self._started = 0
        self._running = 0
        self._closed: Call | None = None

    def submit(self, work: Callable[[], None]) -> Call:
        """Queue ``work``. Raises TierError once closed."""
        if self._closed is not None:
            raise TierError(self._name, "is closed")
        call = Call(work)
        self._queue.put(call)
        if self._started < self._threads and not self._idle.acquire(blocking=False):
            self._start()
        return call

    def close(self, last: Callable[[], None]) -> Call:
        """End the threads after the work at hand; the last one out, else the caller, runs ``last``.
        May be called again, to no further effect; returns the call that stands for ``last``."""
        with self._lock:
            if self._closed is not None:
                return self._closed
            self._closed = Call(last)
            for _ in range(self._running):
                self._queue.put(None)
            if not self._running:
                self._closed.run()
            return self._closed

    def _start(self) -> None:
        with self._lock:
            if self._started == self._threads or self._closed is not None:
                return
            self._started += 1
            self._running += 1
            Thread(target=self._work, name=f"hps-{self._name}-{self._started}", daemon=True).start()

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            call.run()
            del call  # its arrays would live until the next call
            self._idle.release()
        with self._lock:
            self._running -= 1
            if not self._running and self._closed is not None:
                self._closed.run()
