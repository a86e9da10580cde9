"""Handlers of gRPC methods, on the server's own thread or on a thread pool."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc

from hps.config.auth import Role
from hps.errors import BadRequest, HpsError
from services.frontend.errors import RequestCancelled, client_error
from services.frontend.grpc.responders import (
    CallContext,
    StreamResponder,
    ThreadResponder,
    UnaryResponder,
)
from services.frontend.grpc.status import abort, call_status

Begin = Callable[[bytes, UnaryResponder], None]
Behavior = Callable[[Any, CallContext], Any]
Send = Callable[[bytes | None], None]

# Requests begin one at a time, as on grpc's core: an admission queue that has a slot counts a request once it
# runs, and threads that begin requests together would exceed its limit.
_BEGINNING = threading.Lock()


class UnaryHandler:
    """Answers a unary method's calls through a ``UnaryResponder``, immediately or later.

    ``begin`` does not wait, rejects unknown callers whatever their message, and passes work that takes long
    with a large message to `UnaryResponder.run`. It rejects an overload before that: threads that did so
    would compete with those that answer.
    """

    role: Role | None = "read"
    """The role that callers need, whatever the message; None: all callers."""
    is_auxiliary = False
    """True if a separate limit applies to its calls, not that of requests, as for health checks."""
    experimental_thread_pool: ThreadPoolExecutor | None = None
    """The pool on which grpc calls the handler, if it does; grpc defines the name."""

    def __init__(self, begin: Begin) -> None:
        self.begin = begin

    def refuse(self, error: HpsError) -> None:
        """Fail all further calls with ``error``."""
        self.begin = lambda _message, reply: reply.fail(error)

    def reject(self, error: Exception, reply: UnaryResponder) -> None:
        """Answer a caller without ``role``; ``begin`` also checks it, and reports the same ``error``."""
        self.begin(b"", reply)

    def __call__(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        """Answer a call on grpc's thread, which waits. grpc's signature."""
        reply = ThreadResponder(context)
        with _BEGINNING:
            self.begin(message, reply)
        reply.run_large()
        try:
            return reply.result()
        except HpsError as error:
            abort(error, context)
            raise AssertionError("abort raises") from None


class PooledUnaryHandler(UnaryHandler):
    """Runs a function on the threads of ``pool`` and answers with its result or error."""

    is_auxiliary = True

    def __init__(self, handler: grpc.RpcMethodHandler, pool: ThreadPoolExecutor) -> None:
        """``handler`` holds the function and its message types. The function's ``role``, if any, applies."""
        super().__init__(self._submit)
        self._behavior: Behavior = handler.unary_unary
        self._read = handler.request_deserializer
        self._write = handler.response_serializer
        self.role = getattr(self._behavior, "role", None)
        self._pool = self.experimental_thread_pool = pool

    def refuse(self, error: HpsError) -> None:
        super().refuse(error)  # calls on grpc's core; those on grpc's threads do not use `begin`

        def refuse_call(_request: Any, _context: CallContext) -> Any:
            raise error

        self._behavior = refuse_call

    def reject(self, error: Exception, reply: UnaryResponder) -> None:
        reply.fail(client_error(error, ""))

    def __call__(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            return self._answered(message, context)
        except Exception as error:
            abort(client_error(error, ""), context)
            raise AssertionError("abort raises") from None

    def _submit(self, message: bytes, reply: UnaryResponder) -> None:
        pending = self._pool.submit(self._answer, message, reply)
        pending.add_done_callback(partial(_if_cancelled, reply))
        reply.waits_for(pending)

    def _answer(self, message: bytes, reply: UnaryResponder) -> None:
        try:
            reply.answer(self._answered(message, reply.context))
        except BaseException as error:  # every failure must reach the caller
            reply.fail(client_error(error, ""))

    def _answered(self, message: bytes, context: CallContext) -> bytes:
        answer: bytes = self._write(self._behavior(self._request(message), context))
        return answer

    def _request(self, message: bytes) -> Any:
        try:
            return self._read(message)
        except Exception as error:  # the class depends on protobuf's build
            raise BadRequest(f"the message is not valid for the method: {error}") from None


class ServerStreamHandler(UnaryHandler):
    """Answers a call several times, at any time, without keeping a thread.

    Only where grpc itself runs the handler does a client that does not read keep a thread of ``pool``.
    """

    role = None
    is_auxiliary = True
    experimental_non_blocking = True
    """grpc's name for a handler that returns before it has answered."""

    def __init__(
        self, begin: Callable[[bytes, StreamResponder], None], pool: ThreadPoolExecutor
    ) -> None:
        super().__init__(begin)  # type: ignore[arg-type]  # a UnaryCall is both
        self.experimental_thread_pool = pool

    def __call__(  # type: ignore[override]  # several answers
        self, message: bytes, context: grpc.ServicerContext, send_response_callback: Send
    ) -> None:
        self.begin(message, _GrpcStreamResponder(context, send_response_callback))  # type: ignore[arg-type]  # as above


class _GrpcStreamResponder:
    """`StreamResponder` on grpc's public interface."""

    def __init__(self, context: Any, send: Send) -> None:
        self._context, self._send = context, send
        self.cancel = context.cancel

    def push(self, message: bytes, pushed: Callable[[], None]) -> None:
        self._send(message)
        pushed()

    def when_gone(self, on_gone: Callable[[], object]) -> None:
        if not self._context.add_callback(on_gone):
            on_gone()

    def fail(self, error: HpsError) -> None:
        ending = call_status(error)
        self._context.set_trailing_metadata(ending.trailers or ())
        self._context.set_code(ending.code)
        self._context.set_details(str(error))
        self._send(None)


class BidiStreamHandler:
    """Answers the calls of a bidirectional stream on the threads of ``pool``; each keeps one."""

    def __init__(self, behavior: Callable[..., Any], pool: ThreadPoolExecutor) -> None:
        self._behavior = behavior
        self.experimental_thread_pool = pool

    def refuse(self, error: HpsError) -> None:
        """Fail all further calls with ``error``."""
        self._behavior = lambda _request, context: abort(error, context)

    def __call__(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._behavior(request, context)


def _if_cancelled(reply: UnaryResponder, pending: Future[None]) -> None:
    if pending.cancelled():
        reply.fail(RequestCancelled("the request was cancelled"))
