"""RocksDB: the store that holds every row of a node, in one column family per table.

Reads are sorted by stored key before one batched get per table; values land in the caller's array by
one join and one scatter. Writes go through the write-ahead log without fsync: acknowledged rows survive
``kill -9`` of the process; a power loss may take the last writes not yet flushed by the operating
system, but leaves a consistent earlier state. ``sync()`` makes everything so far survive that too.

``fetch`` may be called from many threads beside a writer. The mutating verbs take a lock, so several
callers do no harm, but they wait for each other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
from rocksdict import ColumnFamily, Rdict, WriteBatch

from hps.errors import TierError
from hps.tiers.base import FetchContext, Part, TierInfo, newest_of_each
from hps.tiers.rocksdb_layout import (
    CodeArray,
    Layout,
    Stored,
    WrongLength,
    codes,
    column_family,
    decode,
    encode,
    encode_tombstones,
    stored_keys,
)
from hps.tiers.rocksdb_load import BulkLoad, LoadRecord, Records, clean_leftovers
from hps.tiers.rocksdb_open import (
    NAME,
    OpenSettings,
    existing_families,
    make_options,
    open_database,
    translate,
)
from hps.types import (
    EmbeddingTable,
    KeyArray,
    Source,
    VectorArray,
    VersionArray,
    version_unix_ms,
)

__all__ = ["LoadRecord", "RocksDbTier"]

# rocksdict holds the interpreter lock while it writes (1.4 µs a row): more rows per batch would
# keep request threads waiting.
_WRITE_SLICE = 256


class _Family:
    """An open column family."""

    __slots__ = ("data", "handle", "name", "streamed")

    def __init__(self, name: str, data: Rdict, handle: ColumnFamily, *, streamed: bool) -> None:
        self.name = name
        self.data = data
        self.handle = handle
        self.streamed = streamed


class RocksDbTier:
    """Implements `Tier`. One instance owns ``path``; a second process gets a TierError.

    ``layout="hps"`` reads and writes HPS's own layout: no versions, no tombstones, last write wins.
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
    ) -> None:
        self._settings = OpenSettings(Path(path), block_cache_bytes, block_size, threads, read_only)
        self._layout: Layout = layout
        self._options = make_options(self._settings)
        self._families: dict[EmbeddingTable, _Family] = {}
        self._lock = RLock()
        self._closed = False
        self.info = TierInfo(NAME, Source.ROCKSDB, blocking=True, volatile=False)
        self._names = set(existing_families(self._settings.path))
        self._db = open_database(self._settings, self._options, self._names)
        self._records = Records(self._db)
        if not read_only:
            clean_leftovers(self._settings.path)

    @property
    def path(self) -> Path:
        return self._settings.path

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def read_only(self) -> bool:
        return self._settings.read_only

    # -- tables -----------------------------------------------------------------------------------

    def open_tables(self, tables: Sequence[EmbeddingTable]) -> None:
        """Make ready for these tables; missing column families are created, all in one go as long
        as no table is open yet (2,000 take about a second), else one by one."""
        with self._lock:
            wanted = {column_family(t, self._layout): t for t in tables if t not in self._families}
            missing = [name for name in wanted if name not in self._names]
            if missing and not self.read_only:
                self._create(missing)
            streamed = self._records.streamed(list(wanted)) if wanted else set()
            for name, table in wanted.items():
                if name not in self._names:
                    raise TierError(
                        NAME,
                        f"{self.path} holds no table {table.id}, and read_only forbids to create it",
                    )
                self._families[table] = _Family(
                    name,
                    self._db.get_column_family(name),
                    self._db.get_column_family_handle(name),
                    streamed=name in streamed,
                )

    def _create(self, names: list[str]) -> None:
        """RocksDB rewrites its OPTIONS file at each creation, which is quadratic in the number of
        tables; opening anew creates them all with one rewrite."""
        try:
            if len(names) > 2 and not self._families:
                self._records.release()
                self._db.close()
                self._db = open_database(self._settings, self._options, self._names | set(names))
                self._records = Records(self._db)
            else:
                for name in names:
                    self._db.create_column_family(name, self._options)
        except TierError:
            raise
        except Exception as error:
            raise translate(error, self.path) from error
        self._names |= set(names)

    def _family(self, table: EmbeddingTable) -> _Family:
        family = self._families.get(table)
        if family is None:
            self.open_tables([table])
            family = self._families[table]
        return family

    def loaded(self, table: EmbeddingTable) -> LoadRecord | None:
        """The record of the table's last complete bulk load, or None."""
        record = self._records.get(column_family(table, self._layout))
        return record if record is not None and record.complete else None

    def streamed(self, table: EmbeddingTable) -> bool:
        """Whether rows were written or deleted since the table was loaded."""
        return self._family(table).streamed

    def rows(self, table: EmbeddingTable) -> int:
        """RocksDB's estimate of the number of rows, tombstones included."""
        count = self._family(table).data.property_int_value("rocksdb.estimate-num-keys")
        return int(count or 0)

    def drop(self, table: EmbeddingTable) -> None:
        """Forget the table: its rows, its tombstones and its load record."""
        name = column_family(table, self._layout)
        with self._lock:
            self._writable()
            self._families.pop(table, None)
            self._records.remove(name)
            if name in self._names:
                self._db.drop_column_family(name)
                self._names.discard(name)

    def codes(self, keys: KeyArray) -> CodeArray:
        """(n,) keys -> (n,) uint64 that sort as the stored keys do; for `bulk_load`."""
        return codes(keys, self._layout)

    def bulk_load(
        self,
        table: EmbeddingTable,
        chunks: Iterable[tuple[CodeArray, VectorArray]],
        record: LoadRecord,
        progress: Callable[[int], None] = lambda _rows: None,
    ) -> LoadRecord:
        """Replace the table's contents by ``chunks``, whose codes (see ``codes``) ascend strictly
        within and over the chunks.

        Crash-safe: the record is written first as incomplete, then the rows are ingested, and last it
        becomes complete; a table whose record is incomplete counts as not loaded. Returns the
        record with its true number of rows.
        """
        with self._lock:
            self._writable()
            self.drop(table)
            name = column_family(table, self._layout)
            self._records.put(name, record.started())
            family = self._family(table)
            job = BulkLoad(self.path, self._options, table, self._layout, record.version)
            try:
                rows = job.run(chunks, family.data, progress)
            except TierError:
                raise
            except (OSError, Exception) as error:
                if type(error) is Exception or isinstance(error, OSError):
                    raise translate(error, self.path) from error
                raise
            finally:
                job.clean()
            done = record.finished(rows)
            self._records.put(name, done)
            return done

    # -- reading ----------------------------------------------------------------------------------

    def _read(self, table: EmbeddingTable, data: Rdict, code: CodeArray) -> Stored:
        """Values of sorted codes."""
        try:
            values: Any = data.get(stored_keys(code), b"")
        except Exception as error:
            raise translate(error, self.path) from error
        try:
            return decode(table, values, self._layout)
        except WrongLength as error:
            raise TierError(
                NAME,
                f"table {table.id}: a stored row has {error.found} bytes, expected {error.expected} "
                f"(dim {table.dim} of {table.dtype}); the table was loaded with another dim or dtype: "
                "serve it under a new version",
            ) from None

    def _expired(self, table: EmbeddingTable, versions: VersionArray) -> np.ndarray:
        """Which tombstones have been remembered for the table's ``tombstone_ttl_s``."""
        oldest_ms = time.time() * 1000.0 - table.tombstone_ttl_s * 1000.0
        return (versions >> np.uint64(20)).astype(np.float64) < oldest_ms

    def fetch(self, parts: Sequence[Part], ctx: FetchContext) -> None:
        for part in parts:
            if len(part.missing):
                self._fetch_part(part)

    def _fetch_part(self, part: Part) -> None:
        table = part.table
        family = self._families.get(table) or self._family(table)
        code = codes(part.keys[part.missing], self._layout)
        order = np.argsort(code)
        stored = self._read(table, family.data, code[order])
        at = order[stored.at]
        done = part.missing[at]
        part.out[done] = stored.vectors
        part.versions[done] = stored.versions
        part.source[done] = Source.ROCKSDB
        if len(stored.dead_at):
            live = ~self._expired(table, stored.dead_versions)
            dead = order[stored.dead_at[live]]
            part.versions[part.missing[dead]] = stored.dead_versions[live]
            at = np.concatenate([at, dead])
        if len(at) == len(code):
            part.missing = part.missing[:0]
        elif len(at):
            left = np.ones(len(code), bool)
            left[at] = False
            part.missing = part.missing[left]

    # -- writing ----------------------------------------------------------------------------------

    def insert(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        self._upsert(table, keys, vectors, versions, resident_only=False)

    def update(
        self, table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
    ) -> None:
        self._upsert(table, keys, vectors, versions, resident_only=True)

    def _upsert(
        self,
        table: EmbeddingTable,
        keys: KeyArray,
        vectors: VectorArray,
        versions: VersionArray,
        *,
        resident_only: bool,
    ) -> None:
        with self._lock:
            self._writable()
            family = self._family(table)
            # Without stored versions the last of equal keys wins, whatever versions they carry.
            ranks = versions if self._layout == "native" else np.zeros(len(keys), np.uint64)
            keep = newest_of_each(keys, ranks)
            if keep is not None:
                keys, vectors, versions = keys[keep], vectors[keep], versions[keep]
            code = codes(keys, self._layout)
            order = np.argsort(code)
            code, versions = code[order], versions[order]
            apply = self._applicable(table, family, code, versions, resident_only=resident_only)
            if apply is not None:
                code, versions, order = code[apply], versions[apply], order[apply]
            self._put(
                family,
                code,
                lambda part: encode(table, vectors[order[part]], versions[part], self._layout),
            )

    def _applicable(
        self,
        table: EmbeddingTable,
        family: _Family,
        code: CodeArray,
        versions: VersionArray,
        *,
        resident_only: bool,
    ) -> np.ndarray | None:
        """Mask of the writes that are not older than what is stored; None = all of them."""
        if self._layout == "hps" and not resident_only:
            return None
        stored = self._read(table, family.data, code)
        known = np.zeros(len(code), np.uint64)
        known[stored.at] = stored.versions
        live = ~self._expired(table, stored.dead_versions)
        known[stored.dead_at[live]] = stored.dead_versions[live]
        mask: np.ndarray = versions >= known
        if self._layout == "hps":
            mask = np.ones(len(code), bool)
        if resident_only:
            resident = np.zeros(len(code), bool)
            resident[stored.at] = True
            mask &= resident
        return mask

    def delete(self, table: EmbeddingTable, keys: KeyArray, versions: VersionArray) -> None:
        if self._layout == "hps":
            self.evict(table, keys)
            return
        with self._lock:
            self._writable()
            family = self._family(table)
            keep = newest_of_each(keys, versions)
            if keep is not None:
                keys, versions = keys[keep], versions[keep]
            code = codes(keys, self._layout)
            order = np.argsort(code)
            code, versions = code[order], versions[order]
            mask = self._applicable(table, family, code, versions, resident_only=False)
            code, versions = code[mask], versions[mask]
            self._put(family, code, lambda part: encode_tombstones(versions[part]))

    def evict(self, table: EmbeddingTable, keys: KeyArray) -> None:
        """Remove rows without a trace. On a store that means losing them."""
        with self._lock:
            self._writable()
            family = self._family(table)
            self._put(family, np.sort(codes(keys, self._layout)), None)

    def _put(
        self,
        family: _Family,
        code: CodeArray,
        values: Callable[[slice], list[bytes]] | None,
    ) -> None:
        """Write (or, without ``values``, remove) in slices of bounded length."""
        if len(code) and not family.streamed:
            self._records.mark_streamed(family.name)
            family.streamed = True
        handle = repeat(family.handle)
        try:
            for start in range(0, len(code), _WRITE_SLICE):
                part = slice(start, start + _WRITE_SLICE)
                batch = WriteBatch(raw_mode=True)
                names = stored_keys(code[part])
                if values is None:
                    deque(map(batch.delete, names, handle), 0)
                else:
                    deque(map(batch.put, names, values(part), handle), 0)
                self._db.write(batch)
        except Exception as error:
            raise translate(error, self.path) from error

    def sync(self) -> None:
        """Make every acknowledged write survive a power loss as well."""
        try:
            self._db.flush_wal(True)
        except Exception as error:
            raise translate(error, self.path) from error

    def _writable(self) -> None:
        if self._settings.read_only:
            raise TierError(NAME, f"{self.path} was opened with read_only: true; writing is off")

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._families.clear()
            self._records.release()
            try:
                self._db.close()
            except Exception as error:
                raise translate(error, self.path) from error


def describe_version(version: int) -> str:
    """For messages: when a version was made."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(version_unix_ms(version) / 1000))
