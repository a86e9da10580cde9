"""Threads that take turns with the interpreter's lock instead of contending for it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

# Far beyond what a request costs that is all there.
_STALLED_S = 0.01


class Runners(ThreadPoolExecutor):
    """Runs tasks on up to ``most`` threads, of which ``at_once`` compute at a time; those that wait for
    somebody else (``waiting``), or have been at it for longer than a computation lasts, do not count: grpc
    has a thread wait for the rest of its request. The thread that ended last is the next to run.

    Python's own executor wakes its threads in turn: with sixteen of them, each request finds another one
    asleep and all contend for the lock, at 2.2 times the price of two (26 keys, 8 requests at a time). It
    is one only because grpc runs nothing else on behalf of a single method.
    """

    def __init__(self, at_once: int, most: int, name: str) -> None:
        super().__init__(most, name)
        self._at_once, self._most, self._name = at_once, most, name
        self._tasks: deque[tuple[Future[Any], Callable[..., Any], Any, Any]] = deque()
        # What each sleeping thread waits for. Bare locks: a Semaphore costs as much as a small lookup.
        self._idle: list[threading.Lock] = []
        self._started = 0
        self._begun: dict[threading.Lock, float] = {}  # by the thread's lock, when its task began
        self._watch = threading.Event()  # while tasks wait
        self._watched = False
        self._closed = False
        self._guard = threading.Lock()
        self._mine = threading.local()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._guard:
            if self._closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._tasks.append((future, fn, args, kwargs))
            self._wake()
            if self._tasks and not self._watch.is_set():
                self._watch.set()
                if not self._watched:
                    self._watched = True
                    name = f"{self._name}-watch"
                    threading.Thread(target=self._look, name=name, daemon=True).start()
        return future

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """For a task of ours that is about to wait: another one may run meanwhile."""
        mine = self._mine.lock
        with self._guard:
            self._begun[mine] = -_STALLED_S
            self._wake()
        try:
            yield
        finally:
            with self._guard:
                self._begun[mine] = time.monotonic()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more tasks. Threads end when there are none left; they are not waited for."""
        with self._guard:
            self._closed = True
            self._watch.set()
            if cancel_futures:
                for future, *_ in self._tasks:
                    future.cancel()
                self._tasks.clear()
            for idle in self._idle:
                idle.release()
            self._idle.clear()

    def _computing(self) -> int:
        now = time.monotonic()
        return sum(now - begun < _STALLED_S for begun in self._begun.values())

    def _wake(self) -> bool:
        """Have a thread take a task, if one may; whether it will."""
        if not self._tasks or self._computing() >= self._at_once:
            return False
        if self._idle:
            mine = self._idle.pop()
            self._begun[mine] = time.monotonic()
            mine.release()
        elif self._started < self._most:
            self._started += 1
            mine = threading.Lock()
            mine.acquire()
            self._begun[mine] = time.monotonic()
            name = f"{self._name}-{self._started}"
            threading.Thread(target=self._run, args=(mine,), name=name, daemon=True).start()
        else:
            return False
        return True

    def _look(self) -> None:
        """While tasks wait, see whether those before them have stalled: nothing else may happen then."""
        while not self._closed:
            self._watch.wait()
            time.sleep(_STALLED_S)
            with self._guard:
                if not self._tasks:
                    self._watch.clear()
                while self._tasks and self._wake():
                    pass

    def _run(self, mine: threading.Lock) -> None:
        self._mine.lock = mine
        while True:
            task = None
            with self._guard:
                self._begun.pop(mine, None)
                if self._tasks and self._computing() < self._at_once:
                    task = self._tasks.popleft()
                    self._begun[mine] = time.monotonic()
                elif self._closed:
                    return
                else:
                    self._idle.append(mine)
            if task is None:
                mine.acquire()
                continue
            _do(*task)
            del task  # an answer must not live until the next request comes


def _do(future: Future[Any], fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = fn(*args, **kwargs)
    except BaseException as error:  # whatever it was, its caller must hear of it
        future.set_exception(error)
    else:
        future.set_result(result)
