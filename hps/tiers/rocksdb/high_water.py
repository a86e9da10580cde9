"""High-water marks: a write newer than every earlier one needs no read.

Streams bring rows nearly in the order of their versions, and reading a stored version costs more than
the rest of an update. So the highest version ever written is kept per bucket of a table's keys. A write
that is not older than its bucket's mark applies, whatever is stored. A write that is older may still be
newer than the stored row of its key, so the stored version is read.

Marks are in memory. Their upper bound is stored in the column family ``default`` under ``highest:<column
family>``, u64 little-endian. It is written before the rows it covers, and after a start all marks begin at
it. If a table was written to without a bound, its marks are unknown, and every write costs a read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from rocksdict import Rdict, WriteBatch

from hps.tiers.rocksdb.layout import CodeArray
from hps.tiers.rocksdb.load import LoadRecords
from hps.types import IndexArray, VersionArray

Write = Callable[[Callable[[WriteBatch], None]], None]
"""``write(fill)`` writes the batch that ``fill`` fills, through the log."""

_MOST_BUCKETS, _LEAST_BUCKETS = 1 << 16, 1 << 6
_ROWS_A_BUCKET = 8
# How far the stored bound is ahead of the marks, in versions: ten seconds (`make_version`). The bound is
# written once in that time; after a start, a stream costs reads for as long.
_AHEAD = 10_000 << 20
_HIGHEST = 2**64 - 1
_SPREAD = np.uint64(0x9E37_79B9_7F4A_7C15)  # 2^64 / the golden ratio: spreads neighbours far apart


class HighWaterMarks:
    """Marks of one column family with about ``rows`` rows. Not thread-safe."""

    def __init__(
        self, db: Callable[[], Rdict], records: LoadRecords, family: str, rows: Callable[[], int]
    ) -> None:
        self._db = db
        self._records = records
        self._family = family
        self._rows = rows
        self._name = f"highest:{family}".encode()
        self._marks: VersionArray | None = None
        self._bound = 0

    def at_or_above(self, code: CodeArray, versions: VersionArray) -> NDArray[np.bool_]:
        """Return a mask (n,) of the writes that need no read: not older than their bucket's mark.

        ``code (n,)`` and ``versions (n,)``: the writes."""
        marks = self._known()
        newer: NDArray[np.bool_] = versions >= marks[_buckets(code, len(marks))]
        return newer

    def rise(self, code: CodeArray, versions: VersionArray, write: Write) -> None:
        """Raise the marks for writes of ``versions (n,)`` to ``code (n,)``; call it before the writes.

        ``write`` stores a new upper bound if that is necessary."""
        if not len(code):
            return
        marks = self._known()
        highest = int(versions.max())
        if highest > self._bound:
            bound = min(highest + _AHEAD, _HIGHEST)
            write(lambda batch: batch.put(self._name, bound.to_bytes(8, "little")))
            self._bound = bound
        np.maximum.at(marks, _buckets(code, len(marks)), versions)

    def renew(self) -> None:
        """Read the marks' start again after a bulk load, whose rows have another version."""
        self._marks = None

    def clear(self) -> None:
        """Reset for an empty table."""
        self._db().delete(self._name)
        self._marks = None

    def _known(self) -> VersionArray:
        if self._marks is None:
            number = 1 << (self._rows() // _ROWS_A_BUCKET).bit_length()
            number = min(_MOST_BUCKETS, max(_LEAST_BUCKETS, number))
            self._bound = self._begin()
            self._marks = np.full(number, self._bound, np.uint64)
        return self._marks

    def _begin(self) -> int:
        noted, loaded = self._db().get(self._name), self._records.get(self._family)
        if noted is None and self._records.streamed([self._family]):
            return _HIGHEST
        bound = 0 if noted is None else int.from_bytes(noted, "little")
        return max(bound, 0 if loaded is None else loaded.version)


def _buckets(code: CodeArray, number: int) -> IndexArray:
    """Map (n,) codes to (n,) bucket numbers below ``number``, a power of two."""
    spread = code * _SPREAD >> np.uint64(65 - number.bit_length())
    return spread.view(np.int64)
