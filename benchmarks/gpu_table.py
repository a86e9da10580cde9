"""The table library on a GPU against HierarchicalKV, in the same run; and growth against a copy of the rows.

Tables of 64 M slots of float32 rows under LRU, calls of 1,048,576 keys whose arrays are on the device. Finds
are timed by CUDA events, medians of 30 calls after a warm-up, as HierarchicalKV's driver times them
(`benchmarks/peers/gpu_hkv.cu`); writes by the host's clock until the device is done, medians of 20. Keys
within a call are distinct: HierarchicalKV is called with ``unique_key=true``; `Table` needs no such option.

Row numbers: `Table.find_rows`, and the GPU cache's numbers, against HierarchicalKV's ``find*``, which returns
pointers. At load 1, keys are random among those inserted last.

Growth: a half full table doubles; compared with one copy of as many bytes as its rows have.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.common import Bar, Benchmark, Options, Report, main
from benchmarks.gpu import CALL, DeviceClock, FilledTable
from benchmarks.measure import versions
from benchmarks.peers import gpu as peers
from hps.cuda import launch
from hps.cuda.loader import cupy, missing_requirement
from hps.table import Table

DIMS = (8, 32, 64)
LOADS = (0.5, 0.75, 1.0)
WRITES = {
    "insert_and_evict": (4.5, "full"),
    "accum_or_assign": (1.3, "load 0.75"),
    "find_or_insert": (1.3, "load 0.75"),
    "find_or_insert, full": (1.3, "full"),
}
BARS = (
    *(
        Bar(
            f"numbers_{load}",
            f"GPU cache's row numbers / HKV find*, load {load}, worst dim",
            at_least=2.0,
        )
        for load in LOADS
    ),
    *(
        Bar(
            f"find_rows_{load}",
            f"Table.find_rows / HKV find*, load {load}, worst dim",
            at_least=1.0,
        )
        for load in LOADS
    ),
    *(
        Bar(f"{name}_{dim}", f"{name} / HKV, dim {dim}", at_least=ratio)
        for name, (ratio, _) in WRITES.items()
        for dim in DIMS
    ),
    *(
        Bar(
            f"growth_{dim}",
            f"growth of a half full table / copy of its rows, dim {dim}",
            at_most=1.2,
        )
        for dim in DIMS
    ),
)


class TimedTable:
    """A table that holds most of the keys from ``first`` to ``end - 1``."""

    def __init__(self, dim: int, capacity: int, **options: Any) -> None:
        self.table = Table(dim, init_capacity=capacity, backend="cuda", **options)
        self.rows = cupy().random.random((CALL, dim), np.float32)
        self.first = self.end = 0

    def fill(self, end: int) -> None:
        while self.end < end:
            self.table.insert_or_assign(self.new(), self.rows)

    def new(self) -> Any:
        self.end += CALL
        return cupy().arange(self.end - CALL, self.end)

    def resident(self) -> Any:
        return cupy().random.randint(self.first, self.end, CALL, np.int64)

    def permuted(self) -> Any:
        return cupy().random.permutation(CALL) + self.first

    def find_rate(self, clock: DeviceClock, call: Callable[[Any], Any]) -> float:
        return CALL / clock.median(self.resident, call) / 1e9

    def write_rate(
        self, keys: Callable[[], Any], call: Callable[[Any], Any], calls: int = 20
    ) -> float:
        stream, times = cupy().cuda.get_current_stream(), []
        for _ in range(calls + 1):
            batch = keys()
            stream.synchronize()
            start = time.perf_counter()
            call(batch)
            stream.synchronize()
            times.append(time.perf_counter() - start)
        return CALL / statistics.median(times[1:]) / 1e9


def measure_table(dim: int, capacity: int) -> dict[str, Any]:
    """Return B keys/s of each operation."""
    cp, clock, timed = cupy(), DeviceClock(), TimedTable(dim, capacity)
    table, rows = timed.table, timed.rows
    out, add = cp.zeros_like(rows), cp.ones(CALL, bool)
    rates: dict[str, Any] = {"dim": dim}
    timed.fill(capacity // 2)
    rates["find_rows, load 0.5"] = timed.find_rate(clock, table.find_rows)
    timed.fill(capacity * 3 // 4)
    rates["find_rows, load 0.75"] = timed.find_rate(clock, table.find_rows)
    rates["find"] = timed.find_rate(clock, lambda keys: table.find(keys, out=out))
    rates["contains"] = timed.find_rate(clock, table.contains)
    rates["assign"] = timed.write_rate(timed.permuted, lambda keys: table.assign(keys, rows))
    rates["accum_or_assign"] = timed.write_rate(
        timed.permuted, lambda keys: table.accum_or_assign(keys, rows, add)
    )
    rates["insert_or_assign"] = timed.write_rate(
        timed.new, lambda keys: table.insert_or_assign(keys, rows), 4
    )
    rates["find_or_insert"] = timed.write_rate(
        timed.new, lambda keys: table.find_or_insert(keys, rows, out=rows), 4
    )
    timed.fill(capacity * 8 // 5)
    rates["insert_and_evict"] = timed.write_rate(
        timed.new, lambda keys: table.insert_and_evict(keys, rows)
    )
    rates["insert_or_assign, full"] = timed.write_rate(
        timed.new, lambda keys: table.insert_or_assign(keys, rows)
    )
    rates["find_or_insert, full"] = timed.write_rate(
        timed.new, lambda keys: table.find_or_insert(keys, rows, out=rows)
    )
    timed.first = timed.end - 8 * CALL
    rates["find_rows, load 1.0"] = timed.find_rate(clock, table.find_rows)
    check(table, timed)
    return rates


def check(table: Table, timed: TimedTable) -> None:
    """Raise AssertionError unless the last keys have the last rows."""
    keys = cupy().arange(timed.end - CALL, timed.end)
    found = table.find(keys)
    assert float(found.found.mean()) > 0.99
    assert bool((found.rows[found.found] == timed.rows[found.found]).all())


def measure_numbers(dim: int, capacity: int) -> dict[str, Any]:
    """Return B keys/s of the GPU cache's row numbers."""
    rates: dict[str, Any] = {"dim": dim}
    for load in LOADS:
        filled = FilledTable.make(dim, capacity, load=min(load, 0.75))
        if load == 1:
            filled.overfill(capacity)
            filled.first, filled.held = int(capacity * 1.2), capacity // 10
        rates[f"numbers, load {load}"] = CALL / filled.fetch_time(CALL, form=launch.NUMBERS) / 1e9
        filled.close()
    return rates


