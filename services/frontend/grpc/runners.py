"""Threads that take turns with the interpreter's lock instead of contending for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any


class Runners(ThreadPoolExecutor):
    """Runs tasks on up to ``most`` threads, of which ``at_once`` compute at a time; those that wait for
    somebody else (``waiting``) do not count. The thread that ended last is the next to run.

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
        self._computing = 0
        self._closed = False
        self._guard = threading.Lock()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._guard:
            if self._closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._tasks.append((future, fn, args, kwargs))
            self._wake()
        return future

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """For a task of ours that is about to wait: another one may run meanwhile."""
        with self._guard:
            self._computing -= 1
            self._wake()
        try:
            yield
        finally:
            with self._guard:
                self._computing += 1

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more tasks. Threads end when there are none left; they are not waited for."""
        with self._guard:
            self._closed = True
            if cancel_futures:
                for future, *_ in self._tasks:
                    future.cancel()
                self._tasks.clear()
            for idle in self._idle:
                idle.release()
            self._idle.clear()

    def _wake(self) -> None:
        if not self._tasks or self._computing >= self._at_once:
            return
        if self._idle:
            self._idle.pop().release()
        elif self._started < self._most:
            self._started += 1
            name = f"{self._name}-{self._started}"
            threading.Thread(target=self._run, name=name, daemon=True).start()
        else:
            return
        self._computing += 1

    def _run(self) -> None:
        mine = threading.Lock()
        mine.acquire()
        while True:
            with self._guard:
                task = None
                if self._tasks and self._computing <= self._at_once:
                    task = self._tasks.popleft()
                else:
                    self._computing -= 1
                    if self._closed:
                        return
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
