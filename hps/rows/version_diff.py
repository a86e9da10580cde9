"""Difference of two model versions as updates, in bounded memory, by a merge of two scans."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from hps.rows.base import TableRows
from hps.rows.compare import same_bits
from hps.rows.files import FileRows
from hps.tiers.positions import TableChanges
from hps.tiers.stored_rows import to_vectors
from hps.types import EmbeddingTable, KeyArray

Step = Callable[[int], None]
_NONE = np.empty(0, np.int64)


def _ignore_progress(_rows: int) -> None:
    pass


def all_rows(
    files: FileRows, table: EmbeddingTable, version: int, step: Step = _ignore_progress
) -> Iterator[TableChanges]:
    """Yield every row of the files as changes. ``step`` gets the number of rows read."""
    for rows in _with_progress(files.scan(table), step):
        yield _changes(table, rows, _NONE, version)


def diff_versions(
    base: FileRows,
    base_table: EmbeddingTable,
    new: FileRows,
    table: EmbeddingTable,
    version: int,
    step: Step = _ignore_progress,
) -> Iterator[TableChanges]:
    """Yield the changes that turn ``base`` into ``new``, by ascending keys, each with ``version``.

    Inserts rows of ``new`` that ``base`` misses or has with other bits; deletes keys that only ``base``
    has. Both tables have the same dim and row format. A yielded step may be empty."""
    for rows, gone in diff_scans(
        _with_progress(base.scan(base_table), step), _with_progress(new.scan(table), step)
    ):
        yield _changes(table, rows, gone, version)


def diff_scans(
    base: Iterable[TableRows], new: Iterable[TableRows]
) -> Iterator[tuple[TableRows, KeyArray]]:
    """Yield rows to write, and keys (m,) to delete, from two scans in the order of their unique keys."""
    old, now = _TableScan(base), _TableScan(new)
    while True:
        ends = [scan.rows.keys[-1] for scan in (old, now) if scan.rows is not None]
        if not ends:
            return
        a, b = old.up_to(min(ends)), now.up_to(min(ends))
        if a is None:
            assert b is not None
            yield b, _NONE
            continue
        if b is None:
            yield a.at(slice(0)), a.keys
            continue
        at = np.minimum(np.searchsorted(a.keys, b.keys), max(0, len(a.keys) - 1))
        equal = a.keys[at] == b.keys if len(a.keys) else np.zeros(len(b.keys), bool)
        equal[equal] = same_bits(a.vectors[at[equal]], b.vectors[equal])
        yield b.at(~equal), np.setdiff1d(a.keys, b.keys, assume_unique=True)


class _TableScan:
    """A scan in progress. ``rows``: read and not taken yet; None at the end."""

    def __init__(self, parts: Iterable[TableRows]) -> None:
        self._parts = iter(parts)
        self.rows = self._read()

    def _read(self) -> TableRows | None:
        return next((rows for rows in self._parts if len(rows.keys)), None)

    def up_to(self, key: int) -> TableRows | None:
        """Take and return the rows up to and including ``key``; None at the end of the scan."""
        if self.rows is None:
            return None
        n = int(np.searchsorted(self.rows.keys, key, side="right"))
        taken = self.rows.at(slice(n))
        self.rows = self.rows.at(slice(n, None)) if n < len(self.rows.keys) else self._read()
        return taken


def _with_progress(parts: Iterable[TableRows], step: Step) -> Iterator[TableRows]:
    for rows in parts:
        yield rows
        step(len(rows.keys))


def _changes(table: EmbeddingTable, rows: TableRows, gone: KeyArray, version: int) -> TableChanges:
    return TableChanges(
        np.ascontiguousarray(rows.keys),
        np.ascontiguousarray(to_vectors(table, rows.vectors)),
        np.full(len(rows.keys), version, np.uint64),
        gone,
        np.full(len(gone), version, np.uint64),
    )
