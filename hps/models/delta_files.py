"""Tables of which a version stores the difference to a base: the base's files, and a folder ``delta``.

The rows are those of the base that are not masked, in its order, then those of the delta. The file ``masked``
has the numbers (int64, ascending) of the base's rows that are replaced or removed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hps.errors import ModelError
from hps.models.file_stamp import FileStamp
from hps.models.manifest import (
    DELTA_FOLDER,
    MASKED_FILE,
    FileEntry,
    Manifest,
    TableEntry,
    digest_of,
)
from hps.models.tables import TableFiles, open_pair
from hps.types import IndexArray, KeyArray

_NUMBER_BYTES = 8
_COPY_ROWS = 1 << 16


@dataclass(frozen=True, slots=True)
class DeltaFiles(TableFiles):
    """A table's ``base`` without the rows whose numbers are in the file ``masked``, and its ``delta``."""

    base: TableFiles = None  # type: ignore[assignment]  # the parent's fields have defaults
    delta: TableFiles = None  # type: ignore[assignment]
    masked: FileStamp = None  # type: ignore[assignment]

    @property
    def pairs(self) -> tuple[TableFiles, ...]:
        return (self.base, self.delta)

    @property
    def kept(self) -> int:
        """The number of the base's rows that are not masked."""
        return self.rows - self.delta.rows

    def entries(self) -> list[tuple[Path, FileEntry]]:
        delta = self.entry.delta if self.entry else None
        assert delta is not None
        return [*self.base.entries(), *self.delta.entries(), (self.masked.path, delta.masked)]

    def masked_rows(self) -> IndexArray:
        """Return the numbers (m,) of the base's masked rows, ascending. Raises ModelError."""
        return _masked(self.masked, self.base.rows)[0]

    def keys(self, start: int = 0, stop: int | None = None) -> KeyArray:
        first, last, drop, rest = self._range(start, stop)
        kept = np.delete(self.base.keys(first, last), drop)
        return np.concatenate([kept, self.delta.keys(*rest)])

    def vectors(self, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        first, last, drop, rest = self._range(start, stop)
        kept = np.delete(self.base.vectors(first, last), drop, axis=0)
        return np.concatenate([kept, self.delta.vectors(*rest)])

    def keys_at(self, rows: IndexArray) -> KeyArray:
        keys, in_base = np.empty(len(rows), np.int64), rows < self.kept
        keys[in_base] = self.base.keys_at(self._base_rows(rows[in_base]))
        keys[~in_base] = self.delta.keys_at(rows[~in_base] - self.kept)
        return keys

    def vectors_at(self, rows: IndexArray) -> NDArray[np.float32]:
        vectors, in_base = np.empty((len(rows), self.dim), np.float32), rows < self.kept
        vectors[in_base] = self.base.vectors_at(self._base_rows(rows[in_base]))
        vectors[~in_base] = self.delta.vectors_at(rows[~in_base] - self.kept)
        return vectors

    def copy_vectors(self, target: Path) -> None:
        with target.open("wb") as copy:
            for start in range(0, self.rows, _COPY_ROWS):
                self.vectors(start, start + _COPY_ROWS).tofile(copy)

    def _base_rows(self, rows: IndexArray) -> IndexArray:
        """The numbers in the base of ``rows (n,)`` of this table, all below ``kept``."""
        return rows + np.searchsorted(_masked(self.masked, self.base.rows)[1], rows, "right")

    def _range(self, start: int, stop: int | None) -> tuple[int, int, IndexArray, tuple[int, int]]:
        """Where rows ``start:stop`` are: in the base, without some rows of that range; in the delta."""
        stop = self.rows if stop is None else min(stop, self.rows)
        rest = max(0, start - self.kept), max(0, stop - self.kept)
        end = min(stop, self.kept)
        if start >= end:
            return 0, 0, np.empty(0, np.int64), rest
        first, last = self._base_rows(np.array([start, end - 1])).tolist()
        masked = self.masked_rows()
        begin, finish = np.searchsorted(masked, [first, last])
        return first, last + 1, masked[begin:finish] - first, rest


@lru_cache(maxsize=8)
def _masked(file: FileStamp, rows: int) -> tuple[IndexArray, IndexArray]:
    """The masked rows (m,), and for each the number of unmasked ones before it."""
    try:
        masked = np.fromfile(file.path, "<i8")
    except OSError as error:
        raise ModelError(f"cannot read {file.path}: {error.strerror or error}") from error
    ascending = len(masked) == 0 or (masked[0] >= 0 and masked[-1] < rows)
    if not ascending or (np.diff(masked) <= 0).any():
        raise ModelError(f"{file.path} is damaged: import the version again")
    before = masked - np.arange(len(masked))
    masked.flags.writeable = before.flags.writeable = False
    return masked, before


def open_files(folder: Path, name: str, dim: int, manifest: Manifest | None) -> TableFiles:
    """Open a table, with its delta if it has one; check sizes as `open_pair`. Reads no contents."""
    entry = manifest.tables.get(name) if manifest else None
    if entry is None or entry.delta is None:
        return open_pair(folder, name, dim, entry)
    base = open_pair(folder, name, dim, entry.model_copy(update={"delta": None}))
    changed = entry.delta
    delta = open_pair(
        folder / DELTA_FOLDER,
        name,
        dim,
        TableEntry(rows=changed.rows, dim=dim, key=changed.key, emb_vector=changed.emb_vector),
    )
    path = folder / DELTA_FOLDER / MASKED_FILE
    try:
        masked = FileStamp.of(path)
    except OSError as error:
        raise ModelError(f"table '{name}': {path}: {error.strerror}") from error
    if (masked.bytes, changed.masked.bytes) != (changed.masked_rows * _NUMBER_BYTES,) * 2:
        raise ModelError(
            f"{path}: the manifest says {changed.masked.bytes} bytes ({changed.masked_rows} rows), found "
            f"{masked.bytes}; the file was replaced or truncated: import the version again"
        )
    return DeltaFiles(
        name,
        folder,
        base.rows - changed.masked_rows + delta.rows,
        dim,
        merged_digest(base.digest, delta.digest, changed.masked.checksum),
        (*base.stamps, *delta.stamps, masked),
        entry,
        base,
        delta,
        masked,
    )


def merged_digest(base: str, delta: str, masked: str) -> str:
    """The digest of a table from those of its base and its delta, and the checksum of the masked rows."""
    return digest_of({"base": base, "delta": delta, "masked": masked})
