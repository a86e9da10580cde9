"""NumPy twin of a table on the device: placement of keys and eviction.

It works key by key, as the kernels do when keys do not compete for a slot; when they do, the kernels may
use another order, but never give another result for the keys themselves. Written to be obvious.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.cuda import layout
from hps.cuda.layout import (
    COUNT_BITS,
    EMPTY,
    HALF,
    MEMBER,
    MEMBERS,
    SCORE_MASK,
    TOMBSTONE,
    EvictionPolicy,
    GpuTableShape,
    eviction_ranks,
)
from hps.types import KeyArray, VectorArray, VersionArray

AGE = layout.TICKS_A_TURN // layout.AGES_A_TURN
Place = tuple[int, int]
"""A half and a slot in it."""
_NO_CANDIDATE = 1 << 65
"""The rank of an empty slot that must not be filled: above all others."""


class TwinTable:
    """Rows of ``dim`` values in host arrays shaped like the device's. One thread at a time.

    ``member``: of the tables that share the rows, the one that is read and written."""

    def __init__(
        self,
        shape: GpuTableShape,
        dim: int,
        dtype: Any = np.float32,
        policy: EvictionPolicy = EvictionPolicy.LRU,
    ) -> None:
        self.shape = shape
        self.policy = policy
        self.member = 0
        self.keys = np.zeros((2 * shape.buckets, HALF), np.int64)
        numbers = np.arange(shape.slots, dtype=np.uint32)
        if shape.roomy:
            numbers[:] = shape.row_mask
        self.words = numbers.reshape(-1, HALF) | np.uint32(EMPTY)
        scores = np.uint64 if policy is EvictionPolicy.SCORE else np.uint32
        self.scores = np.zeros((2 * shape.buckets, HALF), scores)
        self.rows = np.zeros((shape.rows, dim), dtype)
        self.versions = np.zeros(shape.rows, np.uint64)
        self.spare = np.arange(shape.rows - shape.spare, shape.rows, dtype=np.uint32)
        self._open = True
        self.clock = 1
        self.epoch = 0
        self.evicted = 0
        self.dropped = 0
        self._admitted = 0
        self._began = 0, self.clock

    @property
    def now(self) -> int:
        """The score after a hit: the clock, or the epoch above uses or ticks."""
        if self.policy is EvictionPolicy.LRU:
            return self.clock & SCORE_MASK
        ticks = 0
        if self.policy is EvictionPolicy.EPOCH_LRU:
            if self.epoch != self._began[0]:
                self._began = self.epoch, self.clock
            ticks = min(self.clock - self._began[1], (1 << COUNT_BITS) - 1 - AGE)
        return (self.epoch << COUNT_BITS | ticks) & SCORE_MASK

    def find(self, key: int) -> Place | None:
        """Return the slot of the row or tombstone of ``key``."""
        for half in self._halves(key):
            at = np.flatnonzero((self.keys[half] == key) & (self.words[half] & self._hidden == 0))
            if len(at):
                return half, int(at[0])
        return None

    @property
    def _hidden(self) -> np.uint32:
        return np.uint32(self.shape.hidden(self.member))

    def _number(self, place: Place) -> int:
        return int(self.words[place]) & self.shape.row_mask

    def _seers(self, place: Place) -> int:
        """The bits of the members that see a slot's row or tombstone."""
        word = int(self.words[place])
        return ~word & MEMBERS if self.shape.has_members and not word & EMPTY else 0

    def fetch(
        self, keys: KeyArray, oldest_tombstone: int = 0
    ) -> tuple[VectorArray, NDArray[np.uint32], VersionArray]:
        """Return ``vectors (n, dim)``, ``words (n,)`` (`EMPTY` for a miss) and ``versions (n,)``.

        Updates the scores of hits."""
        vectors = np.zeros((len(keys), self.rows.shape[1]), self.rows.dtype)
        words = np.full(len(keys), EMPTY, np.uint32)
        versions = np.zeros(len(keys), np.uint64)
        for i, key in enumerate(keys.tolist()):
            place = self.find(key)
            if place is None:
                continue
            word = int(self.words[place])
            version = self.versions[self._number(place)]
            if word & TOMBSTONE and version < oldest_tombstone:
                continue
            self._stamp(place)
            words[i], versions[i] = word, version
            if not word & TOMBSTONE:
                vectors[i] = self.rows[self._number(place)]
        return vectors, words, versions

    def write(
        self,
        keys: KeyArray,
        vectors: VectorArray | None,
        versions: VersionArray,
        oldest_tombstone: int = 0,
        *,
        scores: NDArray[np.uint64] | None = None,
        members: NDArray[np.uint8] | None = None,
        update: bool = False,
    ) -> None:
        """Insert or update unique ``keys``, at most `batch`; delete them if ``vectors`` is None.

        ``members (n,)``: the members that have the same row, a bit each."""
        admitted = 0
        self._open = not self.shape.roomy or len(self.spare) >= self.shape.batch + len(keys)
        first = (
            0
            if self.policy is EvictionPolicy.SCORE
            else self.now + (self.policy is EvictionPolicy.LFU)
        )
        for i, key in enumerate(keys.tolist()):
            row = None if vectors is None else vectors[i]
            score = 0 if row is None else first if scores is None else int(scores[i])
            wanted = own = int(self._hidden) & MEMBERS
            if own and members is not None:
                wanted |= int(members[i]) * MEMBER & MEMBERS
            place = self.find(key)
            if place is not None:
                if self._outdated(place, int(versions[i]), oldest_tombstone, update):
                    continue
                seers = self._seers(place)
                if seers & ~wanted:
                    self.words[place] |= own
                    place = None
            if place is not None:
                by_time = self.policy.rule is EvictionPolicy.LRU and not update
                if scores is not None or by_time or (row is None and not update):
                    self.scores[place] = score
            else:
                seers = wanted
                if update or (wanted != own and self._shares(key, wanted, own, versions[i])):
                    continue
                for other in self._places(key) if wanted != own else ():
                    seers &= ~self._seers(other)
                place = self._choose(key, first if scores is None else score)
                if place is None:
                    self.dropped += 1
                    continue
                admitted += 1
                self.evicted += self.words[place] < TOMBSTONE
                self.keys[place], self.scores[place] = key, score
            self._fill(i, place, row, versions[i])
            if own:
                self.words[place] |= np.uint32(MEMBERS & ~seers)
        self.spare = self.spare[self.spare != self.shape.row_mask]
        ticks, self._admitted = divmod(
            self._admitted + admitted, max(1, self.shape.capacity // layout.TICKS_A_TURN)
        )
        self.clock += ticks

    def evict(self, keys: KeyArray) -> None:
        for key in keys.tolist():
            place = self.find(key)
            if place is None:
                continue
            self._hide(place)

    def expire(self, oldest: int) -> None:
        """Evict the rows with versions below ``oldest``."""
        for half, rank in np.argwhere(self.words & (self._hidden | TOMBSTONE) == 0).tolist():
            if self.versions[self._number((half, rank))] < oldest:
                self._hide((half, rank))

    def leave(self) -> None:
        """Evict all rows and tombstones of the member."""
        seen = np.argwhere(self.words & self._hidden == 0).tolist()
        for half, rank in seen:
            self._hide((half, rank))

    def _hide(self, place: Place) -> None:
        own = int(self._hidden) & MEMBERS
        if self._seers(place) & ~own:
            self.words[place] |= own
            return
        number = self._number(place)
        if self.shape.roomy:
            self.spare = np.append(self.spare, np.uint32(number))
            number = self.shape.row_mask
        self.words[place] = number | EMPTY

    def resident(self, least: int = 0) -> KeyArray:
        """Return the keys that have a row with a score of at least ``least``, ascending."""
        ranks: NDArray[Any] = self.scores
        if self.policy is not EvictionPolicy.SCORE:
            ranks = eviction_ranks(ranks.astype(np.int64), self.now)
            least = least and eviction_ranks(least, self.now)
        return np.sort(self.keys[(self.words & (self._hidden | TOMBSTONE) == 0) & (ranks >= least)])

    def _places(self, key: int) -> list[Place]:
        """The slots with a row or tombstone of ``key``, of any member."""
        halves = self._halves(key)
        at = np.argwhere((self.keys[halves] == key) & (self.words[halves] < EMPTY))
        return [(halves[choice], rank) for choice, rank in at.tolist()]

    def _shares(self, key: int, wanted: int, own: int, version: Any) -> bool:
        """Show the member the row of another one that has the same, if there is one; return whether."""
        for place in reversed(self._places(key)):
            same = self.versions[self._number(place)] == version
            if same and self._seers(place) & wanted and not int(self.words[place]) & TOMBSTONE:
                self.words[place] &= np.uint32(~own & layout.SCORE_MASK)
                return True
        return False

    def _halves(self, key: int) -> list[int]:
        halves: list[int] = layout.half_buckets(np.array([key], np.int64), self.shape.buckets)[
            0
        ].tolist()
        return halves

    def _stamp(self, place: Place) -> None:
        score, now = int(self.scores[place]), self.now
        if self.policy.rule is EvictionPolicy.LRU:
            if (now - score) & SCORE_MASK >= AGE:
                self.scores[place] = max(score, now)
        elif self.policy is EvictionPolicy.LFU:
            if (score ^ now) >> COUNT_BITS:
                self.scores[place] = now + 1
            elif (score + 1) % (1 << COUNT_BITS):
                self.scores[place] = score + 1

    def _outdated(self, place: Place, version: int, oldest_tombstone: int, update: bool) -> bool:
        held = int(self.versions[self._number(place)])
        expired = bool(int(self.words[place]) & TOMBSTONE) and held < oldest_tombstone
        return expired or version < held if update else not expired and version < held

    def _fill(self, i: int, place: Place, row: VectorArray | None, version: Any) -> None:
        """Write row and version into the i-th spare row, and swap it with the slot's row."""
        number = int(self.spare[i])
        self.spare[i] = self._number(place)
        self.versions[number] = version
        if row is not None:
            self.rows[number] = row
        self.words[place] = number | (TOMBSTONE if row is None else 0)

    def _choose(self, key: int, score: int) -> Place | None:
        """Choose a slot for ``key``; None if ``score`` is lower than all.

        An empty slot of the home half (unless it is the bucket's last and half of the second bucket is
        empty; in a roomy table, one of the last two and the second bucket is emptier), else of the emptier
        bucket, else the lowest score, where slots outside the home half must be lower by an `AGE`.
        """
        halves = self._halves(key)
        vacant = [np.flatnonzero(self.words[half] & EMPTY * self._open) for half in halves]
        in_first, in_second = len(vacant[0]) + len(vacant[1]), len(vacant[2]) + len(vacant[3])
        if self.shape.roomy:
            enough = in_first > 2 or in_second <= in_first
        else:
            enough = in_first > 1 or in_second < HALF
        if len(vacant[0]) and enough:
            order = [0]
        else:
            order = [2, 3] if in_second > len(vacant[1]) else [1]
        for choice in order:
            if len(vacant[choice]):
                return halves[choice], int(vacant[choice][0])
        if self.policy is EvictionPolicy.NONE:
            return None
        if self.policy is EvictionPolicy.SCORE:
            ranks = self.scores[halves].astype(object)  # 64 bits; tombstones are lower still
        else:
            ranks = eviction_ranks(self.scores[halves].astype(np.int64), self.now).astype(object)
        if self.policy.rule is EvictionPolicy.LRU:
            ranks[1:] += AGE
        ranks[self.words[halves] >= TOMBSTONE] = -1
        ranks[self.words[halves] >= EMPTY] = _NO_CANDIDATE
        best = int(ranks.reshape(-1).argmin())
        if self.words[halves].reshape(-1)[best] >= EMPTY:
            return None
        if self.policy is EvictionPolicy.SCORE and ranks.reshape(-1)[best] > score:
            return None
        return halves[best // HALF], best % HALF
