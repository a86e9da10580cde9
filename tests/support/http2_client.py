"""A gRPC client of a few bytes: does what no library does, as to leave answers unread."""

from __future__ import annotations

import socket
import struct

_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_STREAM, _END_HEADERS = 1, 4
_INITIAL_WINDOW_SIZE = 4


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _header(name: str, value: str) -> bytes:
    """A literal field of HPACK, without Huffman."""
    return b"\0%c%b%c%b" % (len(name), name.encode(), len(value), value.encode())


class Http2Client:
    """One connection that takes no byte of any answer's messages: its streams' windows are 0."""

    def __init__(self, address: str) -> None:
        """``address``: ``host:port``."""
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), 60)
        no_window = struct.pack(">HI", _INITIAL_WINDOW_SIZE, 0)
        self._socket.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0, no_window)
        )
        self._stream = -1

    def call(self, path: str, message: bytes = b"") -> None:
        """Begin a call with one message, which is all of its request; at most 16,379 bytes, for one frame."""
        self._stream += 2
        head = b"".join(
            _header(name, value)
            for name, value in {
                ":method": "POST",
                ":scheme": "http",
                ":path": path,
                ":authority": "x",
                "content-type": "application/grpc",
                "te": "trailers",
            }.items()
        )
        body = struct.pack(">BI", 0, len(message)) + message
        self._socket.sendall(
            _frame(_HEADERS, _END_HEADERS, self._stream, head)
            + _frame(_DATA, _END_STREAM, self._stream, body)
        )

    def close(self) -> None:
        self._socket.close()
