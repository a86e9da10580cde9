"""A call with one request, accepted from grpc's core (`call_acceptor.py`)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from grpc._cython import cygrpc

from hps.errors import HpsError
from services.frontend.grpc import responders
from services.frontend.grpc.method_handlers import UnaryHandler
from services.frontend.grpc.slow_readers import WATCHED_BYTES, SlowReaderLimit
from services.frontend.grpc.status import Trailers, call_status

log = logging.getLogger(__name__)

_MOST_DETAILS = 2048
# The operations that all answers share: they hold no state of a call.
_HEADERS = cygrpc.SendInitialMetadataOperation(None, 0)
_OK = cygrpc.SendStatusFromServerOperation(None, cygrpc.StatusCode.ok, b"", 0)
_CLOSE = cygrpc.ReceiveCloseOnServerOperation(0)

EventResult = tuple[Any, Sequence[Any]]
"""Result of an event callback for grpc's server: the call that is over, if any, and callbacks to run."""
NOTHING: EventResult = (None, ())


class Acceptor(Protocol):
    """The owner of the calls, `services.frontend.grpc.core.call_acceptor.CallAcceptor`."""

    slow_readers: SlowReaderLimit

    def request_received(self, call: UnaryCall) -> bool:
        """Return True if ``call``, whose request was received, is to be answered."""
        ...

    def release(self, call: UnaryCall) -> None:
        """Free the slot of ``call``."""
        ...

    def run_on_pool(self, work: Callable[[], None]) -> None:
        """Run ``work`` on another thread."""
        ...


