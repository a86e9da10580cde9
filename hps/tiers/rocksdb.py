"""RocksDB: the store that holds every row of a node, in one column family per table.

Reads are sorted by stored key before one batched get per table; values land in the caller's array by
one join and one scatter. Writes go through the write-ahead log without fsync: acknowledged rows survive
``kill -9`` of the process; a power loss may take the last writes the operating system had not yet
written, but leaves a consistent earlier state. ``sync()`` makes everything so far survive that too.

``fetch`` may be called from many threads beside a writer. The mutating verbs take a lock, so several
callers do no harm, but they wait for each other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rocksdict import WriteBatch

from hps.errors import TierError
from hps.tiers.base import FetchContext, Part, TierInfo, newest_of_each
from hps.tiers.checks import check_keys, check_part, check_rows
from hps.tiers.rocksdb_database import Database, Family
from hps.tiers.rocksdb_layout import (
    CodeArray,
    Layout,
    Stored,
    WrongLength,
)
from hps.tiers.rocksdb_load import BulkLoad, LoadRecord, ingest_folder
from hps.tiers.rocksdb_open import NAME, OpenSettings
from hps.types import (
    EmbeddingTable,
    KeyArray,
    Source,
    VectorArray,
    VersionArray,
    oldest_tombstone,
)

__all__ = ["LoadRecord", "RocksDbTier"]

# rocksdict holds the interpreter lock while it writes (1.4 µs a row): more rows per batch would
# keep request threads waiting.
_WRITE_SLICE = 256


class RocksDbTier:
    """Implements `Tier`. One instance owns ``path``; a second process gets a TierError.

    ``layout="hps"`` reads and writes HPS's own layout: no versions, no tombstones, last write wins.
    ``block_cache_bytes`` are shared by all tables; ``block_size`` is a data block's bytes; ``threads``
    run flushes and compactions; ``clock`` gives Unix seconds and drives the forgetting of tombstones.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        layout: Layout = "native",
        block_cache_bytes: int = 256 << 20,
        block_size: int = 1024,
        threads: int = 2,
        read_only: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        settings = OpenSettings(Path(path), block_cache_bytes, block_size, threads, read_only)
        self._layout: Layout = layout
        self._clock = clock
        self._database = Database(settings, layout)
        self._info = TierInfo(NAME, Source.ROCKSDB, blocking=True, volatile=False)

    @property
    def info(self) -> TierInfo:
        return self._info

    @property
    def path(self) -> Path:
        return self._database.settings.path

    @property
    def scratch(self) -> Path:
        """A folder beside the database for temporary files of a load; emptied at every start."""
        return ingest_folder(self.path)

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def read_only(self) -> bool:
        return self._database.settings.read_only

    # -- tables -----------------------------------------------------------------------------------

    def open_tables(self, tables: Sequence[EmbeddingTable]) -> None:
        """Make ready for these tables. Missing column families are created; before the first use of
        the tier all in one go, afterwards one by one, which is slow beside hundreds of tables: at a
        start, name the tables of all models in one call."""
        self._database.open_tables(tables)

    def loaded(self, table: EmbeddingTable) -> LoadRecord | None:
        """The record of the table's last complete bulk load, or None."""
        record = self._database.record(table)
        return record if record is not None and record.complete else None

    def streamed(self, table: EmbeddingTable) -> bool:
        """Whether rows were written or deleted since the table was loaded (or ever, if it was not)."""
        return self._database.family(table).streamed

    def rows(self, table: EmbeddingTable) -> int:
        """RocksDB's estimate of the number of rows, tombstones and overwritten rows included."""
        with self._database.errors():
            count = self._database.family(table).data.property_int_value(
                "rocksdb.estimate-num-keys"
            )
        return int(count or 0)

    def drop(self, *tables: EmbeddingTable) -> None:
        """Forget tables: their rows, tombstones and load records. No other call on them may run."""
        self._database.drop(tables)

    def codes(self, table: EmbeddingTable, keys: KeyArray) -> CodeArray:
        """(n,) keys -> (n,) uint64 that sort as the stored keys do; for `bulk_load`."""
        return self._database.family(table).codec.codes(keys)

    def bulk_load(
        self,
        table: EmbeddingTable,
        chunks: Iterable[tuple[CodeArray, VectorArray]],
        record: LoadRecord,
        progress: Callable[[int], None] = lambda _rows: None,
    ) -> LoadRecord:
        """Replace the table's rows by ``chunks``, whose codes (see `codes`) ascend strictly within and
        over the chunks. In the ``hps`` layout rows not among them stay, as in HPS.

        Crash-safe: the record is written first as incomplete, then all rows become visible at once,
        and last the record becomes complete; a table whose record is incomplete counts as not
        loaded. Returns the record with the number of rows. ``progress`` gets rows.
        """
        database = self._database
        with database.lock, database.errors():
            database.writable()
            family = database.family(table)
            database.records.put(family.name, record.started())
            family.streamed = False
            if self._layout == "native":
                database.clear(family)
            family.dirty = True
            job = BulkLoad(self.path, database.options, family.codec, record.version)
            try:
                rows = job.run(chunks, record.rows, family.data, family.handle, progress)
            finally:
                job.clean()
            done = record.finished(rows)
            database.records.put(family.name, done)
            return done

    def flush(self) -> None:
        """Write everything so far into table files. Not needed for safety; it spares the next start the
        replay of the log, which after the load of many small tables takes longer."""
        self._database.flush()

    def adopt(self, table: EmbeddingTable, record: LoadRecord, rows: int) -> LoadRecord:
        """Record a load that was done by `insert` because the table held rows already."""
        database = self._database
        with database.lock, database.errors():
            database.writable()
            done = record.finished(rows)
            database.records.put(database.family(table).name, done, keep_streamed=True)
            return done

    # -- reading ----------------------------------------------------------------------------------

    def fetch(self, parts: Sequence[Part], ctx: FetchContext) -> None:
        for part in parts:
            check_part(part)
            if len(part.missing):
                self._fetch_part(part)

    def _fetch_part(self, part: Part) -> None:
        family = self._database.family(part.table)
        code = family.codec.codes(part.keys[part.missing])
        order = np.argsort(code)
        stored = self._read(family, code[order])
        at = order[stored.at]
        found = part.missing[at]
        part.out[found] = stored.vectors
        part.versions[found] = stored.versions
        part.source[found] = Source.ROCKSDB
        if len(stored.dead_at):
            live = self._remembered(part.table, stored.dead_versions)
            dead = order[stored.dead_at[live]]
            part.versions[part.missing[dead]] = stored.dead_versions[live]
            at = np.concatenate([at, dead])
        if len(at) == len(code):
            part.missing = part.missing[:0]
        elif len(at):
            left = np.ones(len(code), bool)
            left[at] = False
            part.missing = part.missing[left]

    def _read(self, family: Family, code: CodeArray) -> Stored:
        """What is stored under ascending codes."""
        try:
            values: Any = family.data.get(family.codec.stored_keys(code), b"")
        except Exception as error:
            self._database.fail(error)
        try:
            return family.codec.decode(values)
        except WrongLength as error:
            table = family.table
            raise TierError(
                NAME,
                f"table {table.id}: a stored row has {error.found} bytes, expected {error.expected} "
                f"(dim {table.dim} of {table.dtype}); it was written with another dim, dtype or "
                "layout: serve it under a new version",
            ) from None

    def _remembered(self, table: EmbeddingTable, versions: VersionArray) -> NDArray[np.bool_]:
        """Which tombstones are not yet older than the table's ``tombstone_ttl_s``."""
        return versions >= np.uint64(oldest_tombstone(table, self._clock()))

    # -- writing ----------------------------------------------------------------------------------

    def insert(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        check_rows(table, keys, vectors, versions)
        self._write(table, keys, vectors, versions, resident_only=False)

    def update(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        check_rows(table, keys, vectors, versions)
        self._write(table, keys, vectors, versions, resident_only=True)

    def delete(self, table: EmbeddingTable, keys: KeyArray, versions: VersionArray) -> None:
        """In the ``hps`` layout a deletion leaves no trace."""
        check_keys(table, keys, versions)
        if self._layout == "hps":
            self.evict(table, keys)
        else:
            self._write(table, keys, None, versions, resident_only=False)

    def _write(
        self,
        table: EmbeddingTable,
        keys: KeyArray,
        vectors: VectorArray | None,
        versions: VersionArray,
        *,
        resident_only: bool,
    ) -> None:
        """Upsert, or delete where ``vectors`` is None, what is not older than what is stored."""
        with self._database.lock, self._database.errors():
            self._database.writable()
            family = self._database.family(table)
            keys = table.narrow(keys)
            # Where versions are not stored the last of equal keys wins, whatever version it carries.
            ranks = versions if family.codec.versioned else np.zeros(len(keys), np.uint64)
            at = newest_of_each(keys, ranks)
            if at is None:
                at = np.arange(len(keys))
            code = family.codec.codes(keys[at])
            order = np.argsort(code)
            code, at = code[order], at[order]
            if family.codec.versioned or resident_only:
                mask = self._applicable(family, code, versions[at], resident_only=resident_only)
                code, at = code[mask], at[mask]
            if vectors is None:
                self._put(family, code, lambda i: family.codec.encode_tombstones(versions[at[i]]))
            else:
                rows = vectors
                self._put(family, code, lambda i: family.codec.encode(rows[at[i]], versions[at[i]]))

    def _applicable(
        self, family: Family, code: CodeArray, versions: VersionArray, *, resident_only: bool
    ) -> NDArray[np.bool_]:
        """Which writes are not older than what is stored. A tombstone that is still remembered is
        resident: an update revives its key."""
        stored = self._read(family, code)
        live = self._remembered(family.table, stored.dead_versions)
        dead_at = stored.dead_at[live]
        known = np.zeros(len(code), np.uint64)
        known[stored.at] = stored.versions
        known[dead_at] = stored.dead_versions[live]
        mask: NDArray[np.bool_] = versions >= known
        if resident_only:
            resident = np.zeros(len(code), bool)
            resident[stored.at] = True
            resident[dead_at] = True
            mask &= resident
        return mask

    def evict(self, table: EmbeddingTable, keys: KeyArray) -> None:
        """Remove rows and tombstones without a trace. On a store that means losing them."""
        check_keys(table, keys)
        with self._database.lock, self._database.errors():
            self._database.writable()
            family = self._database.family(table)
            self._put(family, np.sort(family.codec.codes(keys)), None)

    def _put(
        self, family: Family, code: CodeArray, values: Callable[[slice], list[bytes]] | None
    ) -> None:
        """Write (or, without ``values``, remove) in slices of bounded length."""
        if len(code):
            self._database.mark_streamed(family)
        handle = repeat(family.handle)
        for start in range(0, len(code), _WRITE_SLICE):
            part = slice(start, start + _WRITE_SLICE)
            batch = WriteBatch(raw_mode=True)
            names = family.codec.stored_keys(code[part])
            if values is None:
                deque(map(batch.delete, names, handle), 0)
            else:
                deque(map(batch.put, names, values(part), handle), 0)
            self._database.db.write(batch)

    def sync(self) -> None:
        """Make every acknowledged write survive a power loss as well."""
        self._database.sync()

    def close(self) -> None:
        """Idempotent. Flushes for at most three seconds; what is left is replayed at the next start."""
        self._database.close()
