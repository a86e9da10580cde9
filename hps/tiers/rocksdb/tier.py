"""RocksDbTier: the store of all rows of a node, in one column family per table.

Reads are sorted by stored key before one batched get per table; values are copied into the caller's
array by one join and one scatter. Writes go through the write-ahead log without fsync: acknowledged
rows survive ``kill -9`` of the process. A power loss may take the last writes that the operating system
had not written yet, but leaves a consistent earlier state. A start detects other missing acknowledged
writes (`hps.tiers.rocksdb.recovery`). After ``sync()`` all earlier writes survive a power loss too.

``fetch`` may be called from many threads in parallel with a writer. The mutating verbs are serialized
by a lock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from hps.tiers.base import FetchContext, Part, TierInfo
from hps.tiers.checks import check_keys, check_part, check_rows
from hps.tiers.positions import Applied, StreamPosition, TableChanges, TopicPartition
from hps.tiers.rocksdb.checkpoint import checkpoint
from hps.tiers.rocksdb.counts import compacted_rows, entries_in
from hps.tiers.rocksdb.database import RocksDbDatabase, TableFamily
from hps.tiers.rocksdb.database_options import Access, OnLostWrites, OpenSettings, RocksDbTuning
from hps.tiers.rocksdb.errors import NAME
from hps.tiers.rocksdb.expiry import RowExpiry
from hps.tiers.rocksdb.layout import CodeArray
from hps.tiers.rocksdb.load import BulkLoad, ingest_folder, loaded_until
from hps.tiers.rocksdb.load_record import LoadRecord
from hps.tiers.rocksdb.positions import RocksDbStreamPositions
from hps.tiers.rocksdb.repair import TableRepair, UnreadableRange, check_records, unreadable_ranges
from hps.tiers.rocksdb.rows import ScannedRows, VersionedRows
from hps.tiers.rocksdb.secondary import SecondaryCatchUp
from hps.tiers.rocksdb.write_throttle import StoreFigures
from hps.tiers.row_values import Layout
from hps.types import EmbeddingTable, IndexArray, KeyArray, Source, VectorArray, VersionArray

_TUNING = RocksDbTuning()
# Keys per slice of a fetch. The rows of one slice are still in the processor's cache when they are copied
# out, which saves 13 % of a fetch of 100,000 keys. Each slice waits once for the interpreter lock, so
# slices are not much smaller. With mapped files each row is on a separate page, and larger slices exceed
# the nearest cache: slices of 4096 take a sixth more CPU.
_READ_SLICE, _MAPPED_SLICE = 4096, 512


class RocksDbTier:
    """Rows in RocksDB, as a `Tier` and a `PositionedStore`.

    One instance, the primary, owns ``path``; a second one gets a TierError. Readers may run in parallel
    in other processes: ``access="read_only"`` sees the rows as they were when it was opened and never
    writes to the folder; ``"secondary"`` follows the primary (`catch_up`). Their mutating verbs raise
    TierError.

    ``layout="hps"`` reads and writes HPS's own layout: no versions, no tombstones, last write wins.
    ``on_lost_writes``: whether a primary opens if acknowledged writes are missing from its write-ahead
    log; with ``repair`` also although table files are damaged, for `repair` only. ``clock`` returns Unix
    seconds and drives the expiry of rows and tombstones."""

    info = TierInfo(NAME, Source.ROCKSDB, blocking=True, volatile=False)

    def __init__(
        self,
        path: Path | str,
        *,
        layout: Layout = "native",
        access: Access = "primary",
        tuning: RocksDbTuning = _TUNING,
        on_lost_writes: OnLostWrites = "refuse",
        clock: Callable[[], float] = time.time,
    ) -> None:
        settings = OpenSettings(Path(path), access, tuning, on_lost_writes)
        self.path, self.access = settings.path, access
        self.layout: Layout = layout
        self._database = RocksDbDatabase(settings, layout)
        self.damage = self._database.damage
        """The damaged table files found so far."""
        self._catch_up = SecondaryCatchUp(self._database)
        self._rows = self._make_rows(clock)
        self._positions = positions = RocksDbStreamPositions(self._database, self._rows)
        self.applied, self.identify = positions.applied, positions.identify
        self.restart = positions.restart
        self.expire = RowExpiry(self._database, self._rows).step
        self._slice = _MAPPED_SLICE if tuning.mmap_reads else _READ_SLICE

    def _make_rows(self, clock: Callable[[], float]) -> VersionedRows:
        return VersionedRows(self._database, clock)

    @property
    def scratch(self) -> Path:
        """A folder next to the database for temporary files of a load; emptied at every start."""
        return ingest_folder(self.path)

    # -- tables -----------------------------------------------------------------------------------

    def open_tables(self, tables: Sequence[EmbeddingTable]) -> None:
        """Open these tables; missing column families are created.

        Before the tier's first use, one call creates all of them together. Later each creation is slow with
        hundreds of tables, so pass the tables of all models in one call at a start."""
        self._database.open_tables(tables)

    def families(self) -> list[str]:
        """Names of all existing column families, also of tables that are not open."""
        return sorted(self._database.opened.families)

    def check(self, table: EmbeddingTable) -> None:
        """Raise TierError if the stored rows do not fit the table; a lookup would count it as a fault."""
        self._rows.check_first(self._database.family(table))

    def loaded(self, table: EmbeddingTable) -> LoadRecord | None:
        """Return the record of the table's last complete bulk load, or None."""
        record = self._database.record(table)
        return record if record is not None and record.complete else None

    def streamed(self, table: EmbeddingTable) -> bool:
        """Return whether the table was written to since its load, or ever if it was not loaded."""
        return self._database.family(table).streamed

    def rows(self, table: EmbeddingTable) -> int:
        """Return the number of rows; an estimate once the table was written to (see `rows_exact`).

        The estimate counts added rows only after their compaction, and counts unexpired tombstones."""
        with self._database.errors():
            record = self.loaded(table)
            if record is None:
                return self.entries(table)
            if self.rows_exact(table):
                return record.rows
            return max(record.rows, compacted_rows(self._database.family(table).data))

    def rows_exact(self, table: EmbeddingTable) -> bool:
        """Return whether `rows` is exact: the table was loaded, and not written to since."""
        return (
            self.layout == "native" and not self.streamed(table) and self.loaded(table) is not None
        )

    def entries(self, table: EmbeddingTable) -> int:
        """Return an upper bound of the rows: with tombstones, and overwritten rows not yet compacted."""
        with self._database.errors():
            return entries_in(self._database.family(table).data)

    def drop(self, *tables: EmbeddingTable) -> None:
        """Remove tables: their rows, tombstones and load records. No other call on them may run."""
        self._database.drop(tables)
        self._database.acknowledge()

    def release(self, *tables: EmbeddingTable) -> None:
        """Free the memory of unused tables. Their rows stay; a later request opens them again."""
        self._database.release(tables)

    def codes(self, table: EmbeddingTable, keys: KeyArray) -> CodeArray:
        """Convert (n,) keys to (n,) uint64 that sort as the stored keys do; for `bulk_load`."""
        return self._database.family(table).codec.codes(keys)

    def bulk_load(
        self,
        table: EmbeddingTable,
        chunks: Iterable[tuple[CodeArray, VectorArray]],
        record: LoadRecord,
        progress: Callable[[int], None] = lambda _rows: None,
    ) -> LoadRecord:
        """Replace the table's rows by ``chunks``, whose codes ascend strictly within and across chunks.

        For codes see `codes`. In the ``hps`` layout other rows stay, as in HPS.

        Crash-safe: the record is written as incomplete, then the rows are linked file by file, then the
        record is written as complete. A table with an incomplete record counts as not loaded. In the
        ``native`` layout, a load with an equal record and a ``stamp`` continues a killed load. Returns
        the record with the number of rows. ``progress`` receives rows. Other tables may be read and
        written meanwhile, this one must not."""
        database = self._database
        with database.errors():
            database.writable(record.rows * database.family(table).codec.value_bytes)
            family, loaded_code = self._begin_load(table, record)
            # Without holding the lock, so that other tables can be written to meanwhile.
            job = BulkLoad(
                self.path,
                database.options,
                family.codec,
                record.version,
                database.lock,
                loaded_code,
            )
            try:
                rows = job.run(chunks, record.rows, family.data, family.handle, progress)
            finally:
                job.clean()
            done = record.finished(rows)
            database.records.put(family.name, done)
            family.marks.renew()
            database.acknowledge()
            return done

    def _begin_load(self, table: EmbeddingTable, record: LoadRecord) -> tuple[TableFamily, int]:
        """Record the load as incomplete; return the code after which it continues a killed load, or -1."""
        database = self._database
        with database.lock:
            family = database.family(table)
            loaded_code = -1
            if self.layout == "native" and not family.streamed:
                known = database.records.get(family.name)
                loaded_code = loaded_until(known, record, family.data)
            database.records.put(family.name, record.started())
            family.streamed = False
            family.dirty = True
            if self.layout == "native" and loaded_code < 0:
                database.clear(family)
        return family, loaded_code

    def flush(self) -> None:
        """Write everything so far into table files.

        Otherwise the next start would replay it from the log, which is slow after a load of many small
        tables."""
        self._database.flush()

    def adopt(self, table: EmbeddingTable, record: LoadRecord, rows: int) -> LoadRecord:
        """Record a load whose rows were written by `insert`, because the table held rows already."""
        database = self._database
        with database.lock, database.errors():
            database.writable()
            done = record.finished(rows)
            database.records.put(database.family(table).name, done, keep_streamed=True)
            database.acknowledge()
            return done

    # -- reading ----------------------------------------------------------------------------------

    def catch_up(self) -> None:
        """Read the primary's new writes on a secondary; `fetch` also does so every ``catch_up_s`` seconds."""
        self._catch_up.catch_up()

    def fetch(self, parts: Sequence[Part], ctx: FetchContext) -> None:
        """See `Tier`. Unreadable rows of a damaged table file stay missing and degrade the answer."""
        self._catch_up.catch_up_if_due()
        for part in parts:
            check_part(part)
            if len(part.missing) and not self._fetch_part(part) and NAME not in ctx.degraded:
                ctx.degraded.append(NAME)

    def scan(self, table: EmbeddingTable, *, start: int | None = None) -> Iterator[ScannedRows]:
        """Yield every row in the order of the stored keys, from key ``start`` on, as of the first step.

        Keys (n,), vectors (n, dim) and versions (n,) (0 in the ``hps`` layout), without tombstones. Other
        calls may run meanwhile. Raises TierError; a scan that cannot read on never ends silently."""
        family = self._catch_up.find(table)
        return iter(()) if family is None else self._rows.scan(family, start)

    def tombstones(self, table: EmbeddingTable) -> Iterator[tuple[KeyArray, VersionArray]]:
        """Yield the unexpired tombstones like `scan`: keys (n,), versions (n,)."""
        family = self._catch_up.find(table)
        return iter(()) if family is None else self._rows.tombstones(family)

    def gaps(self, table: EmbeddingTable) -> list[UnreadableRange]:
        """Return the unreadable ranges of a table. Reads all of it."""
        return unreadable_ranges(self._database, self._database.family(table))

    def keys_of(self, table: EmbeddingTable, gap: UnreadableRange) -> tuple[int, int]:
        """Return the first and last key of a gap, in the order of the stored keys."""
        codec = self._database.family(table).codec
        ends = (code.to_bytes(codec.key_bytes, "big") for code in (gap.first, gap.last))
        first, last = codec.keys(b"".join(ends)).tolist()
        return first, last

    def check_records(self) -> None:
        """Raise TierError if the store's own records cannot be read."""
        check_records(self._database)

    def repair(self, table: EmbeddingTable) -> TableRepair:
        """Return the repair of a damaged table; only for a tier opened with ``on_lost_writes="repair"``."""
        return TableRepair(self._database, table)

    def figures(self) -> StoreFigures:
        """Space and compactions, for status and metrics; some microseconds per table."""
        return self._database.figures()

    def checkpoint(self, folder: Path | str) -> None:
        """Copy the served database to ``folder``, empty or missing; see `restore`."""
        checkpoint(self._database, Path(folder))

    def _fetch_part(self, part: Part) -> bool:
        """Fetch one part; return False if some rows could not be read, and stay missing."""
        family = self._catch_up.find(part.table)
        if family is None:
            return True
        code = family.codec.codes(part.keys[part.missing])
        order = np.argsort(code)
        slices = [order[i : i + self._slice] for i in range(0, len(order), self._slice)]
        answered, whole = zip(
            *(self._fetch_slice(family, part, code[at], at) for at in slices), strict=True
        )
        at = answered[0] if len(answered) == 1 else np.concatenate(answered)
        if len(at) == len(code):
            part.missing = part.missing[:0]
        elif len(at):
            left = np.ones(len(code), bool)
            left[at] = False
            part.missing = part.missing[left]
        return all(whole)

    def _fetch_slice(
        self, family: TableFamily, part: Part, code: CodeArray, order: IndexArray
    ) -> tuple[IndexArray, bool]:
        """Fetch ascending codes. ``order``: their positions in ``part.missing``.

        Returns those of ``order`` that were answered, and whether all were readable."""
        every, whole = self._rows.read(family, code)
        stored = self._rows.without_expired(family, every)
        at = order[stored.at]
        found = part.missing[at]
        part.out[found] = stored.vectors
        part.versions[found] = stored.versions
        part.source[found] = Source.ROCKSDB
        if not len(stored.tombstone_at):
            return at, whole
        live = self._rows.unexpired(part.table, stored.tombstone_versions)
        dead = order[stored.tombstone_at[live]]
        part.versions[part.missing[dead]] = stored.tombstone_versions[live]
        return np.concatenate([at, dead]), whole

    # -- writing ----------------------------------------------------------------------------------

    def insert(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        check_rows(table, keys, vectors, versions)
        self._rows.write(table, keys, vectors, versions, resident_only=False)
        self._database.acknowledge()

    def update(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        check_rows(table, keys, vectors, versions)
        self._rows.write(table, keys, vectors, versions, resident_only=True)
        self._database.acknowledge()

    def delete(self, table: EmbeddingTable, keys: KeyArray, versions: VersionArray) -> None:
        """Delete; in the ``hps`` layout without a tombstone."""
        check_keys(table, keys, versions)
        if self.layout == "hps":
            self.evict(table, keys)
        else:
            self._rows.write(table, keys, None, versions, resident_only=False)
            self._database.acknowledge()

    def evict(self, table: EmbeddingTable, keys: KeyArray) -> None:
        """Remove rows and tombstones without a trace. In a store the rows are lost."""
        check_keys(table, keys)
        self._rows.remove(table, keys)
        self._database.acknowledge()

    def apply(
        self, table: EmbeddingTable, changes: TableChanges, positions: Sequence[StreamPosition]
    ) -> None:
        """See `hps.tiers.positions.PositionedStore`."""
        check_rows(table, changes.keys, changes.vectors, changes.versions)
        check_keys(table, changes.deleted, changes.deleted_versions)
        self._positions.apply(table, changes, positions)
        self._database.acknowledge()

    def versions(self, table: EmbeddingTable, keys: KeyArray, at_least: int = 0) -> VersionArray:
        """See `hps.tiers.positions.PositionedStore`. Reads only keys whose high-water mark reaches
        ``at_least``."""
        versions = np.zeros(len(keys), np.uint64)
        positions = np.arange(len(keys))
        if at_least and self.access == "primary":
            positions = self._rows.reaching(table, keys, at_least)
        if len(positions):
            part = Part.make(table, keys[positions])
            self.fetch([part], FetchContext())
            versions[positions] = part.versions
        return versions

    def positions(self, table: EmbeddingTable) -> dict[TopicPartition, Applied]:
        """See `hps.tiers.positions.PositionedStore`."""
        self._catch_up.catch_up_if_due()
        return self._positions.positions(table)

    def sync(self) -> None:
        """Make every acknowledged write survive a power loss."""
        self._database.sync()

    def close(self) -> None:
        """Close; idempotent. Flushes for at most three seconds; the next start replays the rest."""
        self._database.close()
