"""What does a fetch from the GPU cache cost, beside a gather of rows whose numbers are known?

The keys of each call are fresh and random among the keys held; tables are three quarters full. Times are
CUDA events' around the product's own launch, medians of 30 calls after a warm-up, with the device kept
busy before each so that the host's launch is not in them. The floor is measured in the same run.

Peers (NVE's ecache, HierarchicalKV, HugeCTR's gpu_cache and static table) are not built yet: the bars
against them count as unmeasured.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.common import Bar, Benchmark, Options, Report, main
from benchmarks.measure import versions
from hps.cuda import launch
from hps.cuda.loader import cupy, lacking
from hps.tiers.base import FetchContext, Part
from hps.tiers.cpu_cache import CpuCache
from hps.tiers.gpu_cache import GpuCache
from hps.types import EmbeddingTable, make_version

CALL = 1 << 20
SMALL_CALL = 26 * 1024
DIMS = (8, 32, 64, 128)
ROUNDS, WARM_UP = 30, 6
SPIN_CYCLES = 600_000  # a third of a millisecond: more than the host takes for a launch
NOW = make_version(time.time_ns() // 1_000_000)
NVE = {8: 1.3, 32: 1.1, 64: 1.03, 128: 1.05}
HKV = {8: 2.7, 32: 2.15, 64: 1.5}

BARS = (
    *(Bar(f"nve_{d}", f"fetch / NVE, dim {d}, 4 M rows", at_least=r) for d, r in NVE.items()),
    *(
        Bar(f"ticking_{d}", f"clock ticking with every call / still, dim {d}", at_least=0.85)
        for d in DIMS
    ),
    *(Bar(f"hkv_{d}", f"fetch / HKV find, dim {d}, 64 M rows", at_least=r) for d, r in HKV.items()),
    Bar("hps_32", "fetch / HPS query, dim 32, 64 M rows", at_least=12.5),
    Bar("floor_128", "fetch / row gather, dim 128, 64 M rows", at_least=0.97),
    Bar("hkv_numbers", "row numbers only / HKV find*", at_least=1.3),
    Bar("small_32", "26,624 keys, dim 32, µs", at_most=9.0),
    Bar("small_128", "26,624 keys, dim 128, µs", at_most=13.0),
    Bar("beside_writer", "fetch, 1 % of rows written between two / quiet", at_least=0.8),
    Bar("hkv_insert_and_evict", "insert at a full table / HKV insert_and_evict", at_least=1.5),
    Bar("hkv_assign", "update of resident rows / HKV assign", at_least=1.0),
    Bar("hkv_contains", "contains / HKV contains", at_least=1.0),
    Bar("hkv_export", "export / HKV export_batch", at_least=1.0),
    Bar(
        "host_2000",
        "2,000 host keys x 16, 85 % hits, rest from the CPU cache, p50 ms",
        at_most=0.15,
    ),
)


class Clock:
    """Times work on the current stream."""

    def __init__(self) -> None:
        cp = cupy()
        self._spin = cp.RawKernel(
            'extern "C" __global__ void spin(long long n)'
            "{ long long end = clock64() + n; while (clock64() < end); }",
            "spin",
        )
        self._start, self._end = cp.cuda.Event(), cp.cuda.Event()

    def median(self, prepare: Callable[[], Any], work: Callable[[Any], None]) -> float:
        """Seconds that ``work`` of what ``prepare`` returns takes on the device."""
        cp = cupy()
        times = []
        for turn in range(WARM_UP + ROUNDS):
            prepared = prepare()
            self._spin((1,), (1,), (np.int64(SPIN_CYCLES),))
            self._start.record()
            work(prepared)
            self._end.record()
            self._end.synchronize()
            if turn >= WARM_UP:
                times.append(cp.cuda.get_elapsed_time(self._start, self._end) / 1e3)
        return statistics.median(times)


@dataclass
class Filled:
    """A cache of one table that holds most of the keys 0 … held - 1."""

    cache: GpuCache
    table: EmbeddingTable
    held: int
    clock: Clock
    version: int = NOW

    @staticmethod
    def make(dim: int, capacity: int, load: float) -> Filled:
        table = EmbeddingTable.make("bench", dim)
        cache = GpuCache({table: capacity})
        filled = Filled(cache, table, int(capacity * load), Clock())
        for start in range(0, filled.held, CALL):
            filled.insert(np.arange(start, min(start + CALL, filled.held)))
        return filled

    def insert(self, keys: Any, version: int = NOW, verb: str = "insert") -> None:
        cp = cupy()
        keys = cp.asarray(keys)
        vectors = cp.random.random((len(keys), self.table.dim), np.float32)
        stamps = cp.full(len(keys), version, np.uint64)
        getattr(self.cache, verb)(self.table, keys, vectors, stamps)

    def keys(self, n: int) -> Any:
        return cupy().random.randint(0, self.held, n, np.int64)

    def fetch_time(self, n: int, *, form: int = launch.ROWS, ticking: bool = False) -> float:
        cp, held = cupy(), self.cache.held(self.table)
        numbers = form == launch.NUMBERS
        out = cp.empty(n if numbers else (n, self.table.dim), np.uint32 if numbers else np.float32)
        misses = cp.zeros(4 + n, np.uint32)

        def prepare() -> Any:
            held.clock += ticking
            misses[:4] = 0
            return self.keys(n)

        return self.clock.median(
            prepare,
            lambda keys: self.cache.direct.fetch(
                held, keys, out, misses, form=form, stamp=not numbers
            ),
        )

    def settle(self) -> None:
        """Let every row have the current stamp, as when the clock has stood still for a while."""
        cp, held = cupy(), self.cache.held(self.table)
        out, misses = cp.empty((CALL, self.table.dim), np.float32), cp.zeros(4 + CALL, np.uint32)
        for start in range(0, self.held, CALL):
            keys = cp.arange(start, min(start + CALL, self.held))
            self.cache.direct.fetch(held, keys, out, misses)
        cp.cuda.get_current_stream().synchronize()

    def floor_time(self, n: int) -> float:
        cp, held = cupy(), self.cache.held(self.table)
        out = cp.empty((n, self.table.dim), np.float32)
        stream = cp.cuda.get_current_stream()
        return self.clock.median(
            lambda: cp.random.randint(0, held.shape.rows, n, np.uint32),
            lambda numbers: held.gather(stream, numbers, out),
        )


def measure_fetch(report: Report, capacity: int, dims: tuple[int, ...]) -> None:
    rows = []
    for dim in dims:
        filled = Filled.make(dim, capacity, 0.75)
        filled.settle()
        floor, small_floor = filled.floor_time(CALL), filled.floor_time(SMALL_CALL)
        still, small = filled.fetch_time(CALL), filled.fetch_time(SMALL_CALL)
        ticking = filled.fetch_time(CALL, ticking=True)
        numbers = filled.fetch_time(CALL, form=launch.NUMBERS)
        rows.append(
            {
                "dim": dim,
                "floor B/s": CALL / floor / 1e9,
                "fetch B/s": CALL / still / 1e9,
                "ticking B/s": CALL / ticking / 1e9,
                "numbers B/s": CALL / numbers / 1e9,
                "26,624: floor µs": small_floor * 1e6,
                "fetch µs": small * 1e6,
            }
        )
        if capacity == 4 << 20:
            report.values[f"ticking_{dim}"] = still / ticking
            if dim in (32, 128):
                report.values[f"small_{dim}"] = small * 1e6
        elif dim == 128:
            report.values["floor_128"] = floor / still
        if capacity == 4 << 20 and dim == 32:
            report.values["beside_writer"] = beside_writer(report, filled, still)
        filled.cache.close()
        del filled
        cupy().get_default_memory_pool().free_all_blocks()
    report.tables[f"{CALL:,} keys, {capacity >> 20} M rows, three quarters full"] = rows


def beside_writer(report: Report, filled: Filled, quiet: float) -> float:
    """Fetch while another thread writes without a pause, at least 1 % of the rows between any two
    fetches: updates and replacements in turn."""
    cp = cupy()
    hundredth = filled.held // 100
    stop, rounds, new = threading.Event(), 0, filled.held

    def write() -> None:
        nonlocal rounds, new
        with cp.cuda.Stream(non_blocking=True):
            while not stop.is_set():
                if rounds % 2:
                    keys = cp.random.randint(0, filled.held, hundredth, np.int64)
                    filled.insert(keys, NOW + rounds, "update")
                else:
                    filled.insert(cp.arange(new, new + hundredth), NOW + rounds)
                    new += hundredth
                rounds += 1

    usual = sys.getswitchinterval()
    sys.setswitchinterval(2e-5)  # the writer's Python must not hold up the launch that is timed
    writer = threading.Thread(target=write)
    writer.start()
    with cp.cuda.Stream(non_blocking=True):
        held = filled.cache.held(filled.table)
        out = cp.empty((CALL, filled.table.dim), np.float32)
        misses = cp.zeros(4 + CALL, np.uint32)

        def prepare() -> Any:
            done = rounds
            while rounds == done:
                time.sleep(1e-4)
            misses[:4] = 0
            return filled.keys(CALL)

        busy = filled.clock.median(
            prepare, lambda keys: filled.cache.direct.fetch(held, keys, out, misses)
        )
    stop.set()
    writer.join()
    sys.setswitchinterval(usual)
    report.figures["writes of 1 % beside the fetches"] = rounds
    return quiet / busy


def measure_writes(report: Report, capacity: int, dims: tuple[int, ...]) -> None:
    """Writes block the host, so they are timed by the host's clock, input ready on the device."""
    rows = []
    for dim in dims:
        filled = Filled.make(dim, capacity, 0.75)
        rates: dict[str, Any] = {"dim": dim}
        rates["insert, load 0.75"] = _write_rate(filled, "insert", 4, new=True)
        rates["update"] = _write_rate(filled, "update", 10)
        cp = cupy()
        filled.cache.export(filled.table)
        start = time.perf_counter()
        exported = filled.cache.export(filled.table)
        rates["export"] = len(exported[0]) / (time.perf_counter() - start) / 1e9
        del exported
        rates["contains"] = CALL / filled.fetch_time(CALL, form=launch.NUMBERS) / 1e9
        filled.held = int(capacity * 1.3)
        for at in range(int(capacity * 0.8), filled.held, CALL):
            filled.insert(cp.arange(at, at + CALL))
        rates["insert, full"] = _write_rate(filled, "insert", 10, new=True)
        rows.append(rates)
        filled.cache.close()
        del filled
        cp.get_default_memory_pool().free_all_blocks()
    report.tables[f"B rows/s, {CALL:,} keys a call, {capacity >> 20} M rows"] = rows


