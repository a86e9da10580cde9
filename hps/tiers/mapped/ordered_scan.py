"""Rows of a mapped file and of its overlay, in the order of their keys."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hps.tiers.mapped.overlaid_table import OverlaidTable
from hps.tiers.rocksdb.rows import ScannedRows
from hps.types import EmbeddingTable, IndexArray, KeyArray

_ROWS = 1 << 14


def ordered_rows(
    table: EmbeddingTable,
    mapped: OverlaidTable,
    shown: tuple[KeyArray, IndexArray],
    overlay: Iterator[ScannedRows],
) -> Iterator[ScannedRows]:
    """Yield the file's rows ``shown``, keys (n,) ascending and positions (n,), merged with ``overlay``'s."""
    keys, positions = shown
    ahead = _empty(table)
    for start in range(0, len(keys), _ROWS):
        at = positions[start : start + _ROWS]
        some, last = keys[start : start + _ROWS], keys[min(start + _ROWS, len(keys)) - 1]
        while not len(ahead.keys) or ahead.keys[-1] <= last:
            if (more := next(overlay, None)) is None:
                break
            ahead = _joined(ahead, more)
        n = int(np.searchsorted(ahead.keys, last, "right"))
        vectors = np.empty((len(at), table.row_width), table.row_dtype)
        mapped.rows_at(at, vectors)
        rows = ScannedRows(some, vectors, np.full(len(at), mapped.version, np.uint64))
        yield _sorted(_joined(rows, _cut(ahead, 0, n))) if n else rows
        ahead = _cut(ahead, n, len(ahead.keys))
    if len(ahead.keys):
        yield ahead
    yield from overlay


def _empty(table: EmbeddingTable) -> ScannedRows:
    none = np.empty((0, table.row_width), table.row_dtype)
    return ScannedRows(np.empty(0, np.int64), none, np.empty(0, np.uint64))


def _joined(one: ScannedRows, other: ScannedRows) -> ScannedRows:
    return ScannedRows(*map(np.concatenate, zip(one, other, strict=True)))


def _sorted(rows: ScannedRows) -> ScannedRows:
    order = np.argsort(rows.keys)
    return ScannedRows(rows.keys[order], rows.vectors[order], rows.versions[order])


def _cut(rows: ScannedRows, start: int, stop: int) -> ScannedRows:
    return ScannedRows(rows.keys[start:stop], rows.vectors[start:stop], rows.versions[start:stop])
