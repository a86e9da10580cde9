"""Rows that tests write and expect to read: functions of their keys."""

from __future__ import annotations

from typing import Any

import numpy as np

from hps.types import EmbeddingTable


def rising_rows(keys: Any, dim: int, modulus: int = 977, dtype: Any = np.float32) -> np.ndarray:
    """(n, dim): each begins with its key modulo ``modulus`` and rises by one."""
    return (np.asarray(keys)[:, None] % modulus + np.arange(dim)).astype(dtype)


def constant_rows(keys: Any, dim: int, add: float = 0.0) -> np.ndarray:
    """(n, dim) float32: the key plus ``add`` in every place."""
    return np.repeat(np.asarray(keys, np.float32)[:, None] + np.float32(add), dim, axis=1)


def distinct_rows(table: EmbeddingTable, keys: np.ndarray, salt: int = 0) -> np.ndarray:
    """(n, dim) of the table's type: different for each key and ``salt``; exact in float16."""
    return ((keys[:, None] * 7 + np.arange(table.dim) + salt) % 2039).astype(table.dtype)


def rows_from(table: EmbeddingTable, *firsts: float) -> np.ndarray:
    """(n, dim) of the table's type: each begins with one of ``firsts`` and rises by one."""
    return (np.array(firsts)[:, None] + np.arange(table.dim)).astype(table.dtype)
