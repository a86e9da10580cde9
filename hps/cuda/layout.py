"""How a table lies in device memory: constants that hash_table.cuh repeats, and sizes.

*Slot*: 16 bytes that are read and written as one: a key, a word, a score. *Word*: a row's number in
its low 29 bits and the slot's state in the high three. *Bucket*: one 128-byte line of 8 slots in two
halves. A key has a home half and a second bucket; it may live in any slot of both buckets. *Rows* and
their versions lie in arrays of their own, by row number: a writer fills a row nobody sees and shows it
by storing one slot. Every slot owns a row, also while it is empty; the rows beyond those are spare. (In
a static table, which nobody reads while it is filled, all rows are spare and slots get theirs once.)
README.md beside this file says why readers need no lock.

No key value is reserved: a slot's word says whether it is empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.errors import ConfigError
from hps.types import EmbeddingTable, IndexArray, KeyArray

WAYS = 8
HALF = 4
BUCKET_BYTES = 128
SLOT_BYTES = 16
EMPTY = 1 << 31
TOMBSTONE = 1 << 30
CLAIMED = 1 << 29
"""States of a slot, the three high bits of its word: 0 is a row. `CLAIMED` is seen only while a write
runs, and by the writer only: another key of the same batch is about to take the slot."""
ROW_MASK = CLAIMED - 1
NO_ROW = 2**32 - 1
"""Reported for a key that is not there, where row numbers are asked for."""

TICKS_A_TURN = 64
"""Ticks of the clock while the table admits as many rows as it has slots."""
AGES_A_TURN = 8
"""Ticks are told apart where one row is to make room. By fewer than a turn's eighth, an *age*, a hit
leaves its row's score as it is, and a slot elsewhere goes no sooner than one of the home half."""
POLICY_BITS = 8
"""Low bits of what fetch is told of the policy; above them stands the age, where there is one."""
STATIC_LOAD = 0.45
"""Rows per slot of a static table: few enough that each finds a slot without another's leaving."""
COUNT_BITS = 20
"""Low bits of a score that count uses, or the ticks of an epoch; the epoch stands above them."""
SCORE_MASK = 2**32 - 1

WINDOW_SHIFT = 29
"""A device reads rows at random places at the full rate of the bus from 1 << this bytes of pinned memory,
half as fast from twice as much: many are read window by window."""
KEYS_A_WINDOW = 2048
"""So many keys at least for each window: fewer gain less than its launch costs."""

SECTOR = 32
"""Rows start at multiples of this many bytes, so that no two share a sector of the first-level cache."""
MIN_BUCKETS = 8
MAX_SPARE, MIN_SPARE = 1 << 20, 1 << 10
MAX_ROWS = (ROW_MASK - MAX_SPARE) // WAYS * WAYS

SLOT = np.dtype([("key", np.int64), ("word", np.uint32), ("score", np.uint32)])


class EvictionPolicy(IntEnum):
    """What a slot's score means. The lowest score goes first, tombstones before all rows.

    ``NONE``: nothing, no row makes room for another (static tables). ``LRU``: the clock's tick at the
    last use. ``LFU``: how often the row was used in the epoch of its last use (`GpuTable.epoch`, 0 unless
    the caller advances it; older epochs go first). ``SCORE``: what the caller gave with the row, 64 bits in
    an array beside the slots; a row with a lower score than all it could replace is not admitted.
    ``EPOCH_LRU``: the epoch of the last use and, in the bits below, the tick within it.
    """

    NONE = 0
    LRU = 1
    LFU = 2
    SCORE = 3
    EPOCH_LRU = 4

    @property
    def rule(self) -> EvictionPolicy:
        """The policy by which kernels go: what `EPOCH_LRU` adds is the host's affair."""
        return EvictionPolicy.LRU if self is EvictionPolicy.EPOCH_LRU else self


