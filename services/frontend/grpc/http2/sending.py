"""Sending of answers: the client's windows, its frame size, and the socket's buffer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from services.frontend.grpc.http2.frames import (
    CONTINUATION,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    MAX_WINDOW,
    ConnectionFailed,
    ErrorCode,
    PeerSettings,
    StreamFailed,
    frame,
)
from services.frontend.grpc.http2.headers import ANSWER_HEAD, EMPTY_TABLE, TRAILERS_OK
from services.frontend.grpc.http2.interfaces import CorkingPort
from services.frontend.grpc.http2.messages import PREFIX_BYTES
from services.frontend.grpc.http2.streams import Stream

# The most bytes that are copied together for the socket; larger answers are sent in turn with others.
_CHUNK_BYTES = 1 << 18
# Bytes that collect before they are passed to the socket.
_CORKED_BYTES = 1 << 16
# While more bytes wait for the socket, the connection reads nothing: a client could otherwise make the
# server collect small frames, such as statuses, without limit.
_MOST_BUFFERED = 1 << 20

_HEAD_FRAME = frame(HEADERS, END_HEADERS, 0, ANSWER_HEAD)[:5]
_OK_FRAME = frame(HEADERS, END_HEADERS | END_STREAM, 0, TRAILERS_OK)[:5]
_DATA_KIND = b"\0\0"

Sent = Callable[[], None]


class _Outgoing:
    """The data of one stream that waits for a window or the socket."""

    __slots__ = ("items", "trailers")

    def __init__(self) -> None:
        self.items: deque[tuple[memoryview, Sent | None]] = deque()
        self.trailers: bytes | None = None  # their header block


class FrameSender:
    """Sends the frames of one connection, fairly among its streams. Only for the event loop's thread."""

    def __init__(self, transport: asyncio.Transport, port: CorkingPort) -> None:
        self._transport, self._port = transport, port
        self._window = DEFAULT_WINDOW
        self.peer = PeerSettings()
        self._ready: dict[Stream, _Outgoing] = {}
        self._blocked: dict[Stream, _Outgoing] = {}  # their streams' windows are used up
        self._is_paused = self._is_reading_paused = False
        self._corked: list[bytes] | None = None
        self._corked_bytes = 0
        self._block_prefix = b""  # begins the next header block
        self.written = 0
        """Number of writes: a sign of progress."""
        self.answers = 0
        """Number of DATA frames and statuses sent."""

    # The socket

    def write(self, data: bytes) -> None:
        """Send frames that need no window."""
        corked = self._corked
        if corked is None:
            if self._port.corked is None:
                self._write(data)
                return
            self._port.corked.append(self)
            corked = self._corked = []
        corked.append(data)
        self._corked_bytes += len(data)
        if self._corked_bytes > _CORKED_BYTES:
            self.uncork()
            self._corked = []

    def cork(self) -> None:
        """Collect what is written until `uncork`, for one call of the system."""
        if self._corked is None:
            self._corked = []

    def uncork(self) -> None:
        """Send what was collected."""
        corked, self._corked, self._corked_bytes = self._corked, None, 0
        if corked:
            self._write(corked[0] if len(corked) == 1 else b"".join(corked))

    def _write(self, data: bytes) -> None:
        if self._transport.is_closing():
            return  # the client is gone; the loop has not reported it yet
        self.written += 1
        self._transport.write(data)
        if (
            self._is_paused
            and not self._is_reading_paused
            and self._transport.get_write_buffer_size() > _MOST_BUFFERED
        ):
            self._is_reading_paused = True
            self._transport.pause_reading()

    def pause(self) -> None:
        """The socket takes no more for now."""
        self._is_paused = True

    def resume(self) -> None:
        """The socket takes more again."""
        self._is_paused = False
        if self._is_reading_paused:
            self._is_reading_paused = False
            self._transport.resume_reading()
        self.flush()

    # Windows

    def widen(self, size: int) -> None:
        """Apply the client's WINDOW_UPDATE for the connection. Raises ``ConnectionFailed``."""
        self._window += size
        if self._window > MAX_WINDOW:
            raise ConnectionFailed(ErrorCode.FLOW_CONTROL_ERROR, "connection's window overflows")
        self.flush()

    def widen_stream(self, stream: Stream, size: int) -> None:
        """Apply the client's WINDOW_UPDATE for ``stream``. Raises ``StreamFailed``."""
        stream.window += size
        if self.peer.initial_window + stream.window > MAX_WINDOW:
            raise StreamFailed(ErrorCode.FLOW_CONTROL_ERROR, "stream's window overflows")
        outgoing = self._blocked.pop(stream, None)
        if outgoing is not None:
            self._ready[stream] = outgoing
            self.flush()

    @property
    def blocked_streams(self) -> int:
        """Number of streams whose answers wait for a window of the stream."""
        return len(self._blocked)

    def apply_settings(self, payload: bytes) -> None:
        """Apply the client's SETTINGS. Raises ``ConnectionFailed``."""
        before = self.peer.initial_window
        self.peer.update(payload)
        if self.peer.has_reduced_table:
            self._block_prefix = EMPTY_TABLE
        if self.peer.initial_window > before:
            self._ready.update(self._blocked)
            self._blocked.clear()
            self.flush()

    # Answers

    def answer(self, stream: Stream, message: bytes) -> bool:
        """Send the only message of ``stream`` and status OK; False if a part must wait."""
        size = len(message) + PREFIX_BYTES
        if (
            size > self.peer.max_frame
            or size > self._window
            or size > self.peer.initial_window + stream.window
            or stream.has_headers
            or self._ready
            or self._is_paused
            or self._block_prefix
        ):
            self.send_message(stream, message, None)
            return self.end(stream, TRAILERS_OK)
        self._window -= size
        self.answers += 1
        sid = stream.id.to_bytes(4, "big")
        self.write(
            b"".join(
                (
                    _HEAD_FRAME,
                    sid,
                    ANSWER_HEAD,
                    size.to_bytes(3, "big"),
                    _DATA_KIND,
                    sid,
                    b"\0",
                    (size - PREFIX_BYTES).to_bytes(4, "big"),
                    message,
                    _OK_FRAME,
                    sid,
                    TRAILERS_OK,
                )
            )
        )
        return True

    def send_message(self, stream: Stream, message: bytes, sent: Sent | None) -> None:
        """Send a message of ``stream``, after its earlier ones; then call ``sent``."""
        if not stream.has_headers:
            stream.has_headers = True
            self.write(self._header_frames(stream, ANSWER_HEAD, 0))
        outgoing = self._ready.get(stream) or self._blocked.get(stream)
        if outgoing is None:
            outgoing = self._ready[stream] = _Outgoing()
        prefix = b"\0" + len(message).to_bytes(4, "big")
        if len(message) < _CHUNK_BYTES:
            outgoing.items.append((memoryview(prefix + message), sent))
        else:
            outgoing.items.append((memoryview(prefix), None))
            outgoing.items.append((memoryview(message), sent))
        self.flush()

    def end(self, stream: Stream, block: bytes) -> bool:
        """Send the last header block of ``stream``, after its messages; False if it must wait."""
        outgoing = self._ready.get(stream) or self._blocked.get(stream)
        if outgoing is None:
            self.answers += 1
            self.write(self._header_frames(stream, block, END_STREAM))
            return True
        outgoing.trailers = block
        return False

    def _header_frames(self, stream: Stream, block: bytes, flags: int) -> bytes:
        block, self._block_prefix = self._block_prefix + block, b""
        return header_frames(stream.id, block, flags, self.peer.max_frame)

    def forget(self, stream: Stream) -> None:
        """Drop what ``stream`` still has to send."""
        self._ready.pop(stream, None)
        self._blocked.pop(stream, None)

    def clear(self) -> None:
        """Drop all that waits: the connection is lost."""
        self._ready.clear()
        self._blocked.clear()

    def flush(self) -> None:
        """Send what waits, as far as the windows and the socket allow."""
        ready = self._ready
        while ready and self._window > 0 and not self._is_paused:
            stream = next(iter(ready))
            outgoing = ready.pop(stream)
            self._send_part(stream, outgoing)

    def _send_part(self, stream: Stream, outgoing: _Outgoing) -> None:
        """Send up to a chunk of ``stream``, which is in no queue; put the rest back, or finish it."""
        parts: list[bytes | memoryview] = []
        sent: list[Sent] = []
        items, left = outgoing.items, _CHUNK_BYTES
        sid = stream.id.to_bytes(4, "big")
        allowed = min(self._window, self.peer.initial_window + stream.window, left)
        taken = 0
        while items and taken < allowed:
            data, done = items.popleft()
            part = data[: min(allowed - taken, self.peer.max_frame)]
            parts += (len(part).to_bytes(3, "big") + _DATA_KIND + sid, part)
            taken += len(part)
            self.answers += 1
            if len(part) < len(data):
                items.appendleft((data[len(part) :], done))
            elif done is not None:
                sent.append(done)
        self._window -= taken
        stream.window -= taken
        is_blocked = self.peer.initial_window + stream.window <= 0
        if items:
            (self._blocked if is_blocked else self._ready)[stream] = outgoing
        elif outgoing.trailers is not None:
            parts.append(self._header_frames(stream, outgoing.trailers, END_STREAM))
        if parts:
            self.write(b"".join(parts))
        if not items and outgoing.trailers is not None:
            stream.connection.finish(stream)
        for done in sent:
            done()


def header_frames(stream_id: int, block: bytes, flags: int, most: int) -> bytes:
    """Return a header block as HEADERS and, beyond ``most`` bytes, CONTINUATION frames."""
    if len(block) <= most:
        return frame(HEADERS, flags | END_HEADERS, stream_id, block)
    frames = [frame(HEADERS, flags, stream_id, block[:most])]
    for at in range(most, len(block), most):
        last = END_HEADERS if at + most >= len(block) else 0
        frames.append(frame(CONTINUATION, last, stream_id, block[at : at + most]))
    return b"".join(frames)
