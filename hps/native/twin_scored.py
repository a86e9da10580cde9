"""NumPy twin of the scored table (include/hps/scored_table.hpp): the executable reference.

It defines contents, placement, scores and evictions. A batch of writes is applied in rounds: a round has at
most one key of each bucket, and the keys of a bucket stay in their order. Buckets do not depend on one
another, so the result is that of one key after the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import IntEnum
from threading import RLock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.native.twin_cache import mixed
from hps.types import IndexArray, KeyArray

SLOTS = 128
"""Slots of a bucket."""
MOST_BUCKETS, MOST_DOUBLINGS = 2**32 - 1, 24
_MOST = np.uint64(2**64 - 1)
_LOW = np.uint64(2**32 - 1)

Scores = NDArray[np.uint64]
Mask = NDArray[np.bool_]
Evicted = tuple[KeyArray, NDArray[Any], Scores]
"""Keys (n,), rows (n, dim) and scores (n,)."""


class ScoreRule(IntEnum):
    """The score that a write gives to a row, from a base and the caller's scores (1 if there are none).

    ``KEEP``: unchanged. ``BASE``: the base. ``ADD``: the caller's, added to the former, up to 2^64 - 1; a
    new row is always admitted. ``EPOCH_ADD``: the base, with the caller's low 32 bits added to the former
    ones, up to 2^32 - 1. ``GIVEN``: the caller's.
    """

    KEEP = 0
    BASE = 1
    ADD = 2
    EPOCH_ADD = 3
    GIVEN = 4


class Write(IntEnum):
    """What a write does with the keys it finds, and with those it misses.

    ``ASSIGN`` replaces the rows found. ``INSERT`` also inserts the others. ``FIND_OR_INSERT`` inserts the
    others, and copies the rows found to the caller. ``ACCUMULATE`` adds to the rows found whose flag is set,
    and inserts the others whose flag is not set.
    """

    INSERT = 0
    FIND_OR_INSERT = 1
    ASSIGN = 2
    ACCUMULATE = 3


class DoublingTable(ABC):
    """A table that grows by doubling its buckets, up to ``max_buckets``."""

    buckets: int
    max_buckets: int
    _base: int
    _lock: Any

    def set_max_buckets(self, max_buckets: int) -> None:
        """Change how far the table may grow; at least to its present size."""
        with self._lock:
            if not self.buckets <= max_buckets <= MOST_BUCKETS:
                raise ValueError("max_buckets must be at least buckets, and less than 2^32")
            self.max_buckets = max_buckets

    def reserve(self, buckets: int) -> None:
        """Double the buckets until there are at least ``buckets``. Nothing is evicted."""
        with self._lock:
            while self.buckets < buckets:
                most = self._base << MOST_DOUBLINGS
                if 2 * self.buckets > min(self.max_buckets, most):
                    raise ValueError("more buckets than max_buckets, or 2^24 times the first ones")
                self._double()

    @abstractmethod
    def _double(self) -> None:
        """Double the buckets, under the lock."""


class ScoredTable(DoublingTable):
    """Rows with scores by key, in ``buckets`` of 128 slots, which may double up to ``max_buckets``.

    ``like (0, dim)`` gives the rows' dim and dtype. A key may be in any slot of its one bucket. A new key
    takes the first free slot of its home half, else of the other half, or replaces the row with the lowest
    score (of equal ones the first) unless its own is lower. A row's number is that of its slot, ``128 *
    bucket + slot``.

    Thread-safe: all methods may run in parallel; each key's change is atomic. The compiled twin raises
    TypeError or ValueError for arrays that do not fit; this one does not check them.
    """

    def __init__(self, buckets: int, max_buckets: int, like: NDArray[Any]) -> None:
        if not 0 < buckets <= max_buckets <= MOST_BUCKETS:
            raise ValueError("a table has 1 to 2^32 - 1 buckets")
        self.like, self.max_buckets = like, max_buckets
        self._base, self._lock = buckets, RLock()
        self._allocate(buckets)

    def _allocate(self, buckets: int) -> None:
        shape = (buckets, SLOTS)
        self.buckets, self.size = buckets, 0
        self._keys, self._scores = np.zeros(shape, np.int64), np.zeros(shape, np.uint64)
        self._occupied = np.zeros(shape, bool)
        self._rows = np.zeros((buckets * SLOTS, self.like.shape[1]), self.like.dtype)

    @staticmethod
    def bytes_for(buckets: int, row_bytes: int) -> int:
        """Return the bytes of ``buckets`` full buckets."""
        return buckets * SLOTS * (17 + row_bytes)

    @property
    def rows(self) -> NDArray[Any]:
        """The memory of all rows (128 * buckets, dim), by number."""
        return self._rows

    def _buckets_of(self, keys: KeyArray) -> IndexArray:
        x = mixed(keys)
        home = ((x >> np.uint64(32)) * np.uint64(self._base)) >> np.uint64(32)
        segment = x & np.uint64(self.buckets // self._base - 1)
        buckets: IndexArray = (segment * np.uint64(self._base) + home).view(np.int64)
        return buckets

    # -- reading ----------------------------------------------------------------------------------

    def find_rows(self, keys: KeyArray) -> IndexArray:
        """Return the number of each key's row (n,), -1 for missing keys."""
        with self._lock:
            buckets = self._buckets_of(keys)
            found, slots = self._search(buckets, keys)
            return np.where(found, buckets * SLOTS + slots, -1)

    def _search(self, buckets: IndexArray, keys: KeyArray) -> tuple[Mask, IndexArray]:
        equal = self._occupied[buckets] & (self._keys[buckets] == keys[:, None])
        return equal.any(1), equal.argmax(1)

    def find(self, keys: KeyArray, rows: NDArray[Any] | None, scores: Scores | None) -> Mask:
        """Copy the rows found to ``rows (n, dim)`` and their scores to ``scores (n,)``; return which were
        found.

        Entries of missing keys stay as they are.
        """
        with self._lock:
            numbers = self.find_rows(keys)
            found: Mask = numbers >= 0
            if rows is not None:
                rows[found] = self._rows[numbers[found]]
            if scores is not None:
                scores[found] = self._scores.reshape(-1)[numbers[found]]
            return found

    def export(
        self, first: int, slots: int, with_rows: bool
    ) -> tuple[KeyArray, Scores, NDArray[Any] | None]:
        """Return keys, scores and rows of the occupied slots among ``slots`` from number ``first`` on."""
        with self._lock:
            numbers = first + np.flatnonzero(self._occupied.reshape(-1)[first : first + slots])
            keys, scores = self._keys.reshape(-1)[numbers], self._scores.reshape(-1)[numbers]
            return keys, scores, self._rows[numbers] if with_rows else None

    # -- writing ----------------------------------------------------------------------------------

    def write(
        self,
        operation: int,
        keys: KeyArray,
        rows: NDArray[Any] | None,
        accumulate: Mask | None,
        rule: int,
        base: int,
        scores: Scores | None,
        with_evicted: bool,
    ) -> tuple[Mask, Evicted | None]:
        """Apply ``operation`` (a `Write`) to each key in turn; return which keys were found before it.

        ``rule`` (a `ScoreRule`), ``base`` and ``scores (n,)`` give the rows' scores. ``rows`` may be None
        with ``ASSIGN``, which then changes scores only; ``FIND_OR_INSERT`` writes to it. ``accumulate`` are
        the flags of ``ACCUMULATE``. ``with_evicted``: also return the rows that were replaced, and those of
        the caller that were not admitted, in the order of the keys.
        """
        given = np.ones(len(keys), np.uint64) if scores is None else scores
        found, evicted = np.zeros(len(keys), bool), _EvictedRows(self.like)
        with self._lock:
            buckets = self._buckets_of(keys)
            for at in _rounds(buckets):
                k, b = keys[at], buckets[at]
                hit, slot = self._search(b, k)
                found[at] = hit
                change, place = hit, ~hit
                if operation == Write.ASSIGN:
                    place = np.zeros(len(at), bool)
                elif operation == Write.ACCUMULATE and accumulate is not None:
                    change, place = hit & accumulate[at], ~hit & ~accumulate[at]
                self._change(operation, at[change], b[change], slot[change], rows)
                score = self._scores[b[change], slot[change]]
                score = _updated(ScoreRule(rule), base, given[at[change]], score)
                self._scores[b[change], slot[change]] = score
                if rows is not None:
                    self._place(at[place], b[place], k[place], rows, rule, base, given, evicted)
        return found, evicted.arrays() if with_evicted else None

    def _change(
        self, operation: int, at: IndexArray, b: IndexArray, slot: IndexArray, rows: Any
    ) -> None:
        numbers = b * SLOTS + slot
        if operation == Write.FIND_OR_INSERT:
            rows[at] = self._rows[numbers]
        elif operation == Write.ACCUMULATE:
            self._rows[numbers] += rows[at]
        elif rows is not None:
            self._rows[numbers] = rows[at]

    def _place(
        self,
        at: IndexArray,
        b: IndexArray,
        keys: KeyArray,
        rows: NDArray[Any],
        rule: int,
        base: int,
        given: Scores,
        evicted: _EvictedRows,
    ) -> None:
        """Insert new keys, at most one of a bucket."""
        score = _initial(ScoreRule(rule), base, given[at])
        home = (mixed(keys) >> np.uint64(31) & np.uint64(1)).view(np.int64)[:, None]
        order = np.arange(SLOTS) ^ home * (SLOTS // 2)  # the slots of the home half first
        free = ~self._occupied[b[:, None], order]
        full = ~free.any(1)
        first = np.take_along_axis(order, free.argmax(1)[:, None], 1)[:, 0]
        slot = np.where(full, self._scores[b].argmin(1), first)
        lowest = self._scores[b, slot]
        refused = full & (score < lowest) & (rule != ScoreRule.ADD)
        evicted.add(at[refused], keys[refused], rows[at[refused]], score[refused])
        out = full & ~refused
        evicted.add(
            at[out],
            self._keys[b[out], slot[out]],
            self._rows[b[out] * SLOTS + slot[out]],
            lowest[out],
        )
        at, b, keys, slot = (each[~refused] for each in (at, b, keys, slot))
        self._keys[b, slot], self._scores[b, slot] = keys, score[~refused]
        self._rows[b * SLOTS + slot] = rows[at]
        self.size += len(at) - int(out.sum())
        self._occupied[b, slot] = True

    def erase(self, keys: KeyArray, scores: Scores | None) -> Mask:
        """Erase ``keys``, with ``scores (n,)`` only those with this score; return which were erased."""
        with self._lock:
            numbers = self.find_rows(keys)
            there = np.flatnonzero(numbers >= 0)
            if scores is not None:
                there = there[self._scores.reshape(-1)[numbers[there]] == scores[there]]
            there = there[np.unique(numbers[there], return_index=True)[1]]
            self._occupied.reshape(-1)[numbers[there]] = False
            self.size -= len(there)
            erased = np.zeros(len(keys), bool)
            erased[there] = True
            return erased

    # -- the table as a whole -----------------------------------------------------------------------

    def clear(self) -> None:
        """Erase all rows."""
        with self._lock:
            self._occupied[:] = False
            self.size = 0

    def _double(self) -> None:
        half, rows = self.buckets, self._rows
        keys, scores, occupied = self._keys, self._scores, self._occupied
        self._allocate(2 * half)
        self._keys[:half], self._scores[:half], self._occupied[:half] = keys, scores, occupied
        self._rows[: half * SLOTS] = rows
        all_keys, all_scores = keys.reshape(-1), scores.reshape(-1)
        at = np.flatnonzero(occupied.reshape(-1))
        self.size = len(at)
        to = self._buckets_of(all_keys[at])
        at, to = at[to >= half], to[to >= half]
        self._occupied.reshape(-1)[at] = False
        self.size -= len(at)
        moved, rows, of_moved = all_keys[at], rows[at], all_scores[at]
        none = _EvictedRows(self.like)  # all find a free slot
        for i in _rounds(to):
            self._place(i, to[i], moved[i], rows, ScoreRule.GIVEN, 0, of_moved, none)


class _EvictedRows:
    """Collects evicted rows by the position of the key that evicted them."""

    def __init__(self, like: NDArray[Any]) -> None:
        none = (np.empty(0, np.int64), np.empty(0, np.int64), like[:0], np.empty(0, np.uint64))
        self._pieces: list[tuple[Any, ...]] = [none]

    def add(self, at: IndexArray, keys: KeyArray, rows: NDArray[Any], scores: Scores) -> None:
        self._pieces.append((at, keys, rows, scores))

    def arrays(self) -> Evicted:
        at, *arrays = (np.concatenate(pieces) for pieces in zip(*self._pieces, strict=True))
        order = np.argsort(at, kind="stable")
        keys, rows, scores = (array[order] for array in arrays)
        return keys, rows, scores


def _rounds(buckets: IndexArray) -> list[IndexArray]:
    """Split the positions of ``buckets (n,)``: round i has the i-th position of each bucket."""
    if not len(buckets):
        return []
    order = np.argsort(buckets, kind="stable")
    ordered = buckets[order]
    turns = np.arange(len(order)) - np.searchsorted(ordered, ordered)
    by_turn = order[np.argsort(turns, kind="stable")]
    return np.split(by_turn, np.cumsum(np.bincount(turns))[:-1])


def _initial(rule: ScoreRule, base: int, given: Scores) -> Scores:
    if rule is ScoreRule.EPOCH_ADD:
        return np.uint64(base) | (given & _LOW)
    if rule in (ScoreRule.ADD, ScoreRule.GIVEN):
        return given
    return np.full(len(given), base, np.uint64)


def _updated(rule: ScoreRule, base: int, given: Scores, former: Scores) -> Scores:
    if rule is ScoreRule.KEEP:
        return former
    if rule is ScoreRule.ADD:
        total = former + given
        return np.where(total < former, _MOST, total)
    if rule is ScoreRule.EPOCH_ADD:
        return np.uint64(base) | np.minimum((former & _LOW) + (given & _LOW), _LOW)
    return _initial(rule, base, given)
