"""How a table lies in device memory: constants that hash_table.cuh repeats, and sizes.

*Bucket*: one 128-byte line of 10 slots: keys (10 x 8 bytes), words (10 x 4 bytes), stamps (10 x 6 bits in 8
bytes). A key may live in two buckets. *Word*: a row's number in its low 30 bits and the slot's state
in the high two. *Rows* and their versions lie in arrays of their own, by row number: a writer fills a
row nobody sees and shows it by storing one word. Every slot owns a row, also while it is empty; the
rows beyond those are spare. README.md beside this file says why readers need no lock.

No key value is reserved: an empty slot's word says that it is empty, and the key it still carries is one
that can't be met (its own last key, or at the start a key that belongs to other buckets).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hps.errors import ConfigError
from hps.types import EmbeddingTable, IndexArray, KeyArray

WAYS = 10
BUCKET_BYTES = 128
WORDS_AT = 80
STAMPS_AT = 120
STAMP_BITS = 6
AGES = 1 << STAMP_BITS
ROW_BITS = 30
EMPTY = 1 << 31
TOMBSTONE = 1 << 30
CLAIMED = EMPTY | TOMBSTONE
"""States of a slot, the two high bits of its word: 0 is a row; claimed slots look empty to readers."""
ROW_MASK = TOMBSTONE - 1
NO_ROW = 2**32 - 1
"""Reported for a key that is not there, where row numbers are asked for."""

PREFER = 9
"""A key goes to its first bucket while that holds fewer than this; else to the emptier of the two."""
MARGIN = 2
"""In full buckets: how many ticks older the second bucket's stalest slot must be to be taken."""
TICKS_A_TURN = 16
"""Ticks of the clock while the table admits as many rows as it has slots."""

SECTOR = 32
"""Rows start at multiples of this many bytes, so that no two share a sector of the first-level cache."""
MIN_BUCKETS = 8
MAX_SPARE, MIN_SPARE = 1 << 20, 1 << 10
MAX_ROWS = (ROW_MASK - MAX_SPARE) // WAYS * WAYS

BUCKET = np.dtype(
    [("keys", np.int64, WAYS), ("words", np.uint32, WAYS), ("stamps", np.uint64)], align=True
)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one table. ``capacity`` slots in ``buckets``; ``spare`` rows besides, which is also the
    most keys that one launch of a write takes; ``stride`` bytes from row to row."""

    buckets: int
    spare: int
    stride: int

    @property
    def capacity(self) -> int:
        return self.buckets * WAYS

    @property
    def rows(self) -> int:
        return self.capacity + self.spare

    @property
    def bytes(self) -> int:
        """Device memory: lines, rows, versions, spare list."""
        return self.buckets * BUCKET_BYTES + self.rows * (self.stride + 8) + self.spare * 4


def shape_of(table: EmbeddingTable, capacity: int) -> Shape:
    """Room for ``capacity`` (> 0) rows of ``table``, rounded up to whole buckets.

    Raises ConfigError when the rows can't be numbered in 30 bits.
    """
    buckets = max(MIN_BUCKETS, -(-capacity // WAYS))
    spare = min(MAX_SPARE, max(MIN_SPARE, buckets * WAYS // 16))
    shape = Shape(buckets, spare, -(-table.row_bytes // SECTOR) * SECTOR)
    if shape.capacity > MAX_ROWS:
        raise ConfigError(
            f"the GPU cache of table {table.id} can't have {capacity:,} rows; a table has at most "
            f"{MAX_ROWS:,}. Lower its cache_rows"
        )
    return shape


def fitting_capacity(table: EmbeddingTable, free_bytes: int) -> int:
    """The largest capacity in rows whose arrays fit into ``free_bytes``; 0 when none does."""
    low, high = 0, MAX_ROWS
    while low < high:
        middle = (low + high + 1) // 2
        if shape_of(table, middle).bytes <= free_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def mix(keys: KeyArray) -> NDArray[np.uint64]:
    """(n,) the hash of each key: the finaliser of MurmurHash3, a bijection."""
    h = keys.view(np.uint64).copy()
    h ^= h >> np.uint64(33)
    h *= np.uint64(0xFF51AFD7ED558CCD)
    h ^= h >> np.uint64(33)
    h *= np.uint64(0xC4CEB9FE1A85EC53)
    h ^= h >> np.uint64(33)
    return h


def buckets_of(keys: KeyArray, buckets: int) -> IndexArray:
    """(n, 2): the two different buckets each of ``keys (n,)`` may live in."""
    h = mix(keys)
    count = np.uint64(buckets)
    first = (h >> np.uint64(32)) * count >> np.uint64(32)
    second = (h & np.uint64(0xFFFF_FFFF)) * count >> np.uint64(32)
    second = np.where(second == first, (second + np.uint64(1)) % count, second)
    return np.stack([first, second], axis=1).view(np.int64)


def fillers(buckets: int) -> KeyArray:
    """(buckets,): for each bucket a key that belongs to others, to stand in its unused slots."""
    keys = np.zeros(buckets, np.int64)
    unsettled = np.arange(buckets)
    candidate = 0
    while len(unsettled):
        own = buckets_of(np.array([candidate], np.int64), buckets)[0]
        keys[unsettled] = candidate
        unsettled = unsettled[np.isin(unsettled, own)]
        candidate += 1
    return keys
