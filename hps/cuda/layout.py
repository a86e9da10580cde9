"""Layout of a table in device memory: sizes, and the constants of hash_table.cuh.

*Slot*: 16 bytes that are read and written as one: a key, a word, a score. *Word*: a row's number in its low
29 bits and the slot's state in the high three. In a table of less than 2²⁶ rows the number has 26 bits, and
three bits say from which *members* the row is hidden: tables that share the arrays. *Bucket*: one 128-byte
line of 8 slots in two halves. A key has a home half and a second bucket; it may be in any slot of both
buckets. *Rows* and their versions are in separate arrays, by row number: a writer fills a row that no reader
can see, and publishes it by storing one slot. In a *packed* table every slot owns a row, also while it is
empty; the remaining rows are spare. In a *roomy* table there are more slots than rows: an empty slot owns
none, and all bits of its row number are set. README.md in this folder says why readers need no lock.

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
MOST_MEMBERS = 3
MEMBER = 1 << 26
"""The bit of a word that hides a row from the first member; those of the others follow."""
MEMBERS = MEMBER * ((1 << MOST_MEMBERS) - 1)
NO_ROW = 2**32 - 1
"""The row number of a missing key."""

TICKS_A_TURN = 64
"""Ticks of the clock while the table admits as many rows as it has slots."""
AGES_A_TURN = 8
"""Eviction compares ticks. Within an eighth of a turn, an *age*, a hit keeps its row's score, and a
slot outside the home half is not evicted before one inside it."""
POLICY_BITS = 8
"""Low bits of the policy argument of fetch; above them is the age, if there is one."""
ROOMY_LOAD = 0.45
"""Rows per slot of a roomy table with ample memory: few enough that every row finds a slot."""
MOST_ROOMY_LOAD = 0.95
"""Above this many rows per slot a packed table does as well."""
EXTRA_SLOTS = 1024
"""Slots that a roomy table has besides: a small one fills up unevenly."""
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
MIN_ROOMY_BATCH = 512
MAX_ROWS = (ROW_MASK - 2 * MAX_SPARE) // WAYS * WAYS

SLOT = np.dtype([("key", np.int64), ("word", np.uint32), ("score", np.uint32)])


class EvictionPolicy(IntEnum):
    """The meaning of a slot's score. The lowest score is evicted first, tombstones before all rows.

    ``NONE``: no eviction (static tables). ``LRU``: the clock's tick at the last use. ``LFU``: the number of
    uses in the epoch of the last use (`TableClock.epoch`, 0 unless the caller advances it; older epochs are
    evicted first). ``SCORE``: the caller's score, 64 bits in an array parallel to the slots; a row with a
    lower score than all that it could replace is not admitted. ``EPOCH_LRU``: the epoch of the last use
    and, in the bits below, the tick within it.
    """

    NONE = 0
    LRU = 1
    LFU = 2
    SCORE = 3
    EPOCH_LRU = 4

    @property
    def rule(self) -> EvictionPolicy:
        """The policy that kernels use: the host does what `EPOCH_LRU` adds."""
        return EvictionPolicy.LRU if self is EvictionPolicy.EPOCH_LRU else self


@dataclass(frozen=True, slots=True)
class GpuTableShape:
    """Sizes of one table.

    ``buckets`` of 8 slots; ``rows`` that lie ``stride`` bytes apart, the last ``host_rows`` of them in
    pinned host memory; ``spare`` of them belong to no slot at first: all of them in a roomy table.
    ``reserve``: rows of a roomy table beyond its capacity, so that writes always have spare rows.
    ``scored``: there is a parallel array of 64-bit scores.
    """

    buckets: int
    rows: int
    spare: int
    stride: int
    host_rows: int = 0
    scored: bool = False
    reserve: int = 0

    @property
    def slots(self) -> int:
        return self.buckets * WAYS

    @property
    def has_members(self) -> bool:
        """Whether other tables may share the rows."""
        return self.rows < MEMBER

    @property
    def row_mask(self) -> int:
        """The bits of a word that are a row's number."""
        return MEMBER - 1 if self.has_members else ROW_MASK

    def hidden(self, member: int) -> int:
        """Return the bits of a word that hide its row from a member; 0 is the first."""
        return EMPTY | (MEMBER << member if self.has_members else 0)

    @property
    def roomy(self) -> bool:
        """Whether empty slots own no row."""
        return self.spare == self.rows

    @property
    def load(self) -> float:
        """Rows per slot, as `plan_table_shape` takes it."""
        return self.capacity / (self.slots - EXTRA_SLOTS) if self.roomy else 1.0

    @property
    def capacity(self) -> int:
        """The rows that can be resident at least."""
        return min(self.slots, self.rows - self.reserve)

    @property
    def batch(self) -> int:
        """The most keys of one write launch.

        A roomy table is written in small batches: keys that choose their slots at the same time do not see
        each other, and every key should get a slot.
        """
        return _roomy_batch(self.capacity) if self.roomy else min(self.spare, MAX_SPARE)

    @property
    def device_rows(self) -> int:
        return self.rows - self.host_rows

    @property
    def bytes(self) -> int:
        """Bytes of device memory: lines, rows, versions, spare list, parallel scores."""
        slots = self.buckets * BUCKET_BYTES + self.slots * 8 * self.scored
        return slots + self.device_rows * self.stride + self.rows * 8 + self.spare * 4

    @property
    def host_bytes(self) -> int:
        """Bytes of pinned host memory."""
        return self.host_rows * self.stride


