"""Files of a fused table: the folders of several HugeCTR tables, read one after the other."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.models.manifest import digest_of
from hps.models.tables import TableFiles
from hps.types import IndexArray, KeyArray

_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FusedFiles(TableFiles):
    """Files of a fused table. ``parts``: the tables that it joins, in the order of their rows."""

    parts: tuple[TableFiles, ...] = ()

    def keys(self, start: int = 0, stop: int | None = None) -> KeyArray:
        found = self._ranges(start, stop, lambda part, first, last: part.keys(first, last))
        return np.concatenate([np.empty(0, np.int64), *found])

    def vectors(self, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        found = self._ranges(start, stop, lambda part, first, last: part.vectors(first, last))
        return np.concatenate([np.empty((0, self.dim), np.float32), *found])

    def keys_at(self, rows: IndexArray) -> KeyArray:
        keys = np.empty(len(rows), np.int64)
        self._pick_into(keys, rows, lambda part, own: part.keys_at(own))
        return keys

    def vectors_at(self, rows: IndexArray) -> NDArray[np.float32]:
        vectors = np.empty((len(rows), self.dim), np.float32)
        self._pick_into(vectors, rows, lambda part, own: part.vectors_at(own))
        return vectors

    def copy_vectors(self, target: Path) -> None:
        with target.open("wb") as copy:
            for part in self.parts:
                with part.vector_path.open("rb") as vectors:
                    shutil.copyfileobj(vectors, copy, _COPY_BYTES)

    def _ranges(
        self, start: int, stop: int | None, read: Callable[[TableFiles, int, int], Any]
    ) -> list[Any]:
        """Return the results of ``read(part, first, last)`` for each part with rows in the range."""
        stop = self.rows if stop is None else min(stop, self.rows)
        found, begin = [], 0
        for part in self.parts:
            first, last = max(start - begin, 0), min(stop - begin, part.rows)
            if first < last:
                found.append(read(part, first, last))
            begin += part.rows
        return found

    def _pick_into(
        self, out: NDArray[Any], rows: IndexArray, pick: Callable[[TableFiles, IndexArray], Any]
    ) -> None:
        begin = 0
        for part in self.parts:
            own = (rows >= begin) & (rows < begin + part.rows)
            if own.any():
                out[own] = pick(part, rows[own] - begin)
            begin += part.rows


def open_fused(name: str, parts: Sequence[TableFiles]) -> TableFiles:
    """Return the files of table ``name``, which joins the rows of ``parts``; all have one dim."""
    if len(parts) == 1:
        return parts[0]
    return FusedFiles(
        name,
        parts[0].folder,
        sum(part.rows for part in parts),
        parts[0].dim,
        digest_of({"fused": [part.digest for part in parts]}),
        tuple(stamp for part in parts for stamp in part.stamps),
        parts=tuple(parts),
    )
