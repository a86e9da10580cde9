"""Hit rate of one table's cache by its capacity, from a sample of a trace."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hps.lookup.key_sampling import TableSample, sampled
from hps.native import dedup, stack_distances
from hps.tiers.base import FetchContext, Part
from hps.tiers.cpu.cache import CpuCache, Eviction
from hps.types import EmbeddingTable, IndexArray, KeyArray

WARM_UP = 0.125
"""Share of the accesses that only warm the cache: its first ones miss in any cache that starts empty."""
_LRU_POINTS, _SIMULATED_POINTS = 48, 20
_SMALLEST_SIMULATION = 128  # rows; smaller caches evict by other rules, from too few candidates
_MOST_SIMULATED = 1 << 19  # accesses; a simulation of as many takes about half a second
_FEWEST_KEYS = 4096
_MOST_PER_FETCH, _FEWEST_PER_FETCH = 1024, 16


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The share of the accesses whose row is in a cache of ``rows`` rows."""

    rows: int
    hit_rate: float


class TableCurve:
    """Hit rates of a cache with the policy ``eviction`` for the accesses of ``sample``.

    ``known (n,)``: accesses to keys that the table has; the others miss in every cache. ``table_rows``: a
    cache that is filled at the start also has rows that the trace did not ask for. LRU: stack distances,
    exact for the sampled keys. Other policies: simulations by our CPU cache, scaled down by the sampling
    rate. An access that repeats a key of its request counts as a hit: the row is read once.

    ``touched_rows``: the rows that the trace asks for; ``reached``: the hit rate of a cache of all of them
    that starts empty; ``unknown_share``: the share of the accesses whose key has no row."""

    def __init__(
        self,
        sample: TableSample,
        table_rows: int,
        eviction: Eviction = "lru",
        *,
        known: NDArray[np.bool_] | None = None,
        warm_up: float = WARM_UP,
    ) -> None:
        if eviction != "lru":
            sample, known = _thinned(sample, known)
        self.sample = sample if known is None else sample.select(known)
        self.eviction, self.table_rows = eviction, table_rows
        self._first = int(warm_up * sample.accesses)
        self._counted = self.sample.positions >= self._first
        self._expected = max(1.0, sample.rate * (sample.accesses - self._first))
        unique, self._ids = dedup(np.ascontiguousarray(self.sample.keys))
        self.touched_rows = min(table_rows, round(len(unique) / sample.rate))
        self._unknown = _unknown_requests(sample, known, self._first)
        self.unknown_share = min(1.0, len(self._unknown) / self._expected)
        self._repeated = _repeated(self._ids, self.sample.requests)
        self._distances = stack_distances(self._ids, len(unique)) if eviction == "lru" else None
        self.points = self._make_points()

    def _make_points(self) -> list[CurvePoint]:
        """Points with ascending rows and hit rates, from no row to all rows of the table."""
        lru = self._distances is not None
        smallest = max(1, round((1 if lru else _SMALLEST_SIMULATION) / self.sample.rate))
        most = max(1, self.touched_rows)
        number = _LRU_POINTS if lru else _SIMULATED_POINTS
        grid = np.geomspace(min(smallest, most), most, number)
        best = self._hit_rate(0)
        points = [CurvePoint(0, best)]
        for rows in sorted({*np.round(grid).astype(np.int64).tolist(), most}):
            best = max(best, self._hit_rate(rows))
            points.append(CurvePoint(rows, best))
        self.reached = best
        if self.table_rows > most:
            points.append(CurvePoint(self.table_rows, 1.0 - self.unknown_share))
        elif self.touched_rows == self.table_rows:
            points[-1] = CurvePoint(most, 1.0 - self.unknown_share)
        return points

    def _hit_rate(self, rows: int) -> float:
        missed = np.count_nonzero(self._missed(rows)) + len(self._unknown)
        return max(0.0, 1.0 - missed / self._expected)

    def at(self, rows: int) -> float:
        """Return the hit rate of a cache of ``rows`` rows, between the curve's points by proportion."""
        return float(
            np.interp(rows, [p.rows for p in self.points], [p.hit_rate for p in self.points])
        )

    def missed(self, rows: int) -> IndexArray:
        """Return the numbers ``(m,)`` of the requests of the accesses that miss in a cache of ``rows`` rows.

        Without those of the warm-up; with those to unknown keys. A request is listed once for each row."""
        if rows >= self.table_rows:
            return self._unknown
        requests = self.sample.requests[self._missed(rows)]
        if self.touched_rows < rows < self.table_rows:
            # The cache was filled with some of the rows that the trace asks for only now.
            absent = (self.table_rows - rows) / (self.table_rows - self.touched_rows)
            requests = requests[np.random.default_rng(rows).random(len(requests)) < absent]
        return np.concatenate([requests, self._unknown])

    def _missed(self, rows: int) -> NDArray[np.bool_]:
        """Return a mask of the accesses that miss in a cache of ``rows`` rows that starts empty."""
        scaled = rows * self.sample.rate
        if rows <= 0:
            mask = np.ones(len(self._ids), bool)
        elif self._distances is not None:
            mask = (self._distances < 0) | (self._distances > max(1.0, scaled))
        else:
            mask = simulate(self.sample.keys, max(1, round(scaled)), self.eviction)
        return mask & self._counted & ~self._repeated


