"""Conversions between a table's vectors and its rows as tiers store them (`hps.row_format`)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.native import decode_rows, encode_rows
from hps.row_format import RowFormat
from hps.types import EmbeddingTable, IndexArray, RowArray, VectorArray


class NotStorable(ValueError):
    """The table's row format can't hold some vectors; ``first`` is the position of the first one."""

    def __init__(self, table: EmbeddingTable, first: int) -> None:
        super().__init__(
            f"row {first} has a value that is not finite, or too large for {table.row_format.name}"
        )
        self.first = first


def to_rows(table: EmbeddingTable, vectors: VectorArray) -> RowArray:
    """Return the rows ``(n, row_width)`` of ``vectors (n, dim)``, which may be of any type of numbers.

    Rows of a plain format are converted as NumPy does. Raises NotStorable for other formats."""
    if table.row_format.is_plain:
        return np.ascontiguousarray(vectors, table.row_dtype)
    rows, storable = to_finite_rows(table, vectors)
    if not storable.all():
        raise NotStorable(table, int(np.flatnonzero(~storable)[0]))
    return rows


def to_finite_rows(
    table: EmbeddingTable, vectors: VectorArray
) -> tuple[RowArray, NDArray[np.bool_]]:
    """Return the rows ``(n, row_width)`` of ``vectors (n, dim)``, and which of them ``(n,)`` are usable.

    A row is usable if all its values are finite, in the vectors and as stored; others are undefined."""
    with np.errstate(over="ignore"):
        if table.row_format.is_plain:
            rows = np.ascontiguousarray(vectors, table.row_dtype)
            return rows, np.isfinite(rows).all(axis=1)
        code = table.row_format.code
        assert code is not None  # it is not plain
        rows = np.empty((len(vectors), table.row_width), table.row_dtype)
        storable = np.zeros(len(vectors), np.uint8)
        encode_rows(np.ascontiguousarray(vectors, np.float32), code, rows, storable)
    return rows, storable.astype(bool)


def decode(rows: RowArray, row_format: RowFormat, dim: int) -> NDArray[np.float32]:
    """Return the vectors ``(n, dim)`` float32 of ``rows (n, width)``."""
    out = np.empty((len(rows), dim), np.float32)
    assert row_format.code is not None  # rows of other types have no decoder
    decode_rows(np.ascontiguousarray(rows), None, out, row_format.code)
    return out


def to_vectors(
    table: EmbeddingTable,
    rows: RowArray,
    numbers: IndexArray | None = None,
    out: VectorArray | None = None,
    *,
    dtype: Any = None,
) -> VectorArray:
    """Return the vectors ``(n, dim)`` of ``rows[numbers]``, or of all ``rows (., row_width)``.

    They are of ``dtype``, by default the table's, or written to ``out``. Rows that are vectors of that dtype
    are returned themselves if there is nothing to pick."""
    wanted = np.dtype(table.dtype if dtype is None else dtype) if out is None else out.dtype
    code = table.row_format.code
    if table.row_format.is_plain and (wanted == table.row_dtype or code is None):
        if out is None:
            picked = rows if numbers is None else rows.take(numbers, axis=0)
            return picked.astype(wanted, copy=False)
        out[...] = rows if numbers is None else rows.take(numbers, axis=0)
        return out
    if out is None:
        out = np.empty((len(rows if numbers is None else numbers), table.dim), wanted)
    assert code is not None
    decode_rows(np.ascontiguousarray(rows), numbers, out, code)
    return out
