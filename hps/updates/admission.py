"""Admission: a key enters the caches once it was looked up often enough without being there.

Keys that are looked up once would evict rows that are looked up often. HugeCTR's low-frequency filter and
TinyLFU (Einziger, Friedman, Manes: "TinyLFU: A Highly Efficient Cache Admission Policy", 2017) keep them
out by an estimate of each key's frequency: a count-min sketch whose counts are halved from time to time, so
that old uses fade."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hps.native import partition_hash
from hps.types import EmbeddingTable, IndexArray, KeyArray

MOST_SIGHTINGS = 15
Count = Callable[[str, int], None]
"""``count(result, keys)`` counts keys by result, see `PROMOTIONS` in hps/observability/metric_table.py."""
_DEPTH = 4
_COUNTERS_A_ROW = 2
_LEAST_COUNTERS = 1 << 12
_HALF_LIFE = 10  # sightings for each row of the cache after which counts are halved


class FrequencySketch:
    """Estimates how often keys were seen; an estimate is never too low until counts fade.

    ``rows``: the keys that it shall tell apart, those of the cache; it takes 8 to 16 bytes for each. Not
    thread-safe."""

    def __init__(self, rows: int) -> None:
        counters = 1 << (max(_LEAST_COUNTERS, _COUNTERS_A_ROW * rows) - 1).bit_length()
        self._mask = np.uint64(counters - 1)
        self._counts = np.zeros((_DEPTH, counters), np.uint8)
        self._seen, self._until_halved = 0, _HALF_LIFE * max(rows, counters // _COUNTERS_A_ROW)

    def add(self, keys: KeyArray, times: IndexArray) -> NDArray[np.uint8]:
        """Count ``keys (n,)``, each once among them, ``times (n,)``; return the estimates ``(n,)``.

        Counts end at 15."""
        at = self._places(keys)
        before = np.stack([row[places] for row, places in zip(self._counts, at, strict=True)])
        estimate: NDArray[np.uint8] = np.minimum(before.min(axis=0) + times, MOST_SIGHTINGS).astype(
            np.uint8
        )
        for row, places in zip(self._counts, at, strict=True):
            np.maximum.at(row, places, estimate)  # raises the lowest counts only
        self._seen += int(times.sum())
        if self._seen >= self._until_halved:
            self._counts >>= np.uint8(1)
            self._seen //= 2
        return estimate

    def _places(self, keys: KeyArray) -> list[NDArray[np.uint64]]:
        hashes = partition_hash(keys)
        step = (hashes >> np.uint64(32)) | np.uint64(1)
        return [(hashes + np.uint64(i) * step) & self._mask for i in range(_DEPTH)]


class Admission:
    """Chooses the keys that may enter the caches. For one thread: the one that writes them.

    A sighting is a lookup for which a store, or another cache, had to answer the key. All caches count in one
    sketch per table, so a row that has entered the CPU cache may enter the GPU cache next.

    ``admit_after``: the sightings that a table's keys need, 1: none; ``rows``: a table's capacity.
    Counts of a table for which ``is_served`` is false are dropped when another table gets some."""

    def __init__(
        self,
        admit_after: Callable[[EmbeddingTable], int],
        rows: Callable[[EmbeddingTable], int],
        is_served: Callable[[EmbeddingTable], bool] = lambda _table: True,
    ) -> None:
        self._admit_after, self._rows, self._is_served = admit_after, rows, is_served
        self._sketches: dict[EmbeddingTable, FrequencySketch] = {}

    def admitted(
        self, table: EmbeddingTable, keys: KeyArray, times: IndexArray
    ) -> NDArray[np.bool_] | None:
        """Count ``keys (n,)``, each once among them, ``times (n,)``; return which may enter, None: all."""
        needed = self._admit_after(table)
        if needed <= 1:
            return None
        sketch = self._sketches.get(table)
        if sketch is None:
            self._sketches = {t: kept for t, kept in self._sketches.items() if self._is_served(t)}
            sketch = self._sketches[table] = FrequencySketch(self._rows(table))
        return np.asarray(sketch.add(keys, times) >= needed)

    def filter(
        self, table: EmbeddingTable, keys: KeyArray, times: IndexArray, count: Count
    ) -> KeyArray:
        """Count ``keys (n,)``, each once among them, ``times (n,)``; return those that may enter.

        ``count`` receives the number of the others, as ``not_admitted``."""
        admitted = self.admitted(table, keys, times)
        if admitted is None:
            return keys
        if left_out := int(np.count_nonzero(~admitted)):
            count("not_admitted", left_out)
        return keys[admitted]
