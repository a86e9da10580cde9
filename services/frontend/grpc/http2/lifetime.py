"""Lifetime of a gRPC connection: handshake, idle time, age, graceful end, clients that read nothing."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from services.frontend.grpc.http2 import frames
from services.frontend.grpc.http2.frames import MAX_WINDOW, ErrorCode
from services.frontend.grpc.http2.limits import MAX_HEADER_LIST_BYTES
from services.frontend.grpc.http2.port import PortContext
from services.frontend.grpc.http2.receive_budget import ConnectionBytes
from services.frontend.grpc.http2.sending import FrameSender
from services.frontend.grpc.http2.streams import Stream

# The time within which a client must read something of what the socket holds.
_STALL_S = 75.0
# The time that a client has to confirm the begin of the graceful end, in which it may still begin calls.
_DRAIN_S = 1.0
# TCP keepalive: seconds without data, seconds between probes, and their number. A client that has vanished
# with an open stream, such as one that watches health, would keep its connection for ever.
_KEEPALIVE = (300, 30, 4)
# The share of the age by which connections differ, so that clients do not all reconnect together.
_AGE_SPREAD = 0.1
_DRAIN_PING = b"hpsdrain"


class GrpcConnectionLifetime(asyncio.Protocol):
    """The part of a connection that periodic sweeps end, in place of timers."""

    transport: asyncio.Transport
    sender: FrameSender
    has_preface = False

    def __init__(self, port: PortContext) -> None:
        self.port = port
        self.streams: dict[int, Stream] = {}
        self.last_stream = 0
        self.running = 0
        """Unary calls whose work has not ended, also those whose client is gone."""
        self.received_bytes = ConnectionBytes(port.receiving.budget)
        self._peer: str | None = None
        self._auth: Mapping[str, Sequence[bytes]] | None = None
        self._host = ""
        self._is_counted = False
        self._draining_since: float | None = None
        self._is_last_known = False  # the client knows which of its calls is the last
        self._made = self._idle_since = self._progress_since = time.monotonic()
        self._spread = 1 + _AGE_SPREAD * random.uniform(-1, 1)
        self._last_seen = 0
        self._progress = 0, 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # a stream's transport
        self.sender = FrameSender(self.transport, self.port)
        _enable_keepalive(transport.get_extra_info("socket"))
        self._host = _host(transport.get_extra_info("peername"))
        self._is_counted = self.port.limit.enter(self._host)
        self.port.connections.add(self)
        if not self._is_counted:
            text = "too many connections; close some, or ask another replica"
            self._close_with(ErrorCode.ENHANCE_YOUR_CALM, text)

    def connection_lost(self, error: Exception | None) -> None:
        self.port.connections.discard(self)
        if self._is_counted:
            self._is_counted = False
            self.port.limit.leave(self._host)
        self.sender.clear()
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            stream.end_receiving()
            stream.gone()

    def pause_writing(self) -> None:
        self.sender.pause()

    def resume_writing(self) -> None:
        self.sender.resume()

    def peer(self) -> str:
        """Return the client's address in gRPC's form; IPv4 addresses in IPv6's form are shown as IPv4."""
        if self._peer is None:
            self._peer = _peer(self.transport.get_extra_info("peername"))
        return self._peer

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        """Return the names in the client's certificate, by their kind."""
        if self._auth is None:
            self._auth = self.port.certificates(self.transport)
        return self._auth

    @property
    def is_idle(self) -> bool:
        """True if no call is open."""
        return not self.streams

    def greet(self) -> None:
        """Send the server's settings, once the client has shown that it speaks HTTP/2."""
        self.has_preface = True
        most = self.port.settings.max_calls_per_connection
        self.sender.write(frames.greeting(most, MAX_HEADER_LIST_BYTES))

    def begin_drain(self) -> None:
        """Ask the client to make no further calls; close the connection when the present ones are over.

        Calls that the client makes before it has read this are answered too: its answer to a PING after the
        GOAWAY shows that it has (RFC 9113, 6.8). `h2` takes no frame after a GOAWAY, neither PINGs nor
        answers.
        """
        if self._draining_since is not None:
            return
        self._draining_since = time.monotonic()
        if not self.has_preface:
            self.transport.close()
            return
        ping = frames.frame(frames.PING, 0, 0, _DRAIN_PING)
        self.sender.write(frames.go_away(MAX_WINDOW, ErrorCode.NO_ERROR) + ping)

    def ping_answered(self, payload: bytes) -> None:
        """Take the client's answer to a ping."""
        if payload == _DRAIN_PING and self._draining_since is not None:
            self._finish_drain()

    def _finish_drain(self) -> None:
        if not self._is_last_known:
            self._is_last_known = True
            self.sender.write(frames.go_away(self.last_stream, ErrorCode.NO_ERROR))
        self.close_if_drained()

    def close_if_drained(self) -> None:
        """Close a connection whose last call is over."""
        if self._is_last_known and not self.streams:
            self.sender.uncork()
            self.transport.close()

    def abort(self) -> None:
        """End the connection and its calls now."""
        self.transport.abort()

    def _close_with(self, code: ErrorCode, text: str) -> None:
        self.sender.write(frames.go_away(self.last_stream, code, text))
        self.sender.uncork()
        self.transport.close()

    def sweep(self, now: float) -> None:
        """End what takes too long. Called about every second."""
        settings = self.port.settings
        if not self.has_preface:
            if now - self._made > settings.handshake_s:
                self.abort()
            return
        if self._is_stalled(now):
            self.abort()
            return
        for stream in list(self.streams.values()):
            if stream.deadline < now - 1.0:  # the call's handler notices it first, if it can
                stream.expire()
        if self._draining_since is None:
            if self._is_to_end(now):
                self.begin_drain()
            return
        if now - self._draining_since > _DRAIN_S:
            self._finish_drain()
        if settings.age_s is not None and now - self._draining_since > settings.grace_s + _DRAIN_S:
            self.abort()

    def _is_to_end(self, now: float) -> bool:
        if self.streams or self.last_stream != self._last_seen:
            self._last_seen, self._idle_since = self.last_stream, now
        settings = self.port.settings
        if now - self._idle_since > settings.idle_s:
            return True
        return settings.age_s is not None and now - self._made > settings.age_s * self._spread

    def _is_stalled(self, now: float) -> bool:
        unsent = self.transport.get_write_buffer_size()
        progress = unsent, self.sender.written
        if not unsent or progress != self._progress:
            self._progress, self._progress_since = progress, now
        return now - self._progress_since > _STALL_S


def _enable_keepalive(sock: socket.socket) -> None:
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT
    for option, value in zip(options, _KEEPALIVE, strict=True):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _host(address: Any) -> str:
    return address[0] if isinstance(address, tuple) else ""


def _peer(address: Any) -> str:
    if not isinstance(address, tuple):
        return "unix:"
    host, port = address[:2]
    if host.startswith("::ffff:") and "." in host:
        return f"ipv4:{host.removeprefix('::ffff:')}:{port}"
    if ":" in host:
        return f"ipv6:%5B{host}%5D:{port}"
    return f"ipv4:{host}:{port}"
