"""The database under `RocksDbTier`: its column families, their load records, opening and closing.

Knows nothing of keys and versions. ``family`` may be called from many threads; everything that changes
the set of tables takes ``lock``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import RLock
from typing import Any, NoReturn

from rocksdict import ColumnFamily, Options, Rdict

from hps.errors import TierError
from hps.tiers.rocksdb_layout import RowCodec, family_name
from hps.tiers.rocksdb_load import LoadRecord, Records, clean_leftovers
from hps.tiers.rocksdb_open import (
    NAME,
    OpenSettings,
    existing_families,
    linked_copy,
    make_options,
    open_database,
    translate,
)
from hps.tiers.rocksdb_tombstones import Tombstones
from hps.tiers.row_values import Layout
from hps.types import EmbeddingTable

# What a stop spends at most on flushing tables; the rest is replayed from the log at the next start.
_CLOSE_BUDGET_S = 3.0
# Waiting flushes share RocksDB's commits, which are what they wait for.
_FLUSHES = 8


@dataclass(eq=False, slots=True)
class Family:
    """A table's open column family. ``streamed``: written to since it was loaded. ``dirty``: written
    to by this process."""

    table: EmbeddingTable
    name: str
    codec: RowCodec
    data: Rdict
    handle: ColumnFamily
    tombstones: Tombstones
    streamed: bool
    dirty: bool = False


class Database:
    """Owns the folder. Raises TierError with the cause and the mend, never RocksDB's own errors."""

    def __init__(self, settings: OpenSettings, layout: Layout) -> None:
        self.settings = settings
        self.layout: Layout = layout
        self.lock = RLock()
        self._families: dict[EmbeddingTable, Family] = {}
        self._names = set(existing_families(settings.path))
        self.options: Options = make_options(settings, len(self._names))
        self._used = False
        if settings.read_only and not self._names:
            raise TierError(
                NAME,
                f"{settings.path} holds no database, and read_only forbids to create one; "
                "load it once without",
            )
        self._links = linked_copy(settings.path) if settings.read_only else None
        opened = replace(settings, path=Path(self._links.name)) if self._links else settings
        self._db: Rdict | None = open_database(opened, self.options, self._names)
        self.records = Records(lambda: self.db)
        if not settings.read_only:
            clean_leftovers(settings.path)

    @property
    def db(self) -> Rdict:
        if self._db is None:
            raise TierError(NAME, f"{self.settings.path} is closed")
        return self._db

    @contextmanager
    def errors(self) -> Any:
        """Translate whatever RocksDB raises inside."""
        try:
            yield
        except TierError:
            raise
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> NoReturn:
        # rocksdict raises bare Exceptions and DbClosedError; anything else is not the database's.
        if type(error).__name__ in ("Exception", "DbClosedError") or isinstance(error, OSError):
            raise translate(error, self.settings.path) from error
        raise error

    def writable(self) -> None:
        if self.settings.read_only:
            raise TierError(
                NAME, f"{self.settings.path} was opened with read_only: true; writing is off"
            )

    # -- column families --------------------------------------------------------------------------

    def family(self, table: EmbeddingTable) -> Family:
        """The table's column family; made when it is asked for the first time."""
        found = self._families.get(table)
        if found is None:
            self.open_tables([table])
            found = self._families[table]
        self._used = True
        return found

    def open_tables(self, tables: Sequence[EmbeddingTable]) -> None:
        with self.lock, self.errors():
            wanted = {t: family_name(t, self.layout) for t in tables if t not in self._families}
            missing = sorted(set(wanted.values()) - self._names)
            if missing:
                if self.settings.read_only:
                    raise TierError(
                        NAME,
                        f"{self.settings.path} holds no table {missing[0]}, and read_only forbids to "
                        "create it; load it once without",
                    )
                self._create(missing)
            streamed = self.records.streamed(list(wanted.values()))
            for table, name in wanted.items():
                self._bind(table, streamed=name in streamed)

    def _bind(self, table: EmbeddingTable, *, streamed: bool) -> None:
        name = family_name(table, self.layout)
        self._families[table] = Family(
            table,
            name,
            RowCodec(table, self.layout),
            self.db.get_column_family(name),
            self.db.get_column_family_handle(name),
            Tombstones(lambda: self.db, name),
            streamed,
        )

    def _create(self, names: list[str]) -> None:
        """RocksDB rewrites its OPTIONS file at each creation, which is quadratic in the number of
        tables. Opening anew makes them all with one rewrite, and is safe until the first use."""
        if len(names) > 2 and not self._used:
            self._names |= set(names)
            self._reopen()
            return
        for name in names:
            self.db.create_column_family(name, self.options)
            self._names.add(name)

    def _reopen(self) -> None:
        bound = {table: family.streamed for table, family in self._families.items()}
        self._release()
        self.options = make_options(self.settings, len(self._names))
        self._db = open_database(self.settings, self.options, self._names)
        for table, streamed in bound.items():
            self._bind(table, streamed=streamed)

    # -- contents ---------------------------------------------------------------------------------

    def is_empty(self, family: Family) -> bool:
        first = family.data.iter()
        first.seek_to_first()
        return not first.valid()

    def clear(self, family: Family) -> None:
        """Remove every row. A range deletion costs the same for any size and, unlike dropping the
        column family, does not rewrite the OPTIONS file."""
        if not self.is_empty(family):
            family.data.delete_range(b"", b"\xff" * 9)
            family.tombstones.clear()
            family.data.flush()
            family.data.compact_range(None, None)

    def drop(self, tables: Iterable[EmbeddingTable]) -> None:
        """Forget tables: rows, tombstones and load records. A handful of column families is removed
        as well; of more, the empty ones stay, as removing each would rewrite the OPTIONS file."""
        with self.lock, self.errors():
            self.writable()
            families = [self.family(t) for t in tables]
            for family in families:
                self.records.remove(family.name)
                self.clear(family)
            for table in tables:
                self._families.pop(table, None)
            if len(families) <= 16:
                for family in families:
                    self.db.drop_column_family(family.name)
                    self._names.discard(family.name)

    def record(self, table: EmbeddingTable) -> LoadRecord | None:
        with self.errors():
            return self.records.get(family_name(table, self.layout))

    def mark_streamed(self, family: Family) -> None:
        if not family.streamed:
            self.records.mark_streamed(family.name)
            family.streamed = True
        family.dirty = True

    def flush(self) -> None:
        """Write what this process wrote into table files, so that no start has to replay it."""
        with self.lock, self.errors():
            self.writable()
            self._flush(math.inf)

    def _flush(self, until: float) -> None:
        def one(family: Family) -> None:
            if time.monotonic() < until:
                family.data.flush()
                family.dirty = False

        dirty = [family for family in self._families.values() if family.dirty]
        if dirty:
            with ThreadPoolExecutor(_FLUSHES, "hps-flush") as pool:
                list(pool.map(one, dirty))

    # -- end --------------------------------------------------------------------------------------

    def sync(self) -> None:
        with self.errors():
            self.db.flush_wal(True)

    def close(self) -> None:
        """Flush what fits the budget, so that the next start need not replay it, and let go."""
        with self.lock, self.errors():
            if self._db is None:
                return
            if not self.settings.read_only:
                self._db.flush_wal(True)
                self._flush(time.monotonic() + _CLOSE_BUDGET_S)
            self._release()
            if self._links is not None:
                self._links.cleanup()

    def _release(self) -> None:
        """Close without RocksDB's binding flushing each table on the way."""
        db, self._db = self.db, None
        db.cancel_all_background(True)
        self._families.clear()
        try:
            db.close()
        except Exception as error:
            # Its own last flush comes after the end of background work.
            if "Shutdown in progress" not in str(error):
                raise
