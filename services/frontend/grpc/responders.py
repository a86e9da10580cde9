"""Where the answer to a request goes, and one that a thread waits for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import grpc

from hps.errors import HpsError


class CallContext(Protocol):
    """What is asked about a call, of grpc or of a `UnaryCall`; see ``grpc.ServicerContext``."""

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]: ...

    def peer(self) -> str: ...

    def auth_context(self) -> Mapping[str, Sequence[bytes]]: ...

    def time_remaining(self) -> float | None: ...


class UnaryResponder(Protocol):
    """Where the answer to one request goes: ``answer`` or ``fail``, once, from any thread."""

    caller: str | None
    """Who calls, "" when that was not asked; None: it has not been looked at yet."""

    @property
    def context(self) -> CallContext: ...

    def answer(self, message: bytes) -> None: ...

    def fail(self, error: HpsError) -> None: ...

    def waits_for(self, future: Future[Any]) -> None:
        """``future`` is cancelled when the client is gone."""

    def go_on(self, work: Callable[[], None], size: int) -> None:
        """Do ``work``, the rest of what is to be done with a request of ``size`` bytes: here, or on another
        thread what would hold up the one that receives. It neither raises nor waits."""


class StreamResponder(Protocol):
    """Where the answers to a request go of which there are several, from any thread."""

    def push(self, message: bytes, pushed: Callable[[], None]) -> None:
        """Begin to send ``message``, the only one under way. ``pushed`` is called when it is gone, on
        whichever thread; not when the call has ended."""

    def when_gone(self, on_gone: Callable[[], object]) -> None:
        """``on_gone`` is called when the client is gone, or has its last answer."""

    def fail(self, error: HpsError) -> None: ...

    def cancel(self) -> None:
        """No more answers."""


class BlockingResponder:
    """The answer to a request that a thread waits for. Of a stream's requests, each uses it in turn."""

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

    def go_on(self, work: Callable[[], None], size: int) -> None:
        work()

    def result(self) -> bytes:
        """The answer, or what was to be told instead; the next request may begin then."""
        try:
            return self._result.result()
        finally:
            self._result, self._future = Future(), None
