"""Choose the smallest cache that meets a target."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from hps.errors import ConfigError
from hps.tiers.capacity import TABLE_BYTES, slot_bytes
from hps.tools.plan.allocation import (
    Allocation,
    AllocationPath,
    TableDemand,
    cpu_cache_bytes,
    hit_rate,
)
from hps.tools.plan.curves import WARM_UP
from hps.tools.plan.latency import Calibration
from hps.tools.plan.requests import request_misses
from hps.tools.plan.trace import Trace

GIB = 1 << 30
UTILIZATION = 0.7
"""The share of a core's time that lookups may take: above it, requests wait for one another."""
DEFAULT_SHARE = 0.95
"""Without a target: this share of the hits of a cache with all rows of the trace that starts empty."""
_PRICED_POINTS = 32
_REFINEMENTS = 32  # between two points of the curves


@dataclass(frozen=True, slots=True)
class Goals:
    """Targets: each is None or a limit. ``hit_rate``: at least; latencies in ms and memory in bytes: at most.

    ``requests_per_s``: of all processes together."""

    hit_rate: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    requests_per_s: float | None = None
    memory_bytes: int | None = None

    @property
    def has_quality(self) -> bool:
        return not (self.hit_rate is self.p50_ms is self.p99_ms is None)


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices per hour: of a GiB of memory, a processor core, a GPU. ``unit``: the currency."""

    gib: float = 0.0
    core: float = 0.0
    gpu: float = 0.0
    unit: str = "USD"

    @property
    def known(self) -> bool:
        return bool(self.gib or self.core or self.gpu)


@dataclass(frozen=True, slots=True)
class Prediction:
    """A cache with ``rows`` of each table, and what it is predicted to do.

    Times are of lookups without queueing, None without a calibration; ``core_requests_per_s``: of one core
    that does nothing else; ``cores``: for the target's requests per second. ``cost``: an hour."""

    rows: Allocation
    bytes: int
    hit_rate: float
    p50_us: float | None = None
    p99_us: float | None = None
    core_requests_per_s: float | None = None
    core_keys_per_s: float | None = None
    cores: int | None = None
    cost: float | None = None


