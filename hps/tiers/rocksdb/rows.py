"""Reading and writing rows under the version rule, on one open database."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice, repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rocksdict import Rdict, WriteBatch

from hps.tiers.base import newest_of_each
from hps.tiers.rocksdb.database import RocksDbDatabase, TableFamily
from hps.tiers.rocksdb.errors import rocksdb_error
from hps.tiers.rocksdb.layout import CodeArray
from hps.tiers.row_values import StoredRows, WrongLength
from hps.types import (
    EmbeddingTable,
    IndexArray,
    KeyArray,
    VectorArray,
    VersionArray,
    oldest_row,
    oldest_tombstone,
)

# Rows per write: rocksdict holds the interpreter lock while it writes (2 µs per row of 128 bytes), so
# larger batches would keep request threads waiting. Rows are encoded in larger chunks, which halves that
# cost.
_WRITE_SLICE, _ENCODE_SLICE = 64, 512
_SCAN_ROWS = 4096


class ScannedRows(NamedTuple):
    """A chunk of rows: keys (n,), vectors (n, dim), versions (n,)."""

    keys: KeyArray
    vectors: VectorArray
    versions: VersionArray


def scan_entries(
    data: Rdict, start: bytes | None = None, most: int = _SCAN_ROWS
) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Yield keys and values from key ``start`` on, at most ``most`` at a time.

    Raises RocksDB's error at a damaged block."""
    items, last = data.items(from_key=start), start
    while some := list(islice(items, most)):
        names, values = map(list, zip(*some, strict=True))
        last = names[-1]
        yield names, values
    # The binding's loop ends without an error at a damaged block too; only the status shows the difference.
    at = data.iter()
    at.seek_to_first() if last is None else at.seek(last)
    if at.valid():
        at.next()
    at.status()


