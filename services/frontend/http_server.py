"""uvicorn as one of several servers in a process: signals, sockets and stalled connections are ours."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import types
from collections.abc import Generator, Iterator
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from hps.errors import ConfigError
from services.frontend.errors import error_body, error_headers
from services.frontend.infer import WHOLE, App

# An idle keep-alive connection is closed after this time; a connection on which a request has begun
# but does not go on, after one to two sweeps.
KEEP_ALIVE_S = 75
SWEEP_S = 10.0
# An idle connection of a server that stops is closed after this time: a request may be on its way.
LINGER_S = 0.5
MAX_HEAD_BYTES = 64 << 10
_BACKLOG = 2048


def listen(host: str, port: int, setting: str) -> socket.socket:
    """A listening TCP socket; ``ConfigError`` naming ``setting`` when that cannot be."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"{setting}.host is {host!r}, which is no address: {error}") from None
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        mend = "choose another address or port"
        if error.errno == errno.EADDRINUSE:
            mend = (
                f"stop the process that listens there, or set {setting}.port (0 takes a free one)"
            )
        raise ConfigError(
            f"{setting}: cannot listen on {host}:{port}: {error.strerror or error}; {mend}"
        ) from None
    return sock


_EXTENSIONS: dict[str, Any] = {WHOLE: {}}


class Protocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 with a bound on the size of a head, our error shape for what is no HTTP, and no
    task for a request that can be answered at once.

    An inference request that came whole begins where its last byte was read, without a turn of the
    event loop; most end there. One that has to wait goes on as a task. ``heard`` counts arrivals, for
    the sweeper.
    """

    heard = 0
    _head = 0
    _last = False
    _reading = False
    _begun: tuple[RequestResponseCycle, Any] | None = None

    def data_received(self, data: bytes) -> None:
        self.heard += 1
        self._reading = True
        super().data_received(data)
        while self._begun is not None:  # answering one may begin the next of a pipeline
            (cycle, app), self._begun = self._begun, None
            if cycle.more_body or cycle.scope["path"] not in getattr(app, "routes", ()):
                super()._start_asgi_task(cycle, app)
            else:
                self._answer_at_once(cycle, app)
        self._reading = False
        if self.cycle is None or self.cycle.scope is not self.scope:  # the head is not complete
            self._head += len(data)
            if self._head > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._refuse(431, f"the request's head has more than {MAX_HEAD_BYTES} bytes")
        elif self._head:
            self._head = 0

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if type(self.cycle) is RequestResponseCycle:
            self.cycle.__class__ = Cycle  # its task has not begun yet
            self.cycle.scope["extensions"] = _EXTENSIONS
            if self._last:
                self.cycle.keep_alive = False

    def shutdown(self) -> None:
        """The server stops: the next answer is the connection's last, and says so."""
        self._last = True
        if self._idle():
            self.loop.call_later(LINGER_S, self._hang_up)
        else:
            self.cycle.keep_alive = False

    def _hang_up(self) -> None:
        if self._idle():
            self.transport.close()

    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self._reading:
            self._begun = cycle, app  # its body may still come with these bytes
        else:
            super()._start_asgi_task(cycle, app)

    def _answer_at_once(self, cycle: RequestResponseCycle, app: Any) -> None:
        running = cycle.run_asgi(app)
        try:
            waits_for = running.send(None)
        except StopIteration:
            return
        task = self.loop.create_task(_go_on(running, waits_for))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _refuse(self, status: int, message: str) -> None:
        """Answer what the parser could not read, unless an answer is on its way already; hang up."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            body = error_body(message)
            lines = [STATUS_LINE[status]]
            for name, value in [*error_headers(status, body), (b"connection", b"close")]:
                lines += (name, b": ", value, b"\r\n")
            self.transport.write(b"".join([*lines, b"\r\n", body]))
        self.transport.close()


@types.coroutine
def _go_on(running: Any, waits_for: Any) -> Generator[Any, Any, None]:
    """The rest of a coroutine that was begun outside a task and waits for ``waits_for``."""
    while True:
        try:
            yield waits_for
        except BaseException as error:  # cancelled: the coroutine decides what becomes of it
            step = partial(running.throw, error)
        else:
            step = partial(running.send, None)
        try:
            waits_for = step()
        except StopIteration:
            return


class Cycle(RequestResponseCycle):
    """uvicorn's, with a short way for an answer that comes whole: one write to the socket instead of
    two, and no search for characters that our own headers don't have."""

    async def send(self, message: Any) -> None:
        if message["type"] != WHOLE:
            await super().send(message)
            return
        if self.disconnected:
            return
        if self.flow.write_paused:
            await self.flow.drain()
        lines = [STATUS_LINE[message["status"]]]
        for name, value in self.default_headers:
            lines += (name, b": ", value, b"\r\n")
        for name, value in message["headers"]:
            lines += (name, b": ", value, b"\r\n")
        lines.append(b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")
        self.response_started = True
        self.waiting_for_100_continue = False
        self.transport.writelines((b"".join(lines), message["body"]))
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()


class HttpServer(uvicorn.Server):
    """One port. Stopped by ``stop`` alone."""

    def __init__(self, app: App, sock: socket.socket, drain_s: float) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # nothing here asks who the client was
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=max(1, round(drain_s)),
                backlog=_BACKLOG,
            )
        )
        self._socket = sock
        host, port = sock.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{port}"

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def serve(self, sockets: Any = None) -> None:
        """Serve until ``stop``; then what was accepted is answered."""
        sweeper = asyncio.create_task(self._sweep())
        try:
            await super().serve(sockets=[self._socket])
        finally:
            sweeper.cancel()

    def stop(self, *, at_once: bool = False) -> None:
        """Begin the end; ``at_once`` drops what is still being answered."""
        self.should_exit = True
        self.force_exit = self.force_exit or at_once

    async def _sweep(self) -> None:
        """Close connections whose request has begun and does not go on: no timer per request."""
        heard: dict[Any, int] = {}
        while True:
            await asyncio.sleep(SWEEP_S)
            before, heard = heard, {}
            connections: list[Any] = list(self.server_state.connections)
            for connection in connections:
                if not _waits_for_client(connection):
                    continue
                if before.get(connection) == connection.heard:
                    connection.transport.close()
                else:
                    heard[connection] = connection.heard


def _waits_for_client(connection: Any) -> bool:
    """Whether a head or a body is incomplete; not: idle between two requests."""
    cycle = connection.cycle
    if cycle is None or cycle.response_complete:
        return connection.timeout_keep_alive_task is None
    return bool(cycle.more_body and not cycle.response_started)
