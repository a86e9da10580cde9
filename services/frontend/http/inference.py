"""One HTTP inference request: parse, submit, wait, answer."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from time import perf_counter_ns
from typing import Any, Protocol

from hps.errors import BadRequest, DeadlineExceeded
from services.frontend.http.asgi import GONE, WHOLE, Receive, Scope, Send
from services.frontend.http.body import COMPRESS_FROM_BYTES, compress, ensure_task
from services.frontend.http.failures import fail
from services.frontend.http.head import RequestHead, printable_request_id
from services.frontend.http.peer import ConnectionPeer
from services.frontend.http.response import HttpReply
from services.frontend.state import FrontendState
from services.frontend.statistics import execution_samples, queued_ns

TOO_LATE = (
    "deadline exceeded: no answer within the request's time; raise parameter 'timeout' "
    "(microseconds) or server.request_timeout_ms"
)


class InferencePort(Protocol):
    """The port of an inference request, `services.frontend.http.infer.InferApp`."""

    state: FrontendState
    timeout_s: float

    def leave(self, client: str | None, error: BaseException | None = None) -> None: ...


class HttpInference:
    """A request that was submitted; as an ASGI application, it waits for the result and answers.

    ``future`` has the result by the instant ``deadline``, or the request fails. ``started``, ``parsed`` and
    ``inferred`` are instants in ns.
    """

    __slots__ = (
        "_app",
        "_call",
        "_client",
        "_error",
        "_gone",
        "_head",
        "_parsed",
        "_started",
        "_state",
        "deadline",
        "future",
    )

    def __init__(
        self,
        app: InferencePort,
        head: RequestHead,
        body: bytes,
        started: int,
        peer: ConnectionPeer,
        client: str | None = None,
    ) -> None:
        """Parse and submit; raise the fault of a request. ``client``: counted until it is answered."""
        self._app = app
        self._head = head
        self._client = client
        self._gone = False
        self._error: BaseException | None = None
        self._state = app.state
        self._started = started
        route = head.route
        assert route is not None
        if route.entry.endpoint.is_saturated:
            route.entry.endpoint.require_capacity(len(body))
        size = header_size(head.headers.get(b"inference-header-content-length"), len(body))
        if size == 0:
            call = route.parser.raw(body, route.entry.endpoint.raw_input)
        else:
            call = route.parser.parse(body, size)
        if (refs := call.form.memory_refs) is not None:
            if route.entry.endpoint.is_saturated:
                route.entry.endpoint.require_capacity(refs.size)
            inputs, call.targets = app.state.regions.take(refs, peer.host)
            call.inputs.update(inputs)
        self._call = call
        self._parsed = perf_counter_ns()
        observer = app.state.observer
        if call.id or head.is_named or observer.watches:
            call.origin = observer.begin(
                route.entry.name,
                started,
                call.id or head.request_id,
                head.traceparent,
                head.tracestate,
            )
        self.deadline = time.monotonic() + (call.form.timeout_us * 1e-6 or app.timeout_s)
        self.future = route.entry.endpoint.submit(call, self.deadline)

    def ready_reply(self) -> HttpReply | None:
        """Return the answer if the result is ready; None: the request must run as an application."""
        if self._error is not None or not self.future.done():
            return None
        try:
            inferred = perf_counter_ns()
            result = self.future.result()
            reply = self._reply(result)
        except Exception:
            return None  # the application reports the error
        if self._head.coding is not None and reply.size >= COMPRESS_FROM_BYTES:
            return None
        self._count(inferred, result)
        self._app.leave(self._client)
        return reply

    def give_up(self) -> None:
        """Cancel the work: the client is gone."""
        self._gone = True
        self.future.cancel()

    def fail(self, error: BaseException) -> None:
        """Cancel the work, and have the request answered with ``error``."""
        self._error = error
        self.future.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error: BaseException | None = None
        try:
            error = await self._answer(scope, send)
        finally:
            self._app.leave(self._client, error)

    async def _answer(self, scope: Scope, send: Send) -> BaseException | None:
        """Send the answer; return the error, if any, which was sent."""
        head, future = self._head, self.future
        if not future.done() and GONE in scope:
            scope[GONE](self.give_up)
        try:
            if self._error is not None:
                raise self._error
            result = future.result() if future.done() else await await_result(future, self.deadline)
            inferred = perf_counter_ns()
            reply = self._reply(result)
            if head.coding is not None and reply.size >= COMPRESS_FROM_BYTES:
                reply = await _compressed(reply, head.coding)
            self._count(inferred, result)
        except (Exception, asyncio.CancelledError) as error:
            if not self._gone:
                await fail(error, head, self._state, send, self._started, origin=self._call.origin)
            # Its traceback refers to the request, whose future refers to the error: a cycle.
            return error.with_traceback(None)
        if WHOLE in scope.get("extensions", ()):
            await send({"type": WHOLE, "reply": reply})
            return None
        await send({"type": "http.response.start", "status": 200, "headers": reply.headers})
        await send({"type": "http.response.body", "body": reply.body})
        return None

    def _reply(self, result: Any) -> HttpReply:
        call, head = self._call, self._head
        route = head.route
        assert route is not None
        outputs = route.entry.endpoint.outputs(call, result)
        if call.targets:
            self._state.regions.put(outputs, call.targets)
        freshness = route.entry.freshness
        stale_s = freshness.flag() if freshness.stale_s else result.stale_s
        reply = route.encoder.encode(call.form, result.defaulted, result.degraded, stale_s, outputs)
        known_id = head.request_id or printable_request_id(call.id)
        return reply.with_request_id(known_id) if known_id else reply

    def _count(self, inferred: int, result: Any) -> None:
        """Count an answer that is ready to be sent."""
        route = self._head.route
        assert route is not None
        call, done, started = self._call, perf_counter_ns(), self._started
        route.entry.statistics.succeeded(
            call.batch,
            started,
            self._parsed,
            inferred,
            done,
            queued_ns(self.future),
            execution_samples(self.future),
        )
        route.observe_ok((done - started) * 1e-9)
        if call.origin is not None:
            self._state.observer.answered(
                "http",
                call.origin,
                route.entry.endpoint,
                call,
                result,
                started,
                self._parsed,
                inferred,
                done,
            )


async def _compressed(reply: HttpReply, coding: str) -> HttpReply:
    body = await compress(reply.body, coding)
    length = b"content-length", b"%d" % len(body)
    coded = b"content-encoding", coding.encode()
    return HttpReply.make([*reply.headers[:-1], coded, length], [body], len(body))


def header_size(value: bytes | None, size: int) -> int | None:
    """Parse ``Inference-Header-Content-Length``; None if it is absent."""
    if value is None:
        return None
    if not value.isdigit() or len(value) > 18 or int(value) > size:
        shown = value[:40].decode("latin-1")
        raise BadRequest(f"inference header size should be in range (0, {size}), got: {shown}")
    return int(value)


async def await_result(future: Future[Any], deadline: float) -> Any:
    """Wait for a result from another thread; cancel it at the deadline."""
    await ensure_task()
    try:
        async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
            return await asyncio.wrap_future(future)
    except TimeoutError:
        raise DeadlineExceeded(TOO_LATE) from None
