"""Row sources: tiers and model files as tables of rows, for work over whole tables.

For comparing, exporting and converting; not for requests."""

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
"""Rows per step of such work."""


class TableRows(NamedTuple):
    """Rows of a table: keys (n,) int64, vectors (n, dim) of its dtype, versions (n,) uint64."""

    keys: KeyArray
    vectors: VectorArray
    versions: VersionArray

    def at(self, where: NDArray[Any] | slice) -> TableRows:
        """Rows at positions, a mask or a slice."""
        return TableRows(self.keys[where], self.vectors[where], self.versions[where])


@dataclass(frozen=True, slots=True)
class StoredKeys:
    """A store's state of some keys.

    ``found (n,)``: keys that it holds; ``deleted (n,)``: keys that it has as tombstones; ``vectors (n,
    dim)`` and ``versions (n,)`` are valid only for those."""

    found: NDArray[np.bool_]
    deleted: NDArray[np.bool_]
    vectors: VectorArray
    versions: VersionArray

    def rows(self, keys: KeyArray) -> TableRows:
        """The found rows of ``keys``, those that were asked for."""
        return TableRows(keys, self.vectors, self.versions).at(self.found)


class RowSource(Protocol):
    """A tier, or a model's files. Raises TierError or ModelError."""

    @property
    def name(self) -> str: ...
    @property
    def versioned(self) -> bool:
        """True if it keeps versions."""
        ...

    @property
    def uniform(self) -> bool:
        """True if all rows of a table have the same version, which then says little of each."""
        ...

    def entries(self, table: EmbeddingTable) -> int:
        """Approximate number of rows."""
        ...

    def scan(self, table: EmbeddingTable) -> Iterator[TableRows]:
        """Each of its rows once, about ``BLOCK`` at a time."""
        ...

    def get(self, table: EmbeddingTable, keys: KeyArray) -> StoredKeys: ...

    def missing_keys(self, table: EmbeddingTable, keys: Iterable[KeyArray]) -> Iterator[KeyArray]:
        """Unique ``keys`` without a row here."""
        ...

    def sample(self, table: EmbeddingTable, keys: KeyArray) -> Iterator[TableRows]:
        """About as many of its rows as there are ``keys``, which are random keys of the table."""
        ...


def fetch(tier: Tier, table: EmbeddingTable, keys: KeyArray) -> StoredKeys:
    """State of unique ``keys (n,)`` of ``table`` in ``tier``."""
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
    """The same keys in blocks of ``size`` or slightly more."""
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
