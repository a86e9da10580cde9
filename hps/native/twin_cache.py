"""NumPy twins of the CPU cache's probe (include/hps/bucket_table.hpp), vectorised over the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.native.twin import partition_hash
from hps.types import IndexArray, KeyArray, SourceArray, VectorArray, VersionArray

EMPTY, ROW, TOMBSTONE = 0, 1, 2
"""States of a slot."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)


def cache_buckets(keys: KeyArray, buckets: int) -> IndexArray:
    """(n, 2): the two buckets that each of ``keys (n,)`` may live in, of 0 < ``buckets`` < 2^32 - 1."""
    h = partition_hash(keys)
    h *= _GOLDEN
    both = np.empty((len(keys), 2), np.uint64)
    np.right_shift(h, _HALF, out=both[:, 0])
    np.bitwise_and(h, _LOW, out=both[:, 1])
    both *= np.uint64(buckets)
    both >>= _HALF
    return both.view(np.int64)


class CacheProbe:
    """Reads the arrays of a cache, which it keeps. Slot = bucket * ways + way.

    ``keys`` and ``states`` (buckets, ways); ``stamps (slots,) uint32``, ``versions (slots,) uint64``
    and ``rows (slots, dim)``; ``code`` is the source code reported for a row.
    """

    def __init__(
        self,
        keys: KeyArray,
        states: NDArray[np.uint8],
        stamps: NDArray[np.uint32],
        versions: VersionArray,
        rows: NDArray[Any],
        code: int,
    ) -> None:
        self._keys, self._states, self._stamps = keys, states, stamps
        self._versions, self._rows, self._code = versions, rows, code

    def find(self, keys: KeyArray) -> IndexArray:
        """(n,) the slot that holds each of ``keys (n,)``, or -1."""
        buckets, ways = self._keys.shape
        both = cache_buckets(keys, buckets)
        match = self._keys[both] == keys[:, None, None]
        match &= self._states[both] != EMPTY
        flat = match.reshape(len(keys), 2 * ways)
        at = flat.argmax(axis=1)
        every = np.arange(len(keys))
        slots: IndexArray = both[every, at // ways] * ways + at % ways
        slots[~flat[every, at]] = -1
        return slots

    def fetch(
        self,
        keys: KeyArray,
        missing: IndexArray,
        clock: int,
        oldest_tombstone: int,
        out: VectorArray,
        versions: VersionArray,
        source: SourceArray,
    ) -> IndexArray | None:
        """Answer ``keys[missing]`` into ``out (n, dim)``, ``versions (n,)`` and ``source (n,)``; see
        `Part`. Returns the positions still missing, None when there are none.

        Hits get the stamp ``clock``; tombstones older than ``oldest_tombstone`` count as not there. The
        compiled twin raises TypeError or ValueError for arrays that do not fit; this one trusts them.
        """
        slots = self.find(keys[missing])
        state = self._states.reshape(-1)[slots]
        state[slots < 0] = EMPTY
        state[(state == TOMBSTONE) & (self._versions[slots] < oldest_tombstone)] = EMPTY
        hit = state != EMPTY
        self._stamps[slots[hit]] = clock
        versions[missing[hit]] = self._versions[slots[hit]]
        row = state == ROW
        out[missing[row]] = self._rows[slots[row]]
        source[missing[row]] = self._code
        return None if hit.all() else missing[~hit]
