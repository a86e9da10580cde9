"""The NumPy twin of a table on the device: where keys are placed, what is dropped for them.

One key after the other, as the kernels do when keys don't compete for a bucket; where they do, the kernels
may settle on another order, never on another result for the keys themselves. Written to be obvious.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.cuda import layout
from hps.cuda.layout import (
    AGES,
    EMPTY,
    MARGIN,
    PREFER,
    ROW_MASK,
    TOMBSTONE,
    WAYS,
    Shape,
)
from hps.types import KeyArray, VectorArray, VersionArray


class TwinTable:
    """Rows of ``dim`` values in host arrays shaped as the device's. One thread at a time."""

    def __init__(self, shape: Shape, dim: int, dtype: Any = np.float32) -> None:
        self.shape = shape
        self.keys = np.repeat(layout.fillers(shape.buckets)[:, None], WAYS, axis=1)
        self.words = np.arange(shape.capacity, dtype=np.uint32).reshape(-1, WAYS) | np.uint32(EMPTY)
        self.stamps = np.zeros((shape.buckets, WAYS), np.uint8)
        self.rows = np.zeros((shape.rows, dim), dtype)
        self.versions = np.zeros(shape.rows, np.uint64)
        self.spare = np.arange(shape.capacity, shape.rows, dtype=np.uint32)
        self.now = 0
        self.evicted = 0
        self._admitted = 0

    def find(self, key: int) -> tuple[int, int] | None:
        """The bucket and slot that carry ``key``, be it as a row, a tombstone or as what was there last."""
        for bucket in self._both(key):
            at = np.flatnonzero(self.keys[bucket] == key)
            if len(at):
                return bucket, int(at[0])
        return None

    def fetch(
        self, keys: KeyArray, oldest_tombstone: int = 0
    ) -> tuple[VectorArray, NDArray[np.uint32], VersionArray]:
        """``vectors (n, dim)``, ``words (n,)`` (`EMPTY` for a miss) and ``versions (n,)``; stamps hits."""
        vectors = np.zeros((len(keys), self.rows.shape[1]), self.rows.dtype)
        words = np.full(len(keys), EMPTY, np.uint32)
        versions = np.zeros(len(keys), np.uint64)
        for i, key in enumerate(keys.tolist()):
            place = self.find(key)
            if place is None or self.words[place] & EMPTY:
                continue
            word = int(self.words[place])
            version = self.versions[word & ROW_MASK]
            if word & TOMBSTONE and version < oldest_tombstone:
                continue
            self.stamps[place] = self.now
            words[i], versions[i] = word, version
            if not word & TOMBSTONE:
                vectors[i] = self.rows[word]
        return vectors, words, versions

    def write(
        self,
        keys: KeyArray,
        vectors: VectorArray | None,
        versions: VersionArray,
        oldest_tombstone: int = 0,
        *,
        update: bool = False,
    ) -> None:
        """Insert or update unique ``keys``; deletions where ``vectors`` is None. At most `spare` keys."""
        admitted = []
        for i, key in enumerate(keys.tolist()):
            row = None if vectors is None else vectors[i]
            place = self.find(key)
            if place is not None and not self.words[place] & EMPTY:
                self._replace(i, place, row, int(versions[i]), oldest_tombstone, update)
            elif not update:
                admitted.append(self._admit(place, key, row, versions[i]))
        self._tick(len(admitted))
        for place in admitted:
            self.stamps[place] = self.now if vectors is not None else (self.now + 1) % AGES

    def evict(self, keys: KeyArray) -> None:
        for key in keys.tolist():
            place = self.find(key)
            if place is not None:
                self.words[place] = int(self.words[place]) & ROW_MASK | EMPTY

    def resident(self) -> KeyArray:
        """The keys that have a row, ascending."""
        return np.sort(self.keys[self.words < TOMBSTONE])

    def _both(self, key: int) -> list[int]:
        both: list[int] = layout.buckets_of(np.array([key], np.int64), self.shape.buckets)[
            0
        ].tolist()
        return both

    def _replace(
        self,
        i: int,
        place: tuple[int, int],
        row: VectorArray | None,
        version: int,
        oldest_tombstone: int,
        update: bool,
    ) -> None:
        word = int(self.words[place])
        held = int(self.versions[word & ROW_MASK])
        forgotten = bool(word & TOMBSTONE) and held < oldest_tombstone
        if (forgotten if update else not forgotten and version < held) or (
            update and version < held
        ):
            return
        fresh = int(self.spare[i])
        self.spare[i] = word & ROW_MASK
        self._fill(place, fresh, row, version)
        if row is not None and not update:
            self.stamps[place] = self.now

    def _admit(
        self, stale: tuple[int, int] | None, key: int, row: VectorArray | None, version: Any
    ) -> tuple[int, int]:
        place = stale or self._choose(*self._both(key))
        word = int(self.words[place])
        self.evicted += word < TOMBSTONE
        self.keys[place] = key
        self._fill(place, word & ROW_MASK, row, version)
        self.stamps[place] = self.now
        return place

    def _tick(self, admitted: int) -> None:
        ticks, self._admitted = divmod(
            self._admitted + admitted, self.shape.capacity // layout.TICKS_A_TURN
        )
        self.now = (self.now + ticks) % AGES

    def _fill(
        self, place: tuple[int, int], number: int, row: VectorArray | None, version: Any
    ) -> None:
        self.versions[number] = version
        if row is not None:
            self.rows[number] = row
        self.words[place] = number | (TOMBSTONE if row is None else 0)

    def _choose(self, first: int, second: int) -> tuple[int, int]:
        """An empty slot if there is one, else the stalest; see `layout.PREFER` and `layout.MARGIN`."""
        free = [np.flatnonzero(self.words[b] & EMPTY) for b in (first, second)]
        if len(free[0]) > WAYS - PREFER:
            return first, int(free[0][0])
        if len(free[0]) or len(free[1]):
            bucket, at = (second, free[1]) if len(free[1]) > len(free[0]) else (first, free[0])
            return bucket, int(at[0])
        now = np.uint8(self.now)
        ages = [(now - self.stamps[b]) % AGES for b in (first, second)]
        scores = np.concatenate([ages[0] + MARGIN, ages[1]])
        best = int(scores.argmax())
        return (first, best) if best < WAYS else (second, best - WAYS)