def measure_growth(dim: int, capacity: int) -> dict[str, Any]:
    """Return milliseconds of a growth, and of a copy of the rows held."""
    cp, grown, copied = cupy(), [], []
    stream = cp.cuda.get_current_stream()
    for _ in range(5):
        timed = TimedTable(dim, capacity // 2, max_capacity=capacity, max_load_factor=1.0)
        timed.fill(capacity // 4)
        stream.synchronize()
        start = time.perf_counter()
        timed.table.reserve(capacity)
        stream.synchronize()
        grown.append(time.perf_counter() - start)
        source = timed.table.rows[: timed.table.size]
        target = cp.empty_like(source)
        stream.synchronize()
        start = time.perf_counter()
        target[:] = source
        stream.synchronize()
        copied.append(time.perf_counter() - start)
        del timed, source, target
        cp.get_default_memory_pool().free_all_blocks()
    return {
        "dim": dim,
        "growth ms": statistics.median(grown) * 1e3,
        "copy ms": statistics.median(copied) * 1e3,
        "growth / copy": statistics.median(grown) / statistics.median(copied),
    }


def judge(
    values: dict[str, float], rates: dict[str, Any], numbers: dict[str, Any], hkv: Any
) -> None:
    dim = rates["dim"]
    for name in WRITES:
        values[f"{name}_{dim}"] = rates[name] / hkv[name]
    for load in LOADS:
        theirs = hkv["find*" if load == 0.75 else f"find*, load {load}"]
        for bar, ours in (
            (f"find_rows_{load}", rates[f"find_rows, load {load}"]),
            (f"numbers_{load}", numbers[f"numbers, load {load}"]),
        ):
            values[bar] = min(values.get(bar, np.inf), ours / theirs)


def run(options: Options) -> Report:
    cp, report = cupy(), Report()
    cp.random.seed(options.seed)
    report.figures["device"] = cp.cuda.runtime.getDeviceProperties(0)["name"].decode()
    report.figures["versions"] = versions("numpy", "cupy-cuda12x", "cupy-cuda13x")
    if why := peers.build(("hkv",)).get("hkv"):
        report.notes.append(f"hkv was not run: {why}.")
    capacity, dims = (8 << 20, DIMS[:1]) if options.quick else (64 << 20, DIMS)
    tables: dict[str, list[dict[str, Any]]] = {}
    for dim in dims:
        rates = measure_table(dim, capacity)
        cp.get_default_memory_pool().free_all_blocks()
        numbers = measure_numbers(dim, capacity)
        growth = measure_growth(dim, capacity)
        report.values[f"growth_{dim}"] = growth["growth / copy"]
        hkv = peers.figures("hkv", dim, capacity)
        if hkv:
            judge(report.values, rates, numbers, hkv)
        for title, row in (
            ("hps.table, B keys/s", rates),
            ("GPU cache, B keys/s", numbers),
            ("HierarchicalKV, B keys/s", {"dim": dim, **hkv}),
            ("growth", growth),
        ):
            tables.setdefault(title, []).append(row)
    report.tables.update(tables)
    return report


BENCHMARK = Benchmark(
    name="gpu_table",
    title="The table library on a GPU against HierarchicalKV",
    run=run,
    bars=BARS,
    measured=("hps/cuda", "hps/table", "hps/tiers/gpu"),
    helpers=(
        *("benchmarks/common.py", "benchmarks/measure.py", "benchmarks/gpu.py"),
        *(f"benchmarks/peers/gpu{name}" for name in (".py", "_common.cuh", "_hkv.cu")),
    ),
    missing_requirement=missing_requirement,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
