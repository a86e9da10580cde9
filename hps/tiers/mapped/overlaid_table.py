"""A mapped file, and which of its rows are overridden by an overlay in RocksDB."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.native import bitmap_words
from hps.native.mapped_format import BLOCK_BYTES, HEADER_BYTES, MappedFile, open_mapped, read_header
from hps.tiers.base import Part
from hps.types import EmbeddingTable, IndexArray, KeyArray, Source, VectorArray

Bits = NDArray[np.uint64]
_NONE = np.empty(0, np.int64)
_READ_ROWS = 1 << 18


class OverlaidTable:
    """The rows of one table in the file ``path``, all of ``version``.

    A bit per row says that the overlay has an entry of its key, which hides the row; ``has_others`` says
    that the overlay may have keys that the file has not. ``asks_first``: the bits are not known, as another
    process writes the overlay. Reads may run on many threads in parallel with one writer. Raises ModelError
    if the file cannot be used."""

    def __init__(self, path: Path, version: int, *, asks_first: bool = False) -> None:
        header = read_header(path)
        self.version = version
        self.asks_first = asks_first
        self.has_others = asks_first
        self.unreadable = ""
        """Why no row of the file can be used; empty if they can."""
        self._bits = np.zeros(bitmap_words(header.rows), np.uint64)
        self._damaged: list[tuple[int, int]] = []
        self.file: MappedFile = open_mapped(path, version, Source.ROCKSDB, self._bits)
        self._table: Any = self.file.table

    @property
    def rows(self) -> int:
        return self.file.header.rows

    @property
    def overridden(self) -> int:
        """The number of rows that the overlay hides."""
        return int(self._table.overridden)

    def fits(self, table: EmbeddingTable) -> bool:
        header = self.file.header
        return (header.dim, header.dtype) == (table.dim, table.dtype)

    # -- reading ----------------------------------------------------------------------------------

    def fetch(self, part: Part) -> tuple[IndexArray, IndexArray]:
        """Fetch rows of ``part.missing`` that no entry of the overlay hides.

        Returns the ascending positions that the overlay must be asked for, and those that neither has.
        Raises RuntimeError if a page of the file cannot be read."""
        if self.unreadable:
            return part.missing, _NONE
        hidden, absent = self._table.fetch(
            part.keys, part.missing, part.out, part.versions, part.source
        )
        hidden = _NONE if hidden is None else hidden
        if absent is None:
            return hidden, _NONE
        if not self.has_others:
            return hidden, absent
        return (np.sort(np.concatenate([hidden, absent])) if len(hidden) else absent), _NONE

    def answers(self, keys: KeyArray) -> NDArray[np.bool_]:
        """Return a mask of the ``keys (n,)`` that the file has and no entry of the overlay hides."""
        at = self.positions(keys)
        present = at >= 0
        if not self.rows:
            return present
        at = np.maximum(at, 0)
        hidden = self._bits[1 + at // 64] >> (at % 64).astype(np.uint64) & np.uint64(1)
        shown: NDArray[np.bool_] = np.equal(hidden, 0)
        return present & shown

    def positions(self, keys: KeyArray) -> IndexArray:
        """Return the position of each of ``keys (n,)`` in the file, hidden or not; -1 for an absent key."""
        if self.unreadable:
            return np.full(len(keys), -1)
        at: IndexArray = self._table.positions(keys)
        return at

    def rows_at(self, positions: IndexArray, out: VectorArray) -> None:
        """Copy the rows at ``positions (n,)`` to ``out (n, dim)``."""
        self._table.copy_records(positions, out)

    def populate(self, keys: KeyArray) -> int:
        """Read the pages of the rows of ``keys (n,)`` into memory; return the number that were not."""
        return 0 if self.unreadable else int(self._table.populate(keys))

    def bits(self) -> Bits:
        """Return a copy of the bits that hide rows, for `shown`."""
        return self._bits.copy()

    def shown(self, bits: Bits) -> tuple[KeyArray, IndexArray]:
        """Return the keys (n,) of all rows that ``bits`` do not hide, ascending, and their positions (n,).

        Takes up to 40 bytes of memory per row for a while. Raises OSError."""
        hidden = np.unpackbits(bits[1:].view(np.uint8), bitorder="little")[: self.rows]
        keys = np.concatenate([np.empty(0, np.int64), *self._keys()])
        at = np.flatnonzero(hidden == 0)
        at = at[np.argsort(keys[at])]
        return keys[at], at

    def _keys(self) -> Iterable[KeyArray]:
        """Yield the keys of all rows, in the order of the file; read, so that none can end the process."""
        header = self.file.header
        record = np.dtype(
            {"names": ["key"], "formats": ["<i8"], "itemsize": header.record_bytes, "offsets": [0]}
        )
        for start in range(0, self.rows, _READ_ROWS):
            n = min(_READ_ROWS, self.rows - start)
            offset = HEADER_BYTES + start * header.record_bytes
            yield np.fromfile(header.path, record, n, offset=offset)["key"].astype(np.int64)

    # -- changes, by one thread at a time -----------------------------------------------------------

    def override(self, keys: KeyArray) -> None:
        """Record that the overlay has an entry of each of ``keys (n,)``; call it once they are written."""
        if self.unreadable or (len(keys) and self._table.override_keys(keys)):
            self.has_others = True

    def mark_damaged(self, block: int) -> None:
        """Hide the rows in a block whose checksum does not fit; see `may_be_damaged`."""
        header = self.file.header
        begin, end = block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES
        if end > self.rows * header.record_bytes:
            self.unreadable = "its index is damaged"
            return
        first, last = begin // header.record_bytes, -(-end // header.record_bytes)
        at = np.arange(first, min(last, self.rows))
        self.has_others = True
        self._damaged.append((first, last))
        words, bits = 1 + at // 64, np.uint64(1) << (at % 64).astype(np.uint64)
        new = self._bits[words] & bits == 0
        np.bitwise_or.at(self._bits, words, bits)
        self._bits[0] += np.uint64(np.count_nonzero(new))

    def may_be_damaged(self, keys: KeyArray) -> bool:
        """Return whether a damaged part of the file may have a row of one of ``keys (n,)``.

        A damaged key cannot be found, so this is true for every absent key of a damaged file."""
        if not len(keys) or not (self.unreadable or self._damaged):
            return False
        at = self.positions(keys)
        inside = at < 0
        for first, last in self._damaged:
            inside |= (at >= first) & (at < last)
        return bool(inside.any())
