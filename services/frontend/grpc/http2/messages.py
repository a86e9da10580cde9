"""gRPC's messages in a stream's data: five-byte prefix, limit, compression."""

from __future__ import annotations

import zlib

from services.frontend.admission.byte_budget import ByteReservation
from services.frontend.admission.inflate import INLINE_BYTES, inflate
from services.frontend.grpc.http2.status_codes import (
    INTERNAL,
    RESOURCE_EXHAUSTED,
)
from services.frontend.grpc.status import Trailers

PREFIX_BYTES = 5
# Smaller pieces of a message are copied together: an object per byte would take sixty times its memory.
_SMALL = 1024
# zlib's window bits: ``gzip`` and ``deflate``, which is zlib's format.
_WINDOW_BITS = {"gzip": 31, "deflate": 15}
ENCODINGS = frozenset(("identity", *_WINDOW_BITS))
"""Values of ``grpc-encoding`` that requests may have."""
ACCEPTED_ENCODINGS = (("grpc-accept-encoding", "identity,deflate,gzip"),)
"""Metadata of an answer that rejects another compression."""


class CallFailed(Exception):
    """The request is invalid, or rejected; the call ends with gRPC's status ``code`` and ``details``."""

    def __init__(self, code: int, details: str, trailers: Trailers = None) -> None:
        super().__init__(details)
        self.code, self.details, self.trailers = code, details, trailers


class MessageReader:
    """Splits the data of one stream into messages. Not thread-safe."""

    __slots__ = ("_is_compressed", "_most", "_pieces", "_prefix", "missing")

    def __init__(self, most: int) -> None:
        """``most``: the largest message in bytes."""
        self._most = most
        self._prefix = b""
        self._pieces: list[bytes | bytearray] = []
        self._is_compressed = False
        self.missing = PREFIX_BYTES
        """Bytes missing in the prefix or message that is arriving."""

    @property
    def is_between(self) -> bool:
        """True if no part of a further message has been received."""
        return self.missing == PREFIX_BYTES and not self._prefix and not self._pieces

    def feed(self, data: bytes) -> list[tuple[bytes, bool]]:
        """Add data; return the messages that are complete, each with True if it is compressed.

        Raises ``CallFailed`` if a message is too large, as its prefix tells.
        """
        complete = []
        at, end = 0, len(data)
        while at < end:
            if len(self._prefix) < PREFIX_BYTES:
                at = self._read_prefix(data, at)
                if len(self._prefix) < PREFIX_BYTES:
                    break
            piece = data[at : at + self.missing]
            at += len(piece)
            self.missing -= len(piece)
            if piece:
                self._add(piece)
            if not self.missing:
                complete.append((self._message(), self._is_compressed))
        return complete

    def _read_prefix(self, data: bytes, at: int) -> int:
        part = data[at : at + PREFIX_BYTES - len(self._prefix)]
        prefix = self._prefix = self._prefix + part
        self.missing = PREFIX_BYTES - len(prefix)
        if not self.missing:
            self._is_compressed = is_compressed(prefix[0])
            self.missing = require_allowed(int.from_bytes(prefix[1:], "big"), self._most)
        return at + len(part)

    def _add(self, piece: bytes) -> None:
        pieces = self._pieces
        if len(piece) >= _SMALL or not pieces:
            pieces.append(piece)
        elif type(pieces[-1]) is bytearray:
            pieces[-1] += piece
        else:
            pieces.append(bytearray(piece))

    def _message(self) -> bytes:
        pieces, self._pieces = self._pieces, []
        self._prefix, self.missing = b"", PREFIX_BYTES
        return bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces)


def is_compressed(flag: int) -> bool:
    """Return the prefix's flag. Raises ``CallFailed`` if it is invalid."""
    if flag > 1:
        raise CallFailed(INTERNAL, f"invalid flag {flag} of a message")
    return flag == 1


def require_allowed(size: int, most: int) -> int:
    """Return a message's size. Raises ``CallFailed`` if it exceeds ``most``."""
    if size > most:
        raise CallFailed(
            RESOURCE_EXHAUSTED, f"Received message larger than max ({size} vs. {most})"
        )
    return size


def decompress(message: bytes, encoding: str, most: int, reservation: ByteReservation) -> bytes:
    """Return a compressed message's content, of at most ``most`` bytes. Thread-safe.

    Large content and its message are reserved in ``reservation``, which the caller releases. Raises
    ``CallFailed`` and ``Overloaded``. Never holds more than ``most`` bytes, whatever the message claims.
    """
    bits = _WINDOW_BITS.get(encoding)
    if bits is None:
        raise CallFailed(INTERNAL, f"a message is compressed, but grpc-encoding is {encoding!r}")
    unpacker = zlib.decompressobj(bits)
    try:
        content = unpacker.decompress(message, min(most + 1, INLINE_BYTES))
        if not unpacker.eof and len(content) <= most:
            reservation.grow(len(message) + len(content))
            content = inflate(unpacker, content, most, reservation)
    except zlib.error as error:
        raise CallFailed(INTERNAL, f"cannot decompress a message ({encoding}): {error}") from None
    if len(content) > most:
        raise CallFailed(
            RESOURCE_EXHAUSTED, f"Decompressed message larger than max ({len(content)} vs. {most})"
        )
    if not unpacker.eof or unpacker.unused_data:
        raise CallFailed(INTERNAL, f"cannot decompress a message ({encoding}): not one whole")
    return content
