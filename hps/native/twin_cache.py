"""NumPy twins of the CPU cache's probe (include/hps/bucket_table.hpp), vectorised over the batch."""

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
    """(n, 2): the two buckets that each of ``keys (n,)`` may live in, of 0 < ``buckets`` < 2^32."""
    h = partition_hash(keys)
    h *= _GOLDEN
    both = np.empty((len(keys), 2), np.uint64)
    np.right_shift(h, _HALF, out=both[:, 0])
    np.bitwise_and(h, _LOW, out=both[:, 1])
    both *= np.uint64(buckets)
    both >>= _HALF
    return both.view(np.int64)


def cache_find(keys: KeyArray, slot_keys: KeyArray, states: NDArray[np.uint8]) -> IndexArray:
    """(n,) the slot that holds each of ``keys (n,)``, or -1.

    ``slot_keys`` and ``states`` are (buckets, ways); slot = bucket * ways + way.
    """
    buckets, ways = slot_keys.shape
    both = cache_buckets(keys, buckets)
    match = slot_keys[both] == keys[:, None, None]
    match &= states[both] != EMPTY
    flat = match.reshape(len(keys), 2 * ways)
    at = flat.argmax(axis=1)
    every = np.arange(len(keys))
    slots = both[every, at // ways] * ways + at % ways
    slots[~flat[every, at]] = -1
    return slots


def cache_fetch(
    keys: KeyArray,
    missing: IndexArray,
    slot_keys: KeyArray,
    states: NDArray[np.uint8],
    stamps: NDArray[np.uint32],
    slot_versions: VersionArray,
    rows: NDArray[Any],
    clock: int,
    oldest_tombstone: int,
    out: VectorArray,
    versions: VersionArray,
    source: SourceArray,
    code: int,
) -> IndexArray | None:
    """Answer ``keys[missing]`` into ``out (n, dim)``, ``versions (n,)`` and ``source (n,)``; see
    `Part`. Returns the positions still missing, None when there are none.

    By slot: ``stamps``, ``slot_versions`` (slots,) and ``rows (slots, dim)``. Hits get the stamp
    ``clock``; tombstones older than ``oldest_tombstone`` count as not there.
    """
    slots = cache_find(keys[missing], slot_keys, states)
    state = states.reshape(-1)[slots]
    state[slots < 0] = EMPTY
    state[(state == TOMBSTONE) & (slot_versions[slots] < oldest_tombstone)] = EMPTY
    hit = state != EMPTY
    stamps[slots[hit]] = clock
    versions[missing[hit]] = slot_versions[slots[hit]]
    row = state == ROW
    out[missing[row]] = rows[slots[row]]
    source[missing[row]] = code
    return None if hit.all() else missing[~hit]
