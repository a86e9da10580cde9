"""uvicorn as one of several servers in a process, with our own signals, sockets and connection sweeps."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import uvicorn

from services.frontend.acceptor import Acceptor
from services.frontend.connection_limit import ConnectionLimit, most_connections
from services.frontend.http.application import PortApplication
from services.frontend.http.connection_bounds import LINGER_S
from services.frontend.http.protocol import probe
from services.frontend.http.uvicorn_connection import UvicornEvents, uvicorn_config
from services.frontend.listening import BACKLOG, url_of

SWEEP_S = 10.0


@dataclass(frozen=True)
class HttpPortOptions:
    """Options of the connections of one port."""

    drain_s: float
    """The time in which accepted requests are finished at shutdown."""
    tls: ssl.SSLContext | None = None
    """The TLS context; None: plain text."""
    protocol: Literal["auto", "uvicorn"] = "auto"
    """See ``server.http.protocol``."""


def port_config(app: PortApplication, options: HttpPortOptions) -> uvicorn.Config:
    """Return uvicorn's configuration of a port, whose protocol class counts the port's connections."""
    limit = ConnectionLimit(most_connections())
    common: dict[str, Any] = {
        "ws": "none",
        "lifespan": "off",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,  # client addresses are the connections' own
        "timeout_graceful_shutdown": max(1, round(options.drain_s)),
        "backlog": BACKLOG,
    }
    if options.protocol == "auto" and probe.is_supported():
        from services.frontend.http.protocol.connection import HttpProtocol  # imports private names

        protocol = type("Port", (HttpProtocol,), {"of_port": limit})
        return uvicorn.Config(app, http=protocol, **common)
    return uvicorn_config(app, limit, **common)


class HttpServer(uvicorn.Server):
    """One HTTP port. Only ``stop`` stops it."""

    def __init__(self, app: PortApplication, sock: socket.socket, options: HttpPortOptions) -> None:
        super().__init__(port_config(app, options))
        self._socket, self._tls = sock, options.tls
        self._acceptor: Acceptor | None = None
        self.url = url_of(sock, secured=options.tls is not None)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def protocol(self) -> asyncio.Protocol:
        """Create the protocol of a connection that was accepted here."""
        make: Any = self.config.http_protocol_class  # called as uvicorn does
        connection: asyncio.Protocol = make(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return connection

    async def serve(self, sockets: Any = None) -> None:
        """Serve until ``stop``, then finish the accepted requests."""
        if not self.config.loaded:
            self.config.load()
        self.config.ssl = self._tls
        sweeper = asyncio.create_task(self._sweep())
        try:
            await super().serve(sockets=[])
        finally:
            sweeper.cancel()

    async def startup(self, sockets: Any = None) -> None:
        """See uvicorn's ``Server``."""
        await super().startup(sockets)
        self._acceptor = Acceptor(self._socket, self.protocol, self._tls)

    def end_keep_alive(self) -> None:
        """Make the next answer on each connection its last."""
        connections: list[Any] = list(self.server_state.connections)
        for connection in connections:
            connection.end_keep_alive()

    def stop(self, *, force: bool = False) -> None:
        """Start the shutdown; ``force`` drops requests in flight."""
        self.end_keep_alive()
        self.should_exit = True
        self.force_exit = self.force_exit or force

    async def shutdown(self, sockets: Any = None) -> None:
        """See uvicorn's ``Server``; TLS clients that do not complete the TLS shutdown do not hold it up."""
        if self._acceptor is not None:
            self._acceptor.close()
        asyncio.get_running_loop().call_later(2 * LINGER_S, self._abort_closing)
        await super().shutdown(sockets)

    def _abort_closing(self) -> None:
        for connection in list(self.server_state.connections):
            if isinstance(connection, UvicornEvents):
                connection.abort_if_closing()

    async def _sweep(self) -> None:
        """Close stalled connections periodically, without a timer per request."""
        while True:
            await asyncio.sleep(SWEEP_S)
            connections: list[Any] = list(self.server_state.connections)
            for connection in connections:
                connection.sweep(SWEEP_S)
