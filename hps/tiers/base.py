"""The Tier protocol: anything that holds rows.

A chain of tiers, a bridge, a metered tier and a guarded tier are themselves tiers, so features are
layers, not branches. Six verbs and `info`; adding one needs a recorded decision with the reason a
wrapper or a second, optional protocol will not do.

Rules every tier keeps (tests/contract/test_tier.py runs one body on all of them):

* ``fetch`` takes all parts of a batch at once. For a key it holds it writes the row, its version and
  its source code and takes the position out of ``missing``; it leaves the others untouched. It never
  raises for a miss and never fills in defaults.
* A key it knows to be deleted (a tombstone) ends the search: version written, source left 0,
  position taken out of ``missing``.
* Keys are the table's own: whoever takes keys from outside narrows them (`EmbeddingTable.narrow`).
* A write is applied when its version is >= the stored one (or the tombstone's). Within one call the
  same key may stand several times: the highest version wins, on equal versions the last.
* ``fetch`` may be called from many threads beside one writer; the mutating verbs are called by one
  thread per node (invariant 5), unless ``info.shared``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

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

# At hand, because a request makes a part per table.
_UINT64, _UINT8 = np.dtype(np.uint64), np.dtype(np.uint8)
_POSITIONS = np.arange(4096)
_POSITIONS.flags.writeable = False


@dataclass(frozen=True, slots=True)
class TierInfo:
    """What the rest needs to know of a tier.

    ``memory`` is where ``Part.out`` must live. ``blocking`` tiers wait for a disk or a network and
    are never called on an event loop. ``volatile``: contents are lost at restart. ``shared``: one
    copy per cluster rather than per node. ``cache``: may drop rows by itself (a store may not).
    """

    name: str
    source: Source
    memory: Literal["host", "cuda"] = "host"
    blocking: bool = False
    volatile: bool = True
    shared: bool = False
    cache: bool = False


@dataclass(slots=True)
class Part:
    """One table's share of a batch on its way down the tiers.

    keys (n,) int64, unique; out (n, dim) of the table's dtype; versions (n,) uint64; source (n,)
    uint8, 0 = not found yet; missing (m,) int64, ascending positions that are still to be asked for;
    it is replaced, never written to.
    """

    table: EmbeddingTable
    keys: KeyArray
    out: VectorArray
    versions: VersionArray
    source: SourceArray
    missing: IndexArray

    @staticmethod
    def make(table: EmbeddingTable, keys: KeyArray, out: VectorArray | None = None) -> Part:
        """A fresh host part: nothing found yet. ``keys`` must be unique."""
        n = len(keys)
        return Part(
            table,
            keys,
            np.empty((n, table.dim), table.dtype) if out is None else out,
            np.zeros(n, _UINT64),
            np.zeros(n, _UINT8),
            _POSITIONS[:n] if n <= len(_POSITIONS) else np.arange(n),
        )


@dataclass(slots=True)
class FetchContext:
    """What accompanies one batch: its deadline (``time.monotonic()``), the CUDA stream if any, the names
    of the tiers that were skipped as broken, late or full (``degraded``), and whom it is fetched for."""

    deadline: float | None = None
    stream: Any = None
    degraded: list[str] = field(default_factory=list)
    origin: RequestContext | None = None


class Tier(Protocol):
    """What holds rows, by the rules above."""

    @property
    def info(self) -> TierInfo: ...

    def fetch(self, parts: Sequence[Part], ctx: FetchContext) -> None:
        """Answer what this tier holds of ``parts[i].keys[parts[i].missing]``; see the module's rules."""
        ...

    def insert(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        """Upsert; an older version never overwrites a newer one. A cache may drop rows to make room."""
        ...

    def update(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        """As insert, but only for rows already resident (how a cache is refreshed)."""
        ...

    def delete(self, table: EmbeddingTable, keys: KeyArray, versions: VersionArray) -> None:
        """Remove rows whose version is <= the given one and remember the deletion (tombstone)."""
        ...

    def evict(self, table: EmbeddingTable, keys: KeyArray) -> None:
        """Drop rows to make room. A row evicted from a cache comes back from the tier below."""
        ...

    def close(self) -> None:
        """Release files, sockets and memory; idempotent. No other call may follow."""
        ...


def newest_of_each(keys: KeyArray, versions: VersionArray) -> IndexArray | None:
    """Positions to keep so that each key stands once, with its highest version (the last on a tie).

    None when the keys are unique already (the common case, decided by sorting the keys alone).
    """
    ordered = np.sort(keys)
    if not (ordered[1:] == ordered[:-1]).any():
        return None
    order = np.lexsort((np.arange(len(keys)), versions, keys))
    sorted_keys = keys[order]
    last = np.empty(len(keys), bool)
    np.not_equal(sorted_keys[1:], sorted_keys[:-1], out=last[:-1])
    last[-1] = True
    return np.sort(order[last])
