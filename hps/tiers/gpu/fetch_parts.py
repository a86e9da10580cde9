"""Parts of a fetch from a GPU cache as kernel arguments, and their misses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.cuda.fetch import FetchArguments
from hps.cuda.table import GpuTable
from hps.tiers.base import Part
from hps.types import IndexArray, KeyArray, oldest_tombstone


def fetch_arguments(part: Part, table: GpuTable, now: float) -> FetchArguments:
    """Return the kernel arguments that fetch the misses of ``part`` from ``table``.

    ``now``: Unix seconds."""
    n = len(part.missing)
    positions = None if n == len(part.keys) else part.missing
    oldest = 0 if part.versions is None else oldest_tombstone(part.table, now)
    return table, part.keys, positions, part.out, part.versions, part.source, oldest, n


def distribute_misses(parts: Sequence[Part], misses: NDArray[np.uint32]) -> None:
    """Set each part's ``missing`` from ``misses``, ascending positions in the keys of all parts joined."""
    if len(parts) == 1:
        parts[0].missing = _still_missing(parts[0], misses.astype(np.int64))
        return
    start, first = 0, 0
    ends = np.cumsum([len(part.missing) for part in parts])
    cuts = np.searchsorted(misses, ends).tolist()
    for part, end, cut in zip(parts, ends.tolist(), cuts, strict=True):
        part.missing = _still_missing(part, misses[first:cut].astype(np.int64) - start)
        start, first = end, cut


def _still_missing(part: Part, misses: KeyArray) -> IndexArray:
    """Return ``part.missing[misses]`` as a NumPy array."""
    if len(part.keys) == len(part.missing):
        return misses
    missing: Any = part.missing
    left: IndexArray = (missing if isinstance(missing, np.ndarray) else missing.get())[misses]
    return left