class Planner:
    """Predicts caches for ``demands``, the tables of ``trace``, and chooses among them.

    ``gpus``: their number, for the cost."""

    def __init__(
        self,
        trace: Trace,
        demands: Mapping[str, TableDemand],
        calibration: Calibration | None = None,
        *,
        goals: Goals = Goals(),
        prices: Prices = Prices(),
        gpus: int = 0,
    ) -> None:
        self.trace, self.demands, self.calibration = trace, demands, calibration
        self.goals, self.prices, self._gpus = goals, prices, gpus
        self._first = int(WARM_UP * trace.requests)
        self._path = AllocationPath(demands)
        if calibration is None:
            for name in ("p50_ms", "p99_ms", "requests_per_s"):
                if getattr(goals, name) is not None:
                    flag = name.replace("_", "-")
                    raise ConfigError(
                        f"--{flag} needs latencies; remove --no-latency, or give --calibration FILE"
                    )

    def predict(self, rows: Allocation) -> Prediction:
        """Predict a CPU cache with ``rows`` of each table; more than a table has count as all."""
        rows = {
            name: min(rows.get(name, 0), d.curve.table_rows) for name, d in self.demands.items()
        }
        size, hits = cpu_cache_bytes(self.demands, rows), hit_rate(self.demands, rows)
        if self.calibration is None:
            return Prediction(rows, size, hits, cost=self._cost(size, None))
        found = request_misses(self.trace, self.demands, rows, self._first)
        p50, p99 = self.calibration.percentiles_us(found.keys, found.misses, (50, 99))
        mean_us = float(self.calibration.medians_us(found.keys, found.misses).mean())
        rate, cores = 1e6 / mean_us, None
        if self.goals.requests_per_s is not None:
            cores = max(1, math.ceil(self.goals.requests_per_s / (UTILIZATION * rate)))
        keys = rate * float(found.keys.mean())
        return Prediction(rows, size, hits, p50, p99, rate, keys, cores, self._cost(size, cores))

    def _cost(self, size: int, cores: int | None) -> float | None:
        if not self.prices.known:
            return None
        memory = self.prices.gib * size / GIB
        return memory + self.prices.core * (cores or 0) + self.prices.gpu * self._gpus

    def unmet(self, prediction: Prediction) -> list[str]:
        """Describe each goal that ``prediction`` does not meet."""
        goals, found = self.goals, prediction
        failed = []
        if goals.hit_rate is not None and found.hit_rate < goals.hit_rate:
            failed.append(f"hit rate {goals.hit_rate:.4g}, reached {found.hit_rate:.4f}")
        for name, limit, time in (
            ("p50", goals.p50_ms, found.p50_us),
            ("p99", goals.p99_ms, found.p99_us),
        ):
            if limit is not None and time is not None and time > 1000 * limit:
                failed.append(f"{name} of {limit:g} ms, reached {time / 1000:.3g} ms")
        if goals.memory_bytes is not None and found.bytes > goals.memory_bytes:
            failed.append(f"{goals.memory_bytes:,} bytes, needs {found.bytes:,}")
        return failed

    def choose(self) -> Prediction:
        """Return the smallest cache that meets the goals, or the cheapest one if cores and prices are given.

        With no goal for hit rate or latency: the best one that fits the memory, or one with `DEFAULT_SHARE`
        of the hits that the trace allows. Raises ConfigError if none meets the goals."""
        limit, path = self.goals.memory_bytes, self._path
        fitting = len(path)
        if limit is not None:
            fitting = int(np.searchsorted(path.bytes, limit, "right"))
        if not self.goals.has_quality and limit is not None:
            return self.predict(self._largest(fitting - 1, limit))
        met = self._meets_goals if self.goals.has_quality else self._meets_default
        at = _first_of(fitting, lambda i: met(path[i]))
        if at == fitting:
            best = self.predict(path[fitting - 1])
            within = "" if limit is None else f" within {limit:,} bytes"
            raise ConfigError(f"no cache{within} meets the target of {'; '.join(self.unmet(best))}")
        return self._cheapest(self._smallest(at, met), at, fitting)

    def _meets_goals(self, rows: Allocation) -> bool:
        return not self.unmet(self.predict(rows))

    def _meets_default(self, rows: Allocation) -> bool:
        most = sum(d.share * d.curve.reached for d in self.demands.values())
        return hit_rate(self.demands, rows) >= DEFAULT_SHARE * most

    def _smallest(self, at: int, met: Callable[[Allocation], bool]) -> Allocation:
        """Return the smallest cache that is ``met``, between that of the path before ``at`` and ``at``."""
        after: Allocation = self._path[at]
        if at == 0:
            return after
        name, low, high = self._difference(at)
        step = max(1, (high - low) // _REFINEMENTS)
        steps = (high - low) // step
        number = _first_of(steps, lambda i: met({**after, name: low + i * step}))
        return after if number == steps else {**after, name: low + number * step}

    def _largest(self, at: int, limit: int) -> Allocation:
        """Return the largest cache of ``limit`` bytes from the one of the path at ``at`` on."""
        before: Allocation = self._path[at]
        if at + 1 == len(self._path):
            return before
        name, low, high = self._difference(at + 1)
        left = limit - cpu_cache_bytes(self.demands, before)
        left -= 0 if low else TABLE_BYTES
        more = min(high - low, left // slot_bytes(self.demands[name].table))
        return {**before, name: low + max(0, more)}

    def _difference(self, at: int) -> tuple[str, int, int]:
        """The table that is larger at ``at`` than before, with its rows before and then."""
        before, after = self._path[at - 1], self._path[at]
        name = next(name for name in after if after[name] != before[name])
        return name, before[name], after[name]

    def _cheapest(self, rows: Allocation, start: int, stop: int) -> Prediction:
        """Return the prediction of ``rows`` or, if cheaper, that of a cache of the path from ``start`` on."""
        smallest = self.predict(rows)
        if smallest.cost is None or smallest.cores is None:
            return smallest
        numbers = np.unique(np.linspace(start, stop - 1, _PRICED_POINTS).astype(int))
        every = [smallest, *(self.predict(self._path[i]) for i in numbers)]
        return min(every, key=lambda each: (each.cost or 0.0, each.bytes))


def _first_of(count: int, met: Callable[[int], bool]) -> int:
    """Return the first of ``count`` numbers for which ``met``, which stays true; ``count`` if none does."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if met(middle):
            high = middle
        else:
            low = middle + 1
    return low
