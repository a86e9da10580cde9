"""CacheTable: one table's rows in a CpuCache.

A bucket has WAYS slots; a key lives in one of two buckets told by its hash. Two choices give hit rates
within a fraction of a point of exact LRU, and let a cache 15 % larger than its table hold all of it,
where one bucket per key would lose a tenth to crowding. Keys, states, stamps, versions and rows lie in
arrays of their own: the probe (hps.native) looks for a key in keys and states only. No key value is reserved,
since a slot's state says whether it is empty.

*Recency.* A hit stamps its slot with the table's clock, which ticks once per 1/64 of the capacity
admitted; a key that needs room takes an empty slot of the emptier bucket, else the one with the
oldest stamp. A finer clock was measured to buy nothing.

*Readers beside the writer.* One short lock per table. A reader holds it for one call of the probe (2 µs
for 26 keys; at most READ_SLICE keys), the writer for storing one slice of rows (40 µs for WRITE_SLICE
new rows; what it can prepare it prepares before, undisturbed, because nobody else changes keys, states
and versions). So a row is seen whole or not at all, always beside its own key and version. A sequence
number with retries would spare readers the lock (50 ns) but not the interpreter's, and a writer at
work could starve them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.native import CacheProbe, dedup
from hps.native.twin_cache import EMPTY, ROW, TOMBSTONE
from hps.tiers.base import Part, newest_of_each
from hps.types import EmbeddingTable, IndexArray, KeyArray, Source, VectorArray, VersionArray

WAYS = 16
READ_SLICE = 8192
_LINE = 64
WRITE_SLICE = 256
_COLDEST = 1
_LAST_STAMP = 2**32 - 1
_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class CacheStats:
    """How a table's share of the cache stands. ``evictions`` counts rows dropped to make room."""

    rows: int
    tombstones: int
    capacity: int
    bytes: int
    evictions: int


