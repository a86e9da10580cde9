"""Requests without a pause, as a load balancer sends them: to front ends that say they are ready."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from types import TracebackType
from typing import Any, Self

from hps.client import Client

LOOK_S = 0.2


class Traffic:
    """``threads`` threads that ask until the block ends. ``send(client)`` makes one request and checks its
    answer; what it raises is a failure. Nothing is sent twice."""

    def __init__(
        self, ports: Sequence[int], send: Callable[[Client], Any], threads: int = 2
    ) -> None:
        self._ports, self._send = tuple(ports), send
        self.answered = 0
        self.failures: list[str] = []
        self.slowest_s = 0.0
        self._ready: tuple[int, ...] = ()
        self._lock, self._end = threading.Lock(), threading.Event()
        work = [self._look, *[self._ask] * threads]
        self._threads = [threading.Thread(target=each) for each in work]

    def __enter__(self) -> Self:
        self._ready = tuple(port for port in self._ports if _is_ready(port))
        assert self._ready, "no front end is ready"
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def _look(self) -> None:
        while not self._end.wait(LOOK_S):
            found = tuple(port for port in self._ports if _is_ready(port))
            # A balancer that knows of nobody ready goes on with those it knew.
            self._ready = found or self._ready

    def _ask(self) -> None:
        clients = {port: Client(f"http://127.0.0.1:{port}", retries=0) for port in self._ports}
        for turn in count():
            if self._end.is_set():
                break
            ready = self._ready
            port = ready[turn % len(ready)]
            begun = time.monotonic()
            try:
                self._send(clients[port])
            except Exception as error:
                with self._lock:
                    self.failures.append(f"port {port}: {type(error).__name__}: {error}")
                self._end.wait(0.05)
                continue
            took = time.monotonic() - begun
            with self._lock:
                self.answered += 1
                self.slowest_s = max(self.slowest_s, took)
        for client in clients.values():
            client.close()


def _is_ready(port: int) -> bool:
    with suppress(OSError):
        url = f"http://127.0.0.1:{port}/v2/health/ready"
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    return False