def _write_rate(filled: Filled, verb: str, calls: int, *, new: bool = False) -> float:
    """B rows/s of ``calls`` calls, each of unique keys and newer than all before."""
    cp, times = cupy(), []
    for _ in range(calls + 1):
        filled.version += 1
        first = (1 << 40) + (filled.version - NOW) * CALL
        keys = cp.arange(first, first + CALL) if new else cp.random.permutation(CALL)
        vectors = cp.random.random((CALL, filled.table.dim), np.float32)
        stamps = cp.full(CALL, filled.version, np.uint64)
        cp.cuda.get_current_stream().synchronize()
        start = time.perf_counter()
        getattr(filled.cache, verb)(filled.table, keys, vectors, stamps, unique=True)
        times.append(time.perf_counter() - start)
    return CALL / statistics.median(times[1:]) / 1e9


def parts_of(table: EmbeddingTable, keys: Any) -> Part:
    cp, n = cupy(), len(keys)
    out = cp.empty((n, table.dim), table.dtype)
    return Part(
        table,
        keys,
        out,
        cp.zeros(n, np.uint64),
        cp.zeros(n, np.uint8),
        np.arange(n, dtype=np.int64),
    )


def percentiles(calls: Iterator[Callable[[], None]]) -> dict[str, float]:
    times = []
    for call in calls:
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    times = sorted(times[len(times) // 10 :])
    return {"p50 ms": statistics.median(times), "p99 ms": times[int(len(times) * 0.99)]}


def measure_host(report: Report) -> None:
    """Host keys in, vectors on the device; misses from the CPU cache go up in one copy."""
    cp, rng = cupy(), np.random.default_rng(1)
    table = EmbeddingTable.make("bench", 16)
    gpu, cpu = GpuCache({table: 1_000_000}), CpuCache({table: 2_000_000})
    keys = np.arange(1_000_000)
    rows = rng.random((len(keys), 16), np.float32)
    stamps = np.full(len(keys), NOW, np.uint64)
    cpu.insert(table, keys, rows, stamps)
    gpu.insert(table, keys[:850_000], rows[:850_000], stamps[:850_000])

    def lookup() -> None:
        part = parts_of(table, rng.choice(len(keys), 2000, replace=True))
        start.append(time.perf_counter())
        gpu.fetch([part], FetchContext())
        below = Part.make(table, part.keys[part.missing])
        cpu.fetch([below], FetchContext())
        part.out[cp.asarray(part.missing)] = cp.asarray(below.out)
        cp.cuda.get_current_stream().synchronize()
        end.append(time.perf_counter())

    start: list[float] = []
    end: list[float] = []
    for _ in range(300):
        lookup()
    times = sorted((np.array(end) - np.array(start))[50:] * 1e3)
    report.values["host_2000"] = float(np.median(times))
    report.figures["host_2000_p99_ms"] = float(times[int(len(times) * 0.99)])
    tables = [EmbeddingTable.make(f"t{i}", 32) for i in range(26)]
    cache = GpuCache(dict.fromkeys(tables, 130_000))
    for each in tables:
        held = np.arange(100_000)
        cache.insert(each, held, np.ones((len(held), 32), np.float32), stamps[: len(held)])
    result = []
    for batch in (1, 64, 1024, 16384):
        asked = [
            [parts_of(t, rng.integers(0, 100_000, batch)) for t in tables]
            for _ in range(200 if batch < 5000 else 40)
        ]
        calls = ((lambda p=parts: cache.fetch(p, FetchContext())) for parts in asked)
        result.append({"batch": batch, **percentiles(calls)})
    report.tables["26 tables x 32, host keys in, device vectors out, all hits"] = result


def run(options: Options) -> Report:
    cp = cupy()
    cp.random.seed(options.seed)
    report = Report()
    name = cp.cuda.runtime.getDeviceProperties(0)["name"].decode()
    report.figures["device"] = name
    report.figures["versions"] = versions("numpy", "cupy-cuda12x", "cupy-cuda13x")
    dims = (8, 32) if options.quick else DIMS
    measure_fetch(report, 4 << 20, dims)
    if not options.quick:
        measure_fetch(report, 64 << 20, dims)
    measure_writes(report, (4 if options.quick else 64) << 20, dims[:3])
    measure_host(report)
    report.notes.append("Peers were not run: the bars against them are unmeasured.")
    return report


BENCHMARK = Benchmark(
    name="gpu_cache",
    title="The GPU cache against the row gather",
    run=run,
    bars=BARS,
    measured=("hps/cuda", "hps/tiers/gpu_cache.py"),
    lacking=lacking,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
