"""Removal of expired rows from RocksDB, in bounded steps.

RocksDB could drop them in a compaction filter, but its Python binding does not offer one, and its time to
live counts from the write, not from the row's version. So a step reads the next entries of a table, in the
order of the stored keys, and removes the expired rows among them. Reads ignore expired rows in any case: the
steps only free space, and need not be fast."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hps.tiers.rocksdb.database import RocksDbDatabase
from hps.tiers.rocksdb.rows import VersionedRows, decode_values, scan_entries
from hps.types import EmbeddingTable

STEP_ENTRIES = 1024
"""Entries that a step reads, for which writers wait: .6 ms with rows of 128 bytes."""


class ExpiryStep(NamedTuple):
    """``removed``: rows removed by a step; ``following``: the stored key of the next one, None at the end."""

    removed: int
    following: bytes | None


class RowExpiry:
    """Removes expired rows of one open database. Thread-safe: steps and writers are serialized."""

    def __init__(self, database: RocksDbDatabase, rows: VersionedRows) -> None:
        self._database, self._rows = database, rows

    def step(self, table: EmbeddingTable, start: bytes | None = None) -> ExpiryStep:
        """Remove the expired rows among the next entries.

        They begin at the stored key ``start``; None: at the first one. Does nothing for a table that the
        database does not have. Raises TierError."""
        database = self._database
        with database.lock, database.errors():
            if not database.known(table):
                return ExpiryStep(0, None)
            family = database.family(table)
            oldest = self._rows.oldest_row(family)
            entries = next(scan_entries(family.data, start, STEP_ENTRIES), None) if oldest else None
            if entries is None:
                return ExpiryStep(0, None)
            names, values = entries
            stored = decode_values(family, values)
            over = stored.at[stored.versions < np.uint64(oldest)]
            if len(over):
                database.require_primary()
                keys = family.codec.keys(b"".join(names[i] for i in over.tolist()))
                self._rows.drop(family, np.sort(family.codec.codes(keys)))
                database.acknowledge()
            following = names[-1] + b"\0" if len(names) == STEP_ENTRIES else None
            return ExpiryStep(len(over), following)
