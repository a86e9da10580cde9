"""``POST /v2/models/<m>[/versions/<v>]/infer``: the hot route, as raw ASGI.

One dictionary lookup finds the model by path; other paths are passed to FastAPI.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from time import perf_counter_ns
from typing import Any

from hps.config.server_settings import ServerSettings
from hps.errors import HpsError, Unavailable
from hps.node.served_versions import CURRENT
from services.frontend.auth import Authorizer
from services.frontend.errors import Overloaded, RequestBodyTimeout, RequestTooLarge
from services.frontend.http.arriving_request import ArrivingRequest
from services.frontend.http.asgi import App, Receive, Scope, Send
from services.frontend.http.body import ClientGone, decompress, read_body
from services.frontend.http.failures import error_reply, send_error
from services.frontend.http.head import HeadLines, RequestHead, shared_headers
from services.frontend.http.inference import HttpInference
from services.frontend.http.peer import ConnectionPeer, peer_of
from services.frontend.http.response import HttpReply
from services.frontend.http.routes import HttpRoute, http_route, inference_path
from services.frontend.inference import InferencePort
from services.frontend.state import FrontendState

_INFER = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")
# Bounds of the heads kept; longer ones are not worth their memory.
_HEADS_KEPT, HEAD_BYTES = 1024, 2048
# Bound of the bodies that `InferApp.expect` collects.
_COLLECTED_BYTES = 8 << 20


class InferApp:
    """ASGI application for inference requests; passes all others to ``rest``. Runs on one event loop.

    A request to a path of the routes may begin outside a task (see ``connection``).
    """

    def __init__(
        self, state: FrontendState, settings: ServerSettings, guard: Authorizer, rest: App
    ) -> None:
        self.state = state
        self._port = InferencePort(state, "http", "infer", settings.request_timeout_ms)
        self._guard = guard
        self._rest = rest
        self._max_body = settings.max_body_bytes
        self._max_keys = settings.max_keys
        self._routes: dict[str, HttpRoute] = {}
        # Parsed heads by their bytes. They keep references to their routes.
        self._heads: dict[bytes, RequestHead] = {}
        self._lines = HeadLines()
        state.on_models_changed(self._find_routes)

    def _find_routes(self) -> None:
        """Update the routes to the served names; an unchanged name keeps its route and cached templates."""
        known = {r.entry: r for r in self._routes.values() if r.split is None}
        routes: dict[str, HttpRoute] = {}
        headers: set[str] = set()
        for name, found in self.state.addresses.items():
            for version, entry in found.items():
                route = known.get(entry) or http_route(entry, self._port, self._max_keys)
                known[entry] = routes[inference_path(name, version)] = route
            if (split := self.state.splits.get(name)) is not None:
                chosen = {version: known[entry] for version, entry in found.items()}
                routes[inference_path(name, CURRENT)] = chosen[CURRENT].divided(split, chosen)
                headers |= {key.name for key in split.keys if key.kind == "header"}
        self._heads.clear()
        self._lines = HeadLines(headers)
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = None
        if scope["type"] == "http" and scope["method"] == "POST":
            route = self._routes.get(scope["path"])
            if route is None and (unknown := _INFER.fullmatch(scope["path"])):
                await self._refuse(unknown[1], unknown[2], scope, receive, send)
                return
        if route is None:
            await self._rest(scope, receive, send)
            return
        head, peer = RequestHead(route, dict(scope["headers"])), peer_of(scope)
        route = head.chosen_route()
        inference = HttpInference(self._port, route, head, peer)
        admitted = False
        body: bytes | None = None
        try:
            inference.enter(self._check(head, peer))
            if route.split is None and route.entry.endpoint.is_saturated:
                route.entry.endpoint.require_capacity(_announced(head.headers))
            admitted = True
            room = self.state.admission.byte_budget
            body = await read_body(
                receive, head.headers, self._max_body, self._port.timeout_s, room
            )
            if (coding := head.headers.get(b"content-encoding")) is not None:
                body = await decompress(body, coding.decode("latin-1"), self._max_body, room)
            inference.started = perf_counter_ns()  # leaves out the time for which the client sent
            inference.begin(body)
        except ClientGone as error:
            inference.leave(error)
        except (Exception, asyncio.CancelledError) as error:
            reply = inference.error_reply(error)
            is_unread = not admitted or (body is None and _is_unread(error))
            await send_error(reply, head, send, receive if is_unread else None)
        else:
            await inference(scope, receive, send)

    def known(self, request: bytes) -> tuple[RequestHead | None, int]:
        """Return the cached head that ``request`` begins with, or None, and the number of bytes after it."""
        size = request.find(b"\r\n\r\n") + 4
        head = self._heads.get(request[:size])
        if head is None:
            text, own = self._lines.split(request[:size])
            if not own or (head := self._heads.get(text)) is None:
                return None, 0
            head = head.named(own)
        return head, len(request) - size

    def learn(self, scope: Mapping[str, Any], body_size: int, text: bytes) -> None:
        """Cache the head of a request with a body of ``body_size`` bytes by ``text``, its bytes, if it is an
        inference request's and may be repeated."""
        route = self._routes.get(scope["path"]) if scope["method"] == "POST" else None
        if route is None or body_size > self._max_body:
            return
        if not text.startswith(b"POST ") or len(text) > HEAD_BYTES:
            return
        head = RequestHead(route, dict(scope["headers"]))
        if not head.is_cacheable:
            return
        if len(self._heads) >= _HEADS_KEPT:
            self._heads.clear()
        head.body_size = body_size
        repeated, own = self._lines.split(text)
        bare = head.named({})
        bare.headers = shared_headers(head.headers, own)
        self._heads[repeated] = bare

    def begin(self, head: RequestHead, body: bytes, peer: ConnectionPeer) -> HttpInference:
        """Begin a complete request of ``peer``. If it raises, the request has had no effect."""
        inference = self._entered(head, peer)
        try:
            inference.begin(body)
        except BaseException:
            inference.undo()
            raise
        return inference

    def expect(
        self, head: RequestHead, text: bytes, peer: ConnectionPeer
    ) -> ArrivingRequest | None:
        """Return a request of ``peer`` whose body is still to arrive, given its head and the bytes of it.

        None: it is too large, or has a fault, which the slow path reports."""
        if head.body_size > _COLLECTED_BYTES:
            return None
        try:
            inference = self._entered(head, peer)
        except HpsError:
            return None
        budget = self.state.admission.byte_budget
        return ArrivingRequest(inference, head, text, head.body_size, budget)

    def _entered(self, head: RequestHead, peer: ConnectionPeer) -> HttpInference:
        inference = HttpInference(self._port, head.chosen_route(), head, peer)
        inference.enter(self._check(head, peer))
        return inference

    def early_refusal(self, scope: Mapping[str, Any]) -> HttpReply | None:
        """`refusal` for a request whose head is not cached."""
        route = self._routes.get(scope["path"]) if scope["method"] == "POST" else None
        if route is None or not route.entry.endpoint.is_saturated:
            return None
        head = RequestHead(route, dict(scope["headers"]))
        if not head.is_crowded:
            return None
        if b"expect" in head.headers:  # the body may be withheld
            return None
        head.body_size = _announced(head.headers)
        return self.refusal(head, peer_of(scope))

    def refusal(self, head: RequestHead, peer: ConnectionPeer) -> HttpReply | None:
        """Return the rejection of a request in an overload, or None. Needs only the head, not the body."""
        assert head.route is not None
        try:
            self._check(head, peer)
        except HpsError:
            return None  # reported on the slow path
        refusal = head.route.entry.endpoint.rejection(head.body_size)
        return None if refusal is None else self.refuse(head, refusal)

    def refuse(self, head: RequestHead, error: Exception) -> HttpReply:
        """Return the answer to a request that could not begin."""
        entry = None if head.route is None else head.route.entry
        failure = self._port.fail(error, perf_counter_ns(), lambda: head.identity, entry)
        return error_reply(failure, head)

    def _check(self, head: RequestHead, peer: ConnectionPeer) -> str:
        return self._guard.check(head.headers, "read", peer.certificate)

    async def _refuse(
        self, name: str, version: str | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Reject an inference request for a name that is not served."""
        head = RequestHead(None, dict(scope["headers"]))
        try:
            self._check(head, peer_of(scope))
            self.state.entry(name, version)
            raise Unavailable("the model has just become ready; retry")
        except HpsError as error:
            await send_error(self.refuse(head, error), head, send, receive)


def _announced(headers: dict[bytes, bytes]) -> int:
    """Return the announced size of a body; 0 for a chunked one."""
    length = headers.get(b"content-length")
    return int(length) if length is not None and length.isdigit() else 0


def _is_unread(error: BaseException) -> bool:
    """Return True if part of the body was not received when reading it ended with ``error``."""
    if isinstance(error, RequestTooLarge):
        return error.unread
    return isinstance(error, RequestBodyTimeout | Overloaded)
