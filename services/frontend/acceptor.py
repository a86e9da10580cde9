"""Accepts the connections of a listening socket: all that wait, each time that the event loop looks.

A server of libuv, and so of uvloop, accepts one connection in an iteration of its loop (since 1.45, libuv's
pull request 3696). Near saturation an iteration answers hundreds of requests, so that new connections would
wait for seconds, while the requests on others take milliseconds."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from services.frontend.listening import BACKLOG

log = logging.getLogger(__name__)
PAUSE_S = 0.5
"""Pause after the system had no descriptor or memory for a connection."""


class Acceptor:
    """Accepts connections at ``sock``, which it owns, until it is closed. Used on the event loop.

    ``protocol``: makes the protocol of each connection. ``handshake_s``: the longest time of a TLS handshake;
    None: asyncio's."""

    def __init__(
        self,
        sock: socket.socket,
        protocol: Callable[[], asyncio.BaseProtocol],
        tls: ssl.SSLContext | None = None,
        handshake_s: float | None = None,
    ) -> None:
        self._sock, self._protocol, self._tls = sock, protocol, tls
        self._handshake_s = handshake_s
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._closed = False
        sock.setblocking(False)
        self._start()

    def close(self) -> None:
        """Stop accepting. Connections stay open."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._sock)
            self._sock.close()

    def _start(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        for _ in range(BACKLOG):
            try:
                connection, _address = self._sock.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:  # by its client, meanwhile
                continue
            except OSError as error:
                log.warning("connections wait: the system cannot accept one: %s", error.strerror)
                self._loop.remove_reader(self._sock)
                self._loop.call_later(PAUSE_S, self._start)
                return
            connection.setblocking(False)
            task = self._loop.create_task(self._open(connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._protocol,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=self._handshake_s,
            )
        except OSError as error:  # the client has gone, or the handshake failed
            log.debug("a connection was not opened: %s", error)
            connection.close()
