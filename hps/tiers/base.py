"""The Tier protocol: anything that holds rows, and what its callers pass to it.

A chain of tiers, a bridge, a metered tier and a guarded tier are tiers themselves: a feature is a wrapper
around a tier, not a branch inside one. The protocol has six verbs and `info`. A seventh verb needs a
recorded decision that says why a wrapper or a second, optional protocol is not enough.

Rules for every tier (tests/contract/test_tier.py runs the same tests on all of them):

* ``fetch`` takes all parts of a batch together. For a key that the tier holds, it writes the row, its
  version and its source code, and removes the key's position from ``missing``. It leaves all other
  positions unchanged, never raises for a miss and never fills in defaults. Only ``out`` may change at a
  searched position without a row, if a writer works on that key in parallel: its content is undefined.
* A deleted key (a tombstone) ends the search: its version is written, its source stays 0, its position
  is removed from ``missing``.
* Tiers expect narrowed keys: code that receives keys from clients narrows them
  (`EmbeddingTable.narrow`).
* A write is applied if its version is >= the stored one (or the tombstone's). If one call has the same
  key several times, the highest version wins; among equal versions, the last.
* ``fetch`` may be called from many threads in parallel with one writer. The mutating verbs are called
  by one thread per node (invariant 5), unless ``info.shared``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from hps.tracing import RequestContext
from hps.types import (
    EmbeddingTable,
    IndexArray,
    KeyArray,
    Source,
    SourceArray,
    VectorArray,
    VersionArray,
)

# Constants, because every request makes a part per table.
_UINT64, _UINT8 = np.dtype(np.uint64), np.dtype(np.uint8)
_POSITIONS = np.arange(4096)
_POSITIONS.flags.writeable = False
_ALL = slice(None)

Ask = tuple[EmbeddingTable, KeyArray, VectorArray]
"""A table, keys ``(n,) int64`` that may repeat, and ``out`` for their vectors, ``(n, dim)`` of its dtype, or
for their rows as they are stored."""

POOLED_DTYPES = frozenset({np.dtype(np.float32), np.dtype(np.float16)})
"""Dtypes of vectors that `Bags` can pool."""


def is_poolable(table: EmbeddingTable) -> bool:
    """True if `Bags` can pool the table's rows."""
    return table.row_format.code is not None and table.dtype in POOLED_DTYPES


@dataclass(frozen=True, slots=True)
class TableName:
    """A table's model, version and name; ``version`` is 0 for HPS's own names in the ``hps`` layout."""

    model: str
    version: int
    name: str


@dataclass(frozen=True, slots=True)
class TierInfo:
    """Properties of a tier.

    ``memory``: the memory that ``Part.out`` must be in. ``blocking``: the tier waits for a disk or a
    network, so it is never called on an event loop. ``volatile``: a restart loses the contents.
    ``shared``: one copy per cluster instead of one per node. ``cache``: the tier may drop rows by itself;
    a store may not."""

    name: str
    source: Source
    memory: Literal["host", "cuda"] = "host"
    blocking: bool = False
    volatile: bool = True
    shared: bool = False
    cache: bool = False


@dataclass(slots=True)
class Part:
    """One table's keys of a batch on the way down the tiers.

    keys (n,) int64, unique; out (n, row_width) of the table's row_dtype; versions (n,) uint64; source (n,)
    uint8, 0 = no row found; missing (m,) int64, the ascending positions that the next tier must search.
    ``missing`` is replaced, never written to. Tiers on a device also take None for ``versions`` and
    ``source``: see `GpuCache`."""

    table: EmbeddingTable
    keys: KeyArray
    out: VectorArray
    versions: VersionArray
    source: SourceArray
    missing: IndexArray

    @staticmethod
    def make(table: EmbeddingTable, keys: KeyArray, out: VectorArray | None = None) -> Part:
        """Make a part in host memory with all keys missing. ``keys`` must be unique."""
        n = len(keys)
        return Part(
            table,
            keys,
            np.empty((n, table.row_width), table.row_dtype) if out is None else out,
            np.zeros(n, _UINT64),
            np.zeros(n, _UINT8),
            _POSITIONS[:n] if n <= len(_POSITIONS) else np.arange(n),
        )


