"""NumPy twin of the reply decoder (hps/native/src/resp.cpp).

It decodes Redis' reply to several HMGETs as it arrives, straight into the caller's arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.types import IndexArray, SourceArray, VectorArray, VersionArray

_HEADER = 9  # version and flags
_LONGEST_LINE = 65_536


class ProtocolError(ValueError):
    """The bytes are no reply to the request: the connection must be closed."""


class RowReplies:
    """Decoder of rows in Redis replies. Not thread-safe.

    ``counts (r,)``: the elements of each reply, or -1 for a status line that is skipped; ``arrays``: out
    (n, dim), versions (n,) and source (n,); ``positions``: the elements' rows in them, reply by reply.

    A value is a row, if ``versioned`` after u64 little-endian version and u8 flags; a versioned value of 9
    bytes is a tombstone. Rows and tombstones of versions below their entry of ``oldest`` count as absent.
    A row sets all three arrays, its source to ``code``; a tombstone sets only the version; the positions of
    other values are in ``left``.
    """

    def __init__(
        self,
        counts: IndexArray,
        positions: IndexArray,
        arrays: tuple[VectorArray, VersionArray, SourceArray],
        code: int,
        versioned: bool,
        oldest: tuple[int, int],
    ) -> None:
        out, versions, source = arrays
        n = len(out)
        if len(versions) != n or len(source) != n:
            raise ValueError("versions and source must have one entry per row of out")
        if counts[counts > 0].sum() != len(positions):
            raise ValueError("positions must have one entry per element of the replies")
        if len(positions) and not (positions.min() >= 0 and positions.max() < n):
            raise ValueError("positions must be rows of out")
        self._counts = counts.tolist()
        self._positions = positions.tolist()
        self._rows = out.view(np.uint8).reshape(n, -1) if n else out
        self._versions, self._source, self._code = versions, source, code
        self._versioned = versioned
        self._oldest_row, self._oldest_tombstone = oldest
        self._row_bytes = out.shape[1] * out.itemsize
        self._reply, self._element, self._next = 0, -1, 0
        self._skip = 0
        self._left: list[int] = []
        self.errors: list[tuple[int, str]] = []
        """(reply, message) of the replies that were errors."""
        self.wrong_length = 0
        """The length of a value that is no row of this table; 0 if there was none."""

    @property
    def done(self) -> bool:
        return self._reply == len(self._counts)

    @property
    def left(self) -> IndexArray:
        """The positions without row or tombstone, unordered."""
        return np.array(self._left, np.int64)

    def feed(self, buffer: NDArray[np.uint8], begin: int, end: int) -> int:
        """Decode the complete part of ``buffer[begin:end]``; return where the rest begins.

        The caller passes the rest again with the bytes that follow it. Raises ProtocolError.
        """
        if not 0 <= begin <= end <= len(buffer):
            raise ValueError("begin and end must lie in the buffer")
        data = buffer[begin:end].tobytes()
        at = 0
        while not self.done:
            used = self._step(data, at)
            if not used:
                break
            at += used
        return begin + at

    def _step(self, data: bytes, at: int) -> int:
        if self._skip:
            skipped = min(self._skip, len(data) - at)
            self._skip -= skipped
            if not self._skip:
                self._end_element()
            return skipped
        end = data.find(b"\r\n", at)
        if end < 0:
            if len(data) - at > _LONGEST_LINE:
                raise ProtocolError("a reply line has no end")
            return 0
        kind, text = data[at : at + 1], data[at + 1 : end]
        used = end + 2 - at
        if self._element < 0:
            self._begin_reply(kind, text)
            return used
        if kind == b"_" and not text:
            self._miss()
            return used
        if kind != b"$":
            raise ProtocolError("an element of a reply is not a value")
        return self._value(data, end + 2, _number(text), used)

    def _begin_reply(self, kind: bytes, text: bytes) -> None:
        count = self._counts[self._reply]
        if kind == b"-":
            message = text.decode("ascii", "replace").replace("�", "?")
            self.errors.append((self._reply, message))
            self._next += max(count, 0)
            self._next_reply()
        elif kind == b"+" and count < 0:
            self._next_reply()
        elif kind == b"*" and count >= 0 and _number(text) == count:
            self._element = 0
            if not count:
                self._next_reply()
        else:
            raise ProtocolError("a reply does not match the request")

    def _value(self, data: bytes, start: int, length: int, used: int) -> int:
        if length < 0:
            self._miss()
            return used
        is_row = length == self._row_bytes + _HEADER * self._versioned
        if not is_row and not (self._versioned and length == _HEADER):
            self.wrong_length = max(length, 1)
            self._left.append(self._positions[self._next])
            self._skip = length + 2
            return used
        if len(data) < start + length + 2:
            return 0
        if data[start + length : start + length + 2] != b"\r\n":
            raise ProtocolError("a value does not end where it should")
        self._store(data[start : start + length], self._positions[self._next])
        self._end_element()
        return used + length + 2

    def _store(self, value: bytes, position: int) -> None:
        version = int.from_bytes(value[:8], "little") if self._versioned else 0
        is_row = len(value) != _HEADER or not self._versioned
        if self._versioned and version < (self._oldest_row if is_row else self._oldest_tombstone):
            self._left.append(position)
            return
        self._versions[position] = version
        if is_row:
            row: Any = np.frombuffer(value, np.uint8, self._row_bytes, _HEADER * self._versioned)
            self._rows[position] = row
            self._source[position] = self._code

    def _miss(self) -> None:
        self._left.append(self._positions[self._next])
        self._end_element()

    def _end_element(self) -> None:
        self._next += 1
        self._element += 1
        if self._element == self._counts[self._reply]:
            self._next_reply()

    def _next_reply(self) -> None:
        self._element = -1
        self._reply += 1


def _number(text: bytes) -> int:
    digits = text[1:] if text.startswith(b"-") else text
    if not digits.isdigit() or len(digits) > 10:
        raise ProtocolError("a reply has no length")
    return int(text)
