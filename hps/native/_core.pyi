from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.native.twin_codec import Group
from hps.native.twin_in_flight import Share

SOURCES: str
"""The digest of the sources that it was built from, see source.py."""

def partition_hash(keys: NDArray[np.int64]) -> NDArray[np.uint64]:
    """See twin.partition_hash."""

def dedup(keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """See twin.dedup."""

def cache_bytes(capacity: int, row_bytes: int) -> int:
    """Return the bytes of a table of ``capacity`` rows of ``row_bytes``."""

def copy_rows(rows: NDArray[Any], numbers: NDArray[np.int64], out: NDArray[Any]) -> None:
    """Copy ``rows[numbers[i]]`` to ``out[i]``: the lower bound for benchmarks of lookups."""

def cache_kernels() -> list[str]:
    """Return the instruction sets of the read kernels that this machine can run, the fastest first."""

class CacheTable:
    """See twin_cache.CacheTable. Raises TypeError or ValueError for arrays that do not fit.

    ``kernels``: one of ``cache_kernels()``; None selects the fastest."""

    def __init__(
        self,
        capacity: int,
        like: NDArray[Any],
        eviction: str,
        code: int,
        kernels: str | None = None,
        file: int = -1,
        huge_pages: str = "try",
        numa_node: int = -1,
    ) -> None:
        """Create the table in private memory, or in the file of the descriptor ``file``, to share it.

        Raises MemoryError if memory is exhausted, RuntimeError if the system refuses pages or node."""

    @staticmethod
    def attach(file: int, like: NDArray[Any], code: int) -> CacheTable:
        """Attach to the table in ``file``. Raises ValueError if there is no table of such rows."""

    def repair(self) -> bool:
        """Complete or revert the change that a killed writer left; False if there was none."""

    threads: int
    """The number of threads that a call with many keys may use."""

    @property
    def rows(self) -> int: ...
    @property
    def tombstones(self) -> int: ...
    @property
    def evictions(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    def fetch(
        self,
        keys: NDArray[np.int64],
        missing: NDArray[np.int64],
        oldest_tombstone: int,
        out: NDArray[Any],
        versions: NDArray[np.uint64],
        source: NDArray[np.uint8],
    ) -> NDArray[np.int64] | None:
        """See twin_cache.CacheTable.fetch."""

    def gather(self, keys: NDArray[np.int64], out: NDArray[Any]) -> bool:
        """See twin_cache.CacheTable.gather."""

    def pool_bags(
        self,
        keys: NDArray[np.int64],
        offsets: NDArray[np.int64] | None,
        weights: NDArray[np.float32] | None,
        divisors: NDArray[np.float32] | None,
        out: NDArray[Any],
        supplied: tuple[NDArray[np.int64], NDArray[Any]] | None = None,
    ) -> NDArray[np.int64] | None:
        """See twin_cache.CacheTable.pool_bags."""

    def write(
        self,
        keys: NDArray[np.int64],
        rows: NDArray[Any] | None,
        versions: NDArray[np.uint64],
        oldest_tombstone: int,
        resident_only: bool,
    ) -> None:
        """See twin_cache.CacheTable.write."""

    def evict(self, keys: NDArray[np.int64]) -> None:
        """See twin_cache.CacheTable.evict."""

    def top_k(self, n: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """See twin_cache.CacheTable.top_k."""

def gather_all(
    tables: dict[Any, CacheTable],
    requests: list[tuple[Any, NDArray[np.int64], NDArray[Any]]],
    threads: int = 1,
) -> bool:
    """See twin_cache.gather_all."""

class WorkerPool:
    """Threads for many short calls, started at their first use; see twin_misses.WorkerPool."""

    def __init__(self, threads: int) -> None: ...
    @property
    def threads(self) -> int: ...

def gather_misses(
    tables: list[CacheTable | None],
    keys: list[NDArray[np.int64]],
    positions: NDArray[np.uint32],
    rows: NDArray[np.uint8],
    sources: NDArray[np.uint8],
    code: int,
    pool: WorkerPool | None = None,
) -> int:
    """See twin_misses.gather_misses. Raises TypeError or ValueError for arrays that do not fit."""

def pool_rows(
    rows: NDArray[Any],
    numbers: NDArray[np.int64] | None,
    offsets: NDArray[np.int64] | None,
    weights: NDArray[np.float32] | None,
    divisors: NDArray[np.float32] | None,
    out: NDArray[Any],
    kernels: str | None = None,
) -> None:
    """See twin_pool.pool_rows; rows must be float32 or float16. ``kernels``: as of `CacheTable`."""

class InFlight:
    """See twin_in_flight.InFlight. Raises TypeError or ValueError for arguments that do not fit."""

    def claim(
        self,
        number: int,
        tables: Sequence[int],
        keys: Sequence[NDArray[np.int64]],
        missing: Sequence[NDArray[np.int64]],
        now: float,
    ) -> tuple[list[NDArray[np.int64]], list[Share]]: ...
    def land(self, number: int, until: float) -> list[NDArray[np.int64]]: ...
    def leave(self, number: int) -> bool: ...
    def __len__(self) -> int: ...

class ProtocolError(ValueError):
    """See twin_resp.ProtocolError."""

class RowReplies:
    """See twin_resp.RowReplies."""

    def __init__(
        self,
        counts: NDArray[np.int64],
        positions: NDArray[np.int64],
        arrays: tuple[NDArray[Any], NDArray[np.uint64], NDArray[np.uint8]],
        code: int,
        versioned: bool,
        oldest: tuple[int, int],
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

def decode_hps(
    messages: Sequence[bytes | None],
    keyed: NDArray[np.uint8],
    stamps: NDArray[np.uint64],
    key_bytes: int,
    row_bytes: int,
    max_bytes: int,
) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint64], NDArray[np.uint8]]:
    """See twin_codec.decode_hps."""

def decode_native(
    messages: Sequence[bytes | None], max_bytes: int
) -> tuple[NDArray[np.uint8], list[Group]]:
    """See twin_codec.decode_native."""

def encode_hps(
    keys: NDArray[np.int64],
    vectors: NDArray[np.uint8],
    key_bytes: int,
    row_bytes: int,
    rows_per_message: int,
) -> list[bytes]:
    """See twin_codec.encode_hps."""

def crc32(data: NDArray[np.uint8], crc: int = 0) -> int:
    """See twin_codec.crc32."""
