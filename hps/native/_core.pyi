from typing import Any

import numpy as np
from numpy.typing import NDArray

def partition_hash(keys: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The HPS partition hash of each key: (n,) uint64."""

def dedup(keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Distinct keys in order of first appearance (u,), and each key's position among them (n,)."""

def cache_buckets(keys: NDArray[np.int64], buckets: int) -> NDArray[np.int64]:
    """The two buckets each key may live in: (n, 2)."""

class CacheProbe:
    """Works on the arrays of a cache; see twin_cache.CacheProbe."""

    def __init__(
        self,
        keys: NDArray[np.int64],
        states: NDArray[np.uint8],
        stamps: NDArray[np.uint32],
        versions: NDArray[np.uint64],
        rows: NDArray[Any],
        code: int,
    ) -> None: ...
    def find(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """The slot that holds each key, or -1: (n,)."""

    def fetch(
        self,
        keys: NDArray[np.int64],
        missing: NDArray[np.int64],
        clock: int,
        oldest_tombstone: int,
        out: NDArray[Any],
        versions: NDArray[np.uint64],
        source: NDArray[np.uint8],
    ) -> NDArray[np.int64] | None:
        """Answer keys[missing] in place; the positions still missing (m,), or None."""

    def gather(self, keys: NDArray[np.int64], clock: int, out: NDArray[Any]) -> bool:
        """The row of every key into out (n, dim); False when one has none."""

    def admit(
        self,
        keys: NDArray[np.int64],
        versions: NDArray[np.uint64],
        rows: NDArray[Any] | None,
        stamp: int,
    ) -> tuple[int, int]:
        """Give each key, distinct and not resident, a slot; rows and tombstones that had to go."""

class ProtocolError(ValueError):
    """See twin_resp.ProtocolError."""

class RowReplies:
    """See twin_resp.RowReplies."""

    def __init__(
        self,
        counts: NDArray[np.int64],
        positions: NDArray[np.int64],
        out: NDArray[Any],
        versions: NDArray[np.uint64],
        source: NDArray[np.uint8],
        code: int,
        versioned: bool,
        oldest_row: int,
        oldest_tombstone: int,
    ) -> None: ...
    def feed(self, buffer: NDArray[np.uint8], begin: int, end: int) -> int: ...
    @property
    def done(self) -> bool: ...
    @property
    def left(self) -> NDArray[np.int64]: ...
    @property
    def errors(self) -> list[tuple[int, str]]: ...
    @property
    def wrong_length(self) -> int: ...
