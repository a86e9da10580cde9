"""Connections to an HTTP server, used by one call at a time each, within its deadline."""

from __future__ import annotations

import http.client
import select
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, read to its end; ``headers`` by names in any case."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes


class Connections:
    """To the server at ``host:port``; as many as there are calls at a time. Any thread may call.

    A connection is used again only when its last answer was read to the end and the server has not closed it
    since; the one used last goes first, so those of a busy moment are closed by the server in time.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._idle: list[_Connection] = []
        self._lock = threading.Lock()

    def ask(
        self,
        method: str,
        path: str,
        timeout_s: float,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Raises TimeoutError when the answer is not there after ``timeout_s``, another OSError when the
        connection fails or what comes is no HTTP."""
        until = time.monotonic() + timeout_s
        connection = self._take()
        try:
            connection.until = until
            connection.request(method, path, body, dict(headers or {}))
            response = connection.getresponse()
            reply = Reply(response.status, response.headers, response.read())
            ends = response.will_close
        except http.client.HTTPException as error:
            connection.close()
            raise ConnectionError(f"{type(error).__name__}: {error}") from None
        except BaseException:
            connection.close()
            raise
        if ends:
            connection.close()
        else:
            with self._lock:
                self._idle.append(connection)
        return reply

    def close(self) -> None:
        """Nobody may call any more."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _take(self) -> _Connection:
        while True:
            with self._lock:
                if not self._idle:
                    return _Connection(self._host, self._port)
                connection = self._idle.pop()
            if connection.quiet():
                return connection
            connection.close()


class _Connection(http.client.HTTPConnection):
    """``until`` bounds everything it does, an instant of ``time.monotonic()``."""

    until = 0.0

    def connect(self) -> None:
        self.timeout = _left(self.until)
        super().connect()
        bounded = _Bounded(fileno=self.sock.detach())
        bounded.connection, self.sock = self, bounded

    def send(self, data: Any) -> None:
        if self.sock is not None:
            self.sock.settimeout(_left(self.until))
        super().send(data)

    def quiet(self) -> bool:
        """Nothing to read: neither the rest of an answer nor the end."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return not poll.poll(0)


class _Bounded(socket.socket):
    """Every piece of an answer comes within what is left of the call's time."""

    connection: _Connection

    def recv_into(self, *into: Any) -> int:
        self.settimeout(_left(self.connection.until))
        return super().recv_into(*into)


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer in time")
    return left
