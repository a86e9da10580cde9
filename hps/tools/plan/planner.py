"""Choose the smallest cache that meets a target."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from hps.errors import ConfigError
from hps.node.cpu_cache_plan import changed_rows
from hps.tiers.capacity import TABLE_BYTES, slot_bytes
from hps.tools.plan.allocation import (
    Allocation,
    AllocationPath,
    TableDemand,
    cpu_cache_bytes,
    hit_rate,
)
from hps.tools.plan.curves import WARM_UP
from hps.tools.plan.gpu import NO_GPU, GpuCachePlan
from hps.tools.plan.latency import Calibration
from hps.tools.plan.memory import Tables, memory_choices
from hps.tools.plan.node_latency import NodeLatency
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
    """Prices per hour: of a GiB of memory, a processor core, a GPU, a GiB of its memory.

    ``unit``: the currency."""

    gib: float = 0.0
    core: float = 0.0
    gpu: float = 0.0
    gpu_gib: float = 0.0
    unit: str = "USD"

    @property
    def known(self) -> bool:
        return bool(self.gib or self.core or self.gpu or self.gpu_gib)


@dataclass(frozen=True, slots=True)
class Prediction:
    """A cache with ``rows`` of each table, and what it is predicted to do.

    ``bytes``: of the cache. Times are of lookups without queueing, None without a calibration;
    ``core_requests_per_s``: of one core that does nothing else; ``cores``: for the target's requests per
    second. ``cost``: an hour. ``in_memory``: the tables that are read from mapped files in memory, of
    ``mapped_bytes``; the cache has only rows of theirs that updates have changed. ``gpu_bytes``: of each
    GPU's memory; ``gpu_hit_rate``: the share of the keys that it answers, None without one. ``on_gpu``:
    the times are of lookups whose vectors stay on the GPU."""

    rows: Allocation
    bytes: int
    hit_rate: float
    p50_us: float | None = None
    p99_us: float | None = None
    core_requests_per_s: float | None = None
    core_keys_per_s: float | None = None
    cores: int | None = None
    cost: float | None = None
    in_memory: Tables = ()
    mapped_bytes: int = 0
    gpu_bytes: int = 0
    gpu_hit_rate: float | None = None
    on_gpu: bool = False

    @property
    def memory_bytes(self) -> int:
        """Bytes of the cache and of the mapped files in memory."""
        return self.bytes + self.mapped_bytes


class Planner:
    """Predicts caches for ``demands``, the tables of ``trace``, and chooses among them.

    ``gpu``: the GPU cache that is planned; ``gpus``: number of GPUs that have one. ``files``: bytes of the
    mapped files that a node may read from memory, by table, in the node's order. ``redis_share``: of the
    misses, see `redis_share_of`."""

    def __init__(
        self,
        trace: Trace,
        demands: Mapping[str, TableDemand],
        calibration: Calibration | None = None,
        *,
        goals: Goals = Goals(),
        prices: Prices = Prices(),
        gpu: GpuCachePlan = NO_GPU,
        gpus: int = 1,
        files: Mapping[str, int] | None = None,
        redis_share: float | None = None,
    ) -> None:
        self.trace, self.demands = trace, demands
        self._latency = None if calibration is None else NodeLatency(calibration, redis_share)
        self.goals, self.prices, self._gpu, self._gpus = goals, prices, gpu, gpus
        self.files = {} if files is None else files
        self._first = int(WARM_UP * trace.requests)
        if calibration is None:
            for name in ("p50_ms", "p99_ms", "requests_per_s"):
                if getattr(goals, name) is not None:
                    flag = name.replace("_", "-")
                    raise ConfigError(
                        f"--{flag} needs latencies; remove --no-latency, or give --calibration FILE"
                    )

    def predict(
        self, rows: Allocation, in_memory: Tables = (), gpu: GpuCachePlan | None = None
    ) -> Prediction:
        """Predict a CPU cache with ``rows`` of each table; more than a table has count as all.

        Tables ``in_memory`` are read from mapped files in memory, which have all of their rows. ``gpu``:
        another GPU cache than the planned one."""
        rows = {
            name: min(rows.get(name, 0), d.curve.table_rows) for name, d in self.demands.items()
        }
        gpu = self._gpu if gpu is None else gpu
        size, mapped = cpu_cache_bytes(self.demands, rows), sum(self.files[n] for n in in_memory)
        held = self.rows_in_memory(rows, in_memory)
        done = Prediction(
            rows,
            size,
            hit_rate(self.demands, held),
            in_memory=in_memory,
            mapped_bytes=mapped,
            gpu_bytes=gpu.bytes,
            gpu_hit_rate=hit_rate(self.demands, gpu.rows) if gpu.rows else None,
        )
        if self._latency is not None:
            done = self._with_latency(done, self._latency, held, gpu.rows)
        return replace(done, cost=self._cost(done))

    def _with_latency(
        self, done: Prediction, latency: NodeLatency, held: Allocation, on_gpu: Allocation
    ) -> Prediction:
        """Add the times of lookups with the rows ``held`` in host memory, and those ``on_gpu``."""
        first, is_on_gpu = self._first, bool(on_gpu) and latency.calibration.gpu is not None
        if is_on_gpu:
            held = {name: max(n, on_gpu.get(name, 0)) for name, n in held.items()}
        found = request_misses(self.trace, self.demands, held, first, done.in_memory)
        if is_on_gpu:
            missed = request_misses(self.trace, self.demands, on_gpu, first).misses
            misses = np.minimum(found.misses, missed)
            found = replace(found, misses=misses, gpu_misses=missed)
        p50, p99 = latency.percentiles_us(found, (50, 99))
        rate, cores = 1e6 / latency.mean_us(found), None
        if self.goals.requests_per_s is not None:
            cores = max(1, math.ceil(self.goals.requests_per_s / (UTILIZATION * rate)))
        return replace(
            done,
            p50_us=p50,
            p99_us=p99,
            core_requests_per_s=rate,
            core_keys_per_s=rate * float(found.keys.mean()),
            cores=cores,
            on_gpu=is_on_gpu,
        )

    def rows_in_memory(self, rows: Allocation, in_memory: Tables) -> dict[str, int]:
        """Return the rows in memory by table: those of the cache, or all."""
        return {**rows, **{name: self.demands[name].curve.table_rows for name in in_memory}}

    def _cost(self, found: Prediction) -> float | None:
        prices = self.prices
        if not prices.known:
            return None
        cost = prices.gib * found.memory_bytes / GIB + prices.core * (found.cores or 0)
        if found.gpu_bytes:
            cost += self._gpus * (prices.gpu + prices.gpu_gib * found.gpu_bytes / GIB)
        return cost

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
        if goals.memory_bytes is not None and found.memory_bytes > goals.memory_bytes:
            failed.append(f"{goals.memory_bytes:,} bytes, needs {found.memory_bytes:,}")
        return failed

    def choose(self) -> Prediction:
        """Return the smallest memory that meets the goals, or the cheapest one if cores and prices are given.

        With no goal for hit rate or latency: the best one that fits the memory, or one with `DEFAULT_SHARE`
        of the hits that the trace allows. Raises ConfigError if none meets the goals."""
        limit = self.goals.memory_bytes
        best: Prediction | None = None
        searches = [_Search(self, tables) for tables in memory_choices(self.files)]
        searches = [each for each in searches if each.fitting]
        for search in searches:
            if self._may_be_better(search, best):
                found = search.choose()
                if found is not None and (best is None or self._order(found) < self._order(best)):
                    best = found
        if best is None:
            most = max((each.largest() for each in searches), key=lambda found: found.hit_rate)
            within = "" if limit is None else f" within {limit:,} bytes"
            raise ConfigError(f"no cache{within} meets the target of {'; '.join(self.unmet(most))}")
        return best

    @property
    def fills_memory(self) -> bool:
        """The only goal is a limit of the memory."""
        return self.goals.memory_bytes is not None and not self.goals.has_quality

    def _may_be_better(self, search: _Search, best: Prediction | None) -> bool:
        """False if ``search`` only has choices that are larger than ``best``, and that matters most."""
        if best is None or self.fills_memory or best.cores is not None:
            return True
        return search.least_bytes < best.memory_bytes

    def _order(self, found: Prediction) -> tuple[float, float]:
        if self.fills_memory:
            return -found.hit_rate, found.memory_bytes
        return (found.cost or 0.0), found.memory_bytes


class _Search:
    """Searches the CPU caches next to mapped files ``in_memory``.

    ``fitting``: the number of caches of the path that fit the memory. ``least_bytes``: without a cache of
    other tables."""

    def __init__(self, planner: Planner, in_memory: Tables) -> None:
        self._planner, self._in_memory = planner, in_memory
        demands = planner.demands
        self._demands = {name: d for name, d in demands.items() if name not in in_memory}
        self._fixed = {name: changed_rows(demands[name].curve.table_rows) for name in in_memory}
        self._path = AllocationPath(self._demands)
        files = sum(planner.files[name] for name in in_memory)
        self.least_bytes = files + cpu_cache_bytes(demands, self._fixed)
        self.fitting, limit = len(self._path), planner.goals.memory_bytes
        if limit is not None:
            self._left = limit - self.least_bytes
            self.fitting = int(np.searchsorted(self._path.bytes, self._left, "right"))

    def choose(self) -> Prediction | None:
        """Return the best choice; None if none meets the goals."""
        if self._planner.fills_memory:
            return self._predict(self._fill(self.fitting - 1))
        met = self._meets_goals if self._planner.goals.has_quality else self._meets_default
        at = _first_of(self.fitting, lambda i: met(self._path[i]))
        if at == self.fitting:
            return None
        return self._cheapest(self._smallest(at, met), at)

    def largest(self) -> Prediction:
        """Return the largest choice of the path that fits the memory."""
        return self._predict(self._path[self.fitting - 1])

    def _predict(self, rows: Allocation) -> Prediction:
        return self._planner.predict({**self._fixed, **rows}, self._in_memory)

    def _meets_goals(self, rows: Allocation) -> bool:
        least = self._planner.goals.hit_rate
        # Before the latencies, which take longer.
        if least is not None and self._hit_rate(rows) < least:
            return False
        return not self._planner.unmet(self._predict(rows))

    def _meets_default(self, rows: Allocation) -> bool:
        most = sum(d.share * d.curve.reached for d in self._planner.demands.values())
        return self._hit_rate(rows) >= DEFAULT_SHARE * most

    def _hit_rate(self, rows: Allocation) -> float:
        held = self._planner.rows_in_memory(rows, self._in_memory)
        return hit_rate(self._planner.demands, held)

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

    def _fill(self, at: int) -> Allocation:
        """Return the largest cache that fits the memory, from the one of the path at ``at`` on."""
        before: Allocation = self._path[at]
        if at + 1 == len(self._path):
            return before
        name, low, high = self._difference(at + 1)
        left = self._left - cpu_cache_bytes(self._demands, before)
        left -= 0 if low else TABLE_BYTES
        more = min(high - low, left // slot_bytes(self._demands[name].table))
        return {**before, name: low + max(0, more)}

    def _difference(self, at: int) -> tuple[str, int, int]:
        """The table that is larger at ``at`` than before, with its rows before and then."""
        before, after = self._path[at - 1], self._path[at]
        name = next(name for name in after if after[name] != before[name])
        return name, before[name], after[name]

    def _cheapest(self, rows: Allocation, start: int) -> Prediction:
        """Return the prediction of ``rows`` or, if cheaper, that of a cache of the path from ``start`` on."""
        smallest = self._predict(rows)
        if smallest.cost is None or smallest.cores is None:
            return smallest
        numbers = np.unique(np.linspace(start, self.fitting - 1, _PRICED_POINTS).astype(int))
        every = [smallest, *(self._predict(self._path[i]) for i in numbers)]
        return min(every, key=lambda each: (each.cost or 0.0, each.memory_bytes))


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