class UnaryCall:
    """A unary call: its own `CallContext`, a `UnaryResponder` and a `StreamResponder`.

    grpc's own thread reports events by calling ``_received``, ``_closed``, ``_pushed`` or ``_sent``; none of
    them raises, which would end that thread. The call is over when it has its answer, or its client is gone,
    and all operations requested from grpc have completed.

    The operation that reports a client's departure starts when the call has to wait, else with the answer.
    """

    __slots__ = (
        "_acceptor",
        "_event",
        "_has_answer",
        "_has_headers",
        "_is_gone",
        "_listens",
        "_lock",
        "_on_gone",
        "_open_batches",
        "behavior",
        "caller",
    )

    def __init__(self, event: Any, behavior: UnaryHandler, acceptor: Acceptor) -> None:
        self._event = event
        self._acceptor = acceptor
        self.behavior = behavior
        self.caller: str | None = None
        self._lock = threading.Lock()  # guards the fields below
        self._open_batches = 0  # batches started that grpc has not completed
        self._has_headers = self._has_answer = False
        self._listens = False  # the close operation was started
        self._is_gone = False
        self._on_gone: Callable[[], object] | None = None

    # CallContext

    @property
    def context(self) -> UnaryCall:
        return self

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        metadata: Sequence[tuple[str, str | bytes]] = self._event.invocation_metadata
        return metadata

    def peer(self) -> str:
        return str(self._event.call.peer().decode("utf-8", "replace"))

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        properties = cygrpc.auth_context(self._event.call) or {}
        return {name.decode(): values for name, values in properties.items()}

    def time_remaining(self) -> float:
        left_s: float = self._event.call_details.deadline - time.time()
        return max(0.0, left_s)

    # Processing

    def receive(self) -> None:
        """Start receiving the request."""
        with self._lock:
            self._open_batches += 1
        operations = (cygrpc.ReceiveMessageOperation(0),)
        self._event.call.start_server_batch(operations, self._received)

    def _received(self, event: Any) -> EventResult:
        result = self._completed()
        try:
            if self._acceptor.request_received(self):
                message = event.batch_operations[0].message()
                if message is None:
                    self.abort(
                        cygrpc.StatusCode.unimplemented,
                        "the call requires exactly one request message",
                    )
                else:
                    self.behavior.begin(message, self)
        except BaseException:
            self.failed()
        return result

    def run(self, work: Callable[[], None], size: int) -> None:
        if size > responders.LARGE_BYTES:
            self._listen()
            self._acceptor.run_on_pool(partial(self._run, work))
        else:
            work()

    def _run(self, work: Callable[[], None]) -> None:
        """Run ``work``; an exception ends the call."""
        try:
            work()
        except BaseException:
            self.failed()

    def waits_for(self, future: Future[Any]) -> None:
        self.when_gone(future.cancel)

    def when_gone(self, on_gone: Callable[[], object]) -> None:
        """Call ``on_gone`` when the client is gone or has its last answer; replaces an earlier callback."""
        self._on_gone = on_gone
        self._listen()
        if self._is_gone:
            self._on_gone = None
            on_gone()

    def _listen(self) -> None:
        with self._lock:
            if self._listens:
                return
            self._listens = True
            self._open_batches += 1
        operations = (cygrpc.ReceiveCloseOnServerOperation(0),)
        self._event.call.start_server_batch(operations, self._closed)

    def _closed(self, event: Any) -> EventResult:
        if event.batch_operations[0].cancelled():
            with self._lock:
                self._has_answer = self._is_gone = True  # nothing can be sent any more
        else:
            self._is_gone = True  # the client has its answer
        result = self._completed()
        on_gone, self._on_gone = self._on_gone, None
        if on_gone is not None:
            try:
                on_gone()
            except BaseException:
                log.exception("failed to cancel a call whose client is gone")
        return result

    def push(self, message: bytes, pushed: Callable[[], None]) -> None:
        """Start sending one of several answers, without waiting for the reader; only one may be in flight.

        ``pushed`` is called on the server's own thread when the answer is sent; not if the call has ended.
        The call no longer counts against the limit of calls in flight.
        """
        self._acceptor.release(self)
        with self._lock:
            if self._has_answer:
                return
            self._open_batches += 1
            headers = () if self._has_headers else (_HEADERS,)
            self._has_headers = True
        operations = (*headers, cygrpc.SendMessageOperation(message, 0))
        self._event.call.start_server_batch(operations, partial(self._pushed, pushed))

    def _pushed(self, pushed: Callable[[], None], event: Any) -> EventResult:
        result = self._completed()
        if event.success:
            try:
                pushed()
            except BaseException:
                self.failed()
        return result

    # Termination

    def answer(self, message: bytes) -> None:
        self._end((cygrpc.SendMessageOperation(message, 0), _OK), len(message))

    def cancel(self) -> None:
        self._listen()  # completes when the call is cancelled, and ends it
        self._event.call.cancel()

    def failed(self) -> None:
        """End the call after an internal error. Call it in an exception handler."""
        log.exception("call failed; answering INTERNAL")
        self.abort(cygrpc.StatusCode.internal, "internal error")

    def fail(self, error: HpsError) -> None:
        ending = call_status(error)
        self.abort(ending.number, str(error), ending.trailers)

    def abort(self, code: Any, details: str, trailers: Trailers = None) -> None:
        """End with a grpc status, unless an answer was sent."""
        shown = details.encode(errors="replace")
        if len(shown) > _MOST_DETAILS:
            # Trailers have a maximum size, and each of these bytes may take three; beyond it clients get
            # another error.
            shown = shown[:_MOST_DETAILS].decode(errors="ignore").encode()
        self._end((cygrpc.SendStatusFromServerOperation(trailers, code, shown, 0),))

    def _end(self, operations: tuple[Any, ...], size: int = 0) -> None:
        """Send the last operations, with an answer of ``size`` bytes, unless one was sent; free the call's
        slot."""
        with self._lock:
            is_late = self._has_answer
            if not is_late:
                self._has_answer = True
                self._open_batches += 1
                headers = () if self._has_headers else (_HEADERS,)
                close = () if self._listens else (_CLOSE,)
                self._listens = True
        # Before the client has its answer: it may call again immediately.
        self._acceptor.release(self)
        if is_late:
            return
        call = self._event.call
        sent: Callable[[Any], Any] = self._sent
        if size > WATCHED_BYTES:
            sent = self._acceptor.slow_readers.watch(call, size, sent)
        call.start_server_batch((*headers, *operations, *close), sent)

    def _sent(self, _: Any) -> EventResult:
        return self._completed()

    def _completed(self) -> EventResult:
        """Record that grpc has completed one batch of operations."""
        with self._lock:
            self._open_batches -= 1
            is_over = self._has_answer and not self._open_batches
        return (self, ()) if is_over else NOTHING
