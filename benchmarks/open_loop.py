"""An open-loop load generator: requests are sent at given times, whether earlier ones are answered or not.

Latencies count from the instant a request was due, so that a server that falls behind is charged for it
(coordinated omission). The time of a rejection counts from when the request was sent. The body of a rejected
request is sent to its end, as HTTP/1.1 requires. `benchmarks/grpc_load.py` has the connections for gRPC.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Protocol

import numpy as np

_MOST_CONNECTIONS = 1024
SILENCE_S = 30.0


@dataclass
class LoadResult:
    """Statuses and latencies in seconds, in the order of the answers.

    ``late``: the delay with which each request was sent; ``wall_s``: from the first request to the last
    answer; ``ends``: when each answer arrived. All in seconds."""

    statuses: list[int] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    ends: list[float] = field(default_factory=list)

    def of(self, *, ok: bool) -> np.ndarray:
        """Latencies of the answers that were 200, or of the others."""
        kept = [
            s
            for s, status in zip(self.latencies, self.statuses, strict=True)
            if (status == 200) == ok
        ]
        return np.array(kept)

    def __add__(self, other: LoadResult) -> LoadResult:
        """Both runs as one."""
        return LoadResult(
            self.statuses + other.statuses,
            self.latencies + other.latencies,
            self.late + other.late,
            self.wall_s + other.wall_s,
            [*self.ends, *(self.wall_s + end for end in other.ends)],
        )

    @property
    def rejection_times(self) -> np.ndarray:
        """Seconds from sending a request to its rejection, of each rejected one."""
        answers = zip(self.latencies, self.late, self.statuses, strict=True)
        return np.array([s - late for s, late, status in answers if status != 200])

    @property
    def goodput(self) -> float:
        """Answers with status 200 per second."""
        return self.statuses.count(200) / self.wall_s


def poisson(rate: float, seconds: float, seed: int) -> list[float]:
    """Arrival times of a Poisson process, in seconds from the start."""
    random = np.random.default_rng(seed)
    gaps = random.exponential(1 / rate, int(rate * seconds * 1.3) + 50)
    times = np.cumsum(gaps)
    return [float(t) for t in times[times < seconds]]


class Connection(Protocol):
    """A connection with one request at a time: due at ``since``, sent at ``sent`` (monotonic seconds)."""

    socket: socket.socket
    since: float
    sent: float

    @property
    def is_free(self) -> bool:
        """True if the next request may be sent."""
        ...

    def send(self, request: bytes, since: float, poll: select.epoll) -> None: ...

    def handle_events(self, events: int, poll: select.epoll) -> int:
        """Send and receive without blocking; returns the status of an answer that is complete now, else 0."""
        ...


Connect = Callable[[], Connection]


def open_loop(address: str, requests: Sequence[bytes], arrivals: Sequence[float]) -> LoadResult:
    """Send a request at each of ``arrivals``. Raises TimeoutError when the server does not respond."""
    return run_open(partial(_Connection, address), requests, arrivals)


def closed_loop(
    address: str, requests: Sequence[bytes], connections: int, seconds: float
) -> LoadResult:
    """Keep ``connections`` requests in flight. Raises TimeoutError when the server does not respond."""
    return run_closed(partial(_Connection, address), requests, connections, seconds)


def run_open(connect: Connect, requests: Sequence[bytes], arrivals: Sequence[float]) -> LoadResult:
    """As `open_loop`, over connections that ``connect`` makes."""
    return _Run(connect, requests).run(iter(arrivals))


def run_closed(
    connect: Connect, requests: Sequence[bytes], connections: int, seconds: float
) -> LoadResult:
    """As `closed_loop`, over connections that ``connect`` makes."""
    run = _Run(connect, requests)
    end = time.monotonic() + seconds
    run.again = lambda: time.monotonic() < end
    return run.run(iter([0.0] * connections))


class _Run:
    def __init__(self, connect: Connect, requests: Sequence[bytes]) -> None:
        self._connect = connect
        self._supply = cycle(requests)
        self._poll = select.epoll()
        self._open: dict[int, Connection] = {}
        self._free: list[Connection] = []
        self.again: Callable[[], bool] = lambda: False

    def run(self, arrivals: Iterator[float]) -> LoadResult:
        try:
            return self._run(arrivals)
        finally:
            for connection in self._open.values():
                connection.socket.close()
            self._poll.close()

    def _run(self, arrivals: Iterator[float]) -> LoadResult:
        result = LoadResult()
        start = last = heard = time.monotonic()
        due = next(arrivals, None)
        while due is not None or len(self._free) < len(self._open):
            now = time.monotonic()
            while due is not None and start + due <= now:
                self._send(start + due)
                due = next(arrivals, None)
            events = self._poll.poll(0)
            if events or len(self._free) == len(self._open):
                heard = now
            elif now - heard > SILENCE_S:
                raise TimeoutError(f"no answer for {SILENCE_S:.0f} s")
            for number, what in events:
                connection = self._open[number]
                was_free = connection.is_free
                status = connection.handle_events(what, self._poll)
                if status:
                    last = time.monotonic()
                    result.statuses.append(status)
                    result.latencies.append(last - connection.since)
                    result.late.append(connection.sent - connection.since)
                    result.ends.append(last - start)
                if connection.is_free and not was_free:
                    if self.again():
                        connection.send(next(self._supply), time.monotonic(), self._poll)
                    else:
                        self._free.append(connection)
        result.wall_s = last - start
        return result

    def _send(self, since: float) -> None:
        if self._free:
            connection = self._free.pop()
        elif len(self._open) < _MOST_CONNECTIONS:
            connection = self._connect()
            self._open[connection.socket.fileno()] = connection
            self._poll.register(connection.socket.fileno(), select.EPOLLIN)
        else:
            raise RuntimeError(f"{_MOST_CONNECTIONS} requests are unanswered")
        connection.send(next(self._supply), since, self._poll)


def connected(address: str) -> socket.socket:
    """Connect with Nagle's algorithm off."""
    host, _, port = address.rpartition(":")
    made = socket.create_connection((host, int(port)), 10)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


