"""What grpc calls for a method: on the server's own thread, or on one of a pool."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from hps.config.auth import Role
from hps.errors import HpsError
from services.frontend.grpc.ending import abort
from services.frontend.grpc.replies import Awaited, Reply

Begin = Callable[[bytes, Reply], None]


class Direct:
    """A unary behavior that answers by a ``Reply``, at once or later. ``begin`` neither raises nor waits,
    refuses callers whom it does not know, whatever their message, and does by `Reply.go_on` what takes long
    with a large one. Where it can be told before that there is no room, it is: threads that do would take
    turns with those that answer."""

    role: Role | None = "read"

    def __init__(self, begin: Begin, arrivals: ThreadPoolExecutor) -> None:
        self.begin = begin
        self.experimental_thread_pool = arrivals

    def refuse(self, error: HpsError) -> None:
        """Tell all further calls ``error``."""
        self.begin = lambda _message, reply: reply.fail(error)

    def __call__(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        """On a thread of its own, which waits."""
        reply = Awaited(context)
        self.begin(message, reply)
        try:
            return reply.result()
        except HpsError as error:
            abort(error, context)
            raise AssertionError("abort raises") from None


class Pooled:
    """A behavior that grpc runs on the threads of ``experimental_thread_pool``. ``role``: whom it answers,
    whatever the message; None: everybody."""

    def __init__(
        self, behavior: Callable[..., Any], pool: ThreadPoolExecutor, role: Role | None = None
    ) -> None:
        self._behavior = behavior
        self.role = role
        self.experimental_thread_pool = pool

    def refuse(self, error: HpsError) -> None:
        """Tell all further calls ``error``."""
        self._behavior = lambda _request, context: abort(error, context)

    def __call__(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._behavior(request, context)
