"""MemoryTier: rows in a dictionary; the executable specification of `Tier`.

Every other tier is tested against this one, so it is written to be obvious, not fast. It also defines
what the protocol's text leaves open:

* A tombstone is resident: `update` with a version >= the tombstone's restores the key (otherwise a
  cache would keep hiding a row that was inserted again); `evict` removes the tombstone.
* `delete` leaves a tombstone even for an unknown key.
* A tombstone whose version is more than the table's ``tombstone_ttl_s`` in the past counts as absent;
  the row that it deleted stays deleted.
* A row whose version is more than the table's ``ttl_s`` in the past counts as missing, but is still the
  stored version of its key until it is removed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hps.tiers.base import FetchContext, Part, TierInfo
from hps.tiers.checks import check_keys, check_part, check_rows
from hps.types import (
    EmbeddingTable,
    KeyArray,
    Source,
    VectorArray,
    VersionArray,
    oldest_row,
    oldest_tombstone,
)


class MemoryRow(NamedTuple):
    """The state of one key; replaced, never changed, so that readers see the old or the new one."""

    version: int
    row: VectorArray | None
    """(dim,), or None: the key was deleted (a tombstone)."""


class MemoryTier:
    """Rows in one dictionary per table; tables are made on demand and have no capacity.

    ``info`` lets it stand for any kind of tier. ``clock`` returns Unix seconds and drives the expiry of
    rows and tombstones. `fetch` may be called from many threads in parallel with one writer."""

    def __init__(
        self,
        info: TierInfo | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._info = info or TierInfo("memory", Source.MEMORY)
        self._clock = clock
        self._tables: dict[EmbeddingTable, dict[int, MemoryRow]] = {}

    @property
    def info(self) -> TierInfo:
        return self._info

    def fetch(self, parts: Sequence[Part], ctx: FetchContext) -> None:
        for part in parts:
            check_part(part)
            keys, oldest = part.keys.tolist(), oldest_row(part.table, self._clock())
            missing = []
            for i in part.missing.tolist():
                entry = self._resident(part.table, keys[i])
                if entry is None or (entry.row is not None and entry.version < oldest):
                    missing.append(i)
                    continue
                part.versions[i] = entry.version
                if entry.row is not None:
                    part.out[i] = entry.row
                    part.source[i] = self._info.source
            part.missing = np.array(missing, np.int64)

    def insert(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        check_rows(table, keys, vectors, versions)
        for key, row, version in zip(keys.tolist(), vectors, versions.tolist(), strict=True):
            self._write(table, key, MemoryRow(version, row.copy()))

    def update(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        check_rows(table, keys, vectors, versions)
        for key, row, version in zip(keys.tolist(), vectors, versions.tolist(), strict=True):
            if self._resident(table, key) is not None:
                self._write(table, key, MemoryRow(version, row.copy()))

    def delete(self, table: EmbeddingTable, keys: KeyArray, versions: VersionArray) -> None:
        check_keys(table, keys, versions)
        for key, version in zip(keys.tolist(), versions.tolist(), strict=True):
            self._write(table, key, MemoryRow(version, None))

    def evict(self, table: EmbeddingTable, keys: KeyArray) -> None:
        check_keys(table, keys)
        rows = self._tables.get(table, {})
        for key in keys.tolist():
            rows.pop(key, None)

    def drop(self, table: EmbeddingTable) -> None:
        """Remove the whole table."""
        self._tables.pop(table, None)

    def size(self, table: EmbeddingTable) -> int:
        """Number of rows of ``table``, without tombstones."""
        return sum(entry.row is not None for entry in list(self._tables.get(table, {}).values()))

    def close(self) -> None:
        self._tables.clear()

    def _resident(self, table: EmbeddingTable, key: int) -> MemoryRow | None:
        entry = self._tables.get(table, {}).get(key)
        if entry is not None and entry.row is None:
            return entry if entry.version >= oldest_tombstone(table, self._clock()) else None
        return entry

    def _write(self, table: EmbeddingTable, key: int, entry: MemoryRow) -> None:
        current = self._resident(table, key)
        if current is None or entry.version >= current.version:
            self._tables.setdefault(table, {})[key] = entry
