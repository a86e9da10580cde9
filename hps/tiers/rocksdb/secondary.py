"""Catch-up of a reader with the writes of a concurrent primary."""

from __future__ import annotations

import time

from hps.tiers.rocksdb.database import RocksDbDatabase, TableFamily
from hps.tiers.rocksdb.database_options import existing_families
from hps.tiers.rocksdb.layout import family_name
from hps.types import EmbeddingTable


class SecondaryCatchUp:
    """Catch-up of one open database with its primary. Thread-safe.

    Does nothing for a primary and for ``read_only``."""

    def __init__(self, database: RocksDbDatabase) -> None:
        self._database = database
        self._is_secondary = database.settings.access == "secondary"
        self._is_primary = database.settings.access == "primary"
        self._caught_up = time.monotonic()
        # Requested tables that this reader does not have: the primary may create them later.
        self._unknown: set[str] = set()

    def find(self, table: EmbeddingTable) -> TableFamily | None:
        """Return the table's column family; None if a reader does not have it (yet)."""
        database = self._database
        if not self._is_primary and not database.known(table):
            self._unknown.add(family_name(table, database.layout))
            return None
        return database.family(table)

    def catch_up_if_due(self) -> None:
        """Catch up if that is due and no other thread is doing so."""
        if not self._is_secondary:
            return
        if time.monotonic() - self._caught_up < self._database.settings.tuning.catch_up_s:
            return
        if self._database.lock.acquire(blocking=False):
            try:
                self.catch_up()
            finally:
                self._database.lock.release()

    def catch_up(self) -> None:
        """Read the primary's new writes.

        Reopens the database if that is not enough: another database is at the path now, or the primary has
        created a requested table."""
        database = self._database
        if not self._is_secondary:
            return
        with database.lock, database.errors():
            try:
                reopen = self._was_replaced()
                if not reopen:
                    database.db.try_catch_up_with_primary()
            except Exception:
                reopen = True
            if reopen:
                database.reopen()
            self._unknown.clear()
            database.renew_marks()
            self._caught_up = time.monotonic()

    def _was_replaced(self) -> bool:
        path = self._database.settings.path
        if self._database.opened.replaced(path):
            return True
        return bool(self._unknown) and not self._unknown.isdisjoint(existing_families(path))