class CacheTable:
    """At most ``rows`` (> 0) rows and tombstones of ``table``. `fetch` may be called from many threads
    beside the one that calls the other methods."""

    def __init__(self, table: EmbeddingTable, rows: int) -> None:
        self.table = table
        buckets = max(1, rows // WAYS)
        shape = (buckets, rows // buckets)
        self.capacity = shape[0] * shape[1]
        slots = (self.capacity,)
        self._keys, self._states, self._stamps, self._versions, self._rows = _zeros(
            (shape, np.int64),
            (shape, np.uint8),
            (slots, np.uint32),
            (slots, np.uint64),
            ((self.capacity, table.dim), table.dtype),
        )
        # The same memory by slot.
        self._slot_keys, self._slot_states = self._keys.reshape(-1), self._states.reshape(-1)
        self._probe = CacheProbe(
            self._keys, self._states, self._stamps, self._versions, self._rows, int(Source.CPU)
        )
        self._lock = Lock()
        self._clock = _COLDEST + 1
        self._admitted = 0
        self.rows = 0
        self.tombstones = 0
        self.evictions = 0

    def stats(self) -> CacheStats:
        arrays = (self._keys, self._states, self._stamps, self._versions, self._rows)
        size = sum(array.nbytes for array in arrays)
        return CacheStats(self.rows, self.tombstones, self.capacity, size, self.evictions)

    # -- reading ----------------------------------------------------------------------------------

    def fetch(self, part: Part, oldest_tombstone: int) -> None:
        """Answer ``part`` (see `Tier.fetch`); older tombstones count as not there."""
        asked, left = part.missing, []
        for start in range(0, len(asked), READ_SLICE):
            some = asked if len(asked) <= READ_SLICE else asked[start : start + READ_SLICE]
            with self._lock:
                missed = self._probe.fetch(
                    part.keys,
                    some,
                    self._clock,
                    oldest_tombstone,
                    part.out,
                    part.versions,
                    part.source,
                )
            if missed is not None:
                left.append(missed)
        if len(left) == 1:
            part.missing = left[0]
        else:
            part.missing = np.concatenate(left) if left else _NONE

    def gather(self, keys: KeyArray, out: VectorArray) -> bool:
        """See `FusedLookup.gather`."""
        for start in range(0, len(keys), READ_SLICE):
            some = slice(start, start + READ_SLICE)
            with self._lock:
                if not self._probe.gather(keys[some], self._clock, out[some]):
                    return False
        return True

    # -- writing ----------------------------------------------------------------------------------

    def insert(
        self, keys: KeyArray, vectors: VectorArray, versions: VersionArray, oldest_tombstone: int
    ) -> None:
        self._write(keys, vectors, versions, oldest_tombstone, update=False)

    def update(
        self, keys: KeyArray, vectors: VectorArray, versions: VersionArray, oldest_tombstone: int
    ) -> None:
        self._write(keys, vectors, versions, oldest_tombstone, update=True)

    def delete(self, keys: KeyArray, versions: VersionArray, oldest_tombstone: int) -> None:
        """A tombstone for a key that was not resident enters as the coldest slot of its bucket, so a
        flood of deletions drives out at most one row per bucket."""
        self._write(keys, None, versions, oldest_tombstone, update=False)

    def evict(self, keys: KeyArray) -> None:
        slots = self._probe.find(keys)
        slots = np.unique(slots[slots >= 0])
        with self._lock:
            self._discount(slots)
            self._slot_states[slots] = EMPTY
            self._stamps[slots] = 0

    def _write(
        self,
        keys: KeyArray,
        vectors: VectorArray | None,
        versions: VersionArray,
        oldest_tombstone: int,
        *,
        update: bool,
    ) -> None:
        """Write rows, or tombstones where ``vectors`` is None, slice by slice."""
        for start in range(0, len(keys), WRITE_SLICE):
            some = slice(start, start + WRITE_SLICE)
            k, ver = keys[some], versions[some]
            vec = None if vectors is None else vectors[some]
            if len(dedup(k)[0]) < len(k):
                keep = newest_of_each(k, ver)
                k, ver = k[keep], ver[keep]
                vec = None if vec is None else vec[keep]
            self._write_slice(k, vec, ver, oldest_tombstone, update=update)

    def _write_slice(
        self,
        keys: KeyArray,
        vectors: VectorArray | None,
        versions: VersionArray,
        oldest_tombstone: int,
        *,
        update: bool,
    ) -> None:
        """As ``_write``, with unique ``keys``."""
        slots = self._probe.find(keys)
        is_resident = slots >= 0
        at = np.flatnonzero(is_resident)
        if len(at):
            resident = slots[at]
            held = self._versions[resident]
            forgotten = (self._slot_states[resident] == TOMBSTONE) & (held < oldest_tombstone)
            newer = versions[at] >= held
            apply = newer & ~forgotten if update else newer | forgotten
            # A refresh or a deletion is no use of the key: its recency stays.
            stamp = self._clock if vectors is not None and not update else None
            self._store(resident[apply], keys, vectors, versions, at[apply], stamp)
        if not update and len(at) < len(keys):
            self._admit(keys, vectors, versions, np.flatnonzero(~is_resident))

    def _admit(
        self, keys: KeyArray, vectors: VectorArray | None, versions: VersionArray, at: IndexArray
    ) -> None:
        """Find room for the entries ``at``, which are not resident."""
        self._tick(len(at))
        keys, versions = keys[at], versions[at]
        if vectors is None:
            stamp = _COLDEST
            self.tombstones += len(at)
        else:
            stamp = self._clock
            vectors = vectors[at]
            self.rows += len(at)
        with self._lock:
            rows, tombstones = self._probe.admit(keys, versions, vectors, stamp)
        self.rows -= rows
        self.tombstones -= tombstones
        self.evictions += rows

    def _store(
        self,
        slots: IndexArray,
        keys: KeyArray,
        vectors: VectorArray | None,
        versions: VersionArray,
        at: IndexArray,
        stamp: int | None,
    ) -> None:
        """Fill distinct ``slots`` with the entries ``at``, at once for every reader."""
        if not len(slots):
            return
        keys, versions = keys[at], versions[at]
        if vectors is not None:
            vectors = vectors[at]
        with self._lock:
            # Empty until complete: an exception on the way leaves no half-written slot.
            self._discount(slots)
            self._slot_states[slots] = EMPTY
            self._slot_keys[slots] = keys
            self._versions[slots] = versions
            if stamp is not None:
                self._stamps[slots] = stamp
            if vectors is not None:
                self._rows[slots] = vectors
                self._slot_states[slots] = ROW
                self.rows += len(slots)
            else:
                self._slot_states[slots] = TOMBSTONE
                self.tombstones += len(slots)

    def _discount(self, slots: IndexArray) -> None:
        """Take ``slots``, about to change, out of the counts."""
        states = self._slot_states[slots]
        self.rows -= int(np.count_nonzero(states == ROW))
        self.tombstones -= int(np.count_nonzero(states == TOMBSTONE))

    def _tick(self, admitted: int) -> None:
        self._admitted += admitted
        if self._admitted * 64 < self.capacity:
            return
        self._admitted = 0
        with self._lock:
            if self._clock == _LAST_STAMP:  # every age is forgotten once in 2^32 ticks
                np.minimum(self._stamps, _COLDEST, out=self._stamps)
                self._clock = _COLDEST
            self._clock += 1


def _zeros(*arrays: tuple[tuple[int, ...], Any]) -> list[NDArray[Any]]:
    """As np.zeros for each shape and dtype, in one piece of memory, each beginning at a cache line.

    A bucket's keys and a row of 64 bytes then lie across no more lines than they must, and NumPy asks
    for huge pages for a piece of 4 MiB and more: together a third less waiting in a fetch of cold rows.
    """
    sizes = [math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in arrays]
    memory = np.zeros(sum(sizes) + len(sizes) * _LINE, np.uint8)
    at = -memory.ctypes.data % _LINE
    made = []
    for (shape, dtype), size in zip(arrays, sizes, strict=True):
        made.append(memory[at : at + size].view(dtype).reshape(shape))
        at += size + -size % _LINE
    return made
