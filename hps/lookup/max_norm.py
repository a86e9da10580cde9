"""Rows scaled down to a largest norm, before they are pooled."""

from __future__ import annotations

import numpy as np

from hps.types import VectorArray


def scale_to_norm(rows: VectorArray, max_norm: float) -> VectorArray:
    """Return a copy of ``rows (n, dim)`` in which those longer than ``max_norm`` are scaled down to it.

    The copy is float32 (float64 if the rows are), and each operation is rounded. The squares of a row's
    values are added one by one. If the square root of the sum, the row's l2 norm, exceeds ``max_norm``, each
    value is multiplied by ``max_norm`` and divided by the norm. Other rows, and those with a NaN, keep their
    values. TensorFlow's ``max_norm`` does the same, but also multiplies and divides rows that are short."""
    values = rows.astype(np.result_type(rows.dtype, np.float32))
    squares = np.zeros(len(values), values.dtype)
    with np.errstate(all="ignore"):
        for column in values.T:
            squares += column * column
        norms = np.sqrt(squares)
        limit = values.dtype.type(max_norm)
        longer = norms > limit
        values[longer] = values[longer] * limit / norms[longer, None]
    return values
