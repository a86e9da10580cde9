"""Senders of requests: HTTP with keep-alive connections, or gRPC. Used on one event loop."""

from __future__ import annotations

import asyncio
import re
import time
from itertools import cycle
from typing import Any, Protocol

from hps.client import Tls
from hps.client.address import ServerAddress, address
from hps.client.calls import InferCall
from hps.client.errors import unreachable_error
from hps.client.http_messages import Reply, Request
from hps.client.http_wire import HttpCodec
from hps.errors import DeadlineExceeded

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CLOSES = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)


class Sender(Protocol):
    def message(self, call: InferCall) -> Any:
        """Encode a request, to be sent many times."""
        ...

    async def send(self, message: Any, until: float) -> None:
        """Send a message and read the whole answer.

        Raises the HpsError of an answer that is no success, or DeadlineExceeded at ``until``, an instant of
        ``time.monotonic``."""
        ...

    async def close(self) -> None: ...


def open_sender(url: str, api_key: str | None, tls: Tls | None, connections: int = 1) -> Sender:
    """Open a sender for the address; ``connections``: number of gRPC connections. Raises ConfigError."""
    at = address(url, tls)
    return GrpcSender(at, api_key, connections) if at.is_grpc else HttpSender(at, api_key)


class GrpcSender:
    """Sends over gRPC connections in turn: a single one would reach only one of a server's processes."""

    def __init__(self, at: ServerAddress, api_key: str | None, connections: int = 1) -> None:
        from hps.client.grpc import AsyncGrpcChannel, GrpcCodec

        self._wire = GrpcCodec(api_key)
        self._channels = [AsyncGrpcChannel(at, is_shared=False) for _ in range(connections)]
        self._turn = cycle(self._channels)

    def message(self, call: InferCall) -> Any:
        return self._wire.request(call)

    async def send(self, message: Any, until: float) -> None:
        await next(self._turn).send(message, until)

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


class HttpSender:
    """Sends over HTTP; one connection for each request in flight, kept for the next one."""

    def __init__(self, at: ServerAddress, api_key: str | None) -> None:
        self._at = at
        self._context = None if at.tls is None else at.tls.context()
        self._wire = HttpCodec(at.base, api_key)
        self._idle: list[_BenchConnection] = []

    def message(self, call: InferCall) -> bytes:
        request: Request = self._wire.request(call)
        body = request.body or b""
        lines = [
            f"{request.verb} {self._at.path}{request.path} HTTP/1.1",
            f"Host: {self._at.target}",
            *(f"{name}: {value}" for name, value in request.headers.items()),
            f"Content-Length: {len(body)}",
        ]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body

    async def send(self, message: bytes, until: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                connection = self._kept() or await self._opened()
                reply = await connection.exchange(message)
        except TimeoutError:
            raise DeadlineExceeded("no answer within the request's time") from None
        except OSError as error:
            raise unreachable_error(self._at.base, error) from None
        if not connection.closes:
            self._idle.append(connection)
        reply.checked(self._at.base)

    def _kept(self) -> _BenchConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closes:
                return connection
        return None

    async def _opened(self) -> _BenchConnection:
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(
            _BenchConnection, self._at.host, self._at.port, ssl=self._context
        )
        return made

    async def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


class _BenchConnection(asyncio.Protocol):
    """Carries one request at a time. ``closes``: the server will close it."""

    def __init__(self) -> None:
        self.closes = False
        self._transport: Any = None
        self._coming = bytearray()
        self._head: tuple[bytes, int, int | None] | None = None
        self._reply: asyncio.Future[Reply] | None = None

    async def exchange(self, message: bytes) -> Reply:
        """Send a message and return the reply. Raises OSError. A cancelled exchange closes the connection."""
        self._coming.clear()
        self._head = None
        self._reply = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        try:
            return await self._reply
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.closes = True
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.closes = True
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(
                exc or ConnectionResetError("the server closed the connection")
            )

    def data_received(self, data: bytes) -> None:
        seen = len(self._coming)
        self._coming += data
        if self._reply is None or self._reply.done():
            return
        try:
            if self._head is None:
                self._head = self._found_head(max(0, seen - 3))
            if self._head is not None and (body := self._body(*self._head)) is not None:
                self._reply.set_result(Reply(_status(self._head[0]), {}, body))
        except OSError as error:
            self._reply.set_exception(error)

    def _found_head(self, at: int) -> tuple[bytes, int, int | None] | None:
        """The head once complete, the body's start, and its length (None: chunked)."""
        end = self._coming.find(b"\r\n\r\n", at)
        if end < 0:
            return None
        head = bytes(self._coming[: end + 2])
        self.closes = self.closes or _CLOSES.search(head) is not None
        length = _LENGTH.search(head)
        if length is None and _CHUNKED.search(head) is None:
            raise OSError("the answer does not say how long it is")
        return head, end + 4, None if length is None else int(length[1])

    def _body(self, _head: bytes, start: int, length: int | None) -> bytes | None:
        """The body once complete."""
        if length is None:
            ends = self._coming.endswith(b"\r\n\r\n")
            return _unchunked(self._coming, start) if ends else None
        end = start + length
        return bytes(self._coming[start:end]) if len(self._coming) >= end else None


def _status(head: bytes) -> int:
    status = head[9:12]
    return int(status) if status.isdigit() else 0


def _unchunked(coming: bytearray, at: int) -> bytes | None:
    """A chunked body (RFC 9112, 7.1); None while incomplete. Raises OSError."""
    pieces: list[bytes] = []
    while (end := coming.find(b"\r\n", at)) >= 0:
        try:
            size = int(coming[at:end].partition(b";")[0], 16)
        except ValueError:
            raise OSError("the answer has a chunk of no known size") from None
        if not size:
            return b"".join(pieces)
        at = end + 2 + size + 2
        pieces.append(bytes(coming[end + 2 : at - 2]))
    return None
