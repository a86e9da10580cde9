"""HTTP/1.1 connections on uvicorn's public interface, where its private protocol is not used.

uvicorn parses with h11, which bounds heads. This module adds the limit of connections, the client's identity,
sweeps and the last answer of a connection, by the methods of `asyncio.Protocol` and in ASGI. It has no fast
path, and uvicorn answers an invalid request in text.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import uvicorn

from services.frontend.connection_limit import ConnectionLimit
from services.frontend.http.asgi import GONE, App, Receive, Scope, Send
from services.frontend.http.connection_bounds import (
    KEEP_ALIVE_S,
    LINGER_S,
    MAX_HEAD_BYTES,
    TOO_MANY_CONNECTIONS,
    ConnectionActivity,
    StallDetector,
    last_answer,
)
from services.frontend.http.peer import PEER, ConnectionPeer

log = logging.getLogger(__name__)

_CLOSE = b"connection", b"close"


def uvicorn_config(app: App, limit: ConnectionLimit, **options: Any) -> uvicorn.Config:
    """Create the configuration of a port whose connections use uvicorn's public interface."""
    config = uvicorn.Config(
        UvicornApplication(app),
        http="h11",
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_keep_alive=KEEP_ALIVE_S,
        **options,
    )
    config.load()
    bases = UvicornEvents, config.http_protocol_class
    config.http_protocol_class = type("UvicornConnection", bases, {"limit": limit})
    return config


class ClientConnection:
    """One connection: its client, and the requests that the application is processing."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.peer = ConnectionPeer(transport.get_extra_info("peername"), transport)
        self.is_last = False
        """True if the connection closes after the next answer."""
        self._active: set[UvicornRequest] = set()
        self._arrivals = self._requests = 0
        self._is_arriving = False  # bytes were received since the application's last request
        self._stalls = StallDetector()

    def received(self) -> None:
        """Count received bytes."""
        self._arrivals += 1
        self._is_arriving = True

    def begin(self, request: UvicornRequest) -> None:
        """Count a request that the application processes until `end`."""
        self._requests += 1
        self._is_arriving = False
        self._active.add(request)

    def end(self, request: UvicornRequest) -> None:
        """End the count of ``request``."""
        self._is_arriving = False  # what has arrived was its body
        self._active.discard(request)

    def lost(self) -> None:
        """Give up the requests: the client is gone."""
        for request in list(self._active):
            request.give_up()

    def sweep(self, every_s: float) -> None:
        """Close the connection if it has stalled; the application limits the time of bodies."""
        is_arriving = self._is_arriving and not self._active
        activity = ConnectionActivity(
            arrivals=self._arrivals,
            arriving=self._requests + 1 if is_arriving else 0,
            is_answering=bool(self._active),
            is_idle=self._arrivals > 0 and not is_arriving,
        )
        self._stalls.sweep(self.transport, activity, every_s)


# The connection whose bytes are being read; the tasks of its requests inherit it.
_CONNECTION: ContextVar[ClientConnection] = ContextVar("hps_http_connection")


class UvicornEvents(asyncio.Protocol):
    """Mixin for uvicorn's protocol: observes the events of a connection."""

    limit: ConnectionLimit
    """The connections of the port; set in a subclass per port."""
    hps_connection: ClientConnection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn narrows it
        self.hps_connection = connection = ClientConnection(transport)
        if self.limit.enter(connection.peer.host):
            super().connection_made(transport)
            return
        transport.set_protocol(asyncio.Protocol())
        transport.write(last_answer(*TOO_MANY_CONNECTIONS))
        transport.close()
        asyncio.get_running_loop().call_later(LINGER_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        self.hps_connection.received()
        token = _CONNECTION.set(self.hps_connection)
        try:
            super().data_received(data)
        except Exception:  # as when uvicorn answers an invalid request that already has an answer
            log.debug("failed to read a request; closing the connection", exc_info=True)
            self.hps_connection.transport.abort()
        finally:
            _CONNECTION.reset(token)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.limit.leave(self.hps_connection.peer.host)
        self.hps_connection.lost()

    def sweep(self, every_s: float) -> None:
        """Close the connection if it has stalled. Called every ``every_s`` seconds."""
        self.hps_connection.sweep(every_s)

    def abort_if_closing(self) -> None:
        """Abort a closed connection whose client has all bytes but does not complete the TLS shutdown."""
        transport = self.hps_connection.transport
        if transport.is_closing() and not transport.get_write_buffer_size():
            transport.abort()

    def end_keep_alive(self) -> None:
        """Make the next answer the connection's last."""
        self.hps_connection.is_last = True


class UvicornRequest:
    """One request: adds ``Connection: close`` to a last answer, reports a client that disconnects."""

    __slots__ = ("_connection", "_give_up", "_send")

    def __init__(self, connection: ClientConnection, send: Send) -> None:
        self._connection, self._send = connection, send
        self._give_up: Callable[[], None] | None = None

    def when_gone(self, give_up: Callable[[], None]) -> None:
        """Call ``give_up`` if the client disconnects before the request is answered."""
        self._give_up = give_up
        if self._connection.transport.is_closing():
            give_up()

    def give_up(self) -> None:
        """Report that the client is gone."""
        if self._give_up is not None:
            self._give_up()

    async def send(self, message: Any) -> None:
        """Send an ASGI message."""
        if message["type"] == "http.response.start" and self._connection.is_last:
            message = {**message, "headers": [*message["headers"], _CLOSE]}
        await self._send(message)


class UvicornApplication:
    """ASGI middleware that passes the connection's client to ``app``."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = _CONNECTION.get()
        request = UvicornRequest(connection, send)
        scope[PEER] = connection.peer
        scope[GONE] = request.when_gone
        connection.begin(request)
        try:
            await self._app(scope, receive, request.send)
        finally:
            connection.end(request)
