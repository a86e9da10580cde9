"""Bounded thread pools that reject instead of blocking, and completed and chained futures.

Not a ThreadPoolExecutor: its queue is unbounded, and Python joins its threads at exit, so that one stuck
disk or network call would keep the process from exiting. These threads are daemons."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cached_property
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

from hps.errors import DeadlineExceeded, Unavailable

SWITCH_S = 1e-4
"""Interval of `sys.setswitchinterval` for processes in which a thread works beside requests: these need not
wait for Python's usual 5 ms."""
_SHORTEST_REST_S, _LONGEST_REST_S = 2e-4, 0.5
_FIRST_S, _FIRST_SHARE = 0.1, 0.1
"""Work of a paced thread of which it does a tenth at a time: most loads take no more than that."""
T = TypeVar("T")
U = TypeVar("U")
_pace = threading.local()
_STATE_DONE = "FINISHED"  # the state in concurrent.futures, which asyncio and wait() read


@contextmanager
def paced(share: float) -> Iterator[None]:
    """Let this thread work ``share`` of the time only, a tenth of that at first: it sleeps at its calls of
    `rest`.

    For long work beside request threads, which would wait for the interpreter lock each time they need it
    again: a request that takes a third of a millisecond would take three."""
    former = getattr(_pace, "share", 0.0)
    _pace.share, _pace.worked_s, _pace.first_s = share, time.thread_time(), _FIRST_S
    try:
        yield
    finally:
        _pace.share = former


def rest(*, without_lock: bool = False) -> None:
    """Sleep as the thread is `paced`, at most half a second; does nothing in other threads.

    ``without_lock``: the work since the last call hardly held the interpreter lock, as native code does;
    it is not thinned at first."""
    share = getattr(_pace, "share", 0.0)
    if not share:
        return
    worked = time.thread_time() - _pace.worked_s
    if _pace.first_s > 0 and not without_lock:
        share *= _FIRST_SHARE
    pause_s = worked * (1 / share - 1)
    if pause_s >= _SHORTEST_REST_S:
        time.sleep(min(pause_s, _LONGEST_REST_S))
        _pace.worked_s = time.thread_time()
        _pace.first_s -= 0.0 if without_lock else worked


class CompletedFuture(Future[T], Generic[T]):
    """A future that is created with its result.

    It costs a quarter of ``Future()`` plus ``set_result``, which take a condition variable and two lock
    round trips. Most lookups are answered from memory, so this counts."""

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

    # concurrent.futures.wait() and as_completed() lock every future that they receive. Not by __getattr__:
    # each check for an optional attribute would then cost an exception.
    @cached_property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        return threading.Condition()

    @cached_property
    def _waiters(self) -> list[Any]:  # type: ignore[override]
        return []


def chain_future(first: Future[T], start_second: Callable[[T], Future[U]]) -> Future[U]:
    """Start a second stage with the result of ``first``; return the future of both.

    ``start_second`` runs on the thread that completes ``first``. An error of either stage fails the future.
    `_ChainedFuture.cancel` describes cancellation."""
    answer = _ChainedFuture[U](first)

    def first_is_done(done: Future[T]) -> None:
        if done.cancelled() or answer.is_abandoned:
            answer.end_cancelled()
            return
        try:
            second = answer.stage = start_second(done.result())
        except BaseException as error:  # any error must reach the caller
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
    """The future of two consecutive stages. ``stage`` is the one that is running."""

    def __init__(self, first: Future[Any]) -> None:
        super().__init__()
        self.stage: Future[Any] | None = first  # cleared at the end: stages refer to this future
        self.is_abandoned = False

    def cancel(self) -> bool:
        """Cancel the current stage, and start no other.

        A running stage can't be cancelled, since it may write to the caller's arrays: this returns False,
        and the future is cancelled, or done, when that stage ends."""
        self.is_abandoned = True
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
        self.set_running_or_notify_cancel()  # wakes concurrent.futures.wait()


def run_into(future: Future[T], work: Callable[[], T]) -> None:
    """Run ``work``, unless ``future`` is cancelled; the future gets the result or the error."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:  # any error must reach the caller
        future.set_exception(error)
    else:
        future.set_result(result)


class BoundedThreadPool:
    """At most ``threads`` daemon threads, started on demand, with a queue of at most ``queued`` jobs.

    ``setting`` is the name of the queue's bound in the configuration. Thread-safe; ``submit`` never waits."""

    def __init__(self, threads: int, queued: int, *, name: str, setting: str = "") -> None:
        self._limit = queued
        self._max_threads = threads
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
        """Number of queued jobs that no thread has taken yet."""
        return self._queue.qsize()

    def submit(self, work: Callable[[], T], deadline: float | None = None) -> Future[T]:
        """Run ``work`` on a thread; a future that is cancelled while queued is skipped.

        The future fails with ``DeadlineExceeded`` if no thread was free before ``deadline``
        (``time.monotonic()``). Raises ``Unavailable`` when the queue is full or the pool is closed, and
        in a
        forked process, which does not inherit the threads."""
        if os.getpid() != self._process:
            raise Unavailable(
                "this process was forked from the one that opened the node, and has none of its "
                "threads; open the node after forking, or start processes by spawning"
            )
        future: Future[T] = Future()
        with self._lock:
            self.check_open()
            may_start = len(self._threads) < self._max_threads
            if may_start and not self._idle.acquire(blocking=False):
                self._start()
            elif self._queue.qsize() >= self._limit:
                where = f", {self._setting}" if self._setting else ""
                raise Unavailable(
                    f"overloaded: Exceeds maximum queue size ({self._limit} requests are "
                    f"queued{where}); retry later"
                )
            self._queue.put(_PoolTask(future, work, deadline))
        return future

    def check_open(self) -> None:
        """Raise ``Unavailable`` if `close` was called."""
        if self._closed:
            raise Unavailable("the server is shutting down; ask another replica")

    def close(
        self, timeout_s: float | None = None, last: Callable[[], None] = lambda: None
    ) -> None:
        """Finish the accepted jobs, end the threads, then run ``last``. Idempotent.

        Waits at most ``timeout_s`` for the threads. If one hangs for longer, the last thread to end runs
        ``last``, which must not run in parallel with a job."""
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
            del job  # free the result before waiting for the next job
            self._idle.release()
        with self._lock:
            self._running -= 1
            last = None if self._running else self._last
        if last is not None:
            last()


class LookupPools(NamedTuple):
    """Pools of the lookups that cannot be answered on the caller's thread.

    ``memory`` runs large lookups from memory; ``stores`` runs lookups that wait for a disk or a network.
    They are separate so that the latter do not delay the former."""

    memory: BoundedThreadPool
    stores: BoundedThreadPool

    @property
    def waiting(self) -> int:
        return self.memory.waiting + self.stores.waiting


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
        except BaseException as error:  # any error must reach the caller
            self._future.set_exception(error)
        else:
            self._future.set_result(result)
