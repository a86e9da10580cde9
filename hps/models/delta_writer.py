"""Write a table as the difference to a base: a folder ``delta`` beside links to the base's files.

A delta is always against a base that has none, so that a lookup asks two files at most. The difference is
found by the base's mapped file, whose index says where each key is; a table without one is written whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hps.config.model_schema import TableSpec
from hps.errors import ModelError
from hps.models.checksummed_file import ChecksummedFile
from hps.models.delta_files import merged_digest
from hps.models.external_sort import block_rows
from hps.models.manifest import (
    DELTA_FOLDER,
    KEY_FILE,
    MASKED_FILE,
    VECTOR_FILE,
    DeltaEntry,
    TableEntry,
)
from hps.models.mapped_file import MAPPED_FILE, MappedOptions, write_mapped
from hps.models.table_sharing import BaseVersion, is_whole, link_pair
from hps.models.tables import TableFiles, open_pair
from hps.native.mapped_format import MappedFile, open_mapped
from hps.tiers.mapped.masked_positions import MASKED_POSITIONS_FILE, write_masked_positions
from hps.types import IndexArray, KeyArray

Chunk = tuple[KeyArray, NDArray[np.float32]]
_PICKED = 1 << 15
_SPREAD = 4
MAX_SHARE = 0.1
"""Rows of a delta, or rows that it masks, as a share of the base's: above it a table is written whole.

A replaced row is both, and takes the space and the second lookup of one."""


@dataclass(frozen=True, slots=True)
class DeltaBase:
    """The base of a delta: its files, its mapped file, and the version's folder and entry."""

    files: TableFiles
    mapped: MappedFile
    entry: TableEntry

    @property
    def options(self) -> MappedOptions:
        """The properties of the mapped file, which that of a delta must have, too.

        The errors of a delta's rows are measured if those of the base's were."""
        header, measured = (
            self.mapped.header,
            self.entry is not None and bool(self.entry.conversion),
        )
        bits: Literal[32, 64] = 32 if header.key_bits == 32 else 64
        return MappedOptions(header.row_format, bits, measured=measured)

    def positions(self, keys: KeyArray) -> IndexArray:
        """Return the positions (n,) of ``keys``, as in files, in the mapped file; -1 for an absent key."""
        if self.mapped.header.key_bits == 32:
            keys = keys & np.int64(0xFFFF_FFFF)
        found: IndexArray = self.mapped.table.positions(keys)
        return found


@dataclass(frozen=True, slots=True)
class TableDifference:
    """Numbers (n,) of the rows of a table that its base has not, or otherwise; what the base has instead.

    ``masked``: numbers (m,) of the base's rows, ascending, and ``positions`` (m,) in its mapped file."""

    rows: IndexArray
    masked: IndexArray
    positions: IndexArray


def open_delta_base(base: BaseVersion, spec: TableSpec) -> DeltaBase | None:
    """Open a table of ``base`` for `difference`, without its delta; None if it can be no base."""
    entry = base.manifest.tables.get(spec.name)
    if entry is None or entry.dim != spec.dim:
        return None
    if not is_whole(base, spec.name):
        return None
    pure = entry.model_copy(update={"delta": None, "origin": None})
    try:
        files = open_pair(base.table(spec.name), spec.name, spec.dim, pure)
        mapped = open_mapped(files.folder / MAPPED_FILE, 0, 0)
    except ModelError:
        return None
    header, options = mapped.header, MappedOptions.of(spec)
    found = header.digest, header.rows, header.row_format, header.key_bits
    fits = found == (files.digest, files.rows, options.row_format, options.key_bits)
    return DeltaBase(files, mapped, pure) if fits else None


def difference(
    table: TableFiles, base: DeltaBase, max_share: float = MAX_SHARE
) -> TableDifference | None:
    """Compare ``table`` with ``base``; None if more than ``max_share`` differs, or it repeats a key."""
    most, count, present = int(base.files.rows * max_share), 0, 0
    seen = np.zeros(base.files.rows, bool)
    masked = np.zeros(base.files.rows, bool)
    rows: list[IndexArray] = []
    base_rows = _BaseRows(base)
    start = 0
    for keys, vectors in table.blocks(block_rows(table.dim)):
        at = base.positions(keys)
        known = np.flatnonzero(at >= 0)
        old = base_rows.at(at[known])
        same = (old.view(np.uint32) == vectors[known].view(np.uint32)).all(axis=1)
        changed = np.ones(len(keys), bool)
        changed[known[same]] = False
        seen[at[known]] = True
        masked[at[known[~same]]] = True
        present += len(known)
        rows.append(start + np.flatnonzero(changed))
        count += len(rows[-1])
        start += len(keys)
        if count > most:
            return None
    if present != np.count_nonzero(seen):
        return None
    masked |= ~seen
    if np.count_nonzero(masked) > most:
        return None
    return TableDifference(
        np.concatenate([np.empty(0, np.int64), *rows]), *masked_rows(base, masked)
    )


