"""MappedFileTier: tables in mapped files, without a store for rows that are written later."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from hps.errors import TierError
from hps.tiers.base import FetchContext, Part, TierInfo
from hps.tiers.mapped.faults import MappedFaults
from hps.tiers.mapped.overlaid_table import OverlaidTable, has_expired
from hps.tiers.rocksdb.damage import DamagedFiles
from hps.types import EmbeddingTable, KeyArray, Source, VectorArray, VersionArray

NAME = "mapped"


class MappedFileTier:
    """Rows of mapped files. Read-only: the mutating verbs raise TierError.

    ``shared``: the folder of `RowMarks`, if other processes are to read the tables. ``damage``: the damaged
    files; their rows miss, and the answers are degraded. ``clock`` returns Unix seconds and drives the
    expiry of rows. Thread-safe."""

    info = TierInfo(NAME, Source.ROCKSDB, blocking=True, volatile=False)

    def __init__(
        self, *, shared: Path | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._shared, self._clock = shared, clock
        self._tables: dict[EmbeddingTable, OverlaidTable] = {}
        self.damage = DamagedFiles(Path())
        self._faults = MappedFaults(
            self.damage,
            "Import the version again, or start the node with tiers.rocksdb.enabled: true and without the "
            "file",
        )

    def open(
        self, table: EmbeddingTable, path: Path, version: int, delta: Path | None = None
    ) -> None:
        """Serve ``table`` from the mapped file ``path``, and ``delta``, whose rows are of ``version``.

        Raises ModelError if the file cannot be used, OSError if its marks cannot be shared."""
        self._tables[table] = OverlaidTable(path, version, delta=delta, folder=self._shared)

    def release(self, *tables: EmbeddingTable) -> None:
        """Close the files of ``tables``."""
        self._tables = {t: mapped for t, mapped in self._tables.items() if t not in tables}

    def mapped(self, table: EmbeddingTable) -> OverlaidTable | None:
        """Return the file of ``table``; None if it is not open."""
        mapped = self._tables.get(table)
        if mapped is not None and has_expired(table, mapped, self._clock):
            mapped.expire()
        return mapped

    def rows(self, table: EmbeddingTable) -> int:
        """Return the number of rows of ``table``."""
        mapped = self._tables.get(table)
        return 0 if mapped is None else mapped.rows

    def fetch(self, parts: Sequence[Part], ctx: FetchContext) -> None:
        for part in parts:
            mapped = self.mapped(part.table)
            if mapped is None:
                continue
            try:
                hidden, absent = mapped.fetch(part)
            except RuntimeError as error:
                self._faults.set_unreadable(part.table, mapped, error)
                hidden, absent = mapped.fetch(part)
            part.missing = np.sort(np.concatenate([hidden, absent]))
            if mapped.may_be_damaged(part.keys[part.missing]) and NAME not in ctx.degraded:
                ctx.degraded.append(NAME)

    def check_blocks(self, table: EmbeddingTable, first: int = 0, n: int | None = None) -> int:
        """See `MappedTier.check_blocks`."""
        mapped = self._tables.get(table)
        return 0 if mapped is None else self._faults.check_blocks(table, mapped, first, n)

    def insert(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        raise _read_only(table)

    def update(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        raise _read_only(table)

    def delete(self, table: EmbeddingTable, keys: KeyArray, versions: VersionArray) -> None:
        raise _read_only(table)

    def evict(self, table: EmbeddingTable, keys: KeyArray) -> None:
        raise _read_only(table)

    def close(self) -> None:
        self._tables = {}


def _read_only(table: EmbeddingTable) -> TierError:
    return TierError(
        NAME,
        f"table {table.id} is in a file that does not change; set tiers.rocksdb.enabled to true",
    )
