"""Bounded dicts of computed values."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def memoize(memo: dict[K, V], key: K, value: V, limit: int) -> V:
    """Store ``value`` in ``memo`` and return it; a full memo (``limit`` entries) is emptied first.

    Clients rarely fill a memo, and dropped values are computed again; a least-recently-used order would
    make every hit slower. Not a subclass of dict, whose ``get`` would take 5 ns longer. Threads may share a
    memo: a race costs one value."""
    if len(memo) >= limit:
        memo.clear()
    memo[key] = value
    return value
