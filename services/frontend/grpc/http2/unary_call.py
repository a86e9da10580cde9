"""A call with one request, on a stream of a `GrpcConnection`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from threading import get_ident
from typing import Any

from hps.errors import HpsError
from services.frontend.admission.byte_budget import ByteReservation
from services.frontend.errors import Overloaded
from services.frontend.grpc import responders
from services.frontend.grpc.http2.frames import ErrorCode
from services.frontend.grpc.http2.headers import CallHead, Trailers
from services.frontend.grpc.http2.interfaces import StreamConnection
from services.frontend.grpc.http2.messages import CallFailed, decompress
from services.frontend.grpc.http2.status_codes import INTERNAL, UNIMPLEMENTED
from services.frontend.grpc.http2.streams import Stream
from services.frontend.grpc.method_handlers import UnaryHandler
from services.frontend.grpc.status import call_status

log = logging.getLogger(__name__)


class UnaryCall(Stream):
    """A stream that is its own `CallContext`, a `UnaryResponder` and a `StreamResponder`.

    Its state belongs to the event loop: answers of other threads are posted to it. The call keeps its slot
    until it is answered, even if its client is gone, because its work may still run.
    """

    __slots__ = (
        "_has_answer",
        "_held",
        "_is_gone",
        "_is_released",
        "_on_gone",
        "_work",
        "caller",
        "handler",
    )

    def __init__(
        self, connection: StreamConnection, stream_id: int, head: CallHead, handler: UnaryHandler
    ) -> None:
        super().__init__(connection, stream_id, head)
        self.handler = handler
        self.caller: str | None = None
        self._has_answer = self._is_gone = self._is_released = False
        self._on_gone: Callable[[], object] | None = None
        self._work: Future[Any] | None = None
        self._held: ByteReservation | None = None
        """The request's bytes in the byte budget, while the handler has not admitted it."""

    # CallContext

    @property
    def context(self) -> UnaryCall:
        return self

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        return self.head.metadata

    def peer(self) -> str:
        return self.connection.peer()

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        return self.connection.auth_context()

    def time_remaining(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    # Receiving

    def message(self, message: bytes, is_compressed: bool) -> None:
        if not self.connection.port.calls.request_received(self):
            return  # a second message, or the call has ended
        held = None  # a message of one frame is not counted
        if self.received is not None:
            held, self.received = self.received.hand_over(), None
        if is_compressed:
            self.connection.port.calls.run_on_pool(
                partial(self._run, self._decompress, message, held)
            )
        else:
            self._begin(message, held)

    def _begin(self, message: bytes, held: ByteReservation | None) -> None:
        self._held = held
        try:
            self.handler.begin(message, self)
        except BaseException:
            self.failed()
        if not self.handler.is_auxiliary:  # others wait for a thread with their messages
            self._release_bytes()

    def _decompress(self, message: bytes, held: ByteReservation | None) -> None:
        port = self.connection.port
        reservation = ByteReservation(port.receiving.budget)
        try:
            content = decompress(
                message, self.head.encoding, port.settings.max_message_bytes, reservation
            )
        except (CallFailed, Overloaded) as error:
            reservation.release()
            if isinstance(error, Overloaded):
                error = port.receiving.failure(error)
            self.abort(error.code, error.details, error.trailers)
        else:
            port.post(self._begin, content, reservation)
        finally:
            if held is not None:
                held.release()

    def _release_bytes(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.release()

    def half_closed(self) -> None:
        if self.connection.port.calls.forget(self):
            self.abort(UNIMPLEMENTED, "the call requires exactly one request message")

    def gone(self) -> None:
        self._has_answer = self._is_gone = True
        self.connection.port.calls.slow_readers.taken(self)
        if self.connection.port.calls.forget(self):
            self._release()
        if self._work is not None:
            self._run_on_gone(self._work.cancel)
        self._call_on_gone()

    def finished(self) -> None:
        self.connection.port.calls.slow_readers.taken(self)
        self._is_gone = True  # the client has its answer
        if self._on_gone is not None:
            self._call_on_gone()

    def fault(self, code: int, details: str, trailers: Trailers = None) -> None:
        self.discard_rest()
        self.abort(code, details, trailers)

    def _call_on_gone(self) -> None:
        on_gone, self._on_gone = self._on_gone, None
        if on_gone is not None:
            self._run_on_gone(on_gone)

    def _run_on_gone(self, on_gone: Callable[[], object]) -> None:
        try:
            on_gone()
        except BaseException:
            log.exception("failed to cancel a call whose client is gone")

    # Processing

    def run(self, work: Callable[[], None], size: int) -> None:
        if size > responders.LARGE_BYTES:
            held, self._held = self._held, None
            self.connection.port.calls.run_on_pool(partial(self._run_large, work, held))
        else:
            work()

    def _run_large(self, work: Callable[[], None], held: ByteReservation | None) -> None:
        try:
            self._run(work)
        finally:
            if held is not None:
                held.release()

    def _run(self, work: Callable[..., None], *arguments: Any) -> None:
        """Run ``work``; an exception ends the call."""
        try:
            work(*arguments)
        except BaseException:
            self.failed()

    def waits_for(self, future: Future[Any]) -> None:
        self._work = future
        if self._is_gone:
            future.cancel()

    def when_gone(self, on_gone: Callable[[], object]) -> None:
        """Call ``on_gone`` when the client is gone or has its last answer; replaces an earlier callback."""
        self._on_gone = on_gone
        if self._is_gone:
            self._on_gone = None
            on_gone()

    def _release(self) -> None:
        if not self._is_released:
            self._is_released = True
            self._release_bytes()
            self.connection.running -= 1
            self.connection.port.calls.release(self)

    # Answering, from any thread

    def answer(self, message: bytes) -> None:
        port = self.connection.port
        if get_ident() == port.thread:
            self._answer(message)
        else:
            port.post(self._answer, message)

    def push(self, message: bytes, pushed: Callable[[], None]) -> None:
        """Start sending one of several answers, without waiting for the reader; only one may be in flight.

        ``pushed`` is called on the event loop when the answer is sent; not if the call has ended.
        The call no longer counts against the limit of calls in flight.
        """
        self._on_loop(self._push, message, pushed)

    def fail(self, error: HpsError) -> None:
        ending = call_status(error)
        self.abort(ending.number, str(error), ending.trailers)

    def abort(self, code: int, details: str, trailers: Trailers = None) -> None:
        """End with a gRPC status, unless an answer was sent."""
        self._on_loop(self._abort, code, details, trailers)

    def failed(self) -> None:
        """End the call after an internal error. Call it in an exception handler."""
        log.exception("call failed; answering INTERNAL")
        self.abort(INTERNAL, "internal error")

    def cancel(self) -> None:
        """End the call without further answers."""
        self._on_loop(self._cancel)

    def _on_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        port = self.connection.port
        if get_ident() == port.thread:
            function(*arguments)
        else:
            port.post(function, *arguments)

    # Answering, on the event loop

    def _answer(self, message: bytes) -> None:
        self._release()  # before the client has its answer: it may call again immediately
        if not self._has_answer:
            self._has_answer = True
            self.connection.answer(self, message)

    def _push(self, message: bytes, pushed: Callable[[], None]) -> None:
        self._release()
        if not self._has_answer:
            self.connection.send_message(self, message, partial(self._run, pushed))

    def _abort(self, code: int, details: str, trailers: Trailers) -> None:
        self.connection.port.calls.forget(self)
        self._release()
        if not self._has_answer:
            self._has_answer = True
            self.connection.end(self, code, details, trailers)

    def _cancel(self) -> None:
        self._release()
        if not self._is_gone:
            self.connection.reset(self, ErrorCode.CANCEL)
            self.gone()