class VersionedRows:
    """Rows with versions, on one open database.

    ``clock`` returns Unix seconds and drives the expiry of rows and tombstones. ``read`` may be called from
    many threads in parallel with a writer; writers are serialized."""

    def __init__(self, database: RocksDbDatabase, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    def read(self, family: TableFamily, code: CodeArray) -> tuple[StoredRows, bool]:
        """Read the values of ascending codes; return them, and whether all keys were readable.

        Keys in a damaged part of a table file count as not stored."""
        keys, whole = family.codec.stored_keys(code), True
        try:
            values: Any = family.data.get(keys, b"")
        except Exception as error:
            self._database.report_damage(error, family.table.id)
            values, whole = self._read_singly(family, keys), False
        return decode_values(family, values), whole

    def _read_singly(self, family: TableFamily, keys: Sequence[bytes]) -> list[bytes]:
        values: list[Any] = []
        for key in keys:
            try:
                values.append(family.data.get(key, b""))
            except Exception as error:
                self._database.report_damage(error, family.table.id)
                values.append(b"")
        return values

    def oldest_row(self, family: TableFamily) -> int:
        """Return the version below which a row has expired; 0 if rows of the table do not expire."""
        return oldest_row(family.table, self._clock()) if family.codec.versioned else 0

    def without_expired(self, family: TableFamily, stored: StoredRows) -> StoredRows:
        """Return ``stored`` without the rows that have expired, which then count as not stored."""
        if not (oldest := self.oldest_row(family)):
            return stored
        fresh = stored.versions >= np.uint64(oldest)
        rows = stored.at[fresh], stored.versions[fresh], stored.vectors[fresh]
        return StoredRows(*rows, stored.tombstone_at, stored.tombstone_versions)

    def scan(self, family: TableFamily, start: int | None = None) -> Iterator[ScannedRows]:
        """Yield every row, in the order of the stored keys, from key ``start`` on."""
        for keys, every in self._entries(family, start):
            stored = self.without_expired(family, every)
            yield ScannedRows(keys[stored.at], stored.vectors, stored.versions)

    def tombstones(self, family: TableFamily) -> Iterator[tuple[KeyArray, VersionArray]]:
        """Yield keys (n,) and versions (n,) of every unexpired tombstone."""
        for keys, stored in self._entries(family, None):
            live = self.unexpired(family.table, stored.tombstone_versions)
            if live.any():
                yield keys[stored.tombstone_at[live]], stored.tombstone_versions[live]

    def _entries(
        self, family: TableFamily, start: int | None
    ) -> Iterator[tuple[KeyArray, StoredRows]]:
        with self._database.errors():
            last = None
            if start is not None:
                (last,) = family.codec.stored_keys(family.codec.codes(np.array([start], np.int64)))
            for names, values in scan_entries(family.data, last):
                yield family.codec.keys(b"".join(names)), decode_values(family, values)

    def check_first(self, family: TableFamily) -> None:
        """Raise TierError if the length of the table's first row does not match its dim and dtype."""
        with self._database.errors():
            first = family.data.iter()
            first.seek_to_first()
            if first.valid():
                decode_values(family, [first.value()])
                return
            try:
                first.status()
            except Exception as error:
                self._database.report_damage(error, family.table.id)

    def unexpired(self, table: EmbeddingTable, versions: VersionArray) -> NDArray[np.bool_]:
        """Return a mask of the tombstones that are not older than the table's ``tombstone_ttl_s``."""
        return versions >= np.uint64(oldest_tombstone(table, self._clock()))

    def reaching(self, table: EmbeddingTable, keys: KeyArray, version: int) -> IndexArray:
        """Return the positions of the ``keys (n,)`` whose stored version may be ``version`` or higher.

        ``version`` is above 0. Reads no rows: decided by the high-water marks."""
        with self._database.lock, self._database.errors():
            family = self._database.family(table)
            below = np.full(len(keys), version - 1, np.uint64)
            return np.flatnonzero(~family.marks.at_or_above(family.codec.codes(keys), below))

    def write(
        self,
        table: EmbeddingTable,
        keys: KeyArray,
        vectors: VectorArray | None,
        versions: VersionArray,
        *,
        resident_only: bool,
    ) -> None:
        """Upsert the rows, or delete them if ``vectors`` is None, unless a stored version is newer.

        Also removes expired tombstones, at most as many as there are keys: so they do not pile up, and
        no single write takes long."""
        if not len(keys):
            return
        with self._database.lock, self._database.errors():
            family = self._database.family(table)
            self._database.writable(len(keys) * family.codec.value_bytes)
            keys = table.narrow(keys)
            # Without stored versions, the last write of a key wins, whatever its version.
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
            if family.codec.versioned:
                family.marks.rise(code, versions[at], self._database.throttle.write)
            if vectors is None:
                self._put_tombstones(family, code, versions[at])
            else:
                rows = vectors
                self._put(family, code, lambda i: family.codec.encode(rows[at[i]], versions[at[i]]))
            if family.codec.versioned:
                self._sweep(family, len(keys))

    def _applicable(
        self, family: TableFamily, code: CodeArray, versions: VersionArray, *, resident_only: bool
    ) -> NDArray[np.bool_]:
        """Return a mask of the writes that apply: no stored version is newer.

        An unexpired tombstone is resident: an update restores its key."""
        mask = np.zeros(len(code), bool)
        if not resident_only:
            mask = family.marks.at_or_above(code, versions)
        unsure = np.flatnonzero(~mask)
        if len(unsure):
            # An unreadable row counts as absent, so that it can be overwritten.
            stored, _ = self.read(family, code[unsure])
            live = self.unexpired(family.table, stored.tombstone_versions)
            tombstone_at = stored.tombstone_at[live]
            known = np.zeros(len(unsure), np.uint64)
            known[stored.at] = stored.versions
            known[tombstone_at] = stored.tombstone_versions[live]
            mask[unsure] = versions[unsure] >= known
            if resident_only:
                resident = np.zeros(len(unsure), bool)
                resident[stored.at] = True
                resident[tombstone_at] = True
                mask[unsure] &= resident
        return mask

    def _masks(self, family: TableFamily, code: CodeArray) -> NDArray[np.bool_]:
        """Return a mask of the tombstones that must be kept although they have expired: here, none."""
        return np.zeros(len(code), bool)

    def remove(self, table: EmbeddingTable, keys: KeyArray) -> None:
        """Remove rows and tombstones without a trace."""
        with self._database.lock, self._database.errors():
            self._database.writable()
            family = self._database.family(table)
            self._put(family, np.sort(family.codec.codes(keys)), None)

    def drop(self, family: TableFamily, code: CodeArray) -> None:
        """Remove the rows of ascending ``code (n,)``, which have expired. The caller holds the lock."""
        self._put(family, code, None)

    def _put(
        self, family: TableFamily, code: CodeArray, values: Callable[[slice], list[bytes]] | None
    ) -> None:
        """Write entries in slices of bounded length; without ``values``, remove them."""
        handle = repeat(family.handle)

        def fill(part: slice, batch: WriteBatch) -> None:
            if stored is None:
                deque(map(batch.delete, names[part], handle), 0)
            else:
                deque(map(batch.put, names[part], stored[part], handle), 0)

        if len(code):
            self._database.mark_streamed(family)
        for some in _slices(len(code), _ENCODE_SLICE):
            names = family.codec.stored_keys(code[some])
            stored = None if values is None else values(some)
            for part in _slices(len(names), _WRITE_SLICE):
                self._database.throttle.write(partial(fill, part))

    def _put_tombstones(self, family: TableFamily, code: CodeArray, versions: VersionArray) -> None:
        handle = repeat(family.handle)

        def fill(part: slice, batch: WriteBatch) -> None:
            values = family.codec.encode_tombstones(versions[part])
            deque(map(batch.put, family.codec.stored_keys(code[part]), values, handle), 0)
            family.tombstones.note(batch, code[part], versions[part])

        if len(code):
            self._database.mark_streamed(family)
        for part in _slices(len(code), _WRITE_SLICE):
            self._database.throttle.write(partial(fill, part))

    def _sweep(self, family: TableFamily, most: int) -> None:
        """Remove expired tombstones, oldest first."""
        before = oldest_tombstone(family.table, self._clock())
        entries = family.tombstones.expired(before, most)
        for part in _slices(len(entries), _WRITE_SLICE):
            some = entries[part]
            code = np.unique(some["code"].astype(np.uint64))
            stored, _ = self.read(family, code)
            over = stored.tombstone_at[stored.tombstone_versions < np.uint64(before)]
            over = over[~self._masks(family, code[over])]
            self._database.throttle.write(partial(_remove_tombstones, family, code[over], some))


def _slices(number: int, most: int) -> Iterator[slice]:
    return (slice(start, start + most) for start in range(0, number, most))


def _remove_tombstones(
    family: TableFamily, code: CodeArray, entries: NDArray[np.void], batch: WriteBatch
) -> None:
    """Add to ``batch`` the removal of tombstones and their index entries."""
    deque(map(batch.delete, family.codec.stored_keys(code), repeat(family.handle)), 0)
    family.tombstones.remove(batch, entries)


def decode_values(family: TableFamily, values: Sequence[bytes]) -> StoredRows:
    """Decode ``values``, see `RowValueCodec.decode`. Raises TierError for rows of another shape."""
    try:
        return family.codec.decode(values)
    except WrongLength as error:
        table = family.table
        remedy = (
            "serve it under a new version" if family.codec.versioned else "take another database"
        )
        raise rocksdb_error(
            f"table {table.id}: a stored row has {error.actual} bytes, expected {error.expected} "
            f"(dim {table.dim} of {table.row_format.name}); it was written with another dim, dtype or "
            f"layout: {remedy}",
        ) from None
