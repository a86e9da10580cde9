"""``POST /v2/models/<m>[/versions/<v>]/infer``: the hot route, as raw ASGI.

One dictionary look-up finds the model by path; everything else goes on to FastAPI. Success is one
straight line; every failure ends in ``_failure``.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import Future
from time import perf_counter_ns
from typing import Any

from hps import metrics as m
from hps.config.schema import ServerSettings
from hps.errors import BadRequest, DeadlineExceeded, HpsError, Unavailable
from services.frontend.auth import Guard
from services.frontend.body import (
    COMPRESS_FROM_BYTES,
    ClientGone,
    Receive,
    accepted_coding,
    compress,
    discard,
    in_task,
    read_body,
)
from services.frontend.errors import TooLarge, TooSlow, error_body, error_headers, http_status
from services.frontend.logs import fields, log
from services.frontend.response import Headers
from services.frontend.state import Entry, State

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# ASGI extension: status, headers and body in one message. Headers must need no check.
WHOLE = "hps.response.whole"

_INFER = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class InferApp:
    """Answers inference requests and hands every other one to ``rest``. Runs on one event loop.

    A request to one of the paths in ``routes`` may be begun outside a task (see ``http_server``).
    """

    def __init__(self, state: State, settings: ServerSettings, guard: Guard, rest: App) -> None:
        self._state = state
        self.routes = state.routes
        self._guard = guard
        self._rest = rest
        self._max_body = settings.max_body_bytes
        self._timeout_s = settings.request_timeout_ms / 1e3
        self._log_requests = settings.log_level == "debug"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = perf_counter_ns()
        entry = None
        if scope["type"] == "http" and scope["method"] == "POST":
            entry = self.routes.get(scope["path"])
            if entry is None and _INFER.fullmatch(scope["path"]):
                await self._refuse(scope, receive, send, started)
                return
        if entry is None:
            await self._rest(scope, receive, send)
            return
        headers = dict(scope["headers"])
        begun = False
        try:
            self._guard.check(headers, "read")
            begun = True
            body = await read_body(receive, headers, self._max_body, self._timeout_s)
            started = perf_counter_ns()  # what the client took to send is not ours
            answer, reply = await self._answer(entry, headers, body, started)
        except (Exception, asyncio.CancelledError) as error:
            unread = receive if not begun or _is_unread(error) else None
            await self._failure(error, entry, headers, send, unread, started)
            return
        if b"x-request-id" in headers:
            _echo_request_id(headers, reply)
        if self._log_requests:
            _log_request(headers, entry, 200, started)
        if WHOLE in scope.get("extensions", ()):
            await send({"type": WHOLE, "status": 200, "headers": reply, "body": answer})
            return
        await send({"type": "http.response.start", "status": 200, "headers": reply})
        await send({"type": "http.response.body", "body": answer})

    async def _answer(
        self, entry: Entry, headers: dict[bytes, bytes], body: bytes, started: int
    ) -> tuple[bytes, Headers]:
        """The response's body and headers; the statistics know of it."""
        endpoint = entry.endpoint
        size = _header_size(headers.get(b"inference-header-content-length"), len(body))
        if size == 0:
            call = entry.parser.raw(body, endpoint.raw_input)
        else:
            call = entry.parser.parse(body, size)
        parsed = perf_counter_ns()
        form = call.form
        deadline = time.monotonic() + (form.timeout_us * 1e-6 or self._timeout_s)
        future = endpoint.submit(call, deadline)
        result = future.result() if future.done() else await outcome(future, deadline)
        inferred = perf_counter_ns()
        answer, reply = entry.encoder.encode(
            form.id,
            result.defaulted,
            result.degraded,
            endpoint.outputs(call, result),
            form.heads,
        )
        accept = headers.get(b"accept-encoding")
        if accept is not None and len(answer) >= COMPRESS_FROM_BYTES:
            coding = accepted_coding(accept)
            if coding is not None:
                answer = await compress(answer, coding)
                reply[-1] = (b"content-length", b"%d" % len(answer))
                reply.append((b"content-encoding", coding.encode()))
        done = perf_counter_ns()
        entry.statistics.succeeded(call.batch, started, parsed, inferred, done)
        entry.observe_ok((done - started) * 1e-9)
        return answer, reply

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, started: int) -> None:
        """An inference request for a name that is not served, now or ever."""
        headers = dict(scope["headers"])
        match = _INFER.fullmatch(scope["path"])
        assert match is not None
        try:
            self._guard.check(headers, "read")
            self._state.entry(match[1], match[2])
            raise Unavailable("the model has just become ready; ask again")
        except HpsError as error:
            await self._failure(error, None, headers, send, receive, started)

    async def _failure(
        self,
        error: BaseException,
        entry: Entry | None,
        headers: dict[bytes, bytes],
        send: Send,
        unread: Receive | None,
        started: int,
    ) -> None:
        """Answer with what went wrong. ``unread``: where the rest of the request's body comes from."""
        if isinstance(error, ClientGone):
            return
        status, body = describe(error, headers)
        done = perf_counter_ns()
        name = ""
        if entry is not None:
            name = entry.name
            entry.statistics.failed(started, done)
        metrics = self._state.metrics
        metrics.histogram(m.REQUEST_SECONDS, "http", "infer", name, str(status)).observe(
            (done - started) * 1e-9
        )
        reason = _REFUSED.get(status)
        if reason is not None:
            metrics.counter(m.REQUESTS_REFUSED, reason).add()
        reply = error_headers(status, body)
        _echo_request_id(headers, reply)
        if self._log_requests:
            _log_request(headers, entry, status, started)
        await send({"type": "http.response.start", "status": status, "headers": reply})
        if unread is not None and b"expect" not in headers:
            # The client reads the answer only when it has sent its request: let it finish.
            await send({"type": "http.response.body", "body": body, "more_body": True})
            await discard(unread)
            body = b""
        await send({"type": "http.response.body", "body": body})


