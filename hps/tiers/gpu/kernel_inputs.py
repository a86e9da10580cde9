"""Parts and poolings as the kernels' launchers want them, and what was missing as the tiers want it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.cuda.fetch import FetchArguments
from hps.cuda.pool import KernelBags
from hps.cuda.table import GpuTable
from hps.tiers.base import Part
from hps.tiers.gpu.checks import DevicePooling
from hps.types import IndexArray, KeyArray, oldest_tombstone


def fetch_arguments(part: Part, table: GpuTable, now: float) -> FetchArguments:
    """What ``part``, of which something is missing, asks of ``table`` at the instant ``now``."""
    n = len(part.missing)
    positions = None if n == len(part.keys) else part.missing
    oldest = oldest_tombstone(part.table, now)
    return FetchArguments(
        table, part.keys, positions, part.out, part.versions, part.source, n, oldest
    )


def kernel_bags(table: GpuTable, ask: DevicePooling) -> KernelBags:
    keys, mean = ask.keys, ask.combiner == "mean"
    return KernelBags(
        table, keys.keys, keys.offsets, keys.weights, ask.out, keys.hotness or 0, mean
    )


def distribute_misses(parts: Sequence[Part], misses: NDArray[np.uint32]) -> None:
    """Give each part its share of ``misses``, ascending positions in the batch of all parts."""
    if len(parts) == 1:
        parts[0].missing = _left(parts[0], misses.astype(np.int64))
        return
    start, first = 0, 0
    ends = np.cumsum([len(part.missing) for part in parts])
    cuts = np.searchsorted(misses, ends).tolist()
    for part, end, cut in zip(parts, ends.tolist(), cuts, strict=True):
        part.missing = _left(part, misses[first:cut].astype(np.int64) - start)
        start, first = end, cut


def _left(part: Part, misses: KeyArray) -> IndexArray:
    """The positions that stay missing, of those of ``part.missing`` that ``misses`` names."""
    if len(part.keys) == len(part.missing):
        return misses
    missing: Any = part.missing
    left: IndexArray = (missing if isinstance(missing, np.ndarray) else missing.get())[misses]
    return left
