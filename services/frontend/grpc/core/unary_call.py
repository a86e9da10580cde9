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
from services.frontend.grpc.method_handlers import UnaryHandler
from services.frontend.grpc.slow_readers import NOTED, SlowReaderLimit
from services.frontend.grpc.status import Trailers, call_status

log = logging.getLogger(__name__)

# Requests beyond so many bytes are parsed on other threads.
_LARGE = 65_536
_MOST_DETAILS = 2048
# What all answers have. They hold nothing of a call, so there is one of each.
_HEADERS = cygrpc.SendInitialMetadataOperation(None, 0)
_OK = cygrpc.SendStatusFromServerOperation(None, cygrpc.StatusCode.ok, b"", 0)
_CLOSE = cygrpc.ReceiveCloseOnServerOperation(0)

Told = tuple[Any, Sequence[Any]]
"""What grpc's server is told when an event has been seen to: what is over by it, and whom to call."""
NOTHING: Told = (None, ())


class Acceptor(Protocol):
    """The owner of the calls, `services.frontend.grpc.core.call_acceptor.CallAcceptor`."""

    unsent: SlowReaderLimit

    def has_come(self, call: UnaryCall) -> bool:
        """Whether ``call``, whose request was received, is to be answered."""
        ...

    def left(self, call: UnaryCall) -> None:
        """Free the slot of ``call``."""
        ...

    def apart(self, work: Callable[[], None]) -> None:
        """Run ``work`` on another thread."""
        ...


class UnaryCall:
    """A `Reply` and a `Pushed`, and its own context. What grpc tells of it, it tells on its own thread, by
    calling ``_received``, ``_closed``, ``_pushed`` or ``_sent``; none of them raises, which would end that
    thread. The call is over when it has its answer, or its client is gone, and all that was asked of grpc has
    been told.

    grpc is asked whether the client is gone when the call has to wait, else with its answer.
    """

    __slots__ = (
        "_arrivals",
        "_asked",
        "_event",
        "_has_answer",
        "_has_headers",
        "_is_gone",
        "_listens",
        "_lock",
        "_on_gone",
        "behavior",
        "caller",
    )

    def __init__(self, event: Any, behavior: UnaryHandler, arrivals: Acceptor) -> None:
        self._event = event
        self._arrivals = arrivals
        self.behavior = behavior
        self.caller: str | None = None
        self._lock = threading.Lock()  # of what follows
        self._asked = 0  # of grpc, and not told yet
        self._has_headers = self._has_answer = False
        self._listens = False  # whether grpc was asked to tell when the client is gone
        self._is_gone = False
        self._on_gone: Callable[[], object] | None = None

    # Its context.

    @property
    def context(self) -> UnaryCall:
        return self

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        found: Sequence[tuple[str, str | bytes]] = self._event.invocation_metadata
        return found

    def peer(self) -> str:
        return str(self._event.call.peer().decode("utf-8", "replace"))

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        found = cygrpc.auth_context(self._event.call) or {}
        return {name.decode(): values for name, values in found.items()}

    def time_remaining(self) -> float:
        left_s: float = self._event.call_details.deadline - time.time()
        return max(0.0, left_s)

    # What is done with it.

    def receive(self) -> None:
        """Have its request."""
        with self._lock:
            self._asked += 1
        operations = (cygrpc.ReceiveMessageOperation(0),)
        self._event.call.start_server_batch(operations, self._received)

    def _received(self, event: Any) -> Told:
        told = self._told()
        try:
            if self._arrivals.has_come(self):
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
        return told

    def go_on(self, work: Callable[[], None], size: int) -> None:
        if size > _LARGE:
            self._listen()
            self._arrivals.apart(partial(self._do, work))
        else:
            work()

    def _do(self, work: Callable[[], None]) -> None:
        """``work``, whatever comes of it."""
        try:
            work()
        except BaseException:
            self.failed()

    def waits_for(self, future: Future[Any]) -> None:
        self.when_gone(future.cancel)

    def when_gone(self, on_gone: Callable[[], object]) -> None:
        """``on_gone`` is called when the client is gone or has its last answer, in place of what was to be
        called before."""
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
            self._asked += 1
        operations = (cygrpc.ReceiveCloseOnServerOperation(0),)
        self._event.call.start_server_batch(operations, self._closed)

    def _closed(self, event: Any) -> Told:
        if event.batch_operations[0].cancelled():
            with self._lock:
                self._has_answer = self._is_gone = True  # nobody waits for one
        else:
            self._is_gone = True  # with its answer
        told = self._told()
        on_gone, self._on_gone = self._on_gone, None
        if on_gone is not None:
            try:
                on_gone()
            except BaseException:
                log.exception("a call whose client is gone could not be stopped")
        return told

    def push(self, message: bytes, pushed: Callable[[], None]) -> None:
        """Begin to send one of several answers, the only one under way, without waiting for who reads it.
        ``pushed`` is called when it is gone, on the server's own thread; not when the call has ended. Such
        calls are not counted among those that are taken."""
        self._arrivals.left(self)
        with self._lock:
            if self._has_answer:
                return
            self._asked += 1
            headers = () if self._has_headers else (_HEADERS,)
            self._has_headers = True
        operations = (*headers, cygrpc.SendMessageOperation(message, 0))
        self._event.call.start_server_batch(operations, partial(self._pushed, pushed))

    def _pushed(self, pushed: Callable[[], None], event: Any) -> Told:
        told = self._told()
        if event.success:
            try:
                pushed()
            except BaseException:
                self.failed()
        return told

    # How it ends.

    def answer(self, message: bytes) -> None:
        self._end((cygrpc.SendMessageOperation(message, 0), _OK), len(message))

    def cancel(self) -> None:
        self._listen()  # by that it is over
        self._event.call.cancel()

    def failed(self) -> None:
        """End after a fault of ours."""
        log.exception("a call could not be taken up")
        self.abort(cygrpc.StatusCode.internal, "internal error")

    def fail(self, error: HpsError) -> None:
        ending = call_status(error)
        self.abort(ending.number, str(error), ending.trailers)

    def abort(self, code: Any, details: str, trailers: Trailers = None) -> None:
        """End with a status of grpc's, unless it has its answer."""
        shown = details.encode(errors="replace")
        if len(shown) > _MOST_DETAILS:
            # Trailers have a largest size, each byte of these may take three; beyond it clients get another
            # error.
            shown = shown[:_MOST_DETAILS].decode(errors="ignore").encode()
        self._end((cygrpc.SendStatusFromServerOperation(trailers, code, shown, 0),))

    def _end(self, operations: tuple[Any, ...], size: int = 0) -> None:
        """Its last answer, of ``size`` bytes, if anybody waits for it. The work is done, for whomever."""
        with self._lock:
            is_late = self._has_answer
            if not is_late:
                self._has_answer = True
                self._asked += 1
                headers = () if self._has_headers else (_HEADERS,)
                close = () if self._listens else (_CLOSE,)
                self._listens = True
        # Before the client has its answer, who may ask again at once.
        self._arrivals.left(self)
        if is_late:
            return
        call = self._event.call
        sent: Callable[[Any], Any] = self._sent
        if size > NOTED:
            sent = self._arrivals.unsent.noted(call, size, sent)
        call.start_server_batch((*headers, *operations, *close), sent)

    def _sent(self, _: Any) -> Told:
        return self._told()

    def _told(self) -> Told:
        """One of the things that grpc was asked for has come."""
        with self._lock:
            self._asked -= 1
            is_over = self._has_answer and not self._asked
        return (self, ()) if is_over else NOTHING
