"""A connection between a client and a server that can fail."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Network:
    """A port that forwards to another one. ``lose``: open connections pass nothing on any more, and neither
    side notices. ``cut``: they are closed at once."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._lost: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def lose(self) -> None:
        self._lost |= set(self._open)

    def cut(self) -> None:
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._to))
                self._open += [client, server]
                for one, other in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=(one, other), daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(65536):
                if one not in self._lost:
                    other.sendall(data)
            if one not in self._lost:
                other.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        for each in self._open:
            each.close()
