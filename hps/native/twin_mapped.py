"""NumPy twin of mapped tables and of their index (include/hps/mapped_table.hpp, static_index.hpp).

It defines the index: which hash, bucket, slot and position a key has, and the search for pilots. A mapped
file that another process shortens ends the process that reads it by this twin."""

from __future__ import annotations

import mmap
from heapq import heappop, heappush
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.native import twin_pool
from hps.types import IndexArray, KeyArray, SourceArray, VectorArray, VersionArray

Hashes = NDArray[np.uint64]
Positions = NDArray[np.uint32]
PILOTS, RECENT, EVICTIONS_PER_SLOT = 256, 16, 16
_MIX, _PILOT, _SLOT = (
    np.uint64(x) for x in (0xD6E8FEB86659FD93, 0x9E3779B97F4A7C15, 0x9FB21C651E98DF25)
)
_HALF = np.uint64(32)
_ALL_PILOTS = np.arange(PILOTS, dtype=np.uint64)[:, None]


def index_hashes(keys: KeyArray, seed: int) -> Hashes:
    """Return the hashes (n,) of ``keys (n,)``: a bijection, so different keys have different ones."""
    x = keys.view(np.uint64) ^ np.uint64(seed)
    for _ in range(2):
        x ^= x >> _HALF
        x *= _MIX
    return x ^ (x >> _HALF)


def reduce(hashes: Hashes, n: int) -> IndexArray:
    """Return the bucket, or part, of each hash, of ``n``; ascends with the hash."""
    return (((hashes >> _HALF) * np.uint64(n)) >> _HALF).view(np.int64)


def slots_of(hashes: Hashes, pilots: Any, slots: Any) -> IndexArray:
    """Return the slot of each hash in its part of ``slots`` slots."""
    x = (hashes ^ (pilots * _PILOT)) * _SLOT
    return np.asarray(((x >> _HALF) * np.asarray(slots, np.uint64)) >> _HALF).astype(np.int64)


def bitmap_words(rows: int) -> int:
    """Return the length of the bitmap of overridden rows: their number, then a bit per row."""
    return 1 + (rows + 63) // 64


def build_index_part(
    hashes: Hashes, first_bucket: int, buckets: int, n_buckets: int, slots: int
) -> tuple[NDArray[np.uint8], Positions, Positions] | None:
    """Build the index of one part, of ``buckets`` from ``first_bucket`` on.

    ``hashes (n,)``: ascending and distinct. Returns pilots (buckets,), positions (n,) of the keys in the part
    and the remap array (slots - n,); None if no pilots were found, which another seed may have."""
    bucket = reduce(hashes, n_buckets) - first_bucket
    outside = (bucket < 0) | (bucket >= buckets)
    if outside.any() or not (hashes[1:] > hashes[:-1]).all():
        raise ValueError("hashes must ascend and belong to the part")
    if len(hashes) > slots:
        raise ValueError("slots must be at least the keys")
    search = _PilotSearch(hashes, bucket, buckets, slots)
    if not search.run():
        return None
    n, owners = len(hashes), search.owners
    used = np.flatnonzero(owners[n:] >= 0)
    remap = np.zeros(slots - n, np.uint32)
    remap[used] = np.flatnonzero(owners[:n] < 0)[: len(used)]
    slot = slots_of(hashes, search.pilots[bucket].astype(np.uint64), slots)
    positions = np.where(slot < n, slot, remap[np.maximum(slot - n, 0)] if len(remap) else 0)
    return search.pilots, positions.astype(np.uint32), remap