@dataclass(frozen=True, slots=True)
class GpuTableShape:
    """Sizes of one table. ``buckets`` of 8 slots; ``rows`` that lie ``stride`` bytes apart, the last
    ``host_rows`` of them in pinned host memory; ``spare`` of them belong to no slot at first. ``scored``:
    there are scores of 64 bits beside the slots."""

    buckets: int
    rows: int
    spare: int
    stride: int
    host_rows: int = 0
    scored: bool = False

    @property
    def slots(self) -> int:
        return self.buckets * WAYS

    @property
    def capacity(self) -> int:
        """The most rows that can be found."""
        return min(self.slots, self.rows)

    @property
    def batch(self) -> int:
        """The most keys that one launch of a write takes. A static table is filled in small ones: keys that
        choose their slots at the same time don't see each other, and none may be left over."""
        if self.spare == self.rows:
            return min(MAX_SPARE, max(MIN_SPARE, self.rows // 32))
        return min(self.spare, MAX_SPARE)

    @property
    def device_rows(self) -> int:
        return self.rows - self.host_rows

    @property
    def bytes(self) -> int:
        """Device memory: lines, rows, versions, spare list, scores beside the slots."""
        slots = self.buckets * BUCKET_BYTES + self.slots * 8 * self.scored
        return slots + self.device_rows * self.stride + self.rows * 8 + self.spare * 4

    @property
    def host_bytes(self) -> int:
        """Pinned host memory."""
        return self.host_rows * self.stride


def plan_table_shape(
    table: EmbeddingTable,
    capacity: int,
    host_rows: int = 0,
    *,
    static: bool = False,
    scored: bool = False,
) -> GpuTableShape:
    """Room for ``capacity`` (> 0) rows of ``table``, rounded up to whole buckets, ``host_rows`` of them
    in pinned host memory. Of a ``static`` table all ``capacity`` rows find a slot; it is never ``scored``.

    Raises ConfigError when the rows can't be numbered in 29 bits.
    """
    slots = int(capacity / STATIC_LOAD) if static else capacity
    buckets = max(MIN_BUCKETS, -(-slots // WAYS))
    spare = min(MAX_SPARE, max(MIN_SPARE, buckets * WAYS // 16))
    stride = -(-table.row_bytes // SECTOR) * SECTOR
    if capacity > MAX_ROWS:
        raise ConfigError(
            f"the GPU cache of table {table.id} can't have {capacity:,} rows; a table has at most "
            f"{MAX_ROWS:,}. Lower its cache_rows"
        )
    if static:
        return GpuTableShape(buckets, capacity, capacity, stride)
    host_rows = min(host_rows, buckets * WAYS)
    return GpuTableShape(buckets, buckets * WAYS + spare, spare, stride, host_rows, scored)


def fitting_capacity(
    table: EmbeddingTable, free_bytes: int, *, static: bool = False, scored: bool = False
) -> int:
    """The largest capacity in rows whose arrays fit into ``free_bytes``; 0 when none does."""
    low, high = 0, MAX_ROWS
    while low < high:
        middle = (low + high + 1) // 2
        if plan_table_shape(table, middle, static=static, scored=scored).bytes <= free_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def eviction_ranks(scores: Any, now: int) -> Any:
    """How late rows with ``scores`` of 32 bits, an array or a number, make room: the lowest first. Scores
    wrap, as ticks and epochs go on, and are told apart over half of their range on either side of ``now``."""
    return (scores - now + (1 << 31)) & SCORE_MASK


def mix(keys: KeyArray) -> NDArray[np.uint64]:
    """(n,) the hash of each key: the finaliser of MurmurHash3, a bijection."""
    h = keys.view(np.uint64).copy()
    h ^= h >> np.uint64(33)
    h *= np.uint64(0xFF51AFD7ED558CCD)
    h ^= h >> np.uint64(33)
    h *= np.uint64(0xC4CEB9FE1A85EC53)
    h ^= h >> np.uint64(33)
    return h


def half_buckets(keys: KeyArray, buckets: int) -> IndexArray:
    """(n, 4): the halves each of ``keys (n,)`` may live in, half h of bucket b being 2 * b + h: its home
    half, the other half of that bucket, the two of its second bucket."""
    h = mix(keys)
    count = np.uint64(buckets)
    first = (h >> np.uint64(32)) * count >> np.uint64(32)
    second = (h & np.uint64(0xFFFF_FFFF)) * count >> np.uint64(32)
    second = np.where(second == first, (second + np.uint64(1)) % count, second)
    home = first * np.uint64(2) + (h & np.uint64(1))
    both = second * np.uint64(2)
    return np.stack([home, home ^ np.uint64(1), both, both + np.uint64(1)], axis=1).view(np.int64)
