"""Row sources: stores and model files as tables of rows, for comparing, exporting and converting.

They read whole tables; requests do not use them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hps.errors import TierError
from hps.tiers.base import FetchContext, Part, Tier
from hps.types import EmbeddingTable, KeyArray, VectorArray, VersionArray

BLOCK = 1 << 16
"""Rows per step of work over a whole table."""


class TableRows(NamedTuple):
    """Rows of a table: keys (n,) int64, versions (n,) uint64, vectors (n, row_width) as they are stored."""

    keys: KeyArray
    vectors: VectorArray
    versions: VersionArray

    def at(self, where: NDArray[Any] | slice) -> TableRows:
        """Return the rows at positions, of a mask, or of a slice."""
        return TableRows(self.keys[where], self.vectors[where], self.versions[where])


@dataclass(frozen=True, slots=True)
class StoredKeys:
    """A store's state of some keys.

    ``found (n,)``: mask of the keys with a row; ``deleted (n,)``: mask of those with a tombstone;
    ``vectors (n, row_width)`` and ``versions (n,)`` are valid only for found keys, versions also for deleted
    ones."""

    found: NDArray[np.bool_]
    deleted: NDArray[np.bool_]
    vectors: VectorArray
    versions: VersionArray

    def rows(self, keys: KeyArray) -> TableRows:
        """Return the found rows of ``keys``, the keys of this state."""
        return TableRows(keys, self.vectors, self.versions).at(self.found)


class RowSource(Protocol):
    """A store, or a model's files. Raises TierError or ModelError."""

    @property
    def name(self) -> str: ...
    @property
    def versioned(self) -> bool:
        """True if the source keeps versions."""
        ...

    @property
    def uniform(self) -> bool:
        """True if all rows of a table have the same version, so that it does not show a row's age."""
        ...

    def entries(self, table: EmbeddingTable) -> int:
        """Return the approximate number of rows."""
        ...

    def scan(self, table: EmbeddingTable) -> Iterator[TableRows]:
        """Yield each row once, about ``BLOCK`` rows at a time."""
        ...

    def get(self, table: EmbeddingTable, keys: KeyArray) -> StoredKeys: ...

    def missing_keys(self, table: EmbeddingTable, keys: Iterable[KeyArray]) -> Iterator[KeyArray]:
        """Yield those of ``keys`` that have no row here. ``keys`` must be unique."""
        ...

    def sample(self, table: EmbeddingTable, keys: KeyArray) -> Iterator[TableRows]:
        """Yield about as many rows as there are ``keys``, which are random keys of the table."""
        ...


def fetch(tier: Tier, table: EmbeddingTable, keys: KeyArray) -> StoredKeys:
    """Return the state of unique ``keys (n,)`` of ``table`` in ``tier``."""
    part = Part.make(table, keys)
    ctx = FetchContext()
    tier.fetch([part], ctx)
    if ctx.degraded:
        raise TierError(tier.info.name, f"table {table.id} could not be read in full; see the log")
    found = part.source != 0
    answered = np.ones(len(keys), bool)
    answered[part.missing] = False
    return StoredKeys(found, answered & ~found, part.out, part.versions)


def blocks(parts: Iterable[KeyArray], size: int) -> Iterator[KeyArray]:
    """Yield the same keys in blocks of ``size`` or slightly more."""
    waiting: list[KeyArray] = []
    n = 0
    for part in parts:
        waiting.append(part)
        n += len(part)
        if n >= size:
            yield np.concatenate(waiting)
            waiting, n = [], 0
    if n:
        yield np.concatenate(waiting)
