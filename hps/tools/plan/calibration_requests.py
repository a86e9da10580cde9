"""Generated requests of a calibration: tables of limited size, and keys of which a share misses the cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hps.types import JaggedKeys, KeyArray, Pooling

CACHED = 0.3
"""The share of a table that the cache has room for."""
_HOT = 0.2  # the share of that which requests ask for again
_MOST_ROWS = 1 << 20


@dataclass(frozen=True, slots=True)
class TableLoad:
    """One table's part of a typical request: ``keys`` keys for ``samples`` samples, of ``rows`` rows."""

    name: str
    dim: int
    dtype: str
    rows: int
    keys: int
    samples: int = 1
    pooling: Pooling = "none"

    @property
    def hotness(self) -> int:
        return max(1, round(self.keys / self.samples))

    @property
    def batch(self) -> int:
        return max(1, round(self.keys / self.hotness))

    @property
    def count(self) -> int:
        """Keys of a generated request."""
        return self.batch * self.hotness

    @property
    def hot_rows(self) -> int:
        """Number of the rows that requests ask for again: the first ones of the table."""
        return max(1, int(CACHED * _HOT * self.rows))

    def part(self, by: int) -> TableLoad:
        """Return a load of ``by`` times fewer samples."""
        batch = max(1, self.batch // by)
        return replace(self, keys=batch * self.hotness, samples=batch)


def scaled_loads(
    loads: Sequence[TableLoad], most_bytes: int, fewest_rows: int = 1 << 14
) -> list[TableLoad]:
    """Reduce the rows so that all tables stay within ``most_bytes``, but for ``fewest_rows`` each.

    Leaves out tables without keys."""
    found = []
    for load in loads:
        if load.keys:
            fair = min(_MOST_ROWS, most_bytes // len(loads) // (load.dim * 4))
            enough = max(fewest_rows, 8 * load.keys)
            rows = min(max(load.rows, enough), max(fair, enough))
            found.append(replace(load, rows=rows))
    return found


class MissingRequests:
    """Requests of which ``share`` of the keys, of each table, have left the cache long ago."""

    def __init__(
        self, loads: Sequence[TableLoad], share: float, random: np.random.Generator
    ) -> None:
        self._loads, self._random = loads, random
        self._cold = {load.name: round(share * load.count) for load in loads}
        # In random order: neighbours would share blocks of the store's files.
        self._colds: dict[str, KeyArray] = {
            load.name: random.permutation(np.arange(load.hot_rows, load.rows)) for load in loads
        }
        self._next = dict.fromkeys(self._cold, 0)
        self.misses = sum(self._cold.values())

    def one(self) -> Mapping[str, JaggedKeys]:
        """Return the keys of the next request."""
        features = {}
        for load in self._loads:
            cold = self._cold[load.name]
            keys = self._random.integers(0, load.hot_rows, load.count)
            if cold:
                start, order = self._next[load.name], self._colds[load.name]
                keys[:cold] = np.take(order, np.arange(start, start + cold), mode="wrap")
                self._next[load.name] = (start + cold) % len(order)
                self._random.shuffle(keys)
            features[load.name] = JaggedKeys(keys, load.batch)
        return features
