"""uvicorn as one of several servers in a process, with our own signals, sockets and connection sweeps."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import uvicorn

from hps.errors import ConfigError
from services.frontend.connection_limit import ConnectionLimit, most_connections
from services.frontend.http.application import PortApplication
from services.frontend.http.protocol.connection import HttpProtocol

SWEEP_S = 10.0
BACKLOG = 2048


def listen(host: str, port: int, setting: str, *, one_of_many: bool = False) -> socket.socket:
    """Return a listening TCP socket. Raises ``ConfigError`` naming ``setting``.

    ``one_of_many``: other processes of this user may listen on the port too, and connections are spread over
    them.
    """
    return _bound(host, port, setting, one_of_many=one_of_many, listens=True)


def reserve_port(host: str, port: int, setting: str, *, one_of_many: bool = False) -> socket.socket:
    """Return a socket that reserves the port and takes no connections; else as `listen`."""
    return _bound(host, port, setting, one_of_many=one_of_many, listens=False)


def _bound(
    host: str, port: int, setting: str, *, one_of_many: bool, listens: bool
) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(
            f"{setting}.host is {host!r}, which is not a usable address: {error}"
        ) from None
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if one_of_many:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
        if listens:
            sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        remedy = "choose another address or port"
        if error.errno == errno.EADDRINUSE:
            remedy = (
                f"stop the process that listens there, or set {setting}.port (0 takes a free one)"
            )
        raise ConfigError(
            f"{setting}: cannot listen on {host}:{port}: {error.strerror or error}; {remedy}"
        ) from None
    return sock


def url_of(sock: socket.socket, *, secured: bool) -> str:
    """Return the base URL of the server that listens at ``sock``."""
    scheme = "https" if secured else "http"
    host, port = sock.getsockname()[:2]
    return f"{scheme}://{host_of(host)}:{port}"


def host_of(host: str) -> str:
    """Return the host as written in a URL: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


class HttpServer(uvicorn.Server):
    """One HTTP port. Only ``stop`` stops it."""

    def __init__(
        self,
        app: PortApplication,
        sock: socket.socket,
        drain_s: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """``tls``: the TLS context; None: plain text."""
        self._protocol: type[HttpProtocol] = type(
            "Port", (HttpProtocol,), {"of_port": ConnectionLimit(most_connections())}
        )
        super().__init__(
            uvicorn.Config(
                app,
                http=self._protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # client addresses are the connections' own
                timeout_graceful_shutdown=max(1, round(drain_s)),
                backlog=BACKLOG,
            )
        )
        self._socket, self._tls = sock, tls
        self.url = url_of(sock, secured=tls is not None)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def protocol(self) -> HttpProtocol:
        """Create the protocol of a connection that was accepted here."""
        return self._protocol(self.config, self.server_state, self.lifespan.state)

    async def serve(self, sockets: Any = None) -> None:
        """Serve until ``stop``, then finish the accepted requests."""
        self.config.load()
        self.config.ssl = self._tls
        sweeper = asyncio.create_task(self._sweep())
        try:
            await super().serve(sockets=[self._socket])
        finally:
            sweeper.cancel()

    def end_keep_alive(self) -> None:
        """Make the next answer on each connection its last."""
        connections: list[Any] = list(self.server_state.connections)
        for connection in connections:
            connection.leave()

    def stop(self, *, force: bool = False) -> None:
        """Start the shutdown; ``force`` drops requests in flight."""
        self.should_exit = True
        self.force_exit = self.force_exit or force

    async def _sweep(self) -> None:
        """Close stalled connections periodically, without a timer per request."""
        while True:
            await asyncio.sleep(SWEEP_S)
            connections: list[Any] = list(self.server_state.connections)
            for connection in connections:
                connection.sweep(SWEEP_S)
