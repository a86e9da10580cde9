"""The database under `RocksDbTier`: column families, load records, opening and closing.

This layer does not interpret keys and versions. ``family`` may be called from many threads; all changes of
the set of tables take ``lock``."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import RLock
from typing import Any, NoReturn

from rocksdict import ColumnFamily, Options, Rdict

from hps.errors import TierError
from hps.tiers.rocksdb.counts import estimated_rows
from hps.tiers.rocksdb.damage import DamagedFiles
from hps.tiers.rocksdb.database_handle import DatabaseHandle
from hps.tiers.rocksdb.database_options import OpenSettings, note_manifest
from hps.tiers.rocksdb.errors import DamagedFileError, rocksdb_error, translate_rocksdb_error
from hps.tiers.rocksdb.high_water import HighWaterMarks
from hps.tiers.rocksdb.layout import RowCodec, family_name
from hps.tiers.rocksdb.load import LoadRecords, clean_leftovers
from hps.tiers.rocksdb.load_record import LoadRecord
from hps.tiers.rocksdb.overlay_record import OverlayRecord, OverlayRecords
from hps.tiers.rocksdb.tombstones import TombstoneIndex
from hps.tiers.rocksdb.write_throttle import StoreFigures, WriteThrottle
from hps.tiers.row_values import Layout
from hps.types import EmbeddingTable

# The longest time that closing spends on flushes; the next start replays the rest from the log.
_CLOSE_BUDGET_S = 3.0
# Parallel flushes share RocksDB's commits, which take most of the time.
_FLUSHES = 8
_REOPEN_SECONDS = 10.0


@dataclass(eq=False, slots=True)
class TableFamily:
    """A table's open column family.

    ``streamed``: written to since the table was loaded. ``dirty``: written to by this process."""

    table: EmbeddingTable
    name: str
    codec: RowCodec
    data: Rdict
    handle: ColumnFamily
    tombstones: TombstoneIndex
    marks: HighWaterMarks
    streamed: bool
    dirty: bool = False


class RocksDbDatabase:
    """An open database folder. Raises TierError with cause and remedy, never RocksDB's own errors."""

    def __init__(self, settings: OpenSettings, layout: Layout) -> None:
        self.settings = settings
        self.layout: Layout = layout
        self.damage = DamagedFiles(settings.path)
        self.lock = RLock()
        self._families: dict[EmbeddingTable, TableFamily] = {}
        self._used = False
        self._opened: DatabaseHandle | None = DatabaseHandle(settings)
        self.records = LoadRecords(lambda: self.db)
        self.overlays = OverlayRecords(lambda: self.db)
        self.throttle = WriteThrottle(
            lambda: self.db, settings.path, settings.tuning.min_free_bytes
        )
        if settings.access == "primary":
            clean_leftovers(settings.path)
            if self.opened.lost is not None and self.opened.lost.later:
                tables = self.opened.families - {"default"}
                self.records.invalidate_all(tables, versioned=layout == "native")

    @property
    def opened(self) -> DatabaseHandle:
        if self._opened is None:
            raise rocksdb_error(f"{self.settings.path} is closed")
        return self._opened

    @property
    def db(self) -> Rdict:
        return self.opened.db

    @property
    def options(self) -> Options:
        return self.opened.options

    @contextmanager
    def errors(self) -> Any:
        """Context that translates RocksDB's errors to TierError."""
        try:
            yield
        except TierError:
            raise
        except Exception as error:
            self.fail(error)

    def acknowledge(self) -> None:
        """Record writes as acknowledged; every verb that writes calls this before it returns."""
        with self.lock:
            self.opened.acknowledge()

    def fail(self, error: Exception) -> NoReturn:
        # rocksdict raises bare Exceptions and DbClosedError; exceptions of other types come from other
        # code.
        if type(error).__name__ in ("Exception", "DbClosedError") or isinstance(error, OSError):
            raise self._translated(error) from error
        raise error

    def _translated(self, error: Exception) -> TierError:
        """Translate ``error``.

        Not inlined in `fail`, whose frame would keep the error and all frames before it alive."""
        translated = translate_rocksdb_error(error, self.settings.path)
        if isinstance(translated, DamagedFileError):
            self.damage.found(error, self._table_of)
        return translated

    def _table_of(self, file: int) -> str:
        """Return the name of the open table that contains the table file with this number."""
        listed = re.compile(rf"^ {file}:", re.MULTILINE)
        for family in list(self._families.values()):
            if listed.search(family.data.property_value("rocksdb.sstables") or ""):
                return family.table.id
        return "(unknown)"

    def report_damage(self, error: Exception, table: str) -> None:
        """Report the damaged table file that made a read of ``table`` fail, so that the read can continue.

        Raises TierError for every other error. On a secondary, a file that the primary has replaced may be
        missing too."""
        follows = self.settings.access == "secondary" and "no such file" in str(error).lower()
        if follows or not isinstance(
            translate_rocksdb_error(error, self.settings.path), DamagedFileError
        ):
            self.fail(error)
        self.damage.found(error, lambda _file: table)

    def writable(self, needed: int = 0) -> None:
        """Raise TierError unless this instance may write and the disk has ``needed`` bytes free."""
        self.require_primary()
        self.throttle.check(needed)

    def require_primary(self) -> None:
        access = self.settings.access
        if access != "primary":
            raise rocksdb_error(
                f"{self.settings.path} was opened with access: {access}; writing is off. Write where "
                "it is open with access: primary",
            )

    # -- column families --------------------------------------------------------------------------

    def family(self, table: EmbeddingTable) -> TableFamily:
        """Return the table's column family; created at the first call."""
        found = self._families.get(table)
        if found is None:
            self.open_tables([table])
            found = self._families[table]
        self._used = True
        return found

    def known(self, table: EmbeddingTable) -> bool:
        """Return whether the table's column family is open or existed when the database was opened."""
        return table in self._families or family_name(table, self.layout) in self.opened.families

    def renew_marks(self) -> None:
        """Read again which tables were written to: a reader's primary may have written since."""
        with self.lock:
            families = list(self._families.values())
            streamed = self.records.streamed([family.name for family in families])
            for family in families:
                family.streamed = family.name in streamed

    def open_tables(self, tables: Sequence[EmbeddingTable]) -> None:
        with self.lock, self.errors():
            wanted = {t: family_name(t, self.layout) for t in tables if t not in self._families}
            missing = sorted(set(wanted.values()) - self.opened.families)
            if missing and self.settings.access == "secondary":
                self.reopen()
                missing = sorted(set(missing) - self.opened.families)
            if missing:
                if self.settings.access != "primary":
                    raise rocksdb_error(
                        f"{self.settings.path} holds no table {missing[0]}, and access: "
                        f"{self.settings.access} does not create it; load it once with access: primary",
                    )
                self.writable()
                self._create(missing)
            self._bind(wanted)

    def _bind(self, tables: Mapping[EmbeddingTable, str]) -> None:
        streamed = self.records.streamed(list(tables.values()))
        for table, name in tables.items():
            data = self.db.get_column_family(name)
            self._families[table] = TableFamily(
                table,
                name,
                RowCodec(table, self.layout),
                data,
                self.db.get_column_family_handle(name),
                TombstoneIndex(lambda: self.db, name),
                HighWaterMarks(lambda: self.db, self.records, name, partial(estimated_rows, data)),
                streamed=name in streamed,
            )

    def _create(self, names: list[str]) -> None:
        """Create column families.

        RocksDB rewrites its OPTIONS file at each creation, so creating tables one by one takes
        quadratic time. Reopening the database creates them all with one rewrite, and is safe before the
        first use."""
        if len(names) > 2 and not self._used:
            self.reopen(names)
            return
        for name in names:
            try:
                self.db.create_column_family(name, self.options)
            except Exception as error:
                # On a full disk, an earlier attempt may have created the column family although the binding
                # failed.
                if "already exists" not in str(error):
                    raise
                self.reopen(names)
                return
            self.opened.families.add(name)

    def reopen(self, more: Iterable[str] = ()) -> None:
        """Reopen the database with ``more`` column families.

        A primary must not be in use meanwhile; calls that run on a reader finish on the previous handle."""
        bound = {table: family.name for table, family in self._families.items()}
        if self.settings.access == "primary":
            self._release()
            self._opened = self._open_again(more)
        else:
            old, self._opened = self.opened, DatabaseHandle(self.settings)
            old.clean()
            self._families = {}
            bound = {t: name for t, name in bound.items() if name in self.opened.families}
        self._bind(bound)

    def _open_again(self, more: Iterable[str]) -> DatabaseHandle:
        """Open a new handle; retries while fetches on the old one keep the folder locked."""
        until = time.monotonic() + _REOPEN_SECONDS
        while True:
            try:
                return DatabaseHandle(self.settings, more)
            except TierError as error:
                if "already open in this process" not in str(error) or time.monotonic() > until:
                    raise
                time.sleep(0.01)

    # -- contents ---------------------------------------------------------------------------------

    def is_empty(self, family: TableFamily) -> bool:
        first = family.data.iter()
        first.seek_to_first()
        if first.valid():
            return False
        first.status()
        return True

    def clear(self, family: TableFamily) -> None:
        """Remove every row of a table.

        A range deletion costs the same for any size and, unlike dropping the column family, does not
        rewrite the OPTIONS file."""
        if not self.is_empty(family):
            family.data.delete_range(b"", b"\xff" * 9)
            family.tombstones.clear()
            family.marks.clear()
            family.data.flush()
            family.data.compact_range(None, None)

    def drop(self, tables: Iterable[EmbeddingTable]) -> None:
        """Remove tables: rows, tombstones and load records.

        If there are only a few, their column families are dropped too; otherwise the empty families
        stay, because each drop rewrites the OPTIONS file. Works on a full disk, to free space: it does
        not check for free bytes."""
        with self.lock, self.errors():
            self.require_primary()
            families = [self.family(t) for t in tables if self.known(t)]
            for family in families:
                self.records.remove(family.name)
                self.clear(family)
            names = {family.name for family in families}
            # Several table objects may name the same column family; it is gone for all of them.
            self._families = {t: f for t, f in self._families.items() if f.name not in names}
            if len(names) <= 16:
                for name in names:
                    self.db.drop_column_family(name)
                    self.opened.families.discard(name)

    def recreate(self, table: EmbeddingTable) -> None:
        """Recreate a table without reading its files: no rows, no load record, no stream positions."""
        with self.lock, self.errors():
            self.require_primary()
            name = family_name(table, self.layout)
            self.records.remove(name, keep_overlay=True)
            self.db.delete(f"highest:{name}".encode())
            self._families = {t: f for t, f in self._families.items() if f.name != name}
            if name in self.opened.families:
                self.db.drop_column_family(name)
                self.opened.families.discard(name)
            self.open_tables([table])

    def release(self, tables: Iterable[EmbeddingTable]) -> None:
        """Free the memory of tables that are not used any more; their rows stay on disk."""
        with self.lock, self.errors():
            for table in tables:
                family = self._families.get(table)
                if family is not None:
                    if family.dirty:
                        family.data.flush()
                    del self._families[table]

    def record(self, table: EmbeddingTable) -> LoadRecord | None:
        with self.errors():
            return self.records.get(family_name(table, self.layout))

    def overlay(self, table: EmbeddingTable) -> OverlayRecord | None:
        with self.errors():
            return self.overlays.get(family_name(table, self.layout))

    def mark_streamed(self, family: TableFamily) -> None:
        if not family.streamed:
            self.records.mark_streamed(family.name)
            family.streamed = True
        family.dirty = True

    def flush(self) -> None:
        """Flush this process's writes into table files, so that the next start need not replay them."""
        with self.lock, self.errors():
            self.writable()
            self._flush(math.inf)
            note_manifest(self.settings.path)

    def _flush(self, until: float) -> None:
        def one(family: TableFamily) -> None:
            if time.monotonic() < until:
                family.data.flush()
                family.dirty = False

        dirty = [family for family in self._families.values() if family.dirty]
        if dirty:
            with ThreadPoolExecutor(_FLUSHES, "hps-flush") as pool:
                list(pool.map(one, dirty))

    def figures(self) -> StoreFigures:
        with self.errors():
            # Two table objects share a column family while a version that requests still use is loaded
            # again.
            families = {family.name: family.data for family in list(self._families.values())}
            lost = self.opened.lost
            return self.throttle.figures(
                list(families.values()),
                lost_writes=0 if lost is None else lost.most or 1,
                damaged_files=len(self.damage.tables()),
            )

    # -- closing ----------------------------------------------------------------------------------

    def sync(self) -> None:
        with self.errors():
            self.db.flush_wal(True)

    def close(self) -> None:
        """Flush within the time limit, so that the next start has less to replay, and close."""
        with self.lock, self.errors():
            if self._opened is None:
                return
            try:
                if self.settings.access == "primary":
                    self.db.flush_wal(True)
                    self._flush(time.monotonic() + _CLOSE_BUDGET_S)
                    note_manifest(self.settings.path)
            except Exception as error:
                # The log still has the rows that were not flushed, and compaction has reported the damage
                # already.
                if not isinstance(self._translated(error), DamagedFileError):
                    raise
            finally:
                self._release()

    def _release(self) -> None:
        opened, self._opened = self.opened, None
        self._families.clear()
        opened.close()
