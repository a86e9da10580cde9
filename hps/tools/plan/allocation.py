"""Divide a cache's memory over tables, so that it answers the most accesses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from hps.tiers.capacity import TABLE_BYTES, slot_bytes
from hps.tools.plan.curves import CurvePoint, TableCurve
from hps.types import EmbeddingTable

Allocation = Mapping[str, int]
"""Rows of the cache by table."""


@dataclass(frozen=True, slots=True)
class TableDemand:
    """One table's curve, and its share of all accesses of the trace."""

    table: EmbeddingTable
    curve: TableCurve
    share: float


@dataclass(frozen=True, slots=True)
class _Step:
    """An enlargement of one table's cache, and the accesses it answers per byte."""

    name: str
    start: CurvePoint
    end: CurvePoint
    gain: float


def cpu_cache_bytes(demands: Mapping[str, TableDemand], rows: Allocation) -> int:
    """Return the bytes of a CPU cache with ``rows`` of each table, as the node counts them."""
    return sum(slot_bytes(demands[n].table) * r + TABLE_BYTES for n, r in rows.items() if r)


def hit_rate(demands: Mapping[str, TableDemand], rows: Allocation) -> float:
    """Return the share of all accesses that a cache with ``rows`` of each table answers."""
    return sum(d.share * d.curve.at(rows.get(name, 0)) for name, d in demands.items())


class AllocationPath(Sequence[Allocation]):
    """Caches of increasing size, each with the best use of its memory, from none to all rows.

    Takes the enlargements by their gain per byte, along the upper convex hull of each table's curve: a cache
    between two points of a hull may have fewer hits than it shows, so only the hull's points, and the curve's
    points between two of them, are used. ``bytes (n,)``: of each cache."""

    def __init__(self, demands: Mapping[str, TableDemand]) -> None:
        steps = [step for name, demand in demands.items() for step in _steps(name, demand)]
        steps.sort(key=lambda step: -step.gain)
        self._names = list(demands)
        self._growth: list[tuple[str, int]] = []
        sizes = [0]
        held = dict.fromkeys(demands, CurvePoint(0, 0.0))
        for step in steps:
            demand = demands[step.name]
            for point in demand.curve.points:
                if step.start.rows < point.rows <= step.end.rows:
                    before = held[step.name]
                    size = (point.rows - before.rows) * slot_bytes(demand.table)
                    sizes.append(size + (0 if before.rows else TABLE_BYTES))
                    self._growth.append((step.name, point.rows))
                    held[step.name] = point
        self.bytes = np.cumsum(sizes)

    def __len__(self) -> int:
        return len(self._growth) + 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return dict.fromkeys(self._names, 0) | dict(self._growth[: range(len(self))[index]])


def _steps(name: str, demand: TableDemand) -> Iterator[_Step]:
    hull = upper_hull(demand.curve.points)
    for start, end in pairwise(hull):
        hits = demand.share * (end.hit_rate - start.hit_rate)
        if hits > 0:
            yield _Step(
                name, start, end, hits / (slot_bytes(demand.table) * (end.rows - start.rows))
            )


def upper_hull(points: Sequence[CurvePoint]) -> list[CurvePoint]:
    """Return the upper convex hull of points with ascending rows."""
    hull: list[CurvePoint] = []
    for point in points:
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _slope(a: CurvePoint, b: CurvePoint) -> float:
    return (b.hit_rate - a.hit_rate) / (b.rows - a.rows)
