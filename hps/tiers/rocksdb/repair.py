"""Repair of damaged tables: salvage the readable entries and recreate the column family.

RocksDB cannot repair a single column family, but it can drop one without reading it. So the readable
entries of a damaged table are written to SST files in the folder `hps-repair`, the column family is
dropped and created again, the files are linked into it, and the caller inserts the missing rows from the
model's files. A repair that is killed continues when it is run again; until then the database can't be
opened for anything else."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rocksdict import IngestExternalFileOptions, Rdict, SstFileWriter

from hps.tiers.rocksdb.database import RocksDbDatabase, TableFamily
from hps.tiers.rocksdb.database_options import repair_folder
from hps.tiers.rocksdb.layout import CodeArray
from hps.tiers.rocksdb.load import ingest_folder
from hps.tiers.rocksdb.load_record import LoadRecord
from hps.tiers.rocksdb.rows import scan_entries
from hps.types import EmbeddingTable, KeyArray

_FILE_BYTES = 256 << 20
_DONE, _LOST = "saved.json", "lost.npy"


@dataclass(frozen=True, slots=True)
class UnreadableRange:
    """An unreadable part of a table: stored keys as integers, ``first`` to ``last``."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class SalvagedTable:
    """The salvaged entries of a damaged table.

    ``kept``: their number. ``gaps``: the unreadable ranges. ``lost``: keys of the model's files in the
    gaps that could not be read. ``record``: the load record. ``streamed``: rows were written after the
    load."""

    kept: int
    gaps: list[UnreadableRange]
    lost: int
    record: LoadRecord | None
    streamed: bool


def check_records(database: RocksDbDatabase) -> None:
    """Raise TierError if the store's own records, of all tables, cannot be read."""
    with database.errors():
        for _ in scan_entries(database.db):
            pass


def unreadable_ranges(database: RocksDbDatabase, family: TableFamily) -> list[UnreadableRange]:
    """Return the unreadable ranges of a table. Reads all of it."""
    gaps: list[UnreadableRange] = []
    for _ in _readable(database, family.data, family.table.id, family.codec.key_bytes, gaps):
        pass
    return gaps