@dataclass(slots=True)
class Bags:
    """Keys ``(n,) int64`` of a table, possibly repeated, pooled into ``out (bags, dim)``.

    Bag ``b`` has the keys ``offsets[b]:offsets[b + 1]`` of ``offsets (bags + 1,) int64``. Without
    offsets all bags have the same number of keys. Each row is multiplied by its weight in ``weights (n,)
    float32``, and each sum is divided by its divisor in ``divisors (bags,) float32``. An empty bag, and a
    bag with divisor 0, gets zeros. Sums are float32 and added in the order of the keys.

    A gather sets ``missing (m,)``: the ascending positions of the keys without a row in this tier, or
    None if all have one. ``out`` is undefined for bags with missing keys."""

    table: EmbeddingTable
    keys: KeyArray
    out: VectorArray
    offsets: IndexArray | None = None
    weights: NDArray[np.float32] | None = None
    divisors: NDArray[np.float32] | None = None
    missing: IndexArray | None = None


@dataclass(slots=True)
class FetchContext:
    """Context of one batch.

    ``deadline``: in ``time.monotonic()``. ``stream``: the CUDA stream, if any. ``degraded``: names of
    the tiers that were skipped as broken, late or full. ``origin``: trace context of the request."""

    deadline: float | None = None
    stream: Any = None
    degraded: list[str] = field(default_factory=list)
    origin: RequestContext | None = None


class Tier(Protocol):
    """A holder of rows that follows the module's rules."""

    @property
    def info(self) -> TierInfo: ...

    def fetch(self, parts: Sequence[Part], ctx: FetchContext) -> None:
        """Write the rows of ``parts[i].keys[parts[i].missing]`` that this tier holds.

        See the module's rules."""
        ...

    def insert(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        """Upsert; an older version never overwrites a newer one. A cache may drop rows to make room."""
        ...

    def update(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        """Like `insert`, but only for resident rows (this refreshes a cache)."""
        ...

    def delete(self, table: EmbeddingTable, keys: KeyArray, versions: VersionArray) -> None:
        """Delete rows whose version is <= the given one and keep a tombstone."""
        ...

    def evict(self, table: EmbeddingTable, keys: KeyArray) -> None:
        """Drop rows to make room. A cache gets them again from the tier below."""
        ...

    def close(self) -> None:
        """Release files, sockets and memory; idempotent. No other call may follow."""
        ...


def new_part_for_misses(part: Part) -> Part:
    """Make a part, with new arrays, for the keys that ``part`` misses."""
    return Part.make(part.table, part.keys[part.missing])


def restrict_part(part: Part, missing: IndexArray) -> Part:
    """Return a part with the same arrays and only the positions ``missing`` to fetch."""
    return Part(part.table, part.keys, part.out, part.versions, part.source, missing)


def copy_part(part: Part, positions: IndexArray) -> Part:
    """Copy the keys of ``part`` at ``positions``, with their answers, into new arrays."""
    missing = np.flatnonzero(_still_missing(part)[positions])
    return Part(
        part.table,
        part.keys[positions],
        part.out[positions],
        part.versions[positions],
        part.source[positions],
        missing,
    )


def copy_answer(answer: Part, part: Part, at: IndexArray | slice = _ALL) -> None:
    """Copy ``answer`` into ``part``: entry ``at[i]`` of ``answer`` answers the key ``part.missing[i]``."""
    wanted, missed, source = part.missing, _still_missing(answer)[at], answer.source[at]
    rows, done = source != 0, ~missed
    if len(wanted) == len(part.keys) and rows.all() and done.all():
        # Plain copies, which do not hold the interpreter lock as those by position do.
        part.out[...], part.versions[...] = answer.out[at], answer.versions[at]
        part.source[...], part.missing = source, wanted[:0]
        return
    part.out[wanted[rows]] = answer.out[at][rows]
    part.versions[wanted[done]] = answer.versions[at][done]
    part.source[wanted[done]] = source[done]
    part.missing = wanted[missed]


def merge_misses(shares: Sequence[Part]) -> IndexArray:
    """Return the ascending positions that any of ``shares``, views of one part, still misses."""
    if len(shares) == 1:
        return shares[0].missing
    return np.sort(np.concatenate([each.missing for each in shares]))


def _still_missing(part: Part) -> NDArray[np.bool_]:
    still = np.zeros(len(part.keys), bool)
    still[part.missing] = True
    return still


def newest_of_each(keys: KeyArray, versions: VersionArray) -> IndexArray | None:
    """Return the positions that keep each key once, with its highest version (the last on a tie).

    None if the keys are already unique. That common case sorts the keys only, not the versions."""
    ordered = np.sort(keys)
    if not (ordered[1:] == ordered[:-1]).any():
        return None
    order = np.lexsort((np.arange(len(keys)), versions, keys))
    sorted_keys = keys[order]
    last = np.empty(len(keys), bool)
    np.not_equal(sorted_keys[1:], sorted_keys[:-1], out=last[:-1])
    last[-1] = True
    return np.sort(order[last])
