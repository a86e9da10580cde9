"""HTTP/2 frames (RFC 9113): types, flags, error codes, encoding, and checks of their payloads."""

from __future__ import annotations

from enum import IntEnum
from struct import Struct

HEADER_BYTES = 9
HEADER = Struct(">BHBBL")
"""A frame's header: the high and low part of the payload's size, type, flags, stream."""
MAX_FRAME_BYTES = 65_535
"""The largest payload that this server accepts: it reads a large message in fewer frames."""
MAX_WINDOW = (1 << 31) - 1
DEFAULT_FRAME_BYTES, DEFAULT_WINDOW, DEFAULT_HEADER_TABLE_BYTES = 16_384, 65_535, 4096
"""What HTTP/2 allows before the first SETTINGS."""
STREAM_WINDOW = 1 << 19
"""The bytes of a stream that its client may send ahead: messages, as small as five bytes, wait in memory for
a stream's handler. A message that exceeds it gets its window when its prefix has arrived."""

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = 0, 1, 2, 3, 4
PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 5, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITIZED = 0x1, 0x1, 0x4, 0x8, 0x20

_HEADER_TABLE_SIZE, _ENABLE_PUSH, _MAX_CONCURRENT_STREAMS = 1, 2, 3
_INITIAL_WINDOW_SIZE, _MAX_FRAME_SIZE, _MAX_HEADER_LIST_SIZE = 4, 5, 6
_SETTING = Struct(">HL")
_LARGEST_FRAME = (1 << 24) - 1


class ErrorCode(IntEnum):
    """Reasons for RST_STREAM and GOAWAY."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12


class ConnectionFailed(Exception):
    """The client violated the protocol; the connection ends with GOAWAY."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class StreamFailed(Exception):
    """The client violated the protocol on one stream, which ends with RST_STREAM."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return a frame's bytes."""
    size = len(payload)
    return HEADER.pack(size >> 16, size & 0xFFFF, kind, flags, stream) + payload


def reset(stream: int, code: ErrorCode) -> bytes:
    """Return a RST_STREAM frame."""
    return frame(RST_STREAM, 0, stream, code.to_bytes(4, "big"))


def window_update(stream: int, size: int) -> bytes:
    """Return a WINDOW_UPDATE frame; stream 0 is the connection."""
    return frame(WINDOW_UPDATE, 0, stream, size.to_bytes(4, "big"))


def go_away(last_stream: int, code: ErrorCode, text: str = "") -> bytes:
    """Return a GOAWAY frame: streams after ``last_stream`` are not processed."""
    payload = last_stream.to_bytes(4, "big") + code.to_bytes(4, "big") + text.encode()[:200]
    return frame(GOAWAY, 0, 0, payload)


def greeting(most_streams: int, max_header_list: int) -> bytes:
    """Return the server's first frames: its settings and the connection's window."""
    settings = (
        _SETTING.pack(_MAX_CONCURRENT_STREAMS, most_streams)
        + _SETTING.pack(_INITIAL_WINDOW_SIZE, STREAM_WINDOW)
        + _SETTING.pack(_MAX_FRAME_SIZE, MAX_FRAME_BYTES)
        + _SETTING.pack(_MAX_HEADER_LIST_SIZE, max_header_list)
    )
    return frame(SETTINGS, 0, 0, settings) + window_update(0, MAX_WINDOW - DEFAULT_WINDOW)


SETTINGS_ACK = frame(SETTINGS, ACK, 0, b"")


class PeerSettings:
    """The settings of the client that concern a server."""

    __slots__ = ("has_reduced_table", "initial_window", "max_frame")

    def __init__(self) -> None:
        self.initial_window, self.max_frame = DEFAULT_WINDOW, DEFAULT_FRAME_BYTES
        self.has_reduced_table = False
        """True if the next header block must announce that its table is smaller than by default."""

    def update(self, payload: bytes) -> None:
        """Apply a SETTINGS frame. Raises ``ConnectionFailed``."""
        if len(payload) % _SETTING.size:
            raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS has an invalid size")
        for name, value in _SETTING.iter_unpack(payload):
            if name == _INITIAL_WINDOW_SIZE:
                if value > MAX_WINDOW:
                    raise ConnectionFailed(ErrorCode.FLOW_CONTROL_ERROR, "window is too large")
                self.initial_window = value
            elif name == _MAX_FRAME_SIZE:
                if not DEFAULT_FRAME_BYTES <= value <= _LARGEST_FRAME:
                    raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "invalid MAX_FRAME_SIZE")
                self.max_frame = value
            elif name == _HEADER_TABLE_SIZE and value < DEFAULT_HEADER_TABLE_BYTES:
                self.has_reduced_table = True
            elif name == _ENABLE_PUSH and value > 1:
                raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "invalid ENABLE_PUSH")


def unpadded(payload: bytes, flags: int, kind: int) -> bytes:
    """Return the payload of DATA or HEADERS without padding and priority. Raises ``ConnectionFailed``."""
    at, end = 0, len(payload)
    if flags & PADDED:
        if not end:
            raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, "a padded frame is empty")
        at, end = 1, end - payload[0]
    if kind == HEADERS and flags & PRIORITIZED:
        at += 5
    if at > end:
        raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "padding exceeds its frame")
    return payload[at:end]


def require_size(payload: bytes, size: int, name: str) -> None:
    """Raise ``ConnectionFailed`` unless ``payload`` has ``size`` bytes."""
    if len(payload) != size:
        raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, f"{name} must have {size} bytes")
