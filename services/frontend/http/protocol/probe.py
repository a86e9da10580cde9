"""Probe of uvicorn's private protocol: do requests to `HttpProtocol` get their answers?"""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from services.frontend.http.application import PlainAsgi
from services.frontend.http.asgi import WHOLE, Receive, Scope, Send
from services.frontend.http.response import HttpReply

log = logging.getLogger(__name__)

_TIMEOUT_S = 5.0
_OTHER = b"POST /other HTTP/1.1\r\nHost: x\r\n"
_CHUNKED = _OTHER + b"Transfer-Encoding: chunked\r\n\r\n3\r\nchu\r\n", b"3\r\nnks\r\n0\r\n\r\n"
_KNOWN = b"POST /known HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n"
_LAST = _OTHER + b"Connection: close\r\nContent-Length: 4\r\n\r\nlast"
# Name, the pieces in which they arrive, and the bodies of the answers.
_REQUESTS = (
    ("request", (_OTHER + b"Content-Length: 5\r\n\r\n", b"plain"), (b"plain",)),
    ("chunked request", _CHUNKED, (b"chunks",)),
    ("pipelined requests", (b"".join((*_CHUNKED, _KNOWN, b"other")),), (b"chunks", b"other")),
    ("request with a new head", (_KNOWN + b"first",), (b"first",)),
)


@functools.cache
def is_supported() -> bool:
    """Check that this uvicorn's private protocol works as `HttpProtocol` uses it. Tried once per process, by
    a few requests in memory; logs a warning if not."""
    try:
        # On another thread, as an event loop may run on this one.
        with ThreadPoolExecutor(1, "http-probe") as thread:
            reason = thread.submit(asyncio.run, _fault()).result()
    except Exception as error:  # a name that is missing, a request that fails or times out
        reason = repr(error)
    if reason:
        log.warning(
            "unsupported uvicorn %s or httptools %s internals (%s); using uvicorn's public interface",
            uvicorn.__version__,
            importlib.metadata.version("httptools"),
            reason,
        )
    return not reason


async def _fault() -> str:
    """Send requests to a connection; return the name of one that is not answered well, else ""."""
    async with asyncio.timeout(_TIMEOUT_S):
        connection = _Connection()
        for name, pieces, bodies in _REQUESTS:
            if not await connection.answers(pieces, bodies):
                return name
        if not connection.answers_now(_KNOWN + b"again", b"again"):
            return "request with a known head"
        if not (await connection.answers([_LAST], [b"last"]) and connection.has_closed):
            return "last request"
        invalid = _Connection()
        invalid.receive(b"no request\r\n\r\n")
        if not (invalid.sent.startswith(b"HTTP/1.1 400 ") and invalid.has_closed):
            return "invalid request"
    return ""


class _Connection:
    """A connection without a socket to an application that echoes bodies."""

    def __init__(self) -> None:
        from services.frontend.http.protocol.connection import (
            HttpProtocol,
        )  # raises if a name is missing

        options: dict[str, Any] = {"ws": "none", "lifespan": "off", "log_config": None}
        config = uvicorn.Config(
            _Echo(), http=HttpProtocol, access_log=False, proxy_headers=False, **options
        )
        config.load()
        self._protocol = HttpProtocol(config, ServerState(), {})
        self.receive = self._protocol.data_received
        self._transport = _MemoryTransport()
        self._protocol.connection_made(self._transport)

    @property
    def sent(self) -> bytes:
        return self._transport.sent

    @property
    def has_closed(self) -> bool:
        return self._transport.is_closing()

    async def answers(self, pieces: Sequence[bytes], bodies: Sequence[bytes]) -> bool:
        """Receive ``pieces``; return True if answers with exactly these ``bodies`` are sent."""
        for piece in pieces:
            self.receive(piece)
            await asyncio.sleep(0)
        while self._protocol.tasks:
            await asyncio.wait(list(self._protocol.tasks))
        return self._has_sent(bodies)

    def answers_now(self, request: bytes, body: bytes) -> bool:
        """Receive ``request``; return True if it is answered with ``body`` without a task."""
        self.receive(request)
        return self._has_sent([body])

    def _has_sent(self, bodies: Sequence[bytes]) -> bool:
        answers = self.sent.split(b"HTTP/1.1 200 OK\r\n")[1:]
        self._transport.sent = b""
        return len(answers) == len(bodies) and all(
            answer.startswith(b"content-length: %d\r\n" % len(body))
            and answer.endswith(b"\r\n\r\n" + body)
            for answer, body in zip(answers, bodies, strict=True)
        )


class _MemoryTransport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self._has_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += data

    def close(self) -> None:
        self._has_closed = True

    def is_closing(self) -> bool:
        return self._has_closed

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class _Echo(PlainAsgi):
    """Answers with the request's body; a head is known from its second request on."""

    def __init__(self) -> None:
        super().__init__(_echo)
        self._heads: dict[bytes, Any] = {}

    def known(self, request: bytes) -> tuple[Any, int]:
        size = request.find(b"\r\n\r\n") + 4
        return self._heads.get(request[:size]), len(request) - size

    def learn(self, scope: Mapping[str, Any], body_size: int, text: bytes) -> None:
        self._heads[text] = SimpleNamespace(body_size=body_size, is_crowded=False)

    def begin(self, head: Any, body: bytes, peer: Any) -> Any:
        return SimpleNamespace(ready_reply=lambda: _reply(body))


async def _echo(scope: Scope, receive: Receive, send: Send) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    reply = _reply(body)
    if scope["path"] == "/known" and WHOLE in scope["extensions"]:
        await send({"type": WHOLE, "reply": reply})
        return
    await send({"type": "http.response.start", "status": 200, "headers": reply.headers})
    await send({"type": "http.response.body", "body": body})


def _reply(body: bytes) -> HttpReply:
    return HttpReply.make([(b"content-length", b"%d" % len(body))], [body], len(body))
