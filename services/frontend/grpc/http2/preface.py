"""The first bytes of a gRPC connection: HTTP/2's preface, or another protocol."""

from __future__ import annotations

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_MOST_LINE_BYTES = 8192
_HTTP1_ANSWER = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\nconnection: close\r\n"
    b"content-length: 75\r\n\r\n"
    b"This port serves gRPC, which needs HTTP/2; REST is served on another port.\n"
)


class NotHttp2(Exception):
    """The client speaks another protocol. ``answer``: what it can read, or nothing."""

    def __init__(self, answer: bytes) -> None:
        super().__init__()
        self.answer = answer


def preface_size(data: bytes) -> int:
    """Return the size of the preface with which ``data`` begins; 0 if it is incomplete.

    Raises ``NotHttp2``."""
    if data.startswith(PREFACE):
        return len(PREFACE)
    if PREFACE.startswith(data) or _is_line_begun(data):
        return 0
    raise NotHttp2(_HTTP1_ANSWER if b" HTTP/1." in data[:_MOST_LINE_BYTES] else b"")


def _is_line_begun(data: bytes) -> bool:
    """Return True if ``data`` may be the beginning of HTTP/1's first line."""
    return data[:1].isalpha() and b"\n" not in data and len(data) < _MOST_LINE_BYTES
