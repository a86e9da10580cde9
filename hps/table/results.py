"""Results of a table's operations."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hps.types import KeyArray, VectorArray


class FoundRows(NamedTuple):
    """The rows of some keys: ``rows (n, dim)``, ``found (n,)`` bool, ``scores (n,)`` uint64 or None.

    Entries of keys that were not found are zeros in new arrays, and unchanged in the caller's.
    """

    rows: VectorArray
    found: NDArray[np.bool_]
    scores: NDArray[np.uint64] | None = None


class TableRows(NamedTuple):
    """Rows taken out of a table: ``keys (n,)``, ``rows (n, dim)`` and ``scores (n,)`` uint64."""

    keys: KeyArray
    rows: VectorArray
    scores: NDArray[np.uint64]
