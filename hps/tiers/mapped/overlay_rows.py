"""Writes to tables with a mapped file: by the version rule against the file, into the overlay.

RocksDB is written first, then a cache that reads the file (`OverlaidTable.on_hiding`), then the bits that
hide the file's rows, then the write is acknowledged. So a reader sees the file's row until it sees the new
one. A set bit implies an entry in the overlay: an expired
tombstone of a key of the file is kept, and an evicted or expired row leaves one that has expired from the
start. All bits are set once the rows of the file have expired (`OverlaidTable.expire`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hps.tiers.mapped.overlaid_table import OverlaidTable
from hps.tiers.rocksdb.database import RocksDbDatabase, TableFamily
from hps.tiers.rocksdb.layout import CodeArray
from hps.tiers.rocksdb.rows import VersionedRows, scan_entries
from hps.types import EmbeddingTable, IndexArray, KeyArray, VectorArray, VersionArray


class Hidden(Protocol):
    """Something whose rows entries of an overlay hide."""

    def override(self, keys: KeyArray) -> None: ...


class OverlayRows(VersionedRows):
    """`VersionedRows` of tables of which some have a mapped file, which ``overlaid`` returns."""

    def __init__(
        self,
        database: RocksDbDatabase,
        clock: Callable[[], float],
        overlaid: Callable[[EmbeddingTable], OverlaidTable | None],
    ) -> None:
        super().__init__(database, clock)
        self._overlaid = overlaid

    def hide(self, family: TableFamily, mapped: Hidden) -> None:
        """Mark the rows of ``mapped`` that an entry of the overlay hides. Raises TierError."""
        with self._database.errors():
            for names, _ in scan_entries(family.data):
                mapped.override(family.codec.keys(b"".join(names)))

    def write(
        self,
        table: EmbeddingTable,
        keys: KeyArray,
        vectors: VectorArray | None,
        versions: VersionArray,
        *,
        resident_only: bool,
    ) -> None:
        mapped = self._overlaid(table) if len(keys) else None
        if mapped is None:
            super().write(table, keys, vectors, versions, resident_only=resident_only)
            return
        with self._database.lock:
            self._database.require_primary()
            keys = table.narrow(keys)
            in_file = mapped.answers(keys)
            newer = np.flatnonzero(in_file & (versions >= np.uint64(mapped.version)))
            others = np.flatnonzero(~in_file)

            def write(at: IndexArray, *, resident_only: bool) -> None:
                rows = None if vectors is None else vectors[at]
                some, own = keys[at], versions[at]
                super(OverlayRows, self).write(table, some, rows, own, resident_only=resident_only)
                if resident_only:
                    return
                try:
                    if at is newer and len(some) and mapped.on_hiding is not None:
                        mapped.on_hiding(some, rows, own)
                finally:  # RocksDB has the rows
                    mapped.override(some)

            # A row of the file is resident, although RocksDB has none.
            write(newer, resident_only=False)
            write(others, resident_only=resident_only)

    def remove(self, table: EmbeddingTable, keys: KeyArray) -> None:
        mapped = self._overlaid(table) if len(keys) else None
        if mapped is None:
            super().remove(table, keys)
            return
        with self._database.lock, self._database.errors():
            keys = table.narrow(keys)
            in_file = mapped.positions(keys) >= 0
            super().remove(table, keys[~in_file])
            family, hidden = self._database.family(table), keys[in_file]
            self._put_oldest_tombstones(family, np.unique(family.codec.codes(hidden)))
            mapped.override(hidden)

    def drop(self, family: TableFamily, code: CodeArray) -> None:
        in_file = self._masks(family, code)
        super().drop(family, code[~in_file])
        self._put_oldest_tombstones(family, code[in_file])

    def _put_oldest_tombstones(self, family: TableFamily, code: CodeArray) -> None:
        """Put tombstones that have expired from the start, which hide rows of the file."""
        oldest = np.zeros(len(code), np.uint64)
        self._put(family, code, lambda part: family.codec.encode_tombstones(oldest[part]))

    def _masks(self, family: TableFamily, code: CodeArray) -> NDArray[np.bool_]:
        if not len(code):
            return super()._masks(family, code)
        mapped = self._overlaid(family.table)
        if mapped is None:
            return np.full(len(code), self._database.overlay(family.table) is not None)
        names = family.codec.stored_keys(code)
        return mapped.positions(family.codec.keys(b"".join(map(bytes, names)))) >= 0
