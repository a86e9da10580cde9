from typing import Any

import numpy as np
from numpy.typing import NDArray

def partition_hash(keys: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The HPS partition hash of each key: (n,) uint64."""

def dedup(keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Distinct keys in order of first appearance (u,), and each key's position among them (n,)."""

def cache_buckets(keys: NDArray[np.int64], buckets: int) -> NDArray[np.int64]:
    """The two buckets each key may live in: (n, 2)."""

def cache_find(
    keys: NDArray[np.int64], slot_keys: NDArray[np.int64], states: NDArray[np.uint8]
) -> NDArray[np.int64]:
    """The slot that holds each key, or -1: (n,)."""

def cache_fetch(
    keys: NDArray[np.int64],
    missing: NDArray[np.int64],
    slot_keys: NDArray[np.int64],
    states: NDArray[np.uint8],
    stamps: NDArray[np.uint32],
    slot_versions: NDArray[np.uint64],
    rows: NDArray[Any],
    clock: int,
    oldest_tombstone: int,
    out: NDArray[Any],
    versions: NDArray[np.uint64],
    source: NDArray[np.uint8],
    code: int,
) -> NDArray[np.int64] | None:
    """Answer keys[missing] in place; the positions still missing (m,), or None."""
