"""Byte budget of messages that arrive in several frames, and of the windows granted for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from services.frontend.admission.byte_budget import ByteBudget, ByteReservation
from services.frontend.errors import Overloaded
from services.frontend.grpc.http2.messages import CallFailed
from services.frontend.grpc.http2.status_codes import DEADLINE_EXCEEDED
from services.frontend.grpc.status import Trailers, call_status

REQUEST_TIMEOUT_S = 60.0
"""The time within which a message must arrive."""
# The time that a stream waits for a window at most, and the period in which those are checked: bytes are
# released on any thread.
_MAX_WAIT_S, _POLL_S = 20.0, 0.02


class ReceivingStream(Protocol):
    """A stream as the budget uses it: `Stream`."""

    received: ReceivedBytes | None

    @property
    def missing_window(self) -> int:
        """Bytes by which the window is too small for the message that is arriving."""

    def grant(self, size: int) -> None:
        """Let the client send ``size`` more bytes."""

    def fault(self, code: int, details: str, trailers: Trailers = None) -> None:
        """End the call."""


class ConnectionBytes:
    """The messages that are arriving on one connection: at most half of the budget."""

    __slots__ = ("held", "limit", "promised")

    def __init__(self, budget: ByteBudget) -> None:
        self.limit = budget.limit // 2
        self.held = self.promised = 0


class ReceiveBudget:
    """Bounds the messages that are arriving on a port, or wait for their handlers.

    A message counts in the process's budget, which other requests share, from its second frame on. Where the
    budget is full it is rejected. A window for the rest of a large message is granted once that fits;
    streams wait for it in order of arrival. It does not count before it is used: a client could otherwise
    fill the budget by announcing large messages. Only for the event loop's thread.
    """

    def __init__(self, budget: ByteBudget, count_rejection: Callable[[], None]) -> None:
        self.budget, self._count_rejection = budget, count_rejection
        self.promised = 0
        """Bytes of granted windows that have not arrived."""
        # Streams that wait for a window, with the start of their wait.
        self._waiting: dict[ReceivingStream, tuple[ConnectionBytes, float]] = {}
        # Streams on which a part of a message is missing, with the time of its beginning.
        self._arriving: dict[ReceivingStream, float] = {}
        self._is_polling = False

    def require(self, connection: ConnectionBytes, own: int, size: int) -> None:
        """Raise ``CallFailed`` unless ``size`` bytes more fit for a stream that holds ``own``."""
        error = self.budget.rejection(size, own)
        if connection.held > own and connection.held + size > connection.limit:
            error = Overloaded(
                f"messages of this connection hold {connection.held} bytes "
                "(half of server.admission.queue_bytes)",
                "queue_bytes",
            )
        if error is not None:
            raise self.failure(error)

    def failure(self, error: Overloaded) -> CallFailed:
        """Count a rejection; return what ends its call."""
        self._count_rejection()
        return CallFailed(call_status(error).number, str(error), call_status(error).trailers)

    def arrives(self, stream: ReceivingStream) -> None:
        """A part of a message has arrived on ``stream``, whose rest must arrive in time."""
        if stream not in self._arriving:
            self._arriving[stream] = time.monotonic()

    def arrived(self, stream: ReceivingStream) -> None:
        """No part of a message is missing on ``stream``, or it has ended."""
        if self._arriving.pop(stream, None) is not None:
            self._waiting.pop(stream, None)

    def request_window(self, stream: ReceivingStream, connection: ConnectionBytes) -> None:
        """Grant the window that ``stream`` needs for its message, immediately or when it fits."""
        if not self._waiting and self._fits(connection, stream.missing_window):
            self._grant(stream, connection)
        else:
            self._waiting.setdefault(stream, (connection, time.monotonic()))
            self._poll_later()

    def _fits(self, connection: ConnectionBytes, size: int) -> bool:
        # Half of each limit is left to messages that need no such window, and to the beginnings of those that
        # wait. One message at a time may exceed a limit: all could wait for one another.
        most = connection.limit // 2
        if connection.promised and connection.held + connection.promised + size > most:
            return False
        most = self.budget.limit // 2
        return not self.promised or self.budget.held + self.promised + size <= most

    def _grant(self, stream: ReceivingStream, connection: ConnectionBytes) -> None:
        size = stream.missing_window
        if size > 0 and stream.received is not None:
            self.promised += size
            connection.promised += size
            stream.received.promised += size
            stream.grant(size)

    def _poll_later(self) -> None:
        if not self._is_polling:
            self._is_polling = True
            asyncio.get_running_loop().call_later(_POLL_S, self._poll)

    def _poll(self) -> None:
        self._is_polling = False
        now = time.monotonic()
        for stream, (connection, since) in list(self._waiting.items()):
            if self._fits(connection, stream.missing_window):
                del self._waiting[stream]
                self._grant(stream, connection)
            elif now - since > _MAX_WAIT_S:
                del self._waiting[stream]
                self._reject(stream)
        if self._waiting:
            self._poll_later()

    def _reject(self, stream: ReceivingStream) -> None:
        cause = f"other requests left no bytes for {_MAX_WAIT_S:g} s (server.admission.queue_bytes)"
        failure = self.failure(Overloaded(cause, "queue_bytes"))
        stream.fault(failure.code, failure.details, failure.trailers)

    def sweep(self, now: float) -> None:
        """End calls whose messages did not arrive in time."""
        while self._arriving:
            stream, since = next(iter(self._arriving.items()))  # in order of arrival
            if since > now - REQUEST_TIMEOUT_S:
                return
            self.arrived(stream)
            stream.fault(DEADLINE_EXCEEDED, "a message was not received in time")


class ReceivedBytes:
    """The bytes of one stream's messages that no handler has taken. Only for the event loop's thread."""

    __slots__ = ("_budget", "_connection", "_held", "promised")

    def __init__(self, budget: ReceiveBudget, connection: ConnectionBytes) -> None:
        self._budget, self._connection = budget, connection
        self._held = 0
        self.promised = 0
        """Bytes of the window granted for a large message that have not arrived. These always fit."""

    def add(self, size: int) -> None:
        """Count ``size`` bytes that have arrived. Raises ``CallFailed`` if they do not fit."""
        budget, connection = self._budget.budget, self._connection
        if self.promised:
            self._use_promised(min(size, self.promised))
        elif budget.held + size > budget.limit or connection.held + size > connection.limit:
            self._budget.require(connection, self._held, size)
        self._held += size
        connection.held += size
        budget.add(size)

    def _use_promised(self, size: int) -> None:
        self.promised -= size
        self._budget.promised -= size
        self._connection.promised -= size

    def release(self, size: int) -> None:
        """Release up to ``size`` bytes."""
        self._budget.budget.add(-self._taken(size))

    def _taken(self, size: int) -> int:
        size = min(size, self._held)
        self._held -= size
        self._connection.held -= size
        return size

    def hand_over(self) -> ByteReservation:
        """Return the bytes as the reservation of a message that has arrived."""
        return ByteReservation(self._budget.budget, self._taken(self._held))

    def end(self) -> None:
        """Release all of a stream from which nothing is read any more."""
        self._use_promised(self.promised)
        self.release(self._held)
