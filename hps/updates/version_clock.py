"""Versions from the clock, for rows that come without one."""

from __future__ import annotations

import secrets
import threading
import time

import numpy as np

from hps.types import VERSION_SEQUENCE_BITS, VersionArray

OFFSETS = 1 << (VERSION_SEQUENCE_BITS - 1)
"""Number of clock offsets; up to so many rows per millisecond, versions keep the millisecond."""
_HIGHEST = 2**64 - 1


class VersionClock:
    """Versions that only grow: Unix ms << 20, plus the clock's ``offset``, plus one for each row.

    The offset, random by default, keeps two processes that write a key in the same millisecond from
    giving it equal versions: each store would then keep the row that reached it last. When the system's
    clock stands still, is set back, or gives fewer versions than there are rows, versions continue
    after the last one. Thread-safe."""

    def __init__(self, offset: int | None = None) -> None:
        self._lock = threading.Lock()
        self._next = 0
        self._offset = secrets.randbelow(OFFSETS) if offset is None else offset

    def take(self, unix_ms: int, n: int) -> VersionArray:
        """The next ``n`` versions, none of them before ``unix_ms``."""
        with self._lock:
            first = max((unix_ms << VERSION_SEQUENCE_BITS) + self._offset, self._next)
            self._next = first + n
        return np.arange(first, first + n, dtype=np.uint64)

    def now(self) -> int:
        """The next version, of the current time."""
        return int(self.take(time.time_ns() // 1_000_000, 1)[0])

    def above(self, version: int, stored: VersionArray) -> VersionArray:
        """Make versions (n,): ``version``, or one above ``stored (n,)`` where that is not lower.

        0 where no version is left above the stored one."""
        versions = np.full(len(stored), version, np.uint64)
        ahead = stored >= version
        versions[ahead] = stored[ahead] + np.uint64(1 + self._offset)
        versions[stored > _HIGHEST - 1 - self._offset] = 0
        return versions
