"""Tables of `hps.table` on every backend, with rows that are functions of their keys."""

from __future__ import annotations

from typing import Any

import numpy as np

from hps.table import Policy, Table, TableRows
from hps.table.backend import BACKENDS

__all__ = [
    "BACKENDS",
    "BUCKET",
    "DIM",
    "Clock",
    "check_rows",
    "everything",
    "make",
    "rows_of",
    "scores_for",
]

DIM, BUCKET = 4, 128
"""The dim of tables by default, and the slots of a table of one bucket."""


class Clock:
    """A clock that a test advances; nanoseconds."""

    def __init__(self, now: int = 1_700_000_000 * 10**9) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now


def make(backend: str, init_capacity: int = BUCKET, **options: Any) -> Table:
    """Return a table of rows (4,) float32 and customized scores, unless ``options`` say otherwise."""
    options = {"dim": DIM, "policy": "customized", **options}
    return Table(init_capacity=init_capacity, backend=backend, **options)


def rows_of(keys: Any, salt: int = 0, dim: int = DIM, dtype: Any = np.float32) -> np.ndarray:
    """(n, dim): different for each key below 2**20 and ``salt``; each row determines its key modulo 1009."""
    keys = np.asarray(keys, np.int64)
    return ((keys[:, None] % 1009 + np.arange(dim) * (3 + salt)) % 2039).astype(dtype)


def scores_for(table: Table, scores: Any) -> Any:
    """Return ``scores`` as the table's policy takes them."""
    return np.asarray(scores, np.uint64) if table.policy.takes_scores else None


def everything(table: Table) -> dict[int, tuple[list[float], int]]:
    """Return row and score of each key in the table, and check that each key is there once."""
    found = table.export_batch(table.capacity)
    contents = {
        key: (row, score)
        for key, row, score in zip(*(array.tolist() for array in found), strict=True)
    }
    assert len(contents) == len(found.keys) == table.size == len(table)
    return contents


def check_rows(rows: TableRows, salt: int = 0) -> None:
    """Assert that each row is that of its key."""
    np.testing.assert_array_equal(rows.rows, rows_of(rows.keys, salt))


POLICIES = list(Policy)
