"""Tables of `hps.table` on every backend, with rows that are functions of their keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hps.table import Policy, Table, TableRows
from hps.table import backend as backends

__all__ = [
    "BACKENDS",
    "BUCKET",
    "DIM",
    "Clock",
    "DeviceScoredTable",
    "check_rows",
    "everything",
    "make",
    "rows_of",
    "scores_for",
]

BACKENDS = [
    pytest.param(name, marks=pytest.mark.gpu) if name.startswith("cuda") else name
    for name in (*backends.BACKENDS, "cuda, half")
]
"""``cuda, half``: half of the rows in host memory."""
DIM, BUCKET = 4, 128
"""The dim of tables by default, and the slots of a table of one bucket."""


class Clock:
    """A clock that a test advances; nanoseconds."""

    def __init__(self, now: int = 1_700_000_000 * 10**9) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now


class ViewOnHost:
    """A table on a device whose results are copied to the host, also to a caller's ``out`` there."""

    def __init__(self, table: Table) -> None:
        self.__dict__["table"] = table

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.table, name)
        if not callable(value):
            return on_host(value)

        def call(*arguments: Any, out: Any = None, **options: Any) -> Any:
            if out is None:
                return on_host(value(*arguments, **options))
            if not isinstance(out, np.ndarray):
                return on_host(value(*arguments, out=out, **options))
            xp = self.table._memory.xp
            result = on_host(value(*arguments, out=xp.asarray(out), **options))
            out[:] = result.rows
            return result._replace(rows=out)

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.table, name, value)

    def __len__(self) -> int:
        return len(self.table)


def on_host(value: Any) -> Any:
    """Return ``value`` with arrays of a device as NumPy arrays."""
    if isinstance(value, tuple):
        made = [on_host(each) for each in value]
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    return value.get() if hasattr(value, "__cuda_array_interface__") else value


class DeviceScoredTable:
    """`hps.table.device_table.ScoredTable` with NumPy arrays; those that it changes are copied back."""

    def __init__(self, buckets: int, max_buckets: int, like: np.ndarray) -> None:
        from hps.table.device_table import ScoredTable

        self.table = ScoredTable(buckets, max_buckets, like)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.table, name)
        if not callable(value):
            return on_host(value)

        def call(*arguments: Any) -> Any:
            to = self.table._cupy.asarray
            there = [to(each) if isinstance(each, np.ndarray) else each for each in arguments]
            result = on_host(value(*there))
            for mine, changed in zip(arguments, there, strict=True):
                if isinstance(mine, np.ndarray):
                    mine[...] = changed.get()
            return result

        return call


def make(backend: str, init_capacity: int = BUCKET, **options: Any) -> Any:
    """Return a table of rows (4,) float32 and customized scores, unless ``options`` say otherwise."""
    backend, _, half = backend.partition(", ")
    shares = {"device_share": 0.5} if half else {}
    options = {"dim": DIM, "policy": "customized", **shares, **options}
    table = Table(init_capacity=init_capacity, backend=backend, **options)
    return ViewOnHost(table) if backend == "cuda" else table


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
