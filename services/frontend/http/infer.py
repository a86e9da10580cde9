"""``POST /v2/models/<m>[/versions/<v>]/infer``: the hot route, as raw ASGI.

One dictionary look-up finds the model by path; everything else goes on to FastAPI. Success is one
straight line; every failure ends in ``failures.fail``.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from concurrent.futures import Future
from time import perf_counter_ns
from typing import Any

from hps.config.server_settings import ServerSettings
from hps.errors import BadRequest, DeadlineExceeded, HpsError, Unavailable
from services.frontend.auth import Guard
from services.frontend.errors import Overloaded, TooLarge, TooSlow
from services.frontend.http.asgi import GONE, WHOLE, App, Receive, Scope, Send
from services.frontend.http.body import COMPRESS_FROM_BYTES, compress, in_task, read_body
from services.frontend.http.failures import fail, failure
from services.frontend.http.head import Head, apart, repeatable, without_own
from services.frontend.http.response import Reply
from services.frontend.http.routes import Route
from services.frontend.state import State
from services.frontend.statistics import queued_ns

_INFER = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")
# Heads that are kept; longer ones are not worth their memory.
_HEADS_KEPT, _HEAD_BYTES = 1024, 2048


class InferApp:
    """Answers inference requests and hands every other one to ``rest``. Runs on one event loop.

    A request to a path of the routes may be begun outside a task (see ``connection``).
    """

    def __init__(self, state: State, settings: ServerSettings, guard: Guard, rest: App) -> None:
        self.state = state
        self.timeout_s = settings.request_timeout_ms / 1e3
        self._guard = guard
        self._rest = rest
        self._max_body = settings.max_body_bytes
        self._max_keys = settings.max_keys
        self._clients = state.admission.clients
        self._routes: dict[str, Route] = {}
        # Heads that were read, by their bytes. They hold on to their routes.
        self._heads: dict[bytes, Head] = {}
        state.watch(self._find_routes)

    def _find_routes(self) -> None:
        """Take over the names that are served now. A name that is served as before keeps its route, which
        knows the requests it has seen."""
        known = {route.entry: route for route in self._routes.values()}
        routes: dict[str, Route] = {}
        for entry in self.state.entries.values():
            route = known.get(entry) or Route(entry, self.state.metrics, self._max_keys)
            routes.update(dict.fromkeys(route.paths, route))
        self._heads.clear()
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = perf_counter_ns()
        route = None
        if scope["type"] == "http" and scope["method"] == "POST":
            route = self._routes.get(scope["path"])
            if route is None and _INFER.fullmatch(scope["path"]):
                await self._refuse(scope, receive, send, arrived)
                return
        if route is None:
            await self._rest(scope, receive, send)
            return
        head = Head(route, dict(scope["headers"]))
        admitted, client = False, None
        body: bytes | None = None
        try:
            client = self._enter(self._guard.check(head.headers, "read"), scope.get("client"))
            if route.entry.endpoint.is_busy:
                route.entry.endpoint.require_room(_announced(head.headers))
            admitted = True
            room = self.state.admission.room
            body = await read_body(receive, head.headers, self._max_body, self.timeout_s, room)
            arrived = perf_counter_ns()  # what the client took to send is not ours
            inference = Inference(self, head, body, arrived, client)
        except (Exception, asyncio.CancelledError) as error:
            self.leave(client, error)
            coming = not admitted or (body is None and _is_unread(error))
            unread = receive if coming else None
            await fail(error, head, self.state, send, arrived, unread)
            return
        await inference(scope, receive, send)

    def known(self, request: bytes) -> Head | None:
        """The head of ``request``, if it was read before and what follows is its body and no more."""
        size = request.find(b"\r\n\r\n") + 4
        head = self._heads.get(request[:size])
        if head is None:
            text, own = apart(request[:size])
            if not own or (head := self._heads.get(text)) is None:
                return None
            head = head.named(own)
        return head if len(request) - size == head.body_size else None

    def read(self, scope: Mapping[str, Any], body_size: int, text: bytes) -> Head | None:
        """The head of a request that is there with its body, to be kept if ``text``, its bytes, may come
        again; None when the request is for the application: no inference, or to be read with care."""
        route = self._routes.get(scope["path"]) if scope["method"] == "POST" else None
        if route is None or body_size > self._max_body:
            return None
        head = Head(route, dict(scope["headers"]))
        if b"content-encoding" in head.headers:
            return None
        if text.startswith(b"POST ") and len(text) <= _HEAD_BYTES and head.comes_again:
            if len(self._heads) >= _HEADS_KEPT:
                self._heads.clear()
            head.body_size = body_size
            bare = head.named({})
            bare.headers = without_own(head.headers)
            self._heads[apart(text)[0]] = bare
        return head

    def begin(self, head: Head, body: bytes, address: Any) -> Inference:
        """Begin a request that is all there, from the client at ``address``. Raises what is wrong with it:
        nothing has happened then."""
        started = perf_counter_ns()
        caller = self._guard.check(head.headers, "read")
        if self._clients is None:
            return Inference(self, head, body, started)
        client = self._enter(caller, address)
        try:
            return Inference(self, head, body, started, client)
        except BaseException:
            if client is not None:
                self._clients.undo(client)
            raise

    def refusal(self, scope: Mapping[str, Any]) -> Reply | None:
        """The answer to a request whose head is there, when there is no room for it. Its body need not be
        looked at then."""
        route = self._routes.get(scope["path"]) if scope["method"] == "POST" else None
        if route is None or not route.entry.endpoint.is_busy:
            return None
        head = Head(route, dict(scope["headers"]))
        if b"expect" in head.headers:  # its body may come or not
            return None
        try:
            self._guard.check(head.headers, "read")
            route.entry.endpoint.require_room(_announced(head.headers))
        except Overloaded as error:
            return self.refuse(head, error)
        except HpsError:
            pass  # told in the ordinary way
        return None

    def refuse(self, head: Head, error: Exception) -> Reply:
        """The answer to a request that could not be begun."""
        return failure(error, head, self.state, perf_counter_ns())

    def _enter(self, caller: str, address: Any) -> str | None:
        """One more request of a client begins: who it is, None where that does not matter."""
        if self._clients is None:
            return None
        client = caller or (address[0] if address else "")
        self._clients.enter(client)
        return client

    def leave(self, client: str | None, error: BaseException | None = None) -> None:
        """A request of ``client`` is answered, with ``error`` if it failed."""
        if client is not None and self._clients is not None:
            self._clients.leave(client, error)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, arrived: int) -> None:
        """An inference request for a name that is not served, now or ever."""
        head = Head(None, dict(scope["headers"]))
        match = _INFER.fullmatch(scope["path"])
        assert match is not None
        try:
            self._guard.check(head.headers, "read")
            self.state.entry(match[1], match[2])
            raise Unavailable("the model has just become ready; ask again")
        except HpsError as error:
            await fail(error, head, self.state, send, arrived, receive)


class Inference:
    """A request that has been begun. As an ASGI application it waits for what is still missing, and
    answers. ``started``, ``parsed`` and ``inferred`` are instants in ns."""

    __slots__ = (
        "_app",
        "_call",
        "_client",
        "_deadline",
        "_future",
        "_gone",
        "_head",
        "_parsed",
        "_started",
        "_state",
    )

    def __init__(
        self, app: InferApp, head: Head, body: bytes, started: int, client: str | None = None
    ) -> None:
        """Raises what is wrong with the request. ``client``: who is to leave when it is answered."""
        self._app = app
        self._head = head
        self._client = client
        self._gone = False
        self._state = app.state
        self._started = started
        route = head.route
        assert route is not None
        if route.entry.endpoint.is_busy:
            route.entry.endpoint.require_room(len(body))
        size = _header_size(head.headers.get(b"inference-header-content-length"), len(body))
        if size == 0:
            call = route.parser.raw(body, route.entry.endpoint.raw_input)
        else:
            call = route.parser.parse(body, size)
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
        self._deadline = time.monotonic() + (call.form.timeout_us * 1e-6 or app.timeout_s)
        self._future = route.entry.endpoint.submit(call, self._deadline)

    def at_once(self) -> Reply | None:
        """The answer, if nothing has to be waited for; else go on as an application."""
        if not self._future.done():
            return None
        try:
            inferred = perf_counter_ns()
            result = self._future.result()
            reply = self._reply(result)
        except Exception:
            return None  # the application says what is wrong
        if self._head.coding is not None and reply.size >= COMPRESS_FROM_BYTES:
            return None
        self._count(inferred, result)
        self._app.leave(self._client)
        return reply

    def give_up(self) -> None:
        """The client is gone."""
        self._gone = True
        self._future.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error: BaseException | None = None
        try:
            error = await self._answer(scope, send)
        finally:
            self._app.leave(self._client, error)

    async def _answer(self, scope: Scope, send: Send) -> BaseException | None:
        """Returns what went wrong, which is told."""
        head, future = self._head, self._future
        if not future.done() and GONE in scope:
            scope[GONE](self.give_up)
        try:
            result = future.result() if future.done() else await outcome(future, self._deadline)
            inferred = perf_counter_ns()
            reply = self._reply(result)
            if head.coding is not None and reply.size >= COMPRESS_FROM_BYTES:
                reply = await _compressed(reply, head.coding)
            self._count(inferred, result)
        except (Exception, asyncio.CancelledError) as error:
            if not self._gone:
                await fail(error, head, self._state, send, self._started, origin=self._call.origin)
            return error
        if WHOLE in scope.get("extensions", ()):
            await send({"type": WHOLE, "reply": reply})
            return None
        await send({"type": "http.response.start", "status": 200, "headers": reply.headers})
        await send({"type": "http.response.body", "body": reply.body})
        return None

    def _reply(self, result: Any) -> Reply:
        call, head = self._call, self._head
        route = head.route
        assert route is not None
        outputs = route.entry.endpoint.outputs(call, result)
        freshness = route.entry.freshness
        stale_s = freshness.flag() if freshness.stale_s else result.stale_s
        reply = route.encoder.encode(call.form, result.defaulted, result.degraded, stale_s, outputs)
        known_as = head.request_id or repeatable(call.id)
        return reply.known_as(known_as) if known_as else reply

    def _count(self, inferred: int, result: Any) -> None:
        """The statistics know of an answer that is ready to be sent."""
        route = self._head.route
        assert route is not None
        done, started = perf_counter_ns(), self._started
        route.entry.statistics.succeeded(
            self._call.batch, started, self._parsed, inferred, done, queued_ns(self._future)
        )
        route.observe_ok((done - started) * 1e-9)
        call = self._call
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


async def _compressed(reply: Reply, coding: str) -> Reply:
    body = await compress(reply.body, coding)
    length = b"content-length", b"%d" % len(body)
    coded = b"content-encoding", coding.encode()
    return Reply.make([*reply.headers[:-1], coded, length], [body], len(body))


def _announced(headers: dict[bytes, bytes]) -> int:
    """The bytes of a body that is coming; 0 when it comes in chunks."""
    length = headers.get(b"content-length")
    return int(length) if length is not None and length.isdigit() else 0


def _is_unread(error: BaseException) -> bool:
    """Whether part of the body is still on its way, after reading it ended with ``error``."""
    if isinstance(error, TooLarge):
        return error.unread
    return isinstance(error, TooSlow | Overloaded)


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
