"""What answers the calls of a method: on the server's own thread, or on one of a pool."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc

from hps.config.auth import Role
from hps.errors import BadRequest, HpsError
from services.frontend.errors import RequestCancelled, client_error
from services.frontend.grpc.responders import (
    BlockingResponder,
    CallContext,
    StreamResponder,
    UnaryResponder,
)
from services.frontend.grpc.status import abort, call_status

Begin = Callable[[bytes, UnaryResponder], None]
Behavior = Callable[[Any, CallContext], Any]
Send = Callable[[bytes | None], None]


class UnaryHandler:
    """Answers the calls of a unary method by a ``UnaryResponder``, at once or later. ``begin`` does not
    wait, refuses callers whom it does not know, whatever their message, and does by
    `UnaryResponder.go_on` what takes long with a large one. Where it can be told before that there is no
    room, it is: threads that do would take turns with those that answer."""

    role: Role | None = "read"
    """Whom it answers, whatever the message; None: everybody."""
    beside = False
    """Whether its calls leave requests their room, as health's do, and are left some."""
    experimental_thread_pool: ThreadPoolExecutor | None = None
    """Where grpc is to call it, if it does; by grpc's name."""

    def __init__(self, begin: Begin) -> None:
        self.begin = begin

    def refuse(self, error: HpsError) -> None:
        """Tell all further calls ``error``."""
        self.begin = lambda _message, reply: reply.fail(error)

    def reject(self, error: Exception, reply: UnaryResponder) -> None:
        """Tell a caller that is not one of ``role`` so, by ``error``: what ``begin`` finds, too."""
        self.begin(b"", reply)

    def __call__(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        """As grpc has it: on a thread, which waits."""
        reply = BlockingResponder(context)
        self.begin(message, reply)
        try:
            return reply.result()
        except HpsError as error:
            abort(error, context)
            raise AssertionError("abort raises") from None


class PooledUnaryHandler(UnaryHandler):
    """Answers with what a function returns or raises, called on the threads of ``pool``."""

    beside = True

    def __init__(self, handler: grpc.RpcMethodHandler, pool: ThreadPoolExecutor) -> None:
        """``handler``: the function, with its messages. Its ``role``, if it has one, is this one's."""
        super().__init__(self._submit)
        self._behavior: Behavior = handler.unary_unary
        self._read = handler.request_deserializer
        self._write = handler.response_serializer
        self.role = getattr(self._behavior, "role", None)
        self._pool = self.experimental_thread_pool = pool

    def reject(self, error: Exception, reply: UnaryResponder) -> None:
        reply.fail(client_error(error, ""))

    def __call__(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            return self._answered(message, context)
        except Exception as error:
            abort(client_error(error, ""), context)
            raise AssertionError("abort raises") from None

    def _submit(self, message: bytes, reply: UnaryResponder) -> None:
        begun = self._pool.submit(self._answer, message, reply)
        begun.add_done_callback(partial(_if_cancelled, reply))
        reply.waits_for(begun)

    def _answer(self, message: bytes, reply: UnaryResponder) -> None:
        try:
            reply.answer(self._answered(message, reply.context))
        except BaseException as error:  # whatever it was, the caller must hear of it
            reply.fail(client_error(error, ""))

    def _answered(self, message: bytes, context: CallContext) -> bytes:
        answer: bytes = self._write(self._behavior(self._request(message), context))
        return answer

    def _request(self, message: bytes) -> Any:
        try:
            return self._read(message)
        except Exception as error:  # the class of protobuf's depends on how protobuf was built
            raise BadRequest(f"the message is not one of the call's: {error}") from None


class ServerStreamHandler(UnaryHandler):
    """Answers a call several times, whenever there is something to tell. It keeps no thread, whether its
    client reads or not, but where grpc runs it: one of ``pool`` then, while the client does not read."""

    role = None
    beside = True
    experimental_non_blocking = True
    """Grpc's name for what returns before it has answered."""

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
    """`StreamResponder` as grpc has it."""

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
    """Answers a stream's calls on the threads of ``pool``, each keeping one."""

    def __init__(self, behavior: Callable[..., Any], pool: ThreadPoolExecutor) -> None:
        self._behavior = behavior
        self.experimental_thread_pool = pool

    def refuse(self, error: HpsError) -> None:
        """Tell all further calls ``error``."""
        self._behavior = lambda _request, context: abort(error, context)

    def __call__(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._behavior(request, context)


def _if_cancelled(reply: UnaryResponder, begun: Future[None]) -> None:
    if begun.cancelled():
        reply.fail(RequestCancelled("the request was cancelled"))