def _readable(
    database: RocksDbDatabase, data: Rdict, name: str, width: int, gaps: list[UnreadableRange]
) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Yield keys and values of all readable entries, in order; add the unreadable ranges to ``gaps``.

    Keys have ``width`` bytes."""
    start, end, last = 0, (1 << 8 * width) - 1, -1
    while True:
        try:
            for names, values in scan_entries(data, start.to_bytes(width, "big")):
                last = int.from_bytes(names[-1], "big")
                yield names, values
            return
        except Exception as error:
            database.report_damage(error, name)
        first = max(start, last + 1)
        start = _after(data, first, end, width)
        gaps.append(UnreadableRange(first, start - 1))
        if start > end:
            return


def _after(data: Rdict, first: int, end: int, width: int) -> int:
    """Return the smallest readable code after a damaged part that begins at ``first``.

    Searches with doubled, then halved steps. ``end + 1`` if everything up to the end is damaged."""

    def is_readable(code: int) -> bool:
        at = data.iter()
        at.seek(code.to_bytes(width, "big"))
        try:
            at.status()
        except Exception:
            return False
        return True

    damaged, step = first, 1
    while not is_readable(probe := min(first + step, end)):
        if probe == end:
            return end + 1
        damaged, step = probe, step * 2
    while probe - damaged > 1:
        middle = (damaged + probe) // 2
        if is_readable(middle):
            probe = middle
        else:
            damaged = middle
    return probe


class TableRepair:
    """Repair of one table, in a database opened for repair.

    Call `save`, then `put_back`, insert the rows of `lost`, then call `finish`."""

    def __init__(self, database: RocksDbDatabase, table: EmbeddingTable) -> None:
        self._database = database
        self._table = table
        family = database.family(table)
        self._name = family.name
        self._folder = repair_folder(database.settings.path) / family.name.replace("/", "+")

    @property
    def begun(self) -> bool:
        """True if an earlier repair was interrupted after it had saved the entries."""
        return (self._folder / _DONE).exists()

    def save(self, keys: Iterable[KeyArray]) -> SalvagedTable:
        """Write the readable entries to files.

        ``keys``: the keys of the model's files, in chunks. Each of them that is in a gap is looked up
        separately, because another table file may have a newer row of it. After an interruption,
        returns what was saved before it."""
        if self.begun:
            saved = json.loads((self._folder / _DONE).read_text())
            record = saved["record"] and LoadRecord(**saved["record"])
            gaps = [UnreadableRange(**gap) for gap in saved["gaps"]]
            return SalvagedTable(**saved | {"gaps": gaps, "record": record})
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        database, gaps = self._database, list[UnreadableRange]()
        family, records = database.family(self._table), database.records
        with database.errors():
            parts = _readable(database, family.data, self._table.id, family.codec.key_bytes, gaps)
            kept = self._write("1", parts)
            found, lost = self._look_up(family, gaps, keys)
            kept += self._write("2", [found] if found[0] else [])
            record, streamed = records.get(self._name), records.is_streamed(self._name)
        np.save(self._folder / _LOST, lost)
        saved = SalvagedTable(kept, gaps, len(lost), record, streamed)
        part = self._folder / f"{_DONE}.part"
        part.write_text(json.dumps(asdict(saved)))
        part.replace(self._folder / _DONE)
        return saved

    @property
    def lost(self) -> CodeArray:
        """The codes (n,), ascending, of the keys passed to `save` that could not be read."""
        lost: CodeArray = np.load(self._folder / _LOST)
        return lost

    def put_back(self) -> None:
        """Recreate the table with the saved entries and without stream positions."""
        database = self._database
        with database.lock, database.errors():
            database.recreate(self._table)
            family = database.family(self._table)
            database.mark_streamed(family)
            ingest_folder(database.settings.path).mkdir(exist_ok=True)
            for turn in "12":
                linked = [self._link(file) for file in sorted(self._folder.glob(f"{turn}-*.sst"))]
                if linked:
                    options = IngestExternalFileOptions()
                    options.set_move_files(True)
                    family.data.ingest_external_file(linked, options)
            family.marks.renew()
            database.acknowledge()

    def finish(self, saved: SalvagedTable) -> None:
        """Write the load record again, and end the repair."""
        database = self._database
        with database.lock, database.errors():
            family = database.family(self._table)
            if saved.record is not None:
                database.records.put(self._name, saved.record, keep_streamed=saved.streamed)
                family.streamed = saved.streamed
            family.marks.renew()
            family.data.flush()
            database.acknowledge()
        shutil.rmtree(self._folder)
        if not any(self._folder.parent.iterdir()):
            self._folder.parent.rmdir()

    def _link(self, file: Path) -> str:
        """Make a second name for a file, because RocksDB takes over the file that it is given."""
        target = ingest_folder(self._database.settings.path) / file.name
        target.unlink(missing_ok=True)
        os.link(file, target)
        return str(target)

    def _write(self, turn: str, parts: Iterable[tuple[list[bytes], list[bytes]]]) -> int:
        """Write entries, which ascend, to files of bounded size; return the number of entries."""
        number, writer, size = 0, None, 0
        for names, values in parts:
            if writer is None:
                writer, size = SstFileWriter(self._database.options), 0
                writer.open(str(self._folder / f"{turn}-{number:012}.sst"))
            for name, value in zip(names, values, strict=True):
                writer[name] = value
            number += len(names)
            size += sum(map(len, values))
            if size > _FILE_BYTES:
                writer.finish()
                writer = None
        if writer is not None:
            writer.finish()
        return number

    def _look_up(
        self, family: TableFamily, gaps: list[UnreadableRange], keys: Iterable[KeyArray]
    ) -> tuple[tuple[list[bytes], list[bytes]], CodeArray]:
        """Look up ``keys`` that are in ``gaps``.

        Returns the readable entries, in order, and the codes of the others."""
        inside = (
            [code[_within(code, gaps)] for code in map(family.codec.codes, keys)] if gaps else []
        )
        code = np.unique(np.concatenate(inside)) if inside else np.empty(0, np.uint64)
        names, values, lost = [], [], np.zeros(len(code), bool)
        for number, name in enumerate(family.codec.stored_keys(code)):
            try:
                value: Any = family.data.get(name)
            except Exception as error:
                self._database.report_damage(error, self._table.id)
                lost[number] = True
                continue
            if value is not None:
                names.append(name)
                values.append(value)
        return (names, values), code[lost]


def _within(code: CodeArray, gaps: list[UnreadableRange]) -> Any:
    """Return a mask of ``code (n,)`` in one of the ``gaps``, which ascend."""
    firsts = np.array([gap.first for gap in gaps], np.uint64)
    lasts = np.array([gap.last for gap in gaps], np.uint64)
    at = np.searchsorted(firsts, code, "right") - 1
    return (at >= 0) & (code <= lasts[at])
