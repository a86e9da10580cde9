"""Decompression of requests within a limit and the byte budget."""

from __future__ import annotations

from typing import Any

from services.frontend.admission.byte_budget import ByteReservation

INLINE_BYTES = 256 << 10
"""Up to so many bytes of output take no reservation."""
# Bytes inflated between two checks of the byte budget.
_PIECE_BYTES = 1 << 20


def inflate(stream: Any, begun: bytes, limit: int, reservation: ByteReservation) -> bytes:
    """Return ``begun`` and the rest of the output of ``stream``; at most one byte more than ``limit``.

    ``stream`` is a decompressor of ``zlib`` with unconsumed input. Raises ``Overloaded``, ``zlib.error``."""
    pieces, size = [begun], len(begun)
    while not stream.eof and size <= limit:
        piece = stream.decompress(stream.unconsumed_tail, min(_PIECE_BYTES, limit + 1 - size))
        if not piece:
            break  # the stream ends early
        reservation.grow(len(piece))
        pieces.append(piece)
        size += len(piece)
    return b"".join(pieces)
