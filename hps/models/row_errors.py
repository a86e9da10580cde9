"""Errors of rows in a narrow format: stored rows compared with the vectors that they were made from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hps.config.model_schema import RowFormatName
from hps.models.manifest import RowConversion
from hps.row_format import RowFormat
from hps.tiers.stored_rows import to_vectors
from hps.types import EmbeddingTable, RowArray, VectorArray

_BLOCK_VALUES = 1 << 18


@dataclass(slots=True)
class RowErrors:
    """Sums of the errors of any number of rows.

    ``largest``: the largest error of a value. ``total``: all values' errors. ``relative``: the sum over rows
    of the error's norm as a share of the row's norm. Rows that are not finite when they are stored are
    counted in ``not_finite`` only."""

    rows: int = 0
    values: int = 0
    largest: float = 0.0
    total: float = 0.0
    relative: float = 0.0
    not_finite: int = 0

    def add(self, other: RowErrors) -> None:
        """Add the errors of other rows."""
        self.rows += other.rows
        self.values += other.values
        self.largest = max(self.largest, other.largest)
        self.total += other.total
        self.relative += other.relative
        self.not_finite += other.not_finite

    def conversion(self, row_format: RowFormat) -> RowConversion:
        """Return the manifest's figures of these rows."""
        name: RowFormatName = row_format.name  # type: ignore[assignment] # RowConversion checks it
        return RowConversion(
            rows=name,
            max_error=self.largest,
            mean_error=self.total / max(self.values, 1),
            mean_relative_error=self.relative / max(self.rows, 1),
            not_finite_rows=self.not_finite,
        )


def measure_errors(table: EmbeddingTable, vectors: VectorArray, rows: RowArray) -> RowErrors:
    """Compare ``vectors (n, dim)`` float32 with the table's ``rows (n, row_width)`` made from them."""
    found, dim = RowErrors(), vectors.shape[1]
    step = max(1, _BLOCK_VALUES // dim)
    for start in range(0, len(vectors), step):
        exact = vectors[start : start + step]
        found.add(_measure(exact, to_vectors(table, rows[start : start + step], dtype=np.float32)))
    return found


def _measure(exact: VectorArray, decoded: VectorArray) -> RowErrors:
    finite = np.isfinite(decoded).all(axis=1)  # a vector that is not finite gives no finite row
    broken = len(exact) - int(np.count_nonzero(finite))
    if broken:
        exact, decoded = exact[finite], decoded[finite]
    if not exact.size:
        return RowErrors(not_finite=broken)
    difference = np.abs(decoded.astype(np.float64) - exact)
    norms = np.linalg.norm(exact.astype(np.float64), axis=1)
    # A row of zeros is stored exactly in every format, so its share is 0.
    shares = np.linalg.norm(difference, axis=1) / np.where(norms > 0, norms, 1)
    return RowErrors(
        len(exact),
        exact.size,
        float(difference.max()),
        float(difference.sum()),
        float(shares.sum()),
        broken,
    )
