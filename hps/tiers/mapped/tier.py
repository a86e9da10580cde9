"""MappedTier: a `RocksDbTier` of which some tables have their rows in a mapped file.

Such a table is not loaded: lookups read the file ``mapped`` of its version, by `mmap`, and RocksDB is an
*overlay* that holds only what was written since. A bit per row of the file says whether the overlay has an
entry of its key; the bits are made again from the overlay's keys whenever the table is opened. All rows of
the file have one version, that of a load, so the version rule holds between the file and every write. To
callers the table is one that was loaded: positions, scans, counts and versions are those of file and overlay
together, and rows have RocksDB's source, as they come from the node's own store.

On a ``secondary`` the primary's writes are not known, so the overlay is asked before the file.

A table has an overlay record (`hps.tiers.rocksdb.overlay_record`), which names the file: so tools, readers
and tables opened anew find it. Thread-safety: as for `RocksDbTier`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.errors import ModelError, TierError
from hps.tiers.base import Part, restrict_part
from hps.tiers.mapped.faults import MappedFaults
from hps.tiers.mapped.ordered_scan import ordered_rows
from hps.tiers.mapped.overlaid_table import OverlaidTable, has_expired
from hps.tiers.mapped.overlay_keys import CollectedKeys, OverlaidKeys
from hps.tiers.mapped.overlay_rows import OverlayRows
from hps.tiers.rocksdb import LoadRecord, RocksDbTier, ScannedRows
from hps.tiers.rocksdb.database import TableFamily
from hps.tiers.rocksdb.errors import NAME
from hps.tiers.rocksdb.layout import CodeArray
from hps.tiers.rocksdb.overlay_record import OverlayRecord
from hps.tiers.rocksdb.rows import VersionedRows
from hps.types import EmbeddingTable, IndexArray, KeyArray, VectorArray, VersionArray

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MappedFigures:
    """Mapped tables: their number, the bytes of their files, and the rows that the overlay hides."""

    mapped_tables: int
    mapped_bytes: int
    mapped_overridden: int


class MappedTier(RocksDbTier):
    """Rows in mapped files and RocksDB, as a `Tier` and a `PositionedStore`.

    ``maps``: whether `hps.models.loader` maps tables; tables mapped before are served in any case.
    ``shared``: the folder of `RowMarks`, if other processes are to read mapped tables. Other arguments: see
    `RocksDbTier`."""

    def __init__(
        self,
        path: Path | str,
        *,
        maps: bool = True,
        shared: Path | None = None,
        **options: Any,
    ) -> None:
        self.maps = maps
        self._shared = shared
        self._by_table: dict[EmbeddingTable, OverlaidTable | None] = {}
        self._by_name: dict[str, OverlaidTable] = {}
        super().__init__(path, **options)
        remedy = (
            "Remove the file and start the node again, which then loads the table into RocksDB from the "
            "model's other files"
        )
        self._faults = MappedFaults(self.damage, remedy, self._database.lock)

    def _make_rows(self, clock: Callable[[], float]) -> VersionedRows:
        self._clock = clock
        self._overlay_rows = OverlayRows(self._database, clock, self._overlaid)
        return self._overlay_rows

    # -- tables -----------------------------------------------------------------------------------

    def map(
        self, table: EmbeddingTable, path: Path, load: LoadRecord, delta: Path | None = None
    ) -> bool:
        """Serve ``table`` from the mapped file ``path``, whose rows ``load`` describes; return whether it is.

        ``delta``: a second file; see `OverlaidTable`. Not if the database holds its rows already, or some of
        them. Raises ModelError for a file that cannot be used, and if rows were streamed in over another
        file, which would be lost."""
        database = self._database
        with database.lock, database.errors():
            known = database.overlay(table)
            if known is not None and known.load.digest != load.digest and self.streamed(table):
                raise ModelError(
                    f"table {table.id}: {path} is not the file over which rows were streamed into "
                    f"{self.path}, and these would be lost. Publish the files as a new version; or, to "
                    "lose those rows, remove the database"
                )
            if known is None:
                family = database.family(table)
                if (
                    self.access != "primary"
                    or database.record(table) is not None
                    or family.streamed
                    or not database.is_empty(family)
                ):
                    return False
            changes = None if delta is None else delta.absolute()
            record = OverlayRecord(load.finished(load.rows), path.absolute(), changes)
            now = load.digest, record.path, record.delta
            if self.access == "primary" and (
                known is None or (known.load.digest, known.path, known.delta) != now
            ):
                database.overlays.put(database.family(table).name, record)
                database.acknowledge()
            opened = self._by_name.get(table.id)
            if opened is not None and opened.digest != load.digest:
                del self._by_name[table.id]
            self._bind(table, record)
            return True

    def unmap(self, table: EmbeddingTable) -> bool:
        """Close a table's mapped file, if any; return whether its rows in RocksDB are an overlay.

        For the load that follows, which ends that."""
        with self._database.lock:
            self._by_name.pop(table.id, None)
            same = [each for each in self._by_table if each.id == table.id]
            self._by_table.update(dict.fromkeys([*same, table]))
            return self.is_mapped(table)

    def is_mapped(self, table: EmbeddingTable) -> bool:
        """Return whether the table's rows in RocksDB are the overlay of a mapped file."""
        return self._database.overlay(table) is not None

    def has_entries(self, table: EmbeddingTable, keys: KeyArray) -> NDArray[np.bool_]:
        """Return a mask of the ``keys (n,)`` with a row or tombstone in RocksDB, expired or not."""
        return self._has_entries(self._database.family(table), keys)

    def _has_entries(self, family: TableFamily, keys: KeyArray) -> NDArray[np.bool_]:
        code = family.codec.codes(keys)
        order = np.argsort(code)
        stored, _ = self._rows.read(family, code[order])
        mask = np.zeros(len(keys), bool)
        mask[order[np.concatenate([stored.at, stored.tombstone_at])]] = True
        return mask

    def bulk_load(
        self,
        table: EmbeddingTable,
        chunks: Iterable[tuple[CodeArray, VectorArray]],
        record: LoadRecord,
        progress: Callable[[int], None] = lambda _rows: None,
    ) -> LoadRecord:
        self.unmap(table)
        return super().bulk_load(table, chunks, record, progress)

    def mapped(self, table: EmbeddingTable) -> OverlaidTable | None:
        """Return the file and bits of a table that has a mapped file, else None. Raises TierError."""
        return self._overlaid(table)

    def check(self, table: EmbeddingTable) -> None:
        self._overlaid(table)
        super().check(table)

    def populate(self, table: EmbeddingTable, keys: KeyArray) -> None:
        """Read the pages of a mapped table's rows of ``keys (n,)`` into memory, many at a time."""
        mapped = self._overlaid(table)
        if mapped is not None:
            mapped.populate(keys)

    def overlay_keys(self, table: EmbeddingTable) -> KeyArray:
        """Return the keys (n,) of all entries in RocksDB: rows and tombstones, expired or not."""
        found = CollectedKeys()
        self._overlay_rows.hide(self._database.family(table), found)
        return np.concatenate([np.empty(0, np.int64), *found.keys])

    def overlay_rows(self, table: EmbeddingTable) -> Iterator[ScannedRows]:
        """Yield the rows in RocksDB alone, as `RocksDbTier.scan` does."""
        return super().scan(table)

    def loaded(self, table: EmbeddingTable) -> LoadRecord | None:
        overlay = self._database.overlay(table)
        return super().loaded(table) if overlay is None else overlay.load

    def entries(self, table: EmbeddingTable) -> int:
        overlay = self._database.overlay(table)
        return super().entries(table) + (0 if overlay is None else overlay.load.rows)

    def drop(self, *tables: EmbeddingTable) -> None:
        self._forget(tables)
        super().drop(*tables)

    def release(self, *tables: EmbeddingTable) -> None:
        self._forget(tables)
        super().release(*tables)

    def _forget(self, tables: Sequence[EmbeddingTable]) -> None:
        with self._database.lock:
            for table in tables:
                self._by_table.pop(table, None)
            used = {table.id for table, mapped in self._by_table.items() if mapped is not None}
            self._by_name = {name: each for name, each in self._by_name.items() if name in used}

    def mapped_figures(self) -> MappedFigures:
        """Return the figures for status and metrics."""
        tables = list(self._by_name.values())
        return MappedFigures(
            len(tables),
            sum(each.bytes for each in tables),
            sum(each.overridden for each in tables),
        )

    def _overlaid(self, table: EmbeddingTable) -> OverlaidTable | None:
        try:
            mapped = self._by_table[table]
        except KeyError:
            mapped = self._find_overlaid(table)
        if mapped is not None and has_expired(table, mapped, self._clock):
            with self._database.lock:
                mapped.expire()
        return mapped

    def _find_overlaid(self, table: EmbeddingTable) -> OverlaidTable | None:
        with self._database.lock:
            record = self._database.overlay(table)
            if record is not None:
                return self._bind(table, record)
            # A reader's primary may map the table later, but not one that it has loaded.
            if self.access == "primary" or self._database.record(table) is not None:
                self._by_table[table] = None
            return None

    def _bind(self, table: EmbeddingTable, record: OverlayRecord) -> OverlaidTable:
        mapped = self._by_name.get(table.id)
        if mapped is None:
            mapped = self._open(table, record)
            self._by_name[table.id] = mapped
        if not mapped.fits(table):
            header = mapped.file.header
            raise TierError(
                NAME,
                f"table {table.id}: {header.path} has rows of dim {header.dim} and {header.row_format.name}, "
                f"expected dim {table.dim} of {table.row_format.name}: serve it under a new version",
            )
        self._by_table[table] = mapped
        return mapped

    def _open(self, table: EmbeddingTable, record: OverlayRecord) -> OverlaidTable:
        try:
            mapped = OverlaidTable(
                record.path,
                record.load.version,
                asks_first=self.access == "secondary",
                delta=record.delta,
                folder=self._shared,
            )
            if mapped.digest != record.load.digest:
                raise ModelError(f"{record.path}: it has the rows of other files")
        except ModelError as error:
            raise TierError(
                NAME,
                f"table {table.id} is not in {self.path} but in a mapped file, which cannot be used: "
                f"{error}; or start the node, which then loads the table from the model's other files",
            ) from error
        family = self._catch_up.find(table)
        if family is not None and not mapped.asks_first and family.streamed:
            try:
                self._overlay_rows.hide(family, mapped)
            except TierError as error:
                log.warning(
                    "table %s: %s; RocksDB is asked before its mapped file", table.id, error
                )
                mapped.ask_overlay_first()
        return mapped

    # -- damage -----------------------------------------------------------------------------------

    def damaged_files(self) -> dict[str, str]:
        """Return the table of each damaged mapped file that still exists, by path."""
        found = self.damage.tables().items()
        return {file: table for file, table in found if Path(file).is_absolute()}

    def check_blocks(self, table: EmbeddingTable, first: int = 0, n: int | None = None) -> int:
        """See `MappedFaults.check_blocks`; 0 for a table without a mapped file."""
        mapped = self._overlaid(table)
        return 0 if mapped is None else self._faults.check_blocks(table, mapped, first, n)

    # -- reading ----------------------------------------------------------------------------------

    def versions(self, table: EmbeddingTable, keys: KeyArray, at_least: int = 0) -> VersionArray:
        mapped = self._overlaid(table)
        if mapped is None or mapped.asks_first:
            return super().versions(table, keys, 0 if mapped else at_least)
        in_file = mapped.answers(keys)
        versions = np.full(len(keys), mapped.version, np.uint64)
        if not in_file.all():
            versions[~in_file] = super().versions(table, keys[~in_file], at_least)
        return versions

    def scan(self, table: EmbeddingTable, *, start: int | None = None) -> Iterator[ScannedRows]:
        """See `RocksDbTier.scan`. The file's keys are sorted first, which takes 40 bytes of memory each."""
        mapped = self._overlaid(table)
        if mapped is None:
            return super().scan(table, start=start)
        return self._scan(table, mapped, start)

    def _scan(
        self, table: EmbeddingTable, mapped: OverlaidTable, start: int | None
    ) -> Iterator[ScannedRows]:
        with self._database.lock:
            overlay = super().scan(table, start=start)
            first = next(overlay, None)
            bits = mapped.bits()
        try:
            keys, at = mapped.shown(bits)
        except OSError as error:
            raise TierError(NAME, f"{mapped.file.header.path}: {error.strerror}") from error
        if mapped.asks_first:
            keys, at = self._not_in_overlay(table, keys, at)
        if start is not None:
            begin = int(np.searchsorted(keys, start))
            keys, at = keys[begin:], at[begin:]
        yield from ordered_rows(table, mapped, (keys, at), _with(first, overlay))

    def _not_in_overlay(
        self, table: EmbeddingTable, keys: KeyArray, at: IndexArray
    ) -> tuple[KeyArray, IndexArray]:
        family = self._catch_up.find(table)
        if family is None:
            return keys, at
        hidden = OverlaidKeys(keys)
        self._overlay_rows.hide(family, hidden)
        return keys[~hidden.mask], at[~hidden.mask]

    def _fetch_part(self, part: Part) -> bool:
        mapped = self._overlaid(part.table)
        if mapped is None:
            return super()._fetch_part(part)
        if mapped.asks_first:
            return self._fetch_overlay_first(part, mapped)
        asked, absent = self._fetch_mapped(part, mapped)
        if not len(asked):
            part.missing = absent
            return not mapped.may_be_damaged(part.keys[absent])
        rest = restrict_part(part, asked)
        whole = super()._fetch_part(rest)
        left = rest.missing
        if len(absent):
            left = np.sort(np.concatenate([left, absent]))
        part.missing = left
        return whole and not mapped.may_be_damaged(part.keys[left])

    def _fetch_mapped(self, part: Part, mapped: OverlaidTable) -> tuple[IndexArray, IndexArray]:
        try:
            return mapped.fetch(part)
        except RuntimeError as error:
            self._faults.set_unreadable(part.table, mapped, error)
            return mapped.fetch(part)

    def _fetch_overlay_first(self, part: Part, mapped: OverlaidTable) -> bool:
        whole = super()._fetch_part(part)
        family = self._catch_up.find(part.table)
        missing = part.missing
        hidden = np.zeros(len(missing), bool)
        if family is not None and len(missing):
            # Entries that count as missing, but hide the file's row: expired tombstones.
            hidden = self._has_entries(family, part.keys[missing])
        rest = restrict_part(part, missing[~hidden])
        asked, absent = self._fetch_mapped(rest, mapped)
        part.missing = np.sort(np.concatenate([missing[hidden], asked, absent]))
        return whole and not mapped.may_be_damaged(part.keys[part.missing])


def _with(first: ScannedRows | None, rest: Iterator[ScannedRows]) -> Iterator[ScannedRows]:
    if first is not None:
        yield first
        yield from rest
