"""What answers the calls of a method: on the server's own thread, or on one of a pool."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from hps.config.auth import Role
from hps.errors import BadRequest, HpsError
from services.frontend.errors import told
from services.frontend.grpc.ending import abort
from services.frontend.grpc.replies import Awaited, Context, Reply

Begin = Callable[[bytes, Reply], None]
Behavior = Callable[[Any, Context], Any]


class Direct:
    """Answers the calls of a unary method by a ``Reply``, at once or later. ``begin`` neither raises nor
    waits, refuses callers whom it does not know, whatever their message, and does by `Reply.go_on` what takes
    long with a large one. Where it can be told before that there is no room, it is: threads that do would
    take turns with those that answer."""

    role: Role | None = "read"
    """Whom it answers, whatever the message; None: everybody."""
    beside = False
    """Whether its calls leave requests their room, as health's do, and are left some."""

    def __init__(self, begin: Begin) -> None:
        self.begin = begin

    def refuse(self, error: HpsError) -> None:
        """Tell all further calls ``error``."""
        self.begin = lambda _message, reply: reply.fail(error)

    def __call__(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        """As grpc has it: on a thread, which waits."""
        reply = Awaited(context)
        self.begin(message, reply)
        try:
            return reply.result()
        except HpsError as error:
            abort(error, context)
            raise AssertionError("abort raises") from None


class OnThreads(Direct):
    """Answers with what a function returns or raises, called on the threads of ``pool``."""

    beside = True

    def __init__(self, handler: grpc.RpcMethodHandler, pool: ThreadPoolExecutor) -> None:
        """``handler``: the function, with its messages. Its ``role``, if it has one, is this one's."""
        super().__init__(self._submit)
        self._behavior: Behavior = handler.unary_unary
        self._read = handler.request_deserializer
        self._write = handler.response_serializer
        self._pool = pool
        self.role = getattr(self._behavior, "role", None)

    def _submit(self, message: bytes, reply: Reply) -> None:
        self._pool.submit(self._answer, message, reply)

    def _answer(self, message: bytes, reply: Reply) -> None:
        try:
            answer = self._write(self._behavior(self._request(message), reply.context))
        except Exception as error:
            reply.fail(told(error, ""))
        else:
            reply.answer(answer)

    def _request(self, message: bytes) -> Any:
        try:
            return self._read(message)
        except Exception as error:  # the class of protobuf's depends on how protobuf was built
            raise BadRequest(f"the message is not one of the call's: {error}") from None


class Streaming:
    """Answers a stream's calls on the threads of ``pool``, each keeping one."""

    def __init__(self, behavior: Callable[..., Any], pool: ThreadPoolExecutor) -> None:
        self._behavior = behavior
        self.experimental_thread_pool = pool

    def refuse(self, error: HpsError) -> None:
        """Tell all further calls ``error``."""
        self._behavior = lambda _request, context: abort(error, context)

    def __call__(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._behavior(request, context)
