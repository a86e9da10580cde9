"""Interfaces through which gRPC requests are answered, and a blocking implementation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import grpc

from hps.errors import HpsError

LARGE_BYTES = 65_536
"""Requests of more bytes are parsed without keeping others from beginning."""


class CallContext(Protocol):
    """Properties of a call; see ``grpc.ServicerContext``."""

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]: ...

    def peer(self) -> str: ...

    def auth_context(self) -> Mapping[str, Sequence[bytes]]: ...

    def time_remaining(self) -> float | None: ...


class UnaryResponder(Protocol):
    """Sends the answer to one request: ``answer`` or ``fail``, once, from any thread."""

    caller: str | None
    """The caller's name, "" without authentication; None: not checked yet."""

    @property
    def context(self) -> CallContext: ...

    def answer(self, message: bytes) -> None: ...

    def fail(self, error: HpsError) -> None: ...

    def waits_for(self, future: Future[Any]) -> None:
        """Cancel ``future`` when the client is gone."""

    def run(self, work: Callable[[], None], size: int) -> None:
        """Run ``work``, the rest of the work for a request of ``size`` bytes.

        A large request continues on another thread, to not block the receiving one. ``work`` must neither
        raise nor wait.
        """


class StreamResponder(Protocol):
    """Sends several answers to one request, from any thread."""

    def push(self, message: bytes, pushed: Callable[[], None]) -> None:
        """Start sending ``message``; only one may be in flight.

        ``pushed`` is called on any thread when it is sent; not if the call has ended.
        """

    def when_gone(self, on_gone: Callable[[], object]) -> None:
        """Call ``on_gone`` when the client is gone, or has its last answer."""

    def fail(self, error: HpsError) -> None: ...

    def cancel(self) -> None:
        """End the call without further answers."""


class BlockingResponder:
    """A responder whose thread waits for the answer. The requests of a stream use one in turn."""

    def __init__(self, context: grpc.ServicerContext) -> None:
        self.context = context
        self.caller: str | None = None  # a stream may outlive its caller's key
        self._result: Future[bytes] = Future()
        self._future: Future[Any] | None = None
        self._gone = False
        if not context.add_callback(self._cancel):
            self._gone = True

    def _cancel(self) -> None:
        self._gone = True
        if (future := self._future) is not None:
            future.cancel()

    def answer(self, message: bytes) -> None:
        self._result.set_result(message)

    def fail(self, error: HpsError) -> None:
        self._result.set_exception(error)

    def waits_for(self, future: Future[Any]) -> None:
        self._future = future
        if self._gone:
            future.cancel()

    def run(self, work: Callable[[], None], size: int) -> None:
        work()

    def result(self) -> bytes:
        """Wait for the answer; raise the error if it failed. The next request may begin then."""
        try:
            return self._result.result()
        finally:
            self._result, self._future = Future(), None
