"""A model's files as a source of rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

import numpy as np

from hps.errors import HpsError
from hps.models.external_sort import DuplicateCounter, sorted_chunks
from hps.models.loader import row_version
from hps.models.repository import ModelVersion
from hps.rows.base import StoredKeys, TableRows, blocks
from hps.tiers.stored_rows import to_rows
from hps.types import EmbeddingTable, IndexArray, KeyArray

_SIGN = np.uint64(1 << 63)
# Keys searched in one pass over a key file.
_SEARCHED_KEYS = 1 << 23
_READ = 1 << 20


class FileRows:
    """The files of one model version as a row source; of rows with the same key, the last one counts.

    ``scratch``: a folder for temporary files of tables that are larger than memory."""

    name = "files"
    versioned = True
    uniform = True

    def __init__(self, version: ModelVersion, scratch: Path | None = None) -> None:
        self._version = version
        self._scratch = scratch

    def entries(self, table: EmbeddingTable) -> int:
        return self._version.tables[table.name].rows

    def row_version(self, table: EmbeddingTable) -> int:
        """Return the version of all rows of the table."""
        return row_version(self._version, self._version.tables[table.name])

    def scan(self, table: EmbeddingTable) -> Iterator[TableRows]:
        """Yield the rows in the order of the signed keys."""
        try:
            yield from self._scan(table)
        except OSError as error:
            where = self._scratch or gettempdir()
            raise HpsError(
                f"cannot sort the rows of {table.id} in {where}: {error.strerror or error}; make room "
                f"there, or name another folder in TMPDIR"
            ) from error

    def _scan(self, table: EmbeddingTable) -> Iterator[TableRows]:
        files, version = self._version.tables[table.name], self.row_version(table)
        with TemporaryDirectory(prefix="hps-rows-", dir=self._scratch) as scratch:

            def codes(keys: KeyArray) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
                return table.narrow(np.ascontiguousarray(keys)).view(np.uint64) ^ _SIGN

            for code, vectors in sorted_chunks(
                files, codes, DuplicateCounter(), Path(scratch) / "s"
            ):
                keys = (code ^ _SIGN).view(np.int64)
                versions = np.full(len(keys), version, np.uint64)
                yield TableRows(keys, to_rows(table, vectors), versions)

    def get(self, table: EmbeddingTable, keys: KeyArray) -> StoredKeys:
        """Return the state of ``keys (n,)``. Reads the whole key file."""
        files = self._version.tables[table.name]
        at = self._positions(table, keys)
        found = at >= 0
        vectors = np.zeros((len(keys), table.row_width), table.row_dtype)
        vectors[found] = to_rows(table, files.vectors_at(at[found]))
        versions = np.full(len(keys), self.row_version(table), np.uint64)
        return StoredKeys(found, np.zeros(len(keys), bool), vectors, versions)

    def missing_keys(self, table: EmbeddingTable, keys: Iterable[KeyArray]) -> Iterator[KeyArray]:
        for some in blocks(keys, _SEARCHED_KEYS):
            yield some[self._positions(table, some) < 0]

    def sample(self, table: EmbeddingTable, keys: KeyArray) -> Iterator[TableRows]:
        yield self.get(table, keys).rows(keys)

    def draw(self, table: EmbeddingTable, n: int) -> KeyArray:
        """Return up to ``n`` distinct random keys of the table."""
        files = self._version.tables[table.name]
        at = np.random.default_rng().integers(0, files.rows, n if files.rows else 0)
        return np.unique(table.narrow(files.keys_at(np.sort(at))))

    def _positions(self, table: EmbeddingTable, keys: KeyArray) -> IndexArray:
        """Return the last position of each of ``keys (n,)`` in the files; -1 if missing."""
        order = np.argsort(keys)
        ordered = keys[order]
        last = np.full(len(keys), -1, np.int64)
        files = self._version.tables[table.name]
        for start in range(0, files.rows if len(keys) else 0, _READ):
            some = table.narrow(files.keys(start, start + _READ))
            at = np.minimum(np.searchsorted(ordered, some), len(ordered) - 1)
            hit = np.flatnonzero(ordered[at] == some)
            last[at[hit]] = start + hit  # NumPy keeps the last value of a repeated index
        found = np.empty_like(last)
        found[order] = last
        return found
