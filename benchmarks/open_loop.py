"""A load generator whose requests come when they come, not when the server has answered the last ones.

Latencies count from the instant a request was to be sent, so a server that falls behind is not spared. How
soon a refusal comes is counted from when the request was sent. A refused request's body is sent to its end,
as HTTP/1.1 wants.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np

_MOST_CONNECTIONS = 1024


@dataclass
class Seen:
    """Statuses and latencies in seconds, in the order of the answers; ``late`` is how late each request was
    sent, ``wall_s`` from the first request to the last answer."""

    statuses: list[int] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    wall_s: float = 0.0

    def of(self, *, ok: bool) -> np.ndarray:
        """Latencies of the answers that were 200, or of the others."""
        kept = [
            s
            for s, status in zip(self.latencies, self.statuses, strict=True)
            if (status == 200) == ok
        ]
        return np.array(kept)

    def __add__(self, other: Seen) -> Seen:
        """Both runs as one."""
        return Seen(
            self.statuses + other.statuses,
            self.latencies + other.latencies,
            self.late + other.late,
            self.wall_s + other.wall_s,
        )

    @property
    def refusals(self) -> np.ndarray:
        """How long each refusal took from when its request was sent."""
        told = zip(self.latencies, self.late, self.statuses, strict=True)
        return np.array([s - late for s, late, status in told if status != 200])

    @property
    def goodput(self) -> float:
        """Answers a second."""
        return self.statuses.count(200) / self.wall_s


def poisson(rate: float, seconds: float, seed: int) -> list[float]:
    """When requests come, in seconds from the start."""
    random = np.random.default_rng(seed)
    gaps = random.exponential(1 / rate, int(rate * seconds * 1.3) + 50)
    times = np.cumsum(gaps)
    return [float(t) for t in times[times < seconds]]


def open_loop(
    address: str,
    requests: Sequence[bytes],
    arrivals: Sequence[float],
    now_and_then: Callable[[], None] = lambda: None,
) -> Seen:
    """Send a request at each of ``arrivals``; ``now_and_then`` is called every second."""
    return _Run(address, requests).run(iter(arrivals), now_and_then)


def closed_loop(address: str, requests: Sequence[bytes], connections: int, seconds: float) -> Seen:
    """Keep ``connections`` requests in flight."""
    run = _Run(address, requests)
    end = time.monotonic() + seconds
    run.again = lambda: time.monotonic() < end
    return run.run(iter([0.0] * connections), lambda: None)


class _Run:
    def __init__(self, address: str, requests: Sequence[bytes]) -> None:
        host, _, port = address.rpartition(":")
        self._to = (host, int(port))
        self._supply = cycle(requests)
        self._poll = select.epoll()
        self._open: dict[int, _Connection] = {}
        self._free: list[_Connection] = []
        self.again: Callable[[], bool] = lambda: False

    def run(self, arrivals: Iterator[float], now_and_then: Callable[[], None]) -> Seen:
        seen = Seen()
        start = last = second = time.monotonic()
        due = next(arrivals, None)
        while due is not None or len(self._free) < len(self._open):
            now = time.monotonic()
            if now > second + 1:
                second = now
                now_and_then()
            while due is not None and start + due <= now:
                self._send(start + due)
                due = next(arrivals, None)
            for number, events in self._poll.poll(0):
                connection = self._open[number]
                status = connection.go_on(events, self._poll)
                if status:
                    last = time.monotonic()
                    seen.statuses.append(status)
                    seen.latencies.append(last - connection.since)
                    seen.late.append(connection.sent - connection.since)
                if connection.is_free:
                    if self.again():
                        connection.send(next(self._supply), time.monotonic(), self._poll)
                    else:
                        self._free.append(connection)
        for connection in self._open.values():
            connection.socket.close()
        self._poll.close()
        seen.wall_s = last - start
        return seen

    def _send(self, since: float) -> None:
        if self._free:
            connection = self._free.pop()
        elif len(self._open) < _MOST_CONNECTIONS:
            connection = _Connection(self._to)
            self._open[connection.socket.fileno()] = connection
            self._poll.register(connection.socket.fileno(), select.EPOLLIN)
        else:
            raise RuntimeError(f"{_MOST_CONNECTIONS} requests are unanswered")
        connection.send(next(self._supply), since, self._poll)


class _Connection:
    """A keep-alive connection with one request at a time."""

    def __init__(self, to: tuple[str, int]) -> None:
        self.socket = socket.create_connection(to, 10)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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

    def go_on(self, events: int, poll: select.epoll) -> int:
        """Send and receive what can be; the status of an answer that is complete now, else 0."""
        if events & select.EPOLLOUT:
            self._write(poll)
        if not events & select.EPOLLIN:
            return 0
        data = self.socket.recv(1 << 18)
        if not data:
            raise RuntimeError(f"the server hung up after {bytes(self._got[:200])!r}")
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
        """Whether the body, which begins at ``start``, is all there. Nothing follows an answer before the
        next request, so what ends like the last chunk is it."""
        at = head.find(b"\r\ncontent-length: ") + 18
        if at >= 18:
            return len(self._got) >= start + int(head[at : head.index(b"\r", at)])
        if b"\r\ntransfer-encoding: chunked\r\n" not in head:
            raise RuntimeError(f"an answer without a length: {head!r}")
        return self._got.endswith(b"\r\n0\r\n\r\n")


def grpc_open_loop(
    address: str,
    method: str,
    messages: Sequence[bytes],
    arrivals: Sequence[float],
    now_and_then: Callable[[], None] = lambda: None,
) -> tuple[Seen, set[str]]:
    """As `open_loop` over gRPC; status 200 is OK, and the codes of the others are told as well."""
    import grpc

    seen, codes = Seen(), set()
    options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.insecure_channel(address, options) for _ in range(8)]
    calls = cycle([channel.unary_unary(method) for channel in channels])
    supply = cycle(messages)
    open_calls = set()
    start = second = time.monotonic()

    def ended(since: float, sent: float, call: Any) -> None:
        now = time.monotonic()
        seen.late.append(sent - since)
        code = call.code()
        codes.add(code.name)
        seen.statuses.append(200 if code.name == "OK" else 503)
        seen.latencies.append(now - since)
        seen.wall_s = now - start
        open_calls.discard(call)

    for due in arrivals:
        while (left := start + due - time.monotonic()) > 0:
            time.sleep(min(left, 0.05))
        now = time.monotonic()
        if now > second + 1:
            second = now
            now_and_then()
        call = next(calls).future(next(supply), timeout=30)
        open_calls.add(call)
        call.add_done_callback(partial(ended, start + due, now))
    while open_calls:
        time.sleep(0.01)
    for channel in channels:
        channel.close()
    codes.discard("OK")
    return seen, codes


def grpc_closed_loop(
    address: str, method: str, messages: Sequence[bytes], calls: int, seconds: float
) -> Seen:
    """As `closed_loop` over gRPC. Raises ``grpc.RpcError`` for any answer but OK."""
    import grpc

    end = time.monotonic() + seconds

    def ask(channel: Any) -> Seen:
        seen, supply = Seen(), cycle(messages)
        call = channel.unary_unary(method)
        while (since := time.monotonic()) < end:
            call(next(supply), timeout=30)
            seen.statuses.append(200)
            seen.latencies.append(time.monotonic() - since)
            seen.late.append(0.0)
        return seen

    options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.insecure_channel(address, options) for _ in range(calls)]
    start = time.monotonic()
    with ThreadPoolExecutor(calls) as pool:
        seen = sum(pool.map(ask, channels), Seen())
    seen.wall_s = time.monotonic() - start
    for channel in channels:
        channel.close()
    return seen


__all__ = ["Seen", "closed_loop", "grpc_closed_loop", "grpc_open_loop", "open_loop", "poisson"]
