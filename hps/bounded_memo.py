"""Dicts of computed values that cannot grow without bound."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def memoize(memo: dict[K, V], key: K, value: V, limit: int) -> V:
    """Store ``value`` and return it; a memo of ``limit`` entries is emptied before.

    Few clients ever fill a memo, and what was emptied is computed again; a least-recently-used order
    would cost every hit. Not a subclass of dict: its ``get`` takes 5 ns longer. Threads may share a memo:
    a race costs one value.
    """
    if len(memo) >= limit:
        memo.clear()
    memo[key] = value
    return value
