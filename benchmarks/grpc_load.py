"""A light gRPC load generator: unary calls over plain sockets, one thread, ready-made messages.

gRPC's Python client uses more CPU per call than some of the servers under test, and reports answers late.
Only the necessary frames are read (RFC 9113): windows, pings and settings are acknowledged, a call ends with
its trailers, and the unsent rest of its message is dropped. Every connection has one call at a time."""

from __future__ import annotations

import select
import struct
import time
from collections.abc import Sequence
from functools import partial

from benchmarks.open_loop import LoadResult, connected, run_closed, run_open

_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_LARGEST_FRAME, _FIRST_WINDOW, _MOST_WINDOW = 16_384, 65_535, (1 << 31) - 1
# Further frames are made once fewer than this many bytes are unsent.
_READY = 1 << 16
_STATUS = b"\x0bgrpc-status"


def grpc_open(
    address: str, method: str, messages: Sequence[bytes], arrivals: Sequence[float]
) -> LoadResult:
    """As `benchmarks.open_loop.open_loop`; statuses are 200 for OK, else gRPC's numbers. Raises RuntimeError
    when the server closes a connection, or ends a call without a gRPC status."""
    connect = partial(_Connection, address, call_head(method, address))
    return run_open(connect, [_framed(message) for message in messages], arrivals)


def grpc_closed(
    address: str, method: str, messages: Sequence[bytes], connections: int, seconds: float
) -> LoadResult:
    """As `benchmarks.open_loop.closed_loop`; statuses and errors as above."""
    connect = partial(_Connection, address, call_head(method, address))
    return run_closed(connect, [_framed(message) for message in messages], connections, seconds)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return _frame_head(len(payload), kind, flags, stream) + payload


def _frame_head(size: int, kind: int, flags: int, stream: int) -> bytes:
    return struct.pack("!I", size)[1:] + struct.pack("!BBI", kind, flags, stream)


def _framed(message: bytes) -> bytes:
    """The message with gRPC's prefix: not compressed, its length."""
    return struct.pack("!BI", 0, len(message)) + message


def call_head(method: str, address: str) -> bytes:
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


def _status(trailers: bytes) -> int:
    """200 for OK, else gRPC's number.

    Our settings allow the server no dynamic table, and gRPC's servers write headers without Huffman
    coding."""
    at = trailers.find(_STATUS) + len(_STATUS)
    size = trailers[at] if at > len(_STATUS) else 0
    text = trailers[at + 1 : at + 1 + size]
    if not text.isdigit():
        raise RuntimeError(f"trailers without a status: {trailers!r}")
    return int(text) or 200


class _Connection:
    """See `benchmarks.open_loop.Connection`."""

    def __init__(self, address: str, head: bytes) -> None:
        self.socket = connected(address)
        self.since = self.sent = 0.0
        self._head, self._stream = head, -1
        self._got, self._wire = bytearray(), bytearray()
        self._left = memoryview(b"")  # the part of the message that is in no frame yet
        self._answered, self._waits = True, False
        self._message = 0
        self._taken = 0
        # Send windows: of the connection, of the present call, of a new call.
        self._window = self._own_window = self._new_window = _FIRST_WINDOW
        settings = struct.pack("!HIHI", 1, 0, 4, _MOST_WINDOW)
        window = struct.pack("!I", _MOST_WINDOW - _FIRST_WINDOW)
        hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0, settings)
        self.socket.sendall(hello + _frame(_WINDOW, 0, 0, window))
        self.socket.setblocking(False)

    @property
    def is_free(self) -> bool:
        return self._answered

    def send(self, request: bytes, since: float, poll: select.epoll) -> None:
        """``request`` has gRPC's prefix."""
        self.since, self.sent = since, time.monotonic()
        self._answered = False
        self._message = 0
        self._stream += 2
        self._own_window = self._new_window
        self._left = memoryview(request)
        self._wire += _frame(_HEADERS, _END_HEADERS, self._stream, self._head)
        self._write(poll)

    def _write(self, poll: select.epoll) -> None:
        """Send as much as the server's windows and the socket accept."""
        try:
            while self._fill():
                del self._wire[: self.socket.send(self._wire)]
        except BlockingIOError:
            pass
        if self._waits != bool(self._wire):
            self._waits = bool(self._wire)
            more = select.EPOLLOUT if self._waits else 0
            poll.modify(self.socket.fileno(), select.EPOLLIN | more)

    def _fill(self) -> bool:
        """Make frames of the message within the server's windows; True if there are bytes to send."""
        while self._left and len(self._wire) < _READY:
            size = min(len(self._left), self._window, self._own_window, _LARGEST_FRAME)
            if size <= 0:
                break
            self._window -= size
            self._own_window -= size
            is_last = size == len(self._left)
            self._wire += _frame_head(size, _DATA, _END_STREAM * is_last, self._stream)
            self._wire += self._left[:size]
            self._left = self._left[size:]
        return bool(self._wire)

    def handle_events(self, events: int, poll: select.epoll) -> int:
        """See ``Connection``."""
        status = self._receive() if events & ~select.EPOLLOUT else 0
        if self._wire or self._left:
            self._write(poll)
        return status

    def _receive(self) -> int:
        """Read available frames; returns the call's status if they end it, else 0."""
        data = self.socket.recv(1 << 18)
        if not data:
            raise RuntimeError("the server closed the connection")
        self._got += data
        got, at, status = self._got, 0, 0
        while len(got) - at >= 9:
            size = int.from_bytes(got[at : at + 3], "big")
            if len(got) - at < 9 + size:
                break
            status = self._take(got[at + 3], got[at + 4], got, at + 9, size) or status
            at += 9 + size
        del got[:at]
        return status

    def _take(self, kind: int, flags: int, got: bytearray, at: int, size: int) -> int:
        stream = int.from_bytes(got[at - 4 : at], "big")
        if kind == _DATA:
            self._message += size
            self._taken += size
            if self._taken > 1 << 30:
                self._wire += _frame(_WINDOW, 0, 0, struct.pack("!I", self._taken))
                self._taken = 0
        elif kind == _HEADERS and flags & _END_STREAM:
            return self._ended(bytes(got[at : at + size]))
        elif kind == _WINDOW:
            more = int.from_bytes(got[at : at + 4], "big")
            if not stream:
                self._window += more
            elif stream == self._stream:
                self._own_window += more
        elif kind in (_SETTINGS, _PING) and not flags & _ACK:
            payload = bytes(got[at : at + size])
            if kind == _SETTINGS:
                self._settle(payload)
            self._wire += _frame(kind, _ACK, 0, payload if kind == _PING else b"")
        elif kind == _GOAWAY or (kind == _RESET and stream == self._stream and not self._answered):
            raise RuntimeError(f"the server ended the call: {bytes(got[at : at + size])!r}")
        return 0

    def _ended(self, trailers: bytes) -> int:
        status = _status(trailers)
        if status == 200 and self._message < 5:
            raise RuntimeError(f"OK without a message: {trailers!r}")
        self._answered = True
        if self._left:
            self._left = memoryview(b"")
            self._wire += _frame(_RESET, 0, self._stream, bytes(4))
        return status

    def _settle(self, settings: bytes) -> None:
        for name, value in struct.iter_unpack("!HI", settings):
            if name == 4:  # the window of a call
                self._own_window += value - self._new_window
                self._new_window = value
