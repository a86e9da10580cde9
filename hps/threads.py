"""Threads for work that may wait or hang: bounded, refusing instead of blocking, and futures already done.

Not a ThreadPoolExecutor: its queue has no bound, and Python joins its threads at exit, so one hung
disk or network call would keep the process from ending. These are daemons.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import cached_property
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

from hps.errors import DeadlineExceeded, TierError, Unavailable

log = logging.getLogger(__name__)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0  # of `RetryThread`
T = TypeVar("T")
U = TypeVar("U")
_STATE_DONE = "FINISHED"  # concurrent.futures' own word, read by asyncio and by wait()


class CompletedFuture(Future[T], Generic[T]):
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

    # concurrent.futures.wait() and as_completed() lock every future they are given. Not by __getattr__, which
    # would make whoever asks for an attribute that may be missing pay for an exception.
    @cached_property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        return threading.Condition()

    @cached_property
    def _waiters(self) -> list[Any]:  # type: ignore[override]
        return []


def chain_future(first: Future[T], go_on: Callable[[T], Future[U]]) -> Future[U]:
    """The future of what ``go_on`` starts with the result of ``first``, on the thread that has it; the
    errors of all three are its own. Cancelled as `_ChainedFuture.cancel` says."""
    answer = _ChainedFuture[U](first)

    def first_is_done(done: Future[T]) -> None:
        if done.cancelled() or answer.is_given_up:
            answer.end_cancelled()
            return
        try:
            second = answer.stage = go_on(done.result())
        except BaseException as error:  # whatever it was, the caller must hear of it
            answer.end(error=error)
        else:
            second.add_done_callback(second_is_done)

    def second_is_done(done: Future[U]) -> None:
        if done.cancelled():
            answer.end_cancelled()
        elif (error := done.exception()) is not None:
            answer.end(error=error)
        else:
            answer.end(done.result())

    first.add_done_callback(first_is_done)
    return answer


class _ChainedFuture(Future[U], Generic[U]):
    """The future of two stages, one after the other. ``stage`` is the one that is awaited."""

    def __init__(self, first: Future[Any]) -> None:
        super().__init__()
        self.stage: Future[Any] | None = first  # until the end: stages refer to this one
        self.is_given_up = False

    def cancel(self) -> bool:
        """Cancel the stage that is awaited, and start no other. A stage that runs can't be cancelled: it may
        write to the caller's arrays. Then this returns False, and the future is cancelled, or done, when that
        stage ends."""
        self.is_given_up = True
        stage = self.stage
        return self.cancelled() if stage is None else stage.cancel()

    def end(self, result: Any = None, error: BaseException | None = None) -> None:
        self.stage = None
        if error is not None:
            self.set_exception(error)
        else:
            self.set_result(result)

    def end_cancelled(self) -> None:
        self.stage = None
        super().cancel()
        self.set_running_or_notify_cancel()  # for those in concurrent.futures.wait()


class BoundedThreadPool:
    """At most ``threads`` daemon threads, started when they are first needed, behind a queue of at
    most ``queued`` waiting jobs. ``setting`` is the name of that bound in the configuration.

    Any thread may call it; ``submit`` never waits.
    """

    def __init__(self, threads: int, queued: int, *, name: str, setting: str = "") -> None:
        self._limit = queued
        self._most_threads = threads
        self._name = name
        self._setting = setting
        self._queue: SimpleQueue[_PoolTask[Any] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._idle = threading.Semaphore(0)
        self._running = 0
        self._closed = False
        self._process = os.getpid()
        self._last: Callable[[], None] | None = None

    @property
    def waiting(self) -> int:
        """Jobs that no thread has taken yet."""
        return self._queue.qsize()

    def submit(self, work: Callable[[], T], deadline: float | None = None) -> Future[T]:
        """Run ``work`` on a thread. ``deadline`` (``time.monotonic()``): the future fails with
        ``DeadlineExceeded`` when no thread was free before it. A cancelled future is not run.

        Raises ``Unavailable`` when the queue is full, the workers are closed, or the process is a fork
        of theirs, which has none of the threads.
        """
        if os.getpid() != self._process:
            raise Unavailable(
                "this process was forked from the one that opened the node, and threads do not come "
                "along; open the node after forking, or start processes by spawning"
            )
        future: Future[T] = Future()
        with self._lock:
            self.check_open()
            may_start = len(self._threads) < self._most_threads
            if may_start and not self._idle.acquire(blocking=False):
                self._start()
            elif self._queue.qsize() >= self._limit:
                where = f", {self._setting}" if self._setting else ""
                raise Unavailable(
                    f"overloaded: Exceeds maximum queue size ({self._limit} requests wait "
                    f"already{where}); retry later"
                )
            self._queue.put(_PoolTask(future, work, deadline))
        return future

    def check_open(self) -> None:
        """Raises ``Unavailable`` once `close` was called."""
        if self._closed:
            raise Unavailable("the server is shutting down; ask another replica")

    def close(
        self, timeout_s: float | None = None, last: Callable[[], None] = lambda: None
    ) -> None:
        """Finish what was accepted, end the threads, then run ``last``. Idempotent.

        Waits at most ``timeout_s`` for the threads; when one hangs for longer, the last thread to
        end runs ``last``, which must not run beside a job.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for _ in self._threads:
                self._queue.put(None)
        until = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))
        with self._lock:
            if self._running:
                self._last = last
                return
        last()

    def _start(self) -> None:
        name = f"hps-{self._name}-{len(self._threads)}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)
        self._running += 1

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            job.run()
            del job  # a result must not live until the next job comes
            self._idle.release()
        with self._lock:
            self._running -= 1
            last = None if self._running else self._last
        if last is not None:
            last()


class LookupPools(NamedTuple):
    """Where lookups go that can't be answered on the caller's thread: ``memory`` for those that are only
    large, ``stores`` for those that wait for a disk or a network, and must not hold up the others."""

    memory: BoundedThreadPool
    stores: BoundedThreadPool

    @property
    def waiting(self) -> int:
        return self.memory.waiting + self.stores.waiting


class RetryThread:
    """Tries ``work`` on a thread of its own until it does not raise TierError, with growing pauses: for
    what could not be done at the start because a server was not there."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self._work = work
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        pause = _FIRST_PAUSE_S
        while not self._closed.wait(pause):
            try:
                self._work()
            except TierError as error:
                log.warning("%s; trying again in %.0f s", error, pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            except Exception:
                log.exception("what could not be done at the start can't be done at all")
                return
            else:
                return

    def close(self) -> None:
        """Try no more. An attempt at hand is left to fail by itself."""
        self._closed.set()
        self._thread.join(1.0)


class PeriodicThread:
    """Does ``work`` every ``every_s`` seconds on a thread of its own, the first time at once. What it raises
    is logged, once for each kind of error, and does not end it."""

    def __init__(self, work: Callable[[], None], every_s: float, name: str) -> None:
        self._work = work
        self._every_s = every_s
        self._closed = threading.Event()
        self._said: set[type[Exception]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                self._work()
            except Exception as error:
                level = logging.DEBUG if type(error) in self._said else logging.ERROR
                log.log(level, "%s failed; trying again", self._thread.name, exc_info=True)
                self._said.add(type(error))
            if self._closed.wait(self._every_s):
                return

    def close(self) -> None:
        """Do it no more. What is under way is left to end by itself."""
        self._closed.set()
        self._thread.join(1.0)


class _PoolTask(Generic[T]):
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
            self._future.set_exception(error)
        else:
            self._future.set_result(result)