class _PilotSearch:
    """The search for the pilots of one part; the largest buckets come first.

    A bucket without a pilot that leads to free slots takes those of the cheapest other buckets, which are
    placed again."""

    def __init__(self, hashes: Hashes, bucket: IndexArray, buckets: int, slots: int) -> None:
        self._hashes, self._slots = hashes, slots
        self._sizes = np.bincount(bucket, minlength=buckets)
        self._starts = np.concatenate([[0], np.cumsum(self._sizes)])
        self.pilots = np.zeros(buckets, np.uint8)
        self.owners = np.full(slots, -1, np.int64)
        self._recent = [-1] * RECENT
        self._turn = self._random = self._evictions = 0

    def run(self) -> bool:
        order = np.argsort(-self._sizes, kind="stable")
        return all(self._place(bucket) for bucket in order[self._sizes[order] > 0].tolist())

    def _place(self, bucket: int) -> bool:
        waiting: list[tuple[int, int]] = []
        while True:
            chosen = self._free_slots(bucket)
            if chosen is None:
                if (chosen := self._cheapest_slots(bucket)) is None:
                    return False
                for slot in chosen.tolist():
                    if (other := int(self.owners[slot])) >= 0:
                        self.owners[self.owners == other] = -1
                        heappush(waiting, (-int(self._sizes[other]), -other))
                        self._evictions += 1
                if self._evictions > EVICTIONS_PER_SLOT * self._slots:
                    return False
            self.owners[chosen] = bucket
            if not waiting:
                return True
            bucket = -heappop(waiting)[1]

    def _every_slots(self, bucket: int) -> tuple[IndexArray, NDArray[np.bool_]]:
        """Return the slots (pilots, keys) of a bucket, and the pilots that give each key another one."""
        hashes = self._hashes[self._starts[bucket] : self._starts[bucket + 1]]
        slots = slots_of(hashes, _ALL_PILOTS, self._slots)
        ordered = np.sort(slots, axis=1)
        return slots, (ordered[:, 1:] != ordered[:, :-1]).all(axis=1)

    def _free_slots(self, bucket: int) -> IndexArray | None:
        slots, distinct = self._every_slots(bucket)
        fits = distinct & (self.owners[slots] < 0).all(axis=1)
        if not fits.any():
            return None
        self.pilots[bucket] = fits.argmax()
        return np.asarray(slots[self.pilots[bucket]])

    def _cheapest_slots(self, bucket: int) -> IndexArray | None:
        self._recent[self._turn % RECENT] = bucket
        self._turn += 1
        self._random = (self._random * 6364136223846793005 + 1442695040888963407) % 2**64
        slots, distinct = self._every_slots(bucket)
        owners = self.owners[slots]
        cost = np.where(owners >= 0, self._sizes[owners] ** 2, 0).sum(axis=1)
        possible = distinct & ~np.isin(owners, [r for r in self._recent if r >= 0]).any(axis=1)
        if not possible.any():
            return None
        turn = (np.arange(PILOTS) + (self._random >> 56)) % PILOTS
        pilot = turn[np.where(possible, cost, np.iinfo(np.int64).max)[turn].argmin()]
        self.pilots[bucket] = pilot
        return np.asarray(slots[pilot])


def place_records(
    positions: Positions, keys: KeyArray, rows: VectorArray, records: NDArray[np.uint8]
) -> None:
    """Write record ``positions[i]`` of ``records (n, record bytes)`` from key and row ``i``."""
    records[positions, :8] = keys.view(np.uint8).reshape(-1, 8)
    row_bytes = rows.shape[1] * rows.itemsize
    records[positions, 8 : 8 + row_bytes] = rows.view(np.uint8).reshape(-1, row_bytes)


