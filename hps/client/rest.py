"""HTTP transport for threads, by the standard library: keep-alive, and a timeout on every wait."""

from __future__ import annotations

import http.client
import io
import select
import socket
from typing import Any

from hps.client.address import ServerAddress
from hps.client.errors import left_s, unreachable_error
from hps.client.http_messages import Reply, Request

_JOINED_BYTES = 256 << 10


class HttpConnectionPool:
    """Connections to one server. Thread-safe.

    Each call uses one connection; the pool keeps as many as were ever in use at the same time."""

    def __init__(self, at: ServerAddress) -> None:
        self._at = at
        self._context = None if at.tls is None else at.tls.context()
        self._idle: list[socket.socket] = []

    def send(self, request: Request, until: float) -> Reply:
        """Send; return the reply of any status.

        Raises ServerUnreachable, and DeadlineExceeded at ``until``."""
        try:
            return self.exchange(request, until)
        except (OSError, http.client.HTTPException) as error:
            raise unreachable_error(self._at.base, error) from None

    def exchange(self, request: Request, until: float) -> Reply:
        """Like `send`, but with the original errors.

        They are TimeoutError, DeadlineExceeded at ``until``, OSError, and HTTPException for a reply that is
        not HTTP."""
        connection = self._connection(until)
        try:
            reply, lasts = _exchange(connection, self._pieces(request), request.verb, until)
        except BaseException:
            connection.close()
            raise
        if lasts:
            self._idle.append(connection)
        else:
            connection.close()
        return reply

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _connection(self, until: float) -> socket.socket:
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread took the last one
                break
            if not _is_over(connection):
                return connection
            connection.close()
        made = socket.create_connection((self._at.host, self._at.port), left_s(until))
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._context is None:
            return made
        return self._context.wrap_socket(made, server_hostname=self._at.host)

    def _pieces(self, request: Request) -> list[bytes]:
        """Head and body, joined if small: the server then need not wait for a second piece."""
        lines = [
            f"{request.verb} {self._at.path}{request.path} HTTP/1.1",
            f"Host: {self._at.target}",
        ]
        lines += [f"{name}: {value}" for name, value in request.headers.items()]
        if request.body is not None:
            lines.append(f"Content-Length: {len(request.body)}")
        head, body = "\r\n".join([*lines, "", ""]).encode("latin-1"), request.body or b""
        return [head + body] if len(body) < _JOINED_BYTES else [head, body]


def _exchange(
    connection: socket.socket, pieces: list[bytes], verb: str, until: float
) -> tuple[Reply, bool]:
    """Return the reply, and whether the connection can be used again."""
    for piece in pieces:
        connection.settimeout(left_s(until))
        connection.sendall(piece)
    coming: Any = _TimedResponse(connection, until)
    response = http.client.HTTPResponse(coming, method=verb)
    with response:
        response.begin()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Reply(response.status, headers, response.read()), not response.will_close


class _TimedResponse(io.RawIOBase):
    """Reads a reply for http.client until an instant; a socket's timeout restarts with every read."""

    def __init__(self, connection: socket.socket, until: float) -> None:
        self._connection, self._until = connection, until

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self, 1 << 16)

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        self._connection.settimeout(left_s(self._until))
        return self._connection.recv_into(into)


def _is_over(connection: socket.socket) -> bool:
    """True if the server has closed an idle connection, which makes it readable."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))
