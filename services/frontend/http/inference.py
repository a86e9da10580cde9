"""One HTTP inference request: bytes to an `Inference`, its outcome to an HTTP answer."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from hps.errors import BadRequest
from hps.tracing import RequestContext
from services.frontend.http.asgi import GONE, WHOLE, Receive, Scope, Send
from services.frontend.http.body import COMPRESS_FROM_BYTES, compress
from services.frontend.http.failures import error_reply
from services.frontend.http.head import RequestHead, printable_request_id
from services.frontend.http.peer import ConnectionPeer
from services.frontend.http.request import JsonInferenceRequest
from services.frontend.http.response import HttpReply
from services.frontend.http.routes import HttpRoute
from services.frontend.inference import Inference, InferencePort
from services.frontend.inference_request import InferenceRequest
from services.frontend.pending import failed_future


class HttpInference(Inference):
    """A request of one connection; as an ASGI application, it waits for the result and answers.

    ``outcome`` is answered: ``future``, or a failure in its place after a timeout or `abort`."""

    __slots__ = ("_encoded", "_gone", "_head", "_peer", "_route", "outcome")

    def __init__(
        self, port: InferencePort, route: HttpRoute, head: RequestHead, peer: ConnectionPeer
    ) -> None:
        super().__init__(port, route.entry)
        self._route = route
        self._head = head
        self._peer = peer
        self._encoded: HttpReply | None = None  # still to be compressed
        self._gone = False

    def identify(self) -> RequestContext:
        return self._head.identity

    def address(self) -> str:
        return self._peer.host

    def _decode(self, body: bytes, route: HttpRoute) -> JsonInferenceRequest:
        size = header_size(self._head.headers.get(b"inference-header-content-length"), len(body))
        if size == 0:
            return route.parser.raw(body, route.entry.endpoint.raw_input)
        return route.parser.parse(body, size)

    def begin(self, body: bytes) -> None:
        """Admit, decode and submit the request; raise its fault."""
        rejection = self.admit(len(body))
        try:
            if rejection is not None:
                raise rejection
        finally:
            del rejection  # break the reference cycle: the error's traceback refers to this frame
        route = self._route
        if route.split is None:
            call: InferenceRequest = self._decode(body, route)
        else:
            chosen, call = route.split.decode(self._head.header, partial(self._decode, body))
            self._route = chosen
            self.redirect(chosen.entry, len(body))
        self.submit(call)
        self.outcome = self.future

    def ready_reply(self) -> HttpReply | None:
        """Return the answer if it is ready.

        None: run the request as an application, which waits for the result or compresses the answer.
        """
        future = self.outcome
        if not future.done():
            return None
        failure = future.exception()  # raising it would make a reference cycle
        if failure is not None:
            return self.error_reply(failure)
        try:
            result = future.result()
            reply = self._encode(result)
            if self._is_compressed(reply):
                self._encoded = reply
                return None
            call = self.call
            self.succeed(result, future, self._route.observe, call.batch, self.observed_inputs())
            return reply
        except Exception as error:
            return self.error_reply(error)

    def give_up(self) -> None:
        """Cancel the work: the client is gone."""
        self._gone = True
        self.future.cancel()

    def abort(self, error: BaseException) -> None:
        """Cancel the work, and have the request answered with ``error``."""
        self.outcome = failed_future(error)
        self.future.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            reply = await self._reply(scope)
        except (Exception, asyncio.CancelledError) as error:
            if self._gone:
                self.leave(error)
                return
            reply = self.error_reply(error)
            error.with_traceback(None)  # it refers to the request, whose future refers to the error
        if WHOLE in scope.get("extensions", ()):
            await send({"type": WHOLE, "reply": reply})
            return
        await send(
            {"type": "http.response.start", "status": reply.status, "headers": reply.headers}
        )
        await send({"type": "http.response.body", "body": reply.body})

    async def _reply(self, scope: Scope) -> HttpReply:
        future = self.outcome
        if not future.done():
            if GONE in scope:
                scope[GONE](self.give_up)
            result = await self.port.state.pending.result(future, self.deadline)
        else:
            result = future.result()
        reply = self._encoded or self._encode(result)
        if self._is_compressed(reply):
            reply = await _compressed(reply, self._head.coding)
        call = self.call
        self.succeed(result, self.future, self._route.observe, call.batch, self.observed_inputs())
        return reply

    def _encode(self, result: Any) -> HttpReply:
        reply = self.encode(self._route.encoder, result)
        known_id = self._head.identity.request_id
        if not known_id and self.call.id:
            known_id = printable_request_id(self.call.id)
        return reply.with_request_id(known_id) if known_id else reply

    def _is_compressed(self, reply: HttpReply) -> bool:
        return self._head.coding is not None and reply.size >= COMPRESS_FROM_BYTES

    def error_reply(self, error: BaseException) -> HttpReply:
        """Count the failure and return the answer to it."""
        return error_reply(self.fail(error), self._head)


async def _compressed(reply: HttpReply, coding: str | None) -> HttpReply:
    assert coding is not None
    body = await compress(reply.body, coding)
    length = b"content-length", b"%d" % len(body)
    coded = b"content-encoding", coding.encode()
    return HttpReply.make([*reply.headers[:-1], coded, length], [body], len(body))


def header_size(value: bytes | None, size: int) -> int | None:
    """Parse ``Inference-Header-Content-Length`` of a body of ``size`` bytes; None if it is absent.

    Raises ``BadRequest`` unless it is a number up to ``size``."""
    if value is None:
        return None
    if not value.isdigit() or len(value) > 18 or int(value) > size:
        shown = value[:40].decode("latin-1")
        raise BadRequest(f"inference header size should be in range (0, {size}), got: {shown}")
    return int(value)