class MappedTable:
    """One table of a model version, in a read-only file; see `mapped_format.open_mapped`.

    ``sections``: `MappedHeader.sections`. All methods are thread-safe. The compiled twin raises TypeError or
    ValueError for arrays that do not fit. Once a page of its file could not be read (``is_damaged``), its
    `gather` and `pool_bags` find no row, and other reads raise RuntimeError; this one does neither."""

    is_damaged = False

    def __init__(
        self,
        file: int,
        like: NDArray[Any],
        sections: list[int],
        parts: NDArray[np.uint32],
        remap_entries: int,
        version: int,
        code: int,
        bitmap: NDArray[np.uint64] | None = None,
        *,
        format: int | None = None,
    ) -> None:
        self.rows, record_bytes, self._seed, self._buckets, records, pilots, remap, size = sections
        self.dim, self.like, self._version, self._code = like.shape[1], like, version, code
        self.format = format
        starts = np.concatenate([[0], np.cumsum(parts[:, 1], dtype=np.int64)])
        remaps = np.concatenate([[0], np.cumsum(parts[:, 2] - parts[:, 1], dtype=np.int64)])
        if (
            (parts[:, 1] > parts[:, 2]).any()
            or not (np.array_equal(starts[:-1], parts[:, 0]) and starts[-1] == self.rows)
            or not (np.array_equal(remaps[:-1], parts[:, 3]) and remaps[-1] == remap_entries)
        ):
            raise ValueError("parts must cover the rows")
        self._parts = np.where(parts[:, 1:2] == 0, [[0, 1, 1, 0]], parts).astype(np.int64)
        data = np.frombuffer(mmap.mmap(file, size, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8)
        self._data, self._records_at = data, records
        row = np.dtype((like.dtype, (self.dim,)))
        record = np.dtype(
            {"names": ["key", "row"], "formats": ["<i8", row], "offsets": [0, 8], "itemsize": record_bytes}
        )  # fmt: skip
        self._records = data[records : records + self.rows * record_bytes].view(record)
        self._pilots = data[pilots : pilots + self._buckets]
        self._remap = data[remap : remap + 4 * remap_entries].view("<u4")
        self._bitmap, self._lock, self.threads = bitmap, Lock(), 1

    def fetch(
        self,
        keys: KeyArray,
        missing: IndexArray,
        out: VectorArray,
        versions: VersionArray,
        source: SourceArray,
    ) -> tuple[IndexArray | None, IndexArray | None]:
        """Fetch ``keys[missing]`` into ``out (n, dim)``, ``versions (n,)`` and ``source (n,)``; see `Part`.

        Returns the positions of keys whose row is overridden, and of those that the table does not have;
        None instead of an empty array."""
        at = self.positions(keys[missing])
        absent = at < 0
        overridden = ~absent & self._is_overridden(at)
        found = ~(absent | overridden)
        out[missing[found]] = self._records["row"][at[found]]
        versions[missing[found]] = self._version
        source[missing[found]] = self._code
        return (
            missing[overridden] if overridden.any() else None,
            missing[absent] if absent.any() else None,
        )

    def gather(self, keys: KeyArray, out: VectorArray) -> bool:
        """Copy the row of each of ``keys (n,)``, which may repeat, to ``out (n, dim)``.

        False if a key is absent or overridden; ``out`` is undefined then."""
        at = self.positions(keys)
        if (at < 0).any() or self._is_overridden(at).any():
            return False
        out[...] = self._records["row"][at]
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
        """See `CacheTable.pool_bags`. Absent and overridden keys have no row."""
        return twin_pool.pool_bags(
            self.read_rows, self.like, keys, offsets, weights, divisors, out, supplied, self.format
        )

    def read_rows(self, keys: KeyArray, vectors: VectorArray) -> NDArray[np.bool_]:
        """Read the rows of all ``keys`` into ``vectors``; return which keys have none."""
        source = np.zeros(len(keys), np.uint8)
        self.fetch(keys, np.arange(len(keys)), vectors, np.zeros(len(keys), np.uint64), source)
        return np.equal(source, 0)

    def positions(self, keys: KeyArray) -> IndexArray:
        """Return the position of each of ``keys (n,)``, overridden or not; -1 for an absent key."""
        if not self.rows:
            return np.full(len(keys), -1)
        hashes = index_hashes(keys, self._seed)
        part = self._parts[reduce(hashes, len(self._parts))]
        pilots = self._pilots[reduce(hashes, self._buckets)].astype(np.uint64)
        slot = slots_of(hashes, pilots, part[:, 2])
        beyond = slot >= part[:, 1]
        slot[beyond] = self._remap[(part[:, 3] + slot - part[:, 1])[beyond]]
        at = part[:, 0] + np.where(slot < part[:, 1], slot, 0)
        return np.where(self._records["key"][at] == keys, at, -1)

    def keys_at(self, positions: IndexArray) -> KeyArray:
        """Return the keys (n,) of the records at ``positions (n,)``."""
        return np.asarray(self._records["key"][positions], np.int64)

    def copy_records(self, positions: IndexArray, out: VectorArray) -> None:
        """Copy the rows of the records at ``positions (n,)`` to ``out (n, dim)``."""
        out[...] = self._records["row"][positions]

    def populate(self, keys: KeyArray) -> int:
        """Read the pages of the records of ``keys (n,)`` side by side; return the number not in memory.

        Reading them one by one, as this twin does, is as good if they are in memory."""
        return 0

    def load(self, begin: int, end: int) -> None:
        """Read the file from byte ``begin`` to ``end`` into memory; this twin leaves that to the reads."""

    def resident(self, begin: int, end: int) -> float:
        """The share of the file's pages from ``begin`` to ``end`` that is in memory; this twin says 1."""
        return 1.0

    def override_keys(self, keys: KeyArray) -> int:
        """Mark the rows of ``keys (n,)`` as overridden: fetches report them, and another store answers.

        Lookups that begin after the call see the marks. Returns the number of absent keys."""
        at = self.positions(keys)
        words = self._writable()
        with self._lock:
            for position in at[at >= 0].tolist():
                bit = np.uint64(1 << position % 64)
                if not words[1 + position // 64] & bit:
                    words[1 + position // 64] |= bit
                    words[0] += np.uint64(1)
        return int((at < 0).sum())

    def clear_overrides(self) -> None:
        """Remove all marks."""
        with self._lock:
            self._writable()[:] = 0

    @property
    def overridden(self) -> int:
        """The number of overridden rows."""
        return 0 if self._bitmap is None else int(self._bitmap[0])

    def _writable(self) -> NDArray[np.uint64]:
        if self._bitmap is None or not self._bitmap.flags.writeable:
            raise ValueError("the table has no bitmap that can be written")
        return self._bitmap

    def _is_overridden(self, at: IndexArray) -> NDArray[np.bool_]:
        if self._bitmap is None or not self.rows:
            return np.zeros(len(at), bool)
        words = self._bitmap[1 + np.maximum(at, 0) // 64]
        bits = words >> (np.maximum(at, 0) % 64).astype(np.uint64) & np.uint64(1)
        return np.asarray(np.not_equal(bits, 0))
