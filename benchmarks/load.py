"""A light closed-loop HTTP/1.1 load generator: keep-alive sockets, one thread, almost no parsing.

It uses a fraction of the CPU time per request of the servers under test, so that the server, not the
client, is measured.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

from benchmarks.peers.process import Server

SILENCE_S = 10.0


@dataclass(frozen=True)
class Load:
    """Result of a run. CPU seconds are user + system time; the server's include its children."""

    requests: int
    wall_s: float
    server_cpu_s: float
    client_cpu_s: float

    @property
    def cpu_us(self) -> float:
        """Server CPU time per request, in microseconds."""
        return self.server_cpu_s / self.requests * 1e6

    @property
    def per_second(self) -> float:
        return self.requests / self.wall_s


def http_request(path: str, body: bytes, headers: dict[str, str] | None = None) -> bytes:
    """The bytes of a POST."""
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def exchange(address: str, request: bytes, timeout_s: float = 30.0) -> tuple[bytes, bytes]:
    """Send one request; returns (head, body). Raises RuntimeError unless the status is 200."""
    connection = _Connection(address, timeout_s)
    try:
        connection.socket.sendall(request)
        while not connection.receive():
            pass
        head, _, body = bytes(connection.last).partition(b"\r\n\r\n")
        return head, body
    finally:
        connection.socket.close()


def drive(server: Server, requests: Sequence[bytes], *, connections: int, seconds: float) -> Load:
    """Keep ``connections`` requests in flight for ``seconds``, cycling through ``requests``.

    It never sleeps: a sleeping client must be woken for every answer, which on a virtual machine costs the
    server as much as the answer itself, but only a server that is slower than the client.

    Raises RuntimeError for a status other than 200, TimeoutError when the server does not respond.
    """
    clients = [_Connection(server.address, SILENCE_S) for _ in range(connections)]
    poll = select.epoll()
    by_number = {}
    for client in clients:
        poll.register(client.socket.fileno(), select.EPOLLIN)
        by_number[client.socket.fileno()] = client
    supply = cycle(requests)
    done = 0
    try:
        cpu, own, start = server.cpu_seconds(), time.process_time(), time.monotonic()
        end = start + seconds
        for client in clients:
            client.socket.sendall(next(supply))
        waiting = connections
        heard = start
        while waiting:
            now = time.monotonic()
            events = poll.poll(0)
            if events:
                heard = now
            elif now - heard > SILENCE_S:
                raise TimeoutError(f"no answer from {server.address} for {SILENCE_S:.0f} s")
            more = now < end
            for number, _ in events:
                client = by_number[number]
                if not client.receive():
                    continue
                done += 1
                if more:
                    client.socket.sendall(next(supply))
                else:
                    waiting -= 1
        wall = time.monotonic() - start
        return Load(done, wall, server.cpu_seconds() - cpu, time.process_time() - own)
    finally:
        poll.close()
        for client in clients:
            client.socket.close()


class _Connection:
    """One keep-alive connection. ``last`` is the answer that ``receive`` completed."""

    def __init__(self, address: str, timeout_s: float) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout_s)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.last = b""
        self._parts: list[bytes] = []
        self._expected = 0
        self._have = 0

    def receive(self) -> bool:
        """Read available bytes; True when they complete an answer. Raises RuntimeError unless 200."""
        data = self.socket.recv(1 << 18)
        if not data:
            raise RuntimeError(f"the server closed the connection: {self.last!r}")
        if not self._parts:
            self._start(data)
        self._parts.append(data)
        self._have += len(data)
        if self._expected == 0:
            self._start(b"".join(self._parts))
        if not self._expected or self._have < self._expected:
            return False
        self.last = data if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._have = self._expected = 0
        return True

    def _start(self, data: bytes) -> None:
        """Read the answer's length, once its head is complete."""
        head = data.find(b"\r\n\r\n")
        if head < 0:
            return
        if not data.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(data[:2000].decode(errors="replace"))
        lower = data[:head].lower()
        at = lower.find(b"content-length: ")
        # Not the Inference-Header-Content-Length that a binary answer has as well.
        while at >= 0 and lower[at - 1 : at] == b"-":
            at = lower.find(b"content-length: ", at + 1)
        if at < 0:
            raise RuntimeError("an answer without Content-Length")
        end = lower.find(b"\r", at)
        self._expected = head + 4 + int(lower[at + 16 : end if end > 0 else head])