def _thinned(
    sample: TableSample, known: NDArray[np.bool_] | None
) -> tuple[TableSample, NDArray[np.bool_] | None]:
    """Sample fewer keys, so that simulations take seconds."""
    rate, keep = sample.rate, np.ones(len(sample.keys), bool)
    while np.count_nonzero(keep) > _MOST_SIMULATED:
        fewer = sampled(sample.keys, rate / 2)
        if len(np.unique(sample.keys[fewer])) < _FEWEST_KEYS:
            break
        rate, keep = rate / 2, fewer
    return replace(sample.select(keep), rate=rate), None if known is None else known[keep]


def _unknown_requests(
    sample: TableSample, known: NDArray[np.bool_] | None, first: int
) -> IndexArray:
    """Return the requests ``(m,)`` of the accesses from position ``first`` on whose key is not ``known``."""
    if known is None:
        return np.empty(0, np.int64)
    return sample.requests[~known & (sample.positions >= first)]


def _repeated(ids: IndexArray, requests: IndexArray) -> NDArray[np.bool_]:
    """Return a mask of the accesses ``(n,)`` to a key that their request has asked for already."""
    order = np.argsort(ids, kind="stable")
    again = np.zeros(len(ids), bool)
    same = (np.diff(ids[order]) == 0) & (np.diff(requests[order]) == 0)
    again[order[1:][same]] = True
    return again


def simulate(keys: KeyArray, capacity: int, eviction: Eviction) -> NDArray[np.bool_]:
    """Return for each access to ``keys (n,)``, in order, whether it misses in our CPU cache.

    The cache has ``capacity`` rows and starts empty. Accesses are fetched in batches that are small beside
    the capacity; misses are inserted after each, and a repeated key of a batch hits."""
    table = EmbeddingTable.make("simulated", 1)
    cache = CpuCache({table: capacity}, eviction=eviction)
    size = max(_FEWEST_PER_FETCH, min(_MOST_PER_FETCH, capacity // 8))
    rows, versions = np.zeros((size, 1), np.float32), np.ones(size, np.uint64)
    missed, context = np.zeros(len(keys), bool), FetchContext()
    try:
        for start in range(0, len(keys), size):
            unique, inverse = dedup(np.ascontiguousarray(keys[start : start + size]))
            part = Part.make(table, unique)
            cache.fetch([part], context)
            left = part.missing
            if len(left):
                first = np.unique(inverse, return_index=True)[1]
                missed[start + first[left]] = True
                cache.insert(table, unique[left], rows[: len(left)], versions[: len(left)])
    finally:
        cache.close()
    return missed