def _is_unread(error: BaseException) -> bool:
    """Whether part of the body is still on its way, after reading it ended with ``error``."""
    return isinstance(error, TooSlow) or (isinstance(error, TooLarge) and error.unread)


# Requests that were refused before they were looked at, by status.
_REFUSED = {401: "unauthenticated", 403: "forbidden", 413: "too_large", 503: "unavailable"}


def describe(error: BaseException, headers: dict[bytes, bytes]) -> tuple[int, bytes]:
    """Status and body for an error; one that nobody raised on purpose is logged, not told."""
    if isinstance(error, asyncio.CancelledError):  # the drain is over
        error = Unavailable("the server has shut down before it could answer; ask another replica")
    if isinstance(error, HpsError):
        status = http_status(error)
        if status == 500:
            log.error("request failed %s", fields(id=request_id(headers), error=str(error)))
        return status, error_body(str(error))
    known_as = request_id(headers) or secrets.token_hex(8)
    log.error("internal error %s", fields(id=known_as), exc_info=error)
    message = f"internal error; the server's log has it under id {known_as}"
    return 500, error_body(message)


def _header_size(value: bytes | None, size: int) -> int | None:
    """``Inference-Header-Content-Length``; None when it is absent."""
    if value is None:
        return None
    if not value.isdigit() or len(value) > 18 or int(value) > size:
        shown = value[:40].decode("latin-1")
        raise BadRequest(f"inference header size should be in range (0, {size}), got: {shown}")
    return int(value)


async def outcome(future: Future[Any], deadline: float) -> Any:
    """The result of work that is done elsewhere; cancels it when its time is up."""
    await in_task()
    try:
        async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
            return await asyncio.wrap_future(future)
    except TimeoutError:
        raise DeadlineExceeded(
            "no answer within the request's time; parameter 'timeout' (microseconds) or "
            "server.request_timeout_ms allow more"
        ) from None


def request_id(headers: dict[bytes, bytes]) -> str:
    """``X-Request-ID`` if it is one that may be repeated in a header and a log line, else ""."""
    given = headers.get(b"x-request-id", b"")
    return given.decode() if _REQUEST_ID.fullmatch(given) else ""


def _echo_request_id(headers: dict[bytes, bytes], reply: Headers) -> None:
    if known_as := request_id(headers):
        reply.append((b"x-request-id", known_as.encode()))


def _log_request(
    headers: dict[bytes, bytes], entry: Entry | None, status: int, started: int
) -> None:
    log.debug(
        "request %s",
        fields(
            id=request_id(headers),
            model=entry.name if entry else "",
            status=status,
            us=(perf_counter_ns() - started) // 1000,
        ),
    )