def plan_table_shape(
    table: EmbeddingTable,
    capacity: int,
    host_rows: int = 0,
    *,
    scored: bool = False,
    load: float = 1.0,
) -> GpuTableShape:
    """Plan space for ``capacity`` (> 0) rows of ``table``, ``host_rows`` of them in pinned host memory.

    ``load``: rows per slot. 1 makes a packed table, whose capacity is rounded up to whole buckets; less
    makes a roomy one. Raises ConfigError if the rows cannot be numbered in 29 bits.
    """
    if capacity > MAX_ROWS:
        raise ConfigError(
            f"the GPU cache of table {table.id} can't have {capacity:,} rows; a table has at most "
            f"{MAX_ROWS:,}. Lower its gpu_rows or gpu_share, or tiers.gpu.share"
        )
    stride = -(-table.row_bytes // SECTOR) * SECTOR
    if load < 1:
        buckets = max(MIN_BUCKETS, -(-(int(capacity / load) + EXTRA_SLOTS) // WAYS))
        reserve = 2 * _roomy_batch(capacity)
        rows = capacity + reserve
        return GpuTableShape(buckets, rows, rows, stride, min(host_rows, rows), scored, reserve)
    buckets = max(MIN_BUCKETS, -(-capacity // WAYS))
    spare = min(MAX_SPARE, max(MIN_SPARE, buckets * WAYS // 16))
    host_rows = min(host_rows, buckets * WAYS)
    return GpuTableShape(buckets, buckets * WAYS + spare, spare, stride, host_rows, scored)


def _roomy_batch(capacity: int) -> int:
    return min(MAX_SPARE, max(MIN_ROOMY_BATCH, capacity // 64))


def fitting_capacity(
    table: EmbeddingTable, free_bytes: int, *, scored: bool = False, load: float = 1.0
) -> int:
    """Return the largest capacity in rows whose arrays fit into ``free_bytes``; 0 if none does."""
    low, high = 0, MAX_ROWS
    while low < high:
        middle = (low + high + 1) // 2
        if plan_table_shape(table, middle, scored=scored, load=load).bytes <= free_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def eviction_ranks(scores: Any, now: int) -> Any:
    """Return the eviction ranks of 32-bit ``scores``, an array or a number: the lowest goes first.

    Scores wrap, as ticks and epochs do; they are ordered over half of their range on either side of
    ``now``.
    """
    return (scores - now + (1 << 31)) & SCORE_MASK


def mix(keys: KeyArray) -> NDArray[np.uint64]:
    """Return the hash of each key, ``(n,)``: the finaliser of MurmurHash3, a bijection."""
    h = keys.view(np.uint64).copy()
    h ^= h >> np.uint64(33)
    h *= np.uint64(0xFF51AFD7ED558CCD)
    h ^= h >> np.uint64(33)
    h *= np.uint64(0xC4CEB9FE1A85EC53)
    h ^= h >> np.uint64(33)
    return h


def half_buckets(keys: KeyArray, buckets: int) -> IndexArray:
    """Return the ``(n, 4)`` half buckets that each of ``keys (n,)`` may be in; half h of bucket b is 2 * b
    + h.

    They are its home half, the other half of that bucket, and the two of its second bucket.
    """
    h = mix(keys)
    count = np.uint64(buckets)
    first = (h >> np.uint64(32)) * count >> np.uint64(32)
    second = (h & np.uint64(0xFFFF_FFFF)) * count >> np.uint64(32)
    second = np.where(second == first, (second + np.uint64(1)) % count, second)
    home = first * np.uint64(2) + (h & np.uint64(1))
    both = second * np.uint64(2)
    return np.stack([home, home ^ np.uint64(1), both, both + np.uint64(1)], axis=1).view(np.int64)
