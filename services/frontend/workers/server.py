"""The data port of a worker: its listening socket, and those of workers that cannot accept."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Collection, Sequence
from typing import Any

from services.frontend.acceptor import Acceptor
from services.frontend.http.application import PortApplication
from services.frontend.http.server import HttpPortOptions, HttpServer


class WorkerServer(HttpServer):
    """Accepts connections of worker ``number``, and of workers that it accepts for.

    Sockets are identified by the worker's number, from 1."""

    def __init__(
        self,
        app: PortApplication,
        listeners: Sequence[socket.socket],
        number: int,
        options: HttpPortOptions,
        heartbeat: socket.socket | None = None,
    ) -> None:
        """``heartbeat``: a connection to the node's process.

        It is answered in plain text while the event loop runs."""
        super().__init__(app, listeners[number - 1], options)
        self._others = {n: each for n, each in enumerate(listeners, 1) if n != number}
        self._heartbeat = heartbeat
        self._accepting_for: dict[int, Acceptor] = {}

    def accept_for(self, numbers: Collection[int]) -> None:
        """Also accept connections for exactly these other workers. Call it on the event loop."""
        for number in self._accepting_for.keys() - numbers:
            self._accepting_for.pop(number).close()
        for number in self._others.keys() & set(numbers) - self._accepting_for.keys():
            if not self.should_exit:
                sock = self._others[number].dup()
                self._accepting_for[number] = Acceptor(sock, self.protocol, self._tls)

    async def startup(self, sockets: Any = None) -> None:
        """See uvicorn's ``Server``."""
        await super().startup(sockets)
        if self._heartbeat is not None:
            loop = asyncio.get_running_loop()
            _, protocol = await loop.connect_accepted_socket(self.protocol, self._heartbeat)
            # The heartbeat is neither closed when idle nor awaited at shutdown.
            self.server_state.connections.discard(protocol)

    async def shutdown(self, sockets: Any = None) -> None:
        """See uvicorn's ``Server``; it stops accepting first."""
        self.accept_for(())
        for listener in self._others.values():
            listener.close()
        await super().shutdown(sockets)
