"""Counts of the uses of a mapped table's rows, which rank its hot keys."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.tiers.ranking import HotKeys, hottest
from hps.types import IndexArray, KeyArray

_MOST, _HIGH = 255, 128


class UseCounts:
    """Counts the uses of rows, of a sample of the lookups, in ``uses (rows,) uint8``.

    ``table``: a `MappedTable`. Any number of threads and processes may count; some of their counts are
    lost."""

    def __init__(self, table: Any, uses: NDArray[np.uint8]) -> None:
        self._table, self._uses = table, uses

    def add(self, keys: KeyArray) -> None:
        """Count a use of each of ``keys (n,)`` that the table has. Raises RuntimeError if it is damaged."""
        at: IndexArray = self._table.positions(keys)
        at = at[at >= 0]
        uses = self._uses[at]
        self._uses[at] = uses + (uses < _MOST)

    def used(self, keys: KeyArray) -> NDArray[np.bool_]:
        """Return a mask of the ``keys (n,)`` of which a use was counted. Raises RuntimeError as `add`."""
        at: IndexArray = self._table.positions(keys)
        used: NDArray[np.bool_] = at >= 0
        used[used] = self._uses[at[used]] > 0
        return used

    def top_k(self, n: int) -> HotKeys:
        """Return the keys (k,) of the ``n`` rows used most, and their scores; halves high counts."""
        counted = self._uses.copy()  # others count meanwhile, which NumPy's search rejects
        at = np.flatnonzero(counted)
        uses = counted[at]
        if len(uses) and uses.max() >= _HIGH:
            self._uses >>= 1
        at, scores = hottest(at, uses, n)
        return self._table.keys_at(at), scores