def masked_rows(base: DeltaBase, masked: NDArray[np.bool_]) -> tuple[IndexArray, IndexArray]:
    """Numbers in the base's files, ascending, and positions of the rows at ``masked`` positions.

    Reads all keys of the base."""
    numbers, positions = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for start, at in _position_blocks(base):
        chosen = np.flatnonzero(masked[at])
        numbers.append(start + chosen)
        positions.append(at[chosen])
    return np.concatenate(numbers), np.concatenate(positions)


def _position_blocks(base: DeltaBase) -> Iterator[tuple[int, IndexArray]]:
    """Yield the positions (n,) in the mapped file of successive rows of the base, and the first's number."""
    step = block_rows(1)
    for start in range(0, base.files.rows, step):
        yield start, base.positions(base.files.keys(start, start + step))


class _BaseRows:
    """The base's rows in float32, as they were published, by their positions in the mapped file.

    The mapped file has them unless its rows have another format. Then they are read from the other file,
    for which their numbers take four bytes a row: rows that only round alike are different rows."""

    def __init__(self, base: DeltaBase) -> None:
        self._base = base
        self._numbers: NDArray[np.uint32] | None = None
        if base.options.row_format.name != "float32":
            self._numbers = np.empty(base.files.rows, np.uint32)
            for start, at in _position_blocks(base):
                self._numbers[at] = np.arange(start, start + len(at))

    def at(self, positions: IndexArray) -> NDArray[np.float32]:
        """Return the rows (n, dim) at ``positions (n,)``. Raises ModelError."""
        files = self._base.files
        if self._numbers is None:
            rows = np.empty((len(positions), files.dim), np.float32)
            self._base.mapped.table.copy_records(positions, rows)
            return rows
        numbers = self._numbers[positions].astype(np.int64)
        first, last = (numbers.min(), numbers.max()) if len(numbers) else (0, -1)
        if last - first > _SPREAD * len(numbers):  # in another order
            return files.vectors_at(numbers)
        return files.vectors(int(first), int(last) + 1)[numbers - first]


def replace_by_delta(
    folder: Path, entry: TableEntry, base: DeltaBase, found: TableDifference
) -> TableEntry:
    """Replace the files of a whole table in ``folder`` by links to ``base`` and the rows that differ.

    Returns the new entry. Raises ModelError or OSError."""
    table = open_pair(folder, base.files.name, base.files.dim, entry)
    chunks = (_picked(table, found.rows, start) for start in range(0, len(found.rows), _PICKED))
    delta = write_delta(folder, chunks, base, (found.masked, found.positions))
    for name in (KEY_FILE, VECTOR_FILE):
        (folder / name).unlink()
    link_pair(base.files.folder, folder)
    delta = delta.model_copy(update={"whole": entry.checksums})
    return base.entry.model_copy(update={"delta": delta})


def _picked(table: TableFiles, rows: IndexArray, start: int) -> Chunk:
    some = rows[start : start + _PICKED]
    return table.keys_at(some), table.vectors_at(some)


def write_delta(
    folder: Path,
    chunks: Iterable[Chunk],
    base: DeltaBase,
    masked: tuple[IndexArray, IndexArray],
) -> DeltaEntry:
    """Write the folder ``delta`` of the table in ``folder``.

    ``chunks``: keys (n,) and vectors (n, dim) float32 of rows that ``base`` has not or otherwise. ``masked``:
    numbers and positions of the base's rows that they replace, or that are removed. Raises ModelError or
    OSError."""
    target, rows = folder / DELTA_FOLDER, 0
    target.mkdir(parents=True)
    with (
        ChecksummedFile(target / KEY_FILE) as key_file,
        ChecksummedFile(target / VECTOR_FILE) as vector_file,
        ChecksummedFile(target / MASKED_FILE) as masked_file,
    ):
        for keys, vectors in chunks:
            key_file.write(np.ascontiguousarray(keys, "<i8"))
            vector_file.write(np.ascontiguousarray(vectors, "<f4"))
            rows += len(keys)
        masked_file.write(np.ascontiguousarray(masked[0], "<i8"))
    entry = DeltaEntry(
        rows=rows,
        masked_rows=len(masked[0]),
        key=key_file.entry(),
        emb_vector=vector_file.entry(),
        masked=masked_file.entry(),
    )
    name, dim = base.files.name, base.files.dim
    pair = TableEntry(rows=rows, dim=dim, key=entry.key, emb_vector=entry.emb_vector)
    files = open_pair(target, name, dim, pair)
    report = write_mapped(files, target / MAPPED_FILE, base.options)
    digest = merged_digest(base.files.digest, files.digest, entry.masked.checksum)
    path = target / MASKED_POSITIONS_FILE
    write_masked_positions(path, digest, base.mapped.header, masked[1])
    return entry.model_copy(update={"conversion": report.errors})
