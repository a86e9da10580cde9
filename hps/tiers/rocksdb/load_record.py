"""The record of a table's bulk load."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, slots=True)
class LoadRecord:
    """The record of a table's bulk load.

    ``digest``: of the files. ``rows``: expected before the load, actual after it. ``version``: of the
    rows (see hps.types.make_version). ``loaded_unix``: time of the load. ``stamp``: changes with every
    write to the files; a killed load is continued only if it is equal and not empty."""

    digest: str
    rows: int = 0
    version: int = 0
    dim: int = 0
    dtype: str = "float32"
    loaded_unix: float = 0.0
    complete: bool = False
    stamp: str = ""

    @property
    def bytes(self) -> int:
        """Approximate bytes of the rows."""
        return self.rows * self.dim * np.dtype(self.dtype).itemsize

    def started(self) -> LoadRecord:
        return replace(self, complete=False)

    def finished(self, rows: int) -> LoadRecord:
        return replace(self, rows=rows, loaded_unix=time.time(), complete=True)
