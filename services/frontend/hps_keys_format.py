"""HPS's format of a lookup: inputs ``KEYS`` and ``NUMKEYS``, one flat ``OUTPUT0``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.lookup.base import Lookup, hps_keys_order
from hps.types import JaggedKeys, KeyArray

KEYS, NUMKEYS, OUTPUT0 = "KEYS", "NUMKEYS", "OUTPUT0"
KEYS_SOURCE = "KEYS.source"


class HpsKeysFormat:
    """Order in which ``NUMKEYS`` counts keys, for one engine's model.

    The names are the tables, or the features if HPS fused the tables."""

    def __init__(self, engine: Lookup) -> None:
        features = [(each.name, each.table.name) for each in engine.features.values()]
        order = hps_keys_order(list(engine.tables), features)
        self.names = list(order)
        self._tables = list(order.values())
        self._fused = self.names != self._tables

    def dims(self, engine: Lookup) -> dict[str, int]:
        """Values per key of each name."""
        return {
            name: engine.tables[table].dim
            for name, table in zip(self.names, self._tables, strict=True)
        }

    def split(self, keys: KeyArray, counts: Sequence[int]) -> dict[str, JaggedKeys]:
        """Split ``keys (n,)`` by the ``counts`` of each name; tables without keys are left out."""
        if len(counts) == 1:
            return {self._tables[0]: JaggedKeys(keys, counts[0])} if counts[0] else {}
        start = 0
        found: dict[str, list[KeyArray]] = {}
        for table, count in zip(self._tables, counts, strict=True):
            if count:
                found.setdefault(table, []).append(keys[start : start + count])
                start += count
        return {
            table: JaggedKeys(_one(parts), sum(map(len, parts))) for table, parts in found.items()
        }

    def join(
        self, by_table: Mapping[str, NDArray[Any]], counts: NDArray[Any]
    ) -> list[NDArray[Any]]:
        """Undo `split`: collect the arrays of the names, in order."""
        if not self._fused:
            return list(by_table.values())
        ends = dict.fromkeys(by_table, 0)
        found = []
        for table, count in zip(self._tables, counts.tolist(), strict=True):
            if count:
                begin, ends[table] = ends[table], ends[table] + count
                found.append(by_table[table][begin : ends[table]])
        return found


def _one(parts: Sequence[KeyArray]) -> KeyArray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
