"""One HTTP/2 stream: its windows and the messages that arrive on it."""

from __future__ import annotations

import math
import time

from services.frontend.grpc.http2.frames import STREAM_WINDOW, ErrorCode, StreamFailed
from services.frontend.grpc.http2.headers import CallHead, Trailers
from services.frontend.grpc.http2.interfaces import StreamConnection, StreamReceiver
from services.frontend.grpc.http2.messages import CallFailed, MessageReader
from services.frontend.grpc.http2.receive_budget import ReceivedBytes
from services.frontend.grpc.http2.status_codes import DEADLINE_EXCEEDED, INTERNAL

# The connection returns a stream's window in steps of at least this size, unless the client has little left.
_RETURNED_BYTES, _LITTLE_BYTES = STREAM_WINDOW // 4, STREAM_WINDOW // 16


class Stream:
    """A stream with a call. Subclasses take its messages; all methods run on the event loop."""

    __slots__ = (
        "_credit",
        "_reader",
        "_returned",
        "connection",
        "deadline",
        "has_failed",
        "has_headers",
        "head",
        "id",
        "is_half_closed",
        "received",
        "window",
    )

    def __init__(self, connection: StreamConnection, stream_id: int, head: CallHead) -> None:
        self.connection, self.id, self.head = connection, stream_id, head
        self.window = 0
        """Bytes that may be sent, in addition to the client's initial window."""
        self.has_headers = self.is_half_closed = False
        self.has_failed = False
        """True if a part of the request was invalid, or rejected."""
        self._credit, self._returned = STREAM_WINDOW, 0
        self._reader: MessageReader | None = None
        self.received: ReceivedBytes | None = None
        """Bytes of messages that arrive in several frames, or wait for their handler."""
        timeout_s = head.timeout_s
        self.deadline = math.inf if timeout_s == math.inf else time.monotonic() + timeout_s

    # Events

    def message(self, message: bytes, is_compressed: bool) -> None:
        """Take a message."""
        raise NotImplementedError

    def half_closed(self) -> None:
        """The client sends no further message."""

    def gone(self) -> None:
        """The stream was ended by the client, the loss of its connection, a fault or its deadline."""

    def finished(self) -> None:
        """The last frame of the answer was sent."""

    def fault(self, code: int, details: str, trailers: Trailers = None) -> None:
        """End the call with a gRPC status, because of its request, whose rest is discarded."""
        self.discard_rest()
        self.connection.end(self, code, details, trailers)
        self.gone()

    def expire(self) -> None:
        """End the call at its deadline."""
        self.connection.end(self, DEADLINE_EXCEEDED, "deadline exceeded")
        self.connection.reset(self, ErrorCode.CANCEL)  # if a part of the answer still waits
        self.gone()

    # Receiving

    def receive(self, data: bytes, size: int, *, is_last: bool) -> None:
        """Take the data of a frame, which with padding has ``size`` bytes. Raises ``StreamFailed`` and
        ``CallFailed``."""
        self._credit -= size
        if self._credit < 0:
            raise StreamFailed(ErrorCode.FLOW_CONTROL_ERROR, "stream's window exceeded")
        if self.has_failed:
            return
        if is_last:
            self.is_half_closed = True
            if (
                self._reader is None
                and len(data) > 4
                and not data[0]
                and int.from_bytes(data[1:5], "big") == len(data) - 5
                and len(data) - 5 <= self.connection.port.settings.max_message_bytes
            ):
                self.message(data[5:], False)
                self.half_closed()
                return
        self._read(data)
        if is_last:
            self._end_reading()

    def _read(self, data: bytes) -> None:
        reader, port = self._reader, self.connection.port
        if reader is None:
            most = port.settings.max_message_bytes
            reader = self._reader = MessageReader(most)
        if self.received is None:
            self.received = ReceivedBytes(port.receiving, self.connection.received_bytes)
        self.received.add(len(data))
        for message, is_compressed in reader.feed(data):
            if is_compressed and self.head.encoding == "identity":
                raise CallFailed(INTERNAL, "a message is compressed, but grpc-encoding is missing")
            self.message(message, is_compressed)
        if reader.is_between or self.received is None:
            port.receiving.arrived(self)
        elif not self.is_half_closed:
            port.receiving.arrives(self)
            if reader.missing > self._credit:
                port.receiving.request_window(self, self.connection.received_bytes)

    @property
    def missing_window(self) -> int:
        """Bytes by which the window is too small for the message that is arriving."""
        return 0 if self._reader is None else self._reader.missing - self._credit

    def grant(self, size: int) -> None:
        """Let the client send ``size`` more bytes."""
        self._credit += size
        self.connection.grant(self.id, size)

    def discard_rest(self) -> None:
        """Ignore what still arrives of an invalid or rejected request."""
        self.has_failed = True
        self.end_receiving()

    def end_receiving(self) -> None:
        """Release the bytes of messages that were not handled: no others are read."""
        if self.received is not None:
            self.connection.port.receiving.arrived(self)
            self.received.end()
            self.received = None

    def _end_reading(self) -> None:
        if self._reader is not None and not self._reader.is_between:
            raise CallFailed(INTERNAL, "the last message is incomplete")
        self.half_closed()

    def end_by_trailers(self) -> None:
        """The client's last frame carried no data."""
        if not self.is_half_closed:
            self.is_half_closed = True
            self._end_reading()

    def return_window(self, size: int) -> None:
        """Let the client send ``size`` more bytes, of messages that were taken."""
        if self.received is not None:
            self.received.release(size)
        self._returned += size
        if self._returned < _RETURNED_BYTES and self._credit > _LITTLE_BYTES:
            return
        more = min(self._returned, STREAM_WINDOW - self._credit)
        self._returned = 0
        if more > 0 and not self.is_half_closed:
            self.grant(more)


class BidiStream(Stream):
    """A bidirectional stream, whose messages a `StreamReceiver` takes."""

    __slots__ = ("call",)

    call: StreamReceiver

    def message(self, message: bytes, is_compressed: bool) -> None:
        self.call.message(message, is_compressed)

    def half_closed(self) -> None:
        self.call.half_closed()

    def gone(self) -> None:
        self.call.gone()
