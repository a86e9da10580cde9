"""Several requests to one server at a time, each on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from hps.client.client import Client

T = TypeVar("T")
_Job = tuple[Future[Any], Callable[[Client], Any]]


class ClientPool:
    """``threads`` threads that ask with ``client``, which stays its owner's to close.

    Any thread may call ``submit``; it never waits, so the caller bounds what is under way. Leaving
    the context gives up what no thread has begun; it waits for the rest unless an error ended it. The
    threads are daemons: a server that hangs keeps no process from ending.
    """

    def __init__(self, client: Client, threads: int) -> None:
        self._client = client
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, name=f"hps-client-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> ClientPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        with suppress(Empty):
            while (job := self._jobs.get_nowait()) is not None:
                job[0].cancel()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads if kind is None else ():
            thread.join()

    def submit(self, work: Callable[[Client], T]) -> Future[T]:
        """Run ``work`` with a client; the future has its result, or what it raised."""
        future: Future[T] = Future()
        self._jobs.put((future, work))
        return future

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, work = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work(self._client))
            except BaseException as error:
                future.set_exception(error)
