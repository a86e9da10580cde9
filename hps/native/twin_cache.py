"""NumPy twin of the CPU cache's table (include/hps/cache_table.hpp): the executable reference.

It defines contents, placement and eviction. Reads process the whole batch, writes go key by key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.native import twin_pool
from hps.types import IndexArray, KeyArray, SourceArray, VectorArray, VersionArray

SLOTS, STEPS, LOAD_PERCENT = 4, 16, 60
TICKS_PER_TURNOVER, SWEEP_SHARE, SAMPLE = 64, 16, 19
OLDEST, TOMBSTONE_AGE = 200, 239
FIRST_USES, DECAY, USES_DOUBLE = 32, 4, 16
EVICTIONS = ("lru", "lfu", "random", "fifo")
_MIX = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)


def mixed(keys: KeyArray) -> NDArray[np.uint64]:
    """Return a hash of each of ``keys (n,)`` whose bits all depend on all bits of the key."""
    x = keys.view(np.uint64).copy()
    for _ in range(2):
        x ^= x >> _HALF
        x *= _MIX
    x ^= x >> _HALF
    return x


def homes(keys: KeyArray, buckets: int) -> IndexArray:
    """Return the home bucket of each of ``keys (n,)``, for 0 < ``buckets`` < 2^32."""
    return (((mixed(keys) >> _HALF) * np.uint64(buckets)) >> _HALF).view(np.int64)


def cache_bytes(capacity: int, row_bytes: int) -> int:
    """Return the bytes of a table of ``capacity`` rows of ``row_bytes``."""
    before_rows = 256 + _buckets(capacity) * 64 + capacity * 8
    return before_rows + -before_rows % 64 + capacity * row_bytes


def _buckets(capacity: int) -> int:
    return -(-capacity * 100 // (SLOTS * LOAD_PERCENT))


class CacheTable:
    """At most ``capacity`` rows and tombstones.

    ``like (0, width)`` gives the items and dtype of stored rows; ``format`` is the code of their row format
    (`hps.row_format`), None for that of their dtype; ``code`` is the source code reported for a row. `fetch`
    and `gather` are thread-safe; the methods that write are serialized. The compiled twin raises TypeError
    or ValueError for arrays that do not fit; this one does not check them.
    """

    def __init__(
        self,
        capacity: int,
        like: NDArray[Any],
        eviction: str,
        code: int,
        *,
        format: int | None = None,
    ) -> None:
        if not 0 < capacity < 2**32 - 1:
            raise ValueError("a cache has 1 to 2^32 - 2 rows")
        if eviction not in EVICTIONS:
            raise ValueError(f"eviction must be lru, lfu, random or fifo, not {eviction}")
        self.capacity, self._eviction, self._code, self.like = capacity, eviction, code, like
        self.format = format
        self.bytes = cache_bytes(capacity, like.shape[1] * like.itemsize)
        self.buckets = self._buckets = _buckets(capacity)
        shape = (self._buckets, SLOTS)
        self._keys, self._numbers = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self._occupied, self._is_row = np.zeros(shape, bool), np.zeros(shape, bool)
        self._scores = np.zeros(shape, np.uint8)
        self._reach = np.zeros(self._buckets, np.uint32)  # a bit per step; bit 0 is never set
        self._versions = np.zeros(capacity, np.uint64)
        self._rows = np.zeros((capacity, like.shape[1]), like.dtype)
        self._free: list[int] = []
        self._fresh = self._clock = self._admitted = self._hand = self._swept = 0
        self.rows = self.tombstones = self.evictions = 0
        self._lock, self._turn = Lock(), Lock()
        self.threads = 1
        self._random = np.random.default_rng(capacity)

    # -- reading ----------------------------------------------------------------------------------

    def fetch(
        self,
        keys: KeyArray,
        missing: IndexArray,
        oldest_tombstone: int,
        out: VectorArray,
        versions: VersionArray,
        source: SourceArray,
    ) -> IndexArray | None:
        """Fetch ``keys[missing]`` into ``out (n, dim)``, ``versions (n,)`` and ``source (n,)``; see `Part`.

        Returns the positions still missing, None if there are none. Counts as a use; tombstones older than
        ``oldest_tombstone`` count as absent.
        """
        with self._lock:
            bucket, slot = self._find(keys[missing])
            hit = bucket >= 0
            self._touch(bucket[hit], slot[hit])
            row = hit & self._is_row[bucket, slot]
            held = self._versions[self._numbers[bucket, slot]]
            hit &= row | (held >= oldest_tombstone)
            versions[missing[hit]] = held[hit]
            out[missing[row]] = self._rows[self._numbers[bucket[row], slot[row]]]
            source[missing[row]] = self._code
        return None if hit.all() else missing[~hit]

    def gather(self, keys: KeyArray, out: VectorArray) -> bool:
        """Copy the row of each of ``keys (n,)``, which may repeat, to ``out (n, dim)``; counts as a use.

        Stops with False at the first key without a row; ``out`` is undefined then.
        """
        with self._lock:
            bucket, slot = self._find(keys)
            has_no_row = (bucket < 0) | ~self._is_row[bucket, slot]
            found = int(has_no_row.argmax()) if has_no_row.any() else len(keys)
            used = np.arange(len(keys)) <= found  # a tombstone, too
            self._touch(bucket[used & (bucket >= 0)], slot[used & (bucket >= 0)])
            if found < len(keys):
                return False
            out[...] = self._rows[self._numbers[bucket, slot]]
        return True

    def pool_bags(
        self,
        keys: KeyArray,
        offsets: IndexArray | None,
        weights: twin_pool.Floats | None,
        divisors: twin_pool.Floats | None,
        out: VectorArray,
        supplied: tuple[IndexArray, twin_pool.Floats] | None = None,
    ) -> IndexArray | None:
        """Pool the rows of ``keys (n,)``, each times its entry of ``weights (n,)``, to ``out (bags, dim)``.

        Sums are taken in order and in float32; each bag is divided by its entry of ``divisors (bags,)``;
        zeros for an empty bag and if the divisor is 0.

        Bag ``b`` has the keys ``offsets[b]:offsets[b + 1]``, of ``offsets (bags + 1,)``; without, all have
        equally many. ``supplied`` holds ascending positions of keys (m,) and the vectors (m, dim) float32
        to use for them; then bags without any of these are left unchanged. ``out`` is float32 or float16.
        Returns the positions of keys without a row, None if there are none; their bags are undefined.
        Counts as a use of the keys.
        """
        return twin_pool.pool_bags(
            self.read_rows, self.like, keys, offsets, weights, divisors, out, supplied, self.format
        )

    def read_rows(self, keys: KeyArray, vectors: VectorArray) -> NDArray[np.bool_]:
        """Read the rows of all ``keys`` into ``vectors``; return which keys have none."""
        versions, source = np.zeros(len(keys), np.uint64), np.zeros(len(keys), np.uint8)
        self.fetch(keys, np.arange(len(keys)), 0, vectors, versions, source)
        return np.equal(source, 0)

    def _find(self, keys: KeyArray) -> tuple[IndexArray, IndexArray]:
        """Return bucket and slot of each key; -1 and 0 if it has none."""
        home = homes(keys, self._buckets)
        bucket, slot = np.full(len(keys), -1), np.zeros(len(keys), np.int64)
        reach = self._reach[home] | 1
        for step in range(min(STEPS, self._buckets)):
            at = np.flatnonzero((bucket < 0) & (reach >> step & 1 == 1))
            there = self._bucket_at(home[at], step)
            match = (self._keys[there] == keys[at, None]) & self._occupied[there]
            found = match.any(axis=1)
            bucket[at[found]] = there[found]
            slot[at[found]] = match[found].argmax(axis=1)
        return bucket, slot

    def _touch(self, bucket: IndexArray, slot: IndexArray) -> None:
        if self._eviction == "lru":
            self._scores[bucket, slot] = self._clock
        elif self._eviction == "lfu":
            score = self._scores[bucket, slot]
            raised = self._random.random(len(score)) < 0.5 ** (score // USES_DOUBLE)
            self._scores[bucket, slot] = score + (raised & (score < 255))

    # -- writing ----------------------------------------------------------------------------------

    def write(
        self,
        keys: KeyArray,
        rows: VectorArray | None,
        versions: VersionArray,
        oldest_tombstone: int,
        resident_only: bool,
    ) -> None:
        """Write ``rows (n, dim)``, or tombstones if it is None, key by key.

        A key is skipped if its version is below the one held, and, with ``resident_only``, if it is not
        resident.
        """
        with self._turn:
            for i, (key, version) in enumerate(zip(keys.tolist(), versions.tolist(), strict=True)):
                row = None if rows is None else rows[i]
                with self._lock:
                    self._write_one(key, row, version, oldest_tombstone, resident_only)

    def evict(self, keys: KeyArray) -> None:
        """Evict the rows and tombstones of ``keys``."""
        with self._turn:
            for key in keys.tolist():
                with self._lock:
                    if (at := self._find_one(key)) is not None:
                        self._free.append(self._clear_slot(*at))

    def expire(self, oldest: int, first: int, n: int) -> int:
        """Evict the rows with versions below ``oldest`` in ``n`` buckets from ``first`` on.

        Returns their number. Tombstones stay.
        """
        expired = 0
        with self._turn, self._lock:
            for bucket in range(first, min(first + n, self._buckets)):
                for slot in np.flatnonzero(self._is_row[bucket]).tolist():
                    if self._versions[self._numbers[bucket, slot]] < oldest:
                        self._free.append(self._clear_slot(bucket, slot))
                        expired += 1
        return expired

    def repair(self) -> bool:
        """Do nothing: no other process writes this table."""
        return False

    def top_k(self, n: int) -> tuple[KeyArray, NDArray[np.uint8]]:
        """Return the keys (k,) of the ``n`` hottest rows, hottest first, and their scores (k,), 255 the
        highest."""
        with self._lock:
            keys, scores = self._keys[self._is_row], self._scores[self._is_row].astype(np.int64)
            if self._eviction != "lfu":
                scores = 255 - (self._clock - scores) % 256
        order = np.lexsort((keys, -scores))[:n]
        return keys[order], scores[order].astype(np.uint8)

    def _write_one(
        self,
        key: int,
        row: VectorArray | None,
        version: int,
        oldest_tombstone: int,
        resident_only: bool,
    ) -> None:
        at = self._find_one(key)
        if at is None:
            if not resident_only:
                self._admit(key, row, version)
            return
        held = int(self._versions[self._numbers[at]])
        if not self._is_row[at] and held < oldest_tombstone:
            if resident_only:
                return
        elif version < held:
            return
        self._count(at, -1)
        self._fill(at, row, version)
        if row is not None and not resident_only and self._eviction == "lru":
            self._scores[at] = self._clock

    def _admit(self, key: int, row: VectorArray | None, version: int) -> None:
        if row is not None:
            self._tick()
        home = self._home(key)
        full = not self._free and self._fresh == self.capacity
        coldest = None
        if self._find_free_slot(home) is None or (row is None and full):
            coldest = self._coldest(self._sequence(home))
        number = self._evict_slot(coldest) if coldest else self._allocate_row()
        step, at = self._find_free_slot(home) or (0, (0, 0))
        self._keys[at], self._numbers[at] = key, number
        if self._eviction == "lfu":
            self._scores[at] = 0 if row is None else FIRST_USES
        else:
            self._scores[at] = (self._clock - (TOMBSTONE_AGE if row is None else 0)) % 256
        if step:
            self._reach[home] |= 1 << step
        self._occupied[at] = True
        self._fill(at, row, version)

    def _fill(self, at: tuple[int, int], row: VectorArray | None, version: int) -> None:
        number = self._numbers[at]
        self._versions[number] = version
        if row is not None:
            self._rows[number] = row
        self._is_row[at] = row is not None
        self._count(at, +1)

    def _count(self, at: tuple[int, int], change: int) -> None:
        if self._is_row[at]:
            self.rows += change
        else:
            self.tombstones += change

    # -- buckets and slots ------------------------------------------------------------------------

    def _home(self, key: int) -> int:
        return int(homes(np.array([key], np.int64), self._buckets)[0])

    def _bucket_at(self, home: Any, step: int) -> Any:
        """Return the bucket at a step of the probe sequence that starts at ``home``."""
        return (home + (step if self._buckets <= STEPS else step * (step + 1) // 2)) % self._buckets

    def _sequence(self, home: int) -> Iterator[int]:
        for step in range(min(STEPS, self._buckets)):
            yield self._bucket_at(home, step)

    def _find_one(self, key: int) -> tuple[int, int] | None:
        bucket, slot = self._find(np.array([key], np.int64))
        return (int(bucket[0]), int(slot[0])) if bucket[0] >= 0 else None

    def _find_free_slot(self, home: int) -> tuple[int, tuple[int, int]] | None:
        """Return the first free slot of the probe sequence from ``home``, and its step."""
        for step, bucket in enumerate(self._sequence(home)):
            free = np.flatnonzero(~self._occupied[bucket])
            if len(free):
                return step, (bucket, int(free[0]))
        return None

    def _allocate_row(self) -> int:
        if self._free:
            return self._free.pop()
        if self._fresh < self.capacity:
            self._fresh += 1
            return self._fresh - 1
        sampled: list[int] = []
        seen = 0
        while seen < SAMPLE and len(sampled) < self._buckets:
            sampled.append(self._hand)
            seen += int(self._occupied[self._hand].sum())
            self._hand = (self._hand + 1) % self._buckets
        coldest = self._coldest(sampled)
        assert coldest is not None  # the table is full
        return self._evict_slot(coldest)

    def _coldest(self, buckets: Iterable[int]) -> tuple[int, int] | None:
        """Return the first of the coldest slots."""
        worst, coldest = -1, None
        for bucket in buckets:
            for slot in np.flatnonzero(self._occupied[bucket]).tolist():
                cold = self._coldness(bucket, slot)
                if cold > worst:
                    worst, coldest = cold, (bucket, slot)
        return coldest

    def _coldness(self, bucket: int, slot: int) -> int:
        score = int(self._scores[bucket, slot])
        if self._eviction == "lfu":
            return 255 - score
        if self._eviction == "random":
            if not self._is_row[bucket, slot]:
                return 255
            seed = np.array([(self.evictions << 32) + bucket * SLOTS + slot], np.uint64)
            return int(homes(seed.view(np.int64), 255)[0])
        return (self._clock - score) % 256

    def _evict_slot(self, at: tuple[int, int]) -> int:
        self.evictions += int(self._is_row[at])
        return self._clear_slot(*at)

    def _clear_slot(self, bucket: int, slot: int) -> int:
        """Free a slot; return its row's number."""
        at, home = (bucket, slot), self._home(int(self._keys[bucket, slot]))
        self._count(at, -1)
        self._occupied[at] = self._is_row[at] = False
        others = homes(self._keys[bucket], self._buckets)[self._occupied[bucket]]
        if home != bucket and home not in others:
            step = next(i for i, b in enumerate(self._sequence(home)) if b == bucket)
            self._reach[home] &= ~np.uint32(1 << step)
        return int(self._numbers[at])

    # -- clock ------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._admitted += 1
        if self._admitted * TICKS_PER_TURNOVER < self.capacity:
            return
        self._admitted = 0
        self._clock = (self._clock + 1) % 256
        end = min(self._buckets, self._swept + -(-self._buckets // SWEEP_SHARE))
        scores = self._scores[self._swept : end]
        if self._eviction == "lfu":
            scores -= np.minimum(scores, np.uint8(DECAY))
        else:
            age = (self._clock - scores.astype(np.int64)) % 256
            scores[age > OLDEST] = (self._clock - OLDEST) % 256
        self._swept = end % self._buckets
