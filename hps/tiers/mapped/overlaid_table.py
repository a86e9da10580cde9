"""A mapped file, or a base and a delta, and which of its rows are overridden by an overlay in RocksDB."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.native.mapped_format import BLOCK_BYTES, HEADER_BYTES, MappedFile, open_mapped, read_header
from hps.tiers.base import Part
from hps.tiers.mapped.masked_positions import MASKED_POSITIONS_FILE, read_masked_positions
from hps.tiers.mapped.row_marks import Bits, RowMarks
from hps.types import (
    EmbeddingTable,
    IndexArray,
    KeyArray,
    Source,
    VectorArray,
    VersionArray,
    oldest_row,
)

_NONE = np.empty(0, np.int64)
_READ_ROWS = 1 << 18

OnHiding = Callable[[KeyArray, VectorArray | None, VersionArray], None]
"""Called with changes just before they hide rows: keys, vectors (None: deletions), versions."""


class MappedSegment:
    """A mapped file with a bit per row that hides it; its rows have the table's positions ``first:end``."""

    def __init__(
        self, path: Path, version: int, first: int = 0, folder: Path | None = None
    ) -> None:
        header = read_header(path)
        self.first, self.end = first, first + header.rows
        self.marks = RowMarks(header.rows, folder)
        self.bits = self.marks.words
        self.file: MappedFile = open_mapped(path, version, Source.ROCKSDB, self.bits)
        self.table: Any = self.file.table

    @property
    def rows(self) -> int:
        return self.end - self.first

    def hide(self, at: IndexArray) -> None:
        """Hide the rows with the positions ``at (n,)`` in this file; no lookup may write bits meanwhile."""
        words, bits = 1 + at // 64, np.uint64(1) << (at % 64).astype(np.uint64)
        new = self.bits[words] & bits == 0
        np.bitwise_or.at(self.bits, words, bits)
        self.bits[0] += np.uint64(np.count_nonzero(new))

    def is_hidden(self, at: IndexArray) -> NDArray[np.bool_]:
        """Return which of the rows at ``at (n,)``, positions in this file, are hidden."""
        found = self.bits[1 + at // 64] >> (at % 64).astype(np.uint64) & np.uint64(1)
        hidden: NDArray[np.bool_] = np.not_equal(found, 0)
        return hidden

    def key_blocks(self) -> Iterable[KeyArray]:
        """Yield the keys of all rows, in the order of the file; read, so that none can end the process."""
        header = self.file.header
        record = np.dtype(
            {"names": ["key"], "formats": ["<i8"], "itemsize": header.record_bytes, "offsets": [0]}
        )
        for start in range(0, self.rows, _READ_ROWS):
            n = min(_READ_ROWS, self.rows - start)
            offset = HEADER_BYTES + start * header.record_bytes
            yield np.fromfile(header.path, record, n, offset=offset)["key"].astype(np.int64)


class OverlaidTable:
    """The rows of one table in the file ``path``, all of ``version``.

    A bit per row says that the overlay has an entry of its key, which hides the row; ``has_others`` says
    that keys that the file has not may be in the overlay, or in the delta. ``asks_first``: the bits are not
    known, as another process writes the overlay. Reads may run on many threads in parallel with one writer.

    ``delta``: a second mapped file. A file ``masked_positions`` beside it has the rows of the first one, the
    base, that are replaced or removed; bits of the base hide these, too. So the base is asked first, and
    most keys need no other lookup. ``folder``: of the base's `RowMarks`. Raises ModelError if a file cannot
    be used, OSError for the folder."""

    def __init__(
        self,
        path: Path,
        version: int,
        *,
        asks_first: bool = False,
        delta: Path | None = None,
        folder: Path | None = None,
    ) -> None:
        self.version = version
        self.asks_first = asks_first
        self.on_hiding: OnHiding | None = None
        """A cache whose readers read the file first takes the changes here: else they would miss them."""
        self._unreadable = ""
        self.expired_rows: int | None = None
        """The number of rows that `expire` hid; None: it was not called."""
        base = MappedSegment(path, version, folder=folder)
        self.file: MappedFile = base.file
        self.digest = base.file.header.digest
        self._base, self._delta = base, None
        self._masked = _NONE
        self._segments = [base]
        if delta is not None:
            folder = delta.parent
            self.digest, masked = read_masked_positions(
                folder / MASKED_POSITIONS_FILE, base.file.header
            )
            self._masked = np.sort(masked)
            base.hide(self._masked)
            self._delta = MappedSegment(delta, version, base.end)
            self._segments.append(self._delta)
        self._overlay_has_others = asks_first
        self.has_others = asks_first or delta is not None
        self._has_overlay = asks_first
        self._damaged: list[tuple[int, int]] = []

    @property
    def unreadable(self) -> str:
        """Why no row of the file can be used; empty if they can. A change hides them from all readers."""
        return self._unreadable

    @unreadable.setter
    def unreadable(self, reason: str) -> None:
        self._unreadable = reason
        for segment in self._segments if reason else ():
            segment.marks.hide_all()

    def expire(self) -> None:
        """Hide all rows of the file from all readers, for good; no other thread may write bits meanwhile."""
        self._has_overlay, self.expired_rows = True, self.rows - self.overridden
        for segment in self._segments:
            segment.marks.hide_all()

    @property
    def marks(self) -> RowMarks:
        """The bits of ``file``, the base."""
        return self._base.marks

    @property
    def rows(self) -> int:
        """The number of rows, hidden by the overlay or not."""
        return self._segments[-1].end - len(self._masked)

    @property
    def overridden(self) -> int:
        """The number of rows that the overlay hides."""
        hidden = sum(int(each.table.overridden) for each in self._segments)
        return hidden - len(self._masked)

    @property
    def bytes(self) -> int:
        """The bytes of the mapped files."""
        return sum(each.file.header.bytes for each in self._segments)

    @property
    def blocks(self) -> int:
        """The number of blocks with a checksum: those of the file, then those of the delta."""
        return sum(each.file.header.blocks for each in self._segments)

    @property
    def files(self) -> list[MappedFile]:
        """The mapped files, in the order of their blocks: the base, then the delta."""
        return [each.file for each in self._segments]

    def fits(self, table: EmbeddingTable) -> bool:
        headers = [each.header for each in self.files]
        return all((h.dim, h.row_format) == (table.dim, table.row_format) for h in headers)

    # -- reading ----------------------------------------------------------------------------------

    def fetch(self, part: Part) -> tuple[IndexArray, IndexArray]:
        """Fetch rows of ``part.missing`` that no entry of the overlay hides.

        Returns the ascending positions that the overlay must be asked for, and those that neither has.
        Raises RuntimeError if a page of the file cannot be read."""
        if self.unreadable:
            return part.missing, _NONE
        hidden, absent = self._fetch(self._base, part, part.missing)
        if self._delta is not None and len(left := _merged(hidden, absent)):
            replaced, absent = self._fetch(self._delta, part, left)
            if not self._has_overlay:
                return replaced, absent
            # Hidden in the base, and not in the delta: removed, or hidden by the overlay.
            unknown = np.isin(absent, hidden, assume_unique=True)
            hidden, absent = _merged(replaced, absent[unknown]), absent[~unknown]
            if self._overlay_has_others:
                return _merged(hidden, absent), _NONE
            return hidden, absent
        return (_merged(hidden, absent), _NONE) if self.has_others else (hidden, absent)

    @staticmethod
    def _fetch(
        segment: MappedSegment, part: Part, wanted: IndexArray
    ) -> tuple[IndexArray, IndexArray]:
        hidden, absent = segment.table.fetch(
            part.keys, wanted, part.out, part.versions, part.source
        )
        return _NONE if hidden is None else hidden, _NONE if absent is None else absent

    def answers(self, keys: KeyArray) -> NDArray[np.bool_]:
        """Return a mask of the ``keys (n,)`` that the file has and no entry of the overlay hides."""
        at = self.positions(keys)
        shown = at >= 0
        for segment in self._segments:
            inside = np.flatnonzero((at >= segment.first) & (at < segment.end))
            shown[inside] = ~segment.is_hidden(at[inside] - segment.first)
        return shown

    def answers_directly(self, keys: KeyArray) -> NDArray[np.bool_]:
        """Return a mask of the ``keys (n,)`` whose rows ``file.table`` gathers."""
        try:
            at: IndexArray = self._base.table.positions(keys)
        except RuntimeError:  # damaged
            at = np.full(len(keys), -1)
        found = np.flatnonzero(at >= 0)
        shown = np.zeros(len(keys), bool)
        shown[found] = ~self._base.is_hidden(at[found])
        return shown

    def positions(self, keys: KeyArray) -> IndexArray:
        """Return the position of each of ``keys (n,)``, hidden by the overlay or not; -1 for an absent key.

        Rows of the delta have the positions after those of the base."""
        if self.unreadable:
            return np.full(len(keys), -1)
        at: IndexArray = self._base.table.positions(keys)
        if self._delta is not None:
            places = np.minimum(np.searchsorted(self._masked, at), max(0, len(self._masked) - 1))
            rest = at < 0
            if len(self._masked):
                rest |= self._masked[places] == at
            found = self._delta.table.positions(keys[rest])
            at[rest] = np.where(found < 0, -1, found + self._delta.first)
        return at

    def rows_at(self, positions: IndexArray, out: VectorArray) -> None:
        """Copy the rows at ``positions (n,)`` to ``out (n, dim)``."""
        if self._delta is None:
            self._base.table.copy_records(positions, out)
            return
        for segment in self._segments:
            inside = np.flatnonzero((positions >= segment.first) & (positions < segment.end))
            rows = np.empty((len(inside), *out.shape[1:]), out.dtype)
            segment.table.copy_records(positions[inside] - segment.first, rows)
            out[inside] = rows

    def load(self, begin: int, end: int) -> None:
        """Read the base file from byte ``begin`` to ``end`` into memory."""
        self._base.table.load(begin, end)

    def populate(self, keys: KeyArray) -> int:
        """Read the pages of the rows of ``keys (n,)`` into memory; return the number that were not."""
        if self.unreadable:
            return 0
        return sum(int(each.table.populate(keys)) for each in self._segments)

    def bits(self) -> list[Bits]:
        """Return a copy of the bits that hide rows, for `shown`."""
        return [each.bits.copy() for each in self._segments]

    def shown(self, bits: list[Bits]) -> tuple[KeyArray, IndexArray]:
        """Return the keys (n,) of all rows that ``bits`` do not hide, ascending, and their positions (n,).

        Takes up to 40 bytes of memory per row for a while. Raises OSError."""
        hidden = np.concatenate(
            [
                np.unpackbits(words[1:].view(np.uint8), bitorder="little")[: each.rows]
                for each, words in zip(self._segments, bits, strict=True)
            ]
        )
        every = [keys for each in self._segments for keys in each.key_blocks()]
        keys = np.concatenate([np.empty(0, np.int64), *every])
        at = np.flatnonzero(hidden == 0)
        at = at[np.argsort(keys[at])]
        return keys[at], at

    # -- changes, by one thread at a time -----------------------------------------------------------

    def override(self, keys: KeyArray) -> None:
        """Record that the overlay has an entry of each of ``keys (n,)``; call it once they are written."""
        if not len(keys) and not self.unreadable:
            return
        self._has_overlay = True
        if self.unreadable:
            self.has_others = self._overlay_has_others = True
        elif self._delta is None:
            if self._base.table.override_keys(keys):
                self.has_others = self._overlay_has_others = True
        else:
            at = self.positions(keys)
            if (at < 0).any():
                self._overlay_has_others = True
            for segment in self._segments:
                inside = (at >= segment.first) & (at < segment.end)
                segment.table.override_keys(keys[inside])

    def ask_overlay_first(self) -> None:
        """Ask the overlay for every key first, since the bits are not known."""
        self.asks_first = self.has_others = self._overlay_has_others = self._has_overlay = True

    def damaged_blocks(self, first: int = 0, n: int | None = None) -> list[int]:
        """Return the numbers of those of ``n`` blocks from ``first`` on whose checksum does not fit.

        Raises ModelError as `hps.native.mapped_format.damaged_blocks`."""
        end = self.blocks if n is None else min(self.blocks, first + n)
        damaged, begin = [], 0
        for segment in self._segments:
            blocks = segment.file.header.blocks
            low, high = max(first - begin, 0), min(end - begin, blocks)
            if low < high:
                damaged += [begin + b for b in segment.file.damaged_blocks(low, high - low)]
            begin += blocks
        return damaged

    def file_of_block(self, block: int) -> Path:
        """Return the file that has a block."""
        base = self._base.file.header
        if self._delta is None or block < base.blocks:
            return base.path
        return self._delta.file.header.path

    def mark_damaged(self, block: int) -> None:
        """Hide the rows in a block whose checksum does not fit; see `may_be_damaged`."""
        segment = self._base
        if self._delta is not None and block >= segment.file.header.blocks:
            block, segment = block - segment.file.header.blocks, self._delta
        header = segment.file.header
        begin, end = block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES
        if end > segment.rows * header.record_bytes:
            self.unreadable = "its index is damaged"
            return
        first, last = begin // header.record_bytes, -(-end // header.record_bytes)
        at = np.arange(first, min(last, segment.rows))
        self.has_others = self._overlay_has_others = self._has_overlay = True
        self._damaged.append((first + segment.first, last + segment.first))
        segment.hide(at)

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


def _merged(one: IndexArray, other: IndexArray) -> IndexArray:
    """Return both, which have no number in common, ascending."""
    if not len(one) or not len(other):
        return one if len(one) else other
    return np.sort(np.concatenate([one, other]))


def has_expired(table: EmbeddingTable, mapped: OverlaidTable, clock: Callable[[], float]) -> bool:
    """True if the rows of ``mapped`` have expired and are not hidden yet; ``clock`` returns Unix seconds."""
    if table.ttl_s is None or mapped.expired_rows is not None:
        return False
    return mapped.version < oldest_row(table, clock())
