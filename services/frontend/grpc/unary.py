"""One unary call, as `arrivals.py` takes it from grpc."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from grpc._cython import cygrpc

from hps.errors import HpsError
from services.frontend.grpc.behaviors import Direct
from services.frontend.grpc.ending import Trailers, ending_of
from services.frontend.grpc.unsent import NOTED

if TYPE_CHECKING:
    from services.frontend.grpc.arrivals import Arrivals

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


class UnaryCall:
    """A `Reply`, and its own context. What grpc tells of it, it tells on its own thread, by calling
    ``_received``, ``_closed`` or ``_sent``; it is over when all that was asked of grpc has been told.

    grpc is asked whether the client is gone when the call has to wait, else with its answer.
    """

    __slots__ = (
        "_arrivals",
        "_asked",
        "_event",
        "_has_answer",
        "_listens",
        "_lock",
        "_waits_for",
        "behavior",
        "caller",
    )

    def __init__(self, event: Any, behavior: Direct, arrivals: Arrivals) -> None:
        self._event = event
        self._arrivals = arrivals
        self.behavior = behavior
        self.caller: str | None = None
        self._lock = threading.Lock()  # of what follows
        self._asked = 0  # of grpc, and not told yet
        self._has_answer = False
        self._listens = False  # whether grpc was asked to tell when the client is gone
        self._waits_for: Future[Any] | None = None

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
        self._asked = 1
        operations = (cygrpc.ReceiveMessageOperation(0),)
        self._event.call.start_server_batch(operations, self._received)

    def _received(self, event: Any) -> Told:
        told = self._told()
        try:
            if self._arrivals.has_come(self):  # else too late
                message = event.batch_operations[0].message()
                if message is None:
                    self.abort(
                        cygrpc.StatusCode.unimplemented,
                        f"{self._event.call_details.method!r} requires exactly one request message.",
                    )
                else:
                    self.behavior.begin(message, self)
        except BaseException:  # which would end the server's thread
            self.failed()
        return told

    def go_on(self, work: Callable[[], None], size: int) -> None:
        if size > _LARGE:
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
        self._waits_for = future
        with self._lock:
            if self._listens:
                return  # it has its answer
            self._listens = True
            self._asked += 1
        operations = (cygrpc.ReceiveCloseOnServerOperation(0),)
        self._event.call.start_server_batch(operations, self._closed)

    def _closed(self, event: Any) -> Told:
        if event.batch_operations[0].cancelled() and self._waits_for is not None:
            self._waits_for.cancel()
        return self._told()

    # How it ends.

    def answer(self, message: bytes) -> None:
        self._end((cygrpc.SendMessageOperation(message, 0), _OK, _HEADERS), len(message))

    def failed(self) -> None:
        """End after a fault of ours."""
        log.exception("a call could not be taken up")
        self.abort(cygrpc.StatusCode.internal, "internal error")

    def fail(self, error: HpsError) -> None:
        ending = ending_of(error)
        self.abort(ending.number, str(error), ending.trailers)

    def abort(self, code: Any, details: str, trailers: Trailers = None) -> None:
        """End with a status of grpc's, unless it has its answer."""
        shown = details.encode()
        if len(shown) > _MOST_DETAILS:
            # Trailers have a largest size, each byte of these may take three; beyond it clients get another
            # error.
            shown = shown[:_MOST_DETAILS].decode(errors="ignore").encode()
        self._end((cygrpc.SendStatusFromServerOperation(trailers, code, shown, 0), _HEADERS))

    def _end(self, operations: tuple[Any, ...], size: int = 0) -> None:
        """Its one answer, of ``size`` bytes."""
        with self._lock:
            if self._has_answer:
                return
            self._has_answer = True
            self._asked += 1
            if not self._listens:
                self._listens = True
                operations = (*operations, _CLOSE)
        # Before the client has its answer, who may ask again at once.
        self._arrivals.left(self)
        call = self._event.call
        sent: Callable[[Any], Any] = self._sent
        if size > NOTED:
            sent = self._arrivals.unsent.noted(call, size, sent)
        call.start_server_batch(operations, sent)

    def _sent(self, _: Any) -> Told:
        return self._told()

    def _told(self) -> Told:
        """One of the things that grpc was asked for has come."""
        with self._lock:
            self._asked -= 1
            is_over = self._has_answer and not self._asked
        return (self, ()) if is_over else NOTHING
