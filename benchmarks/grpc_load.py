"""A light closed-loop gRPC load generator: unary calls over plain sockets, one thread, ready-made frames.

gRPC's own client takes more of a core for a call than some of the servers under test. What a server sends is
read as far as needed (RFC 9113): windows, pings and settings are answered, a call is over with its trailers,
and an answer without a message is an error. Every connection has one call at a time.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Sequence
from itertools import cycle

from benchmarks.open_loop import Seen

_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_LARGEST_FRAME, _MOST_WINDOW = 16_384, (1 << 31) - 1
SILENCE_S = 10.0


def grpc_closed(
    address: str, method: str, messages: Sequence[bytes], connections: int, seconds: float
) -> Seen:
    """Keep ``connections`` calls in flight for ``seconds``, cycling through ``messages``.

    Raises RuntimeError for a call that fails, TimeoutError when the server stays silent, ValueError for a
    message that does not fit into a frame.
    """
    supply = cycle([_framed(message) for message in messages])
    head = _head(method, address)
    seen, poll = Seen(), select.epoll()
    clients = {}
    for _ in range(connections):
        client = _Connection(address, head)
        clients[client.socket.fileno()] = client
        poll.register(client.socket.fileno(), select.EPOLLIN)
    try:
        start = heard = time.monotonic()
        end = start + seconds
        for client in clients.values():
            client.call(next(supply))
        waiting = connections
        while waiting:
            events, now = poll.poll(0), time.monotonic()
            if not events and now - heard > SILENCE_S:
                raise TimeoutError(f"no answer from {address} for {SILENCE_S:.0f} s")
            for number, _ in events:
                heard, client = now, clients[number]
                if not client.receive():
                    continue
                answered = time.monotonic()
                seen.statuses.append(200)
                seen.latencies.append(answered - client.since)
                seen.late.append(0.0)
                if answered < end:
                    client.call(next(supply))
                else:
                    waiting -= 1
        seen.wall_s = time.monotonic() - start
        return seen
    finally:
        poll.close()
        for client in clients.values():
            client.socket.close()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack("!I", len(payload))[1:] + struct.pack("!BBI", kind, flags, stream) + payload


def _framed(message: bytes) -> bytes:
    """The message with gRPC's prefix: not compressed, its length."""
    if len(message) + 5 > _LARGEST_FRAME:
        raise ValueError(f"a message of {len(message)} bytes does not fit into a frame")
    return struct.pack("!BI", 0, len(message)) + message


def _head(method: str, address: str) -> bytes:
    """A call's headers in HPACK (RFC 7541), without the dynamic table: POST and http by their index."""

    def text(value: str) -> bytes:
        return bytes([len(value)]) + value.encode()

    return (
        b"\x83\x86\x04"
        + text(method)
        + b"\x01"
        + text(address)
        + b"\x0f\x10"
        + text("application/grpc")
        + b"\x00"
        + text("te")
        + text("trailers")
    )


class _Connection:
    """``since`` is when the call under way began."""

    def __init__(self, address: str, head: bytes) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), SILENCE_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.since = 0.0
        self._head, self._stream = head, -1
        self._got = bytearray()
        self._message = 0
        self._taken = 0
        self._window, self._kept = 65_535, b""
        settings = struct.pack("!HIHI", 1, 0, 4, _MOST_WINDOW)
        window = struct.pack("!I", _MOST_WINDOW - 65_535)
        hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0, settings)
        self.socket.sendall(hello + _frame(_WINDOW, 0, 0, window))

    def call(self, framed: bytes) -> None:
        self.since = time.monotonic()
        self._message = 0
        self._stream += 2
        self._kept = framed
        self._send(_frame(_HEADERS, _END_HEADERS, self._stream, self._head))

    def _send(self, before: bytes = b"") -> None:
        """Send ``before``, and the message too if the server has room for it."""
        if self._kept and self._window >= len(self._kept):
            self._window -= len(self._kept)
            before += _frame(_DATA, _END_STREAM, self._stream, self._kept)
            self._kept = b""
        if before:
            self.socket.sendall(before)

    def receive(self) -> bool:
        """Read what is there; True when it ends the call."""
        data = self.socket.recv(1 << 18)
        if not data:
            raise RuntimeError("the server closed the connection")
        self._got += data
        got, at, over = self._got, 0, False
        while len(got) - at >= 9:
            size = int.from_bytes(got[at : at + 3], "big")
            if len(got) - at < 9 + size:
                break
            over |= self._take(got[at + 3], got[at + 4], got, at + 9, size)
            at += 9 + size
        del got[:at]
        return over

    def _take(self, kind: int, flags: int, got: bytearray, at: int, size: int) -> bool:
        if kind == _DATA:
            self._message += size
            self._taken += size
            if self._taken > 1 << 30:
                self._send(_frame(_WINDOW, 0, 0, struct.pack("!I", self._taken)))
                self._taken = 0
        elif kind == _HEADERS and flags & _END_STREAM:
            if self._message < 5:
                raise RuntimeError(f"the call failed: {bytes(got[at : at + size])!r}")
            return True
        elif kind == _WINDOW:
            if got[at - 4 : at] == b"\0\0\0\0":
                self._window += int.from_bytes(got[at : at + 4], "big")
                self._send()
        elif kind in (_SETTINGS, _PING) and not flags & _ACK:
            answer = bytes(got[at : at + size]) if kind == _PING else b""
            self._send(_frame(kind, _ACK, 0, answer))
        elif kind in (_RESET, _GOAWAY):
            raise RuntimeError(f"the server ended the call: {bytes(got[at : at + size])!r}")
        return False
