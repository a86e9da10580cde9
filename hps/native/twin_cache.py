"""NumPy twins of the CPU cache's kernels (include/hps/bucket_table.hpp), vectorised over the batch."""

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
    """Works on the arrays of a cache, which it keeps. Slot = bucket * ways + way.

    ``keys`` and ``states`` (buckets, ways); ``stamps (slots,) uint32``, 0 in an empty slot; ``versions
    (slots,) uint64`` and ``rows (slots, dim)``; ``code`` is the source code reported for a row.
    Takes no lock. The compiled twin raises TypeError or ValueError for arrays that do not fit; this
    one trusts them.
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

        Hits get the stamp ``clock``; tombstones older than ``oldest_tombstone`` count as not there.
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

    def gather(self, keys: KeyArray, clock: int, out: VectorArray) -> bool:
        """Write the row of each of ``keys (n,)``, which may repeat, to ``out (n, dim)`` and stamp it with
        ``clock``. False when one has no row; what is in ``out`` has no meaning then."""
        slots = self.find(keys)
        if (slots < 0).any() or (self._states.reshape(-1)[slots] != ROW).any():
            return False
        self._stamps[slots] = clock
        out[...] = self._rows[slots]
        return True

    def admit(
        self, keys: KeyArray, versions: VersionArray, rows: VectorArray | None, stamp: int
    ) -> tuple[int, int]:
        """Give each of ``keys``, distinct and not resident, a slot in the bucket with more room, else
        in the one with the older stamp; there the slot with the oldest stamp. Without ``rows``:
        tombstones. Returns how many rows and tombstones had to go.

        The compiled twin serves the keys one after the other, this one in rounds: those of one batch
        that crowd into a bucket may lie elsewhere.
        """
        both, left = cache_buckets(keys, len(self._keys)), np.arange(len(keys))
        states, displaced = self._states.reshape(-1), np.zeros(3, np.int64)
        while len(left):
            slots, placed = self._choose(both)
            at = left[placed]
            displaced += np.bincount(states[slots], minlength=3)
            self._keys.reshape(-1)[slots] = keys[at]
            self._versions[slots] = versions[at]
            self._stamps[slots] = stamp
            if rows is not None:
                self._rows[slots] = rows[at]
            states[slots] = TOMBSTONE if rows is None else ROW
            both, left = both[~placed], left[~placed]
        return int(displaced[ROW]), int(displaced[TOMBSTONE])

    def _choose(self, both: IndexArray) -> tuple[IndexArray, NDArray[np.bool_]]:
        """For each row of ``both (n, 2)`` a slot, and the mask (n,) of the rows that got one.

        A bucket takes no more keys in one round than a quarter of its room, or one when it is full,
        lest it fill up and drop rows while the other bucket has room.
        """
        room = np.count_nonzero(self._states[both] == EMPTY, axis=2)
        stamps = self._stamps.reshape(self._keys.shape)
        oldest = stamps[both].min(axis=2)
        second = (room[:, 1] > room[:, 0]) | (
            (room[:, 1] == room[:, 0]) & (oldest[:, 1] < oldest[:, 0])
        )
        every = np.arange(len(both))
        bucket, room = both[every, second.view(np.int8)], room[every, second.view(np.int8)]
        rank = _rank_within_equals(bucket)
        placed = rank < np.maximum((room + 3) // 4, 1)
        by_age = np.argsort(stamps[bucket[placed]], axis=1, kind="stable")
        way = np.take_along_axis(by_age, rank[placed, None], axis=1)[:, 0]
        return bucket[placed] * self._keys.shape[1] + way, placed


def _rank_within_equals(values: IndexArray) -> IndexArray:
    """(n,) how many earlier entries have the same value: [5, 7, 5, 5] -> [0, 0, 1, 2]."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    first = np.empty(len(values), bool)
    first[:1] = True
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    starts = np.flatnonzero(first)
    rank = np.empty(len(values), np.int64)
    rank[order] = np.arange(len(values)) - starts[np.cumsum(first) - 1]
    return rank
