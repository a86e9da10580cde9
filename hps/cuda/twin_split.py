"""NumPy twin of a table that is split over several devices: an array per device, and who owns a key."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hps.cuda.layout import EMPTY, TOMBSTONE
from hps.cuda.owners import partition
from hps.cuda.twin import TwinTable
from hps.types import KeyArray, VectorArray, VersionArray


class TwinSplit:
    """The twin of `GpuSplit` for one table: ``tables``, one for each device. One thread at a time."""

    def __init__(self, tables: Sequence[TwinTable]) -> None:
        self.tables = tables

    def insert(self, keys: KeyArray, vectors: VectorArray, versions: VersionArray) -> None:
        """Insert unique ``keys`` into their owners' tables, and update copies elsewhere."""
        for owner, mine in enumerate(partition(keys, len(self.tables))):
            for device, table in enumerate(self.tables):
                is_copy = device != owner
                _write(table, keys[mine], vectors[mine], versions[mine], update=is_copy)

    def update(self, keys: KeyArray, vectors: VectorArray, versions: VersionArray) -> None:
        for table in self.tables:
            _write(table, keys, vectors, versions, update=True)

    def delete(self, keys: KeyArray, versions: VersionArray) -> None:
        """Leave a tombstone at each key's owner, and evict copies."""
        for owner, mine in enumerate(partition(keys, len(self.tables))):
            for device, table in enumerate(self.tables):
                if device == owner:
                    _write(table, keys[mine], None, versions[mine])
                else:
                    table.evict(keys[mine])

    def copy_rows(self, keys: KeyArray) -> None:
        """Copy the rows that the owners of ``keys`` have to all other devices."""
        for owner, mine in enumerate(partition(keys, len(self.tables))):
            vectors, words, versions = self.tables[owner].fetch(keys[mine])
            there = words < TOMBSTONE
            for device, table in enumerate(self.tables):
                if device != owner:
                    _write(table, keys[mine][there], vectors[there], versions[there])

    def fetch(
        self, home: int, keys: KeyArray
    ) -> tuple[VectorArray, NDArray[np.uint32], VersionArray]:
        """Return what `TwinTable.fetch` does, from the device ``home`` and then from the owners."""
        vectors, words, versions = self.tables[home].fetch(keys)
        for owner, mine in enumerate(partition(keys, len(self.tables), left_out=home)):
            left = mine[words[mine] == EMPTY]
            vectors[left], words[left], versions[left] = self.tables[owner].fetch(keys[left])
        return vectors, words, versions


def _write(
    table: TwinTable,
    keys: KeyArray,
    vectors: VectorArray | None,
    versions: VersionArray,
    *,
    update: bool = False,
) -> None:
    for start in range(0, len(keys), table.shape.batch):
        some = slice(start, start + table.shape.batch)
        rows = None if vectors is None else vectors[some]
        table.write(keys[some], rows, versions[some], update=update)