class _Connection:
    """A keep-alive HTTP/1.1 connection."""

    def __init__(self, address: str) -> None:
        self.socket = connected(address)
        self.socket.setblocking(False)
        self.since = self.sent = 0.0
        self._left = memoryview(b"")
        self._got = bytearray()
        self._answered = True

    @property
    def is_free(self) -> bool:
        return self._answered and not self._left

    def send(self, request: bytes, since: float, poll: select.epoll) -> None:
        self.since, self.sent, self._answered = since, time.monotonic(), False
        self._left = memoryview(request)
        self._write(poll)

    def _write(self, poll: select.epoll) -> None:
        try:
            while self._left:
                self._left = self._left[self.socket.send(self._left) :]
        except BlockingIOError:
            poll.modify(self.socket.fileno(), select.EPOLLIN | select.EPOLLOUT)
            return
        poll.modify(self.socket.fileno(), select.EPOLLIN)

    def handle_events(self, events: int, poll: select.epoll) -> int:
        """See `Connection`."""
        if events & select.EPOLLOUT:
            self._write(poll)
        if not events & select.EPOLLIN:
            return 0
        data = self.socket.recv(1 << 18)
        if not data:
            raise RuntimeError(f"the server closed the connection after {bytes(self._got[:200])!r}")
        self._got += data
        end = self._got.find(b"\r\n\r\n")
        if end < 0:
            return 0
        head = bytes(self._got[:end]).lower() + b"\r\n"
        if not self._is_whole(head, end + 4):
            return 0
        self._got.clear()
        self._answered = True
        return int(head[9:12])

    def _is_whole(self, head: bytes, start: int) -> bool:
        """True if the body, which begins at ``start``, is complete.

        Nothing follows an answer before the next request, so bytes that end like the last chunk are it."""
        at = head.find(b"\r\ncontent-length: ") + 18
        if at >= 18:
            return len(self._got) >= start + int(head[at : head.index(b"\r", at)])
        if b"\r\ntransfer-encoding: chunked\r\n" not in head:
            raise RuntimeError(f"an answer without a length: {head!r}")
        return self._got.endswith(b"\r\n0\r\n\r\n")
