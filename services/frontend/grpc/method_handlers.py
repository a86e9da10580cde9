"""Handlers of gRPC methods, on the event loop or on a thread pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc

from hps.config.auth import Role
from hps.errors import BadRequest, HpsError
from services.frontend.errors import RequestCancelled, client_error
from services.frontend.grpc.call_identity import address_of
from services.frontend.grpc.responders import CallContext, StreamResponder, UnaryResponder
from services.frontend.grpc.status import abort
from services.frontend.grpc.stream_limit import OpenStream, StreamLimit

Begin = Callable[[bytes, UnaryResponder], None]
Behavior = Callable[[Any, CallContext], Any]
StreamBehavior = Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]]


class UnaryHandler:
    """Answers a unary method's calls through a ``UnaryResponder``, immediately or later.

    ``begin`` does not wait, rejects unknown callers whatever their message, and passes work that takes long
    with a large message to `UnaryResponder.run`. It rejects an overload before that: threads that did so
    would compete with those that answer. It is called on the event loop, so requests begin one at a time.
    """

    role: Role | None = "read"
    """The role that callers need, whatever the message; None: all callers."""
    is_auxiliary = False
    """True if a separate limit applies to its calls, not that of requests, as for health checks."""

    def __init__(self, begin: Begin) -> None:
        self.begin = begin

    def refuse(self, error: HpsError) -> None:
        """Fail all further calls with ``error``."""
        self.begin = lambda _message, reply: reply.fail(error)

    def reject(self, error: Exception, reply: UnaryResponder) -> None:
        """Answer a caller without ``role``; ``begin`` also checks it, and reports the same ``error``."""
        self.begin(b"", reply)


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
        self._pool = pool

    def reject(self, error: Exception, reply: UnaryResponder) -> None:
        reply.fail(client_error(error, ""))

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
            raise _invalid(error) from None


class ServerStreamHandler(UnaryHandler):
    """Answers a call several times, at any time, without keeping a thread."""

    role = None
    is_auxiliary = True

    def __init__(self, begin: Callable[[bytes, StreamResponder], None]) -> None:
        super().__init__(begin)  # type: ignore[arg-type]  # a UnaryCall is both


class BidiStreamHandler:
    """Answers the calls of a bidirectional stream on the threads of ``pool``; each keeps one."""

    def __init__(self, behavior: StreamBehavior, pool: ThreadPoolExecutor) -> None:
        """``behavior(messages, context)`` yields the answers, as bytes."""
        self.behavior = behavior
        self.pool = pool

    def refuse(self, error: HpsError) -> None:
        """Fail all further calls with ``error``."""

        def refused(_messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            abort(error, context)
            yield from ()

        self.behavior = refused


def parsed_stream(handler: grpc.RpcMethodHandler, pool: ThreadPoolExecutor) -> BidiStreamHandler:
    """Return the handler of generated code's stream ``handler``, which has parsed messages.

    Streams that are idle end: each keeps a thread of ``pool``."""
    limit = StreamLimit()

    def behavior(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        stream = limit.enter(address_of(context), context)
        try:
            requests = _parsed(messages, handler.request_deserializer, stream, context)
            for answer in handler.stream_stream(requests, context):
                stream.waits()
                yield handler.response_serializer(answer)
        finally:
            limit.leave(stream)

    return BidiStreamHandler(behavior, pool)


def _parsed(
    messages: Iterator[bytes],
    read: Callable[[bytes], Any],
    stream: OpenStream,
    context: grpc.ServicerContext,
) -> Iterator[Any]:
    for message in messages:
        stream.works()
        try:
            request = read(message)
        except Exception as error:  # the class depends on protobuf's build
            abort(_invalid(error), context)
        yield request


def _invalid(error: Exception) -> BadRequest:
    return BadRequest(f"the message is not valid for the method: {error}")


def _if_cancelled(reply: UnaryResponder, pending: Future[None]) -> None:
    if pending.cancelled():
        reply.fail(RequestCancelled("the request was cancelled"))
