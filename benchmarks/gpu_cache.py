"""Fetches from the GPU cache, against a gather by known row numbers, NVE's ecache, HierarchicalKV and HPS.

The keys of each call are fresh and random among the keys held. A *packed* table has as many slots as rows and
is three quarters full here. A table *as planned* is what a node makes of one that fits
(`hps/tiers/gpu/plan.py`): it has more slots, and all rows are resident. Peers are compared with packed ones.
Reads are timed by CUDA events around the product's own launch, medians of 30 calls after a warm-up, with the
device kept busy before each so that the host's launch is not in them; writes by the host's clock. The
peers run in the same run, each in a separate process with the same keys (`benchmarks/peers/gpu.py`). NVE has
two lookups; the faster one at each dim is the bar. HierarchicalKV with half of its rows in host memory is
measured at our size; its 0.19 billion keys/s at a larger size is used if that is more.
The floor is the fastest gather by known row numbers among many shapes and cache policies, sought in the same
run for each size (`benchmarks/gpu_gather.py`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.common import Bar, Benchmark, Options, Report, main
from benchmarks.gpu import (
    CALL,
    NOW,
    SMALL_CALL,
    FilledTable,
    device_part,
    percentiles,
)
from benchmarks.gpu_fetch_during_writes import measure_with_writer
from benchmarks.gpu_policies import measure_hit_rates, measure_policies
from benchmarks.measure import versions
from benchmarks.peers import gpu as peers
from hps.cuda import launch
from hps.cuda.loader import cupy, missing_requirement
from hps.tiers.base import FetchContext
from hps.tiers.cpu.cache import CpuCache
from hps.tiers.gpu.cache import GpuCache
from hps.tiers.gpu.host_bridge import HostBridge
from hps.types import EmbeddingTable

SMALL, LARGE = 4 << 20, 64 << 20
DIMS = (8, 32, 64, 128)
NVE = {8: 1.3, 32: 1.1, 64: 1.03, 128: 1.05}
HKV = {8: 2.7, 32: 2.15, 64: 1.5}
HKV_HYBRID = 0.19
FLOOR = {8: 0.5, 32: 0.75, 64: 0.86, 128: 0.95}
WRITES = {
    "insert, full": ("insert_and_evict", 1.5, "insert at a full table / HKV insert_and_evict"),
    "update": ("assign", 1.0, "update of resident rows / HKV assign"),
    "contains": ("contains", 1.0, "contains / HKV contains"),
    "export": ("export_batch", 1.0, "export / HKV export_batch"),
}

BARS = (
    *(Bar(f"nve_{d}", f"fetch / NVE, dim {d}, 4 M rows", at_least=r) for d, r in NVE.items()),
    *(
        Bar(f"ticking_{d}", f"clock ticking with every call / still, dim {d}", at_least=0.85)
        for d in DIMS
    ),
    *(Bar(f"hkv_{d}", f"fetch / HKV find, dim {d}, 64 M rows", at_least=r) for d, r in HKV.items()),
    Bar("hps_32", "fetch / HPS query, dim 32, 64 M rows", at_least=12.5),
    *(
        Bar(
            f"floor_{d}",
            f"fetch / fastest row gather, dim {d}, 4 M rows, all resident, as planned",
            at_least=ratio,
        )
        for d, ratio in FLOOR.items()
    ),
    Bar("hkv_numbers", "row numbers only / HKV find*, worst dim", at_least=1.3),
    Bar("small_32", "26,624 keys, dim 32, µs", at_most=9.0),
    Bar("small_128", "26,624 keys, dim 128, µs", at_most=13.0),
    Bar("static", "static mode / dynamic, worst dim, 4 M rows", at_least=1.0),
    Bar("static_hps_32", "static mode / HPS static table, dim 32", at_least=2.5),
    Bar("beside_writer", "fetch, 1 % of rows written between two / quiet", at_least=0.8),
    *(
        Bar(f"hkv_{theirs}_{d}", f"{text}, dim {d}", at_least=ratio)
        for theirs, ratio, text in WRITES.values()
        for d in DIMS[:3]
    ),
    Bar("hit_rate", "points of hit rate below exact LRU, worst case", at_most=1.0),
    *(
        Bar(
            f"pinned_{d}",
            f"rows in pinned host memory / copy rate of the bus, dim {d}",
            at_least=0.85,
        )
        for d in (32, 64)
    ),
    Bar("hybrid_hkv", "half of the rows there / HKV, half of its rows there, dim 64", at_least=1.0),
    Bar(
        "host_2000",
        "2,000 host keys x 16, 85 % hits, rest from the CPU cache, p50 ms",
        at_most=0.15,
    ),
)


def measure_fetch(report: Report, capacity: int, dims: tuple[int, ...]) -> None:
    """Fetches from packed tables, three quarters full."""
    rows = []
    for dim in dims:
        filled = FilledTable.make(dim, capacity)
        filled.settle()
        row, still = fetch_row(filled)
        ticking = filled.fetch_time(CALL, advance="ticks")
        age = filled.cache.held(filled.table).clock.age
        stamping = filled.fetch_time(CALL, advance="ticks", by=age)
        row |= {"ticking B/s": CALL / ticking / 1e9, "every hit stamps B/s": CALL / stamping / 1e9}
        if capacity == SMALL:
            report.values[f"ticking_{dim}"] = still / ticking
            if dim in (32, 128):
                report.values[f"small_{dim}"] = row["26,624: fetch µs"]
            if dim == 32:
                report.values["beside_writer"] = measure_with_writer(report, filled, still)
            row["static B/s"] = fetch_static(report, dim, still)
        filled.close()
        del filled
        rows.append(row | against_peers(report, dim, capacity, row))
    report.tables[f"{CALL:,} keys, {capacity >> 20} M rows, packed, three quarters full"] = rows


def measure_planned(report: Report, capacity: int, dims: tuple[int, ...]) -> None:
    """Fetches from tables as a node makes them if they fit: all rows resident, ample slots."""
    rows, load = [], 0.0
    for dim in dims:
        filled = FilledTable.planned(dim, capacity)
        filled.settle()
        load = filled.cache.held(filled.table).shape.load
        row, _ = fetch_row(filled)
        filled.close()
        rows.append(row)
        if capacity == SMALL:
            report.values[f"floor_{dim}"] = row["fetch / floor"]
    title = (
        f"{CALL:,} keys, {capacity >> 20} M rows, all resident, {load:.2f} rows a slot as planned"
    )
    report.tables[title] = rows


def fetch_row(filled: FilledTable) -> tuple[dict[str, Any], float]:
    """The rates of ``filled`` beside its floor, and the seconds of a fetch of `CALL` keys."""
    (floor, gather), still = filled.floor_time(CALL), filled.fetch_time(CALL)
    numbers = filled.fetch_time(CALL, form=launch.NUMBERS)
    return {
        "dim": filled.table.dim,
        "floor B/s": CALL / floor / 1e9,
        "floor's threads x rows": f"{gather.threads} x {gather.rows}",
        "fetch B/s": CALL / still / 1e9,
        "fetch / floor": floor / still,
        "numbers B/s": CALL / numbers / 1e9,
        "26,624: fetch µs": filled.fetch_time(SMALL_CALL) * 1e6,
    }, still


def fetch_static(report: Report, dim: int, dynamic: float) -> float:
    filled = FilledTable.make(dim, SMALL, static=True)
    took = filled.fetch_time(CALL)
    filled.close()
    worst = report.values.get("static", np.inf)
    report.values["static"] = min(worst, dynamic / took)
    if dim == 32 and (theirs := peers.figures("hps", dim, SMALL)):
        report.values["static_hps_32"] = CALL / took / 1e9 / theirs["static query"]
    return CALL / took / 1e9


def against_peers(
    report: Report, dim: int, capacity: int, ours: Mapping[str, Any]
) -> dict[str, Any]:
    """The peers' fetches at this size, judged against ``ours``, a row of `fetch_row`."""
    row, rate, values = {}, ours["fetch B/s"], report.values
    if capacity == SMALL:
        nve = peers.figures("nve", dim, capacity)
        if nve:
            report.tables.setdefault("NVE, B keys/s, 4 M rows", []).append({"dim": dim, **nve})
            values[f"nve_{dim}"] = rate / max(nve["lookup"], nve["lookup, table behind"])
        return row
    if dim in HKV and (hkv := peers.figures("hkv", dim, capacity)):
        report.tables.setdefault("HierarchicalKV, B keys/s, 64 M rows", []).append(
            {"dim": dim, **hkv}
        )
        values[f"hkv_{dim}"] = rate / hkv["find"]
        numbers = ours["numbers B/s"] / hkv["find*"]
        values["hkv_numbers"] = min(values.get("hkv_numbers", np.inf), numbers)
    if hps := peers.figures("hps", dim, capacity):
        report.tables.setdefault("HPS, B keys/s, 64 M rows", []).append({"dim": dim, **hps})
        row["HPS B/s"] = hps["query"]
        if dim == 32:
            values["hps_32"] = rate / hps["query"]
    return row


def measure_writes(report: Report, capacity: int, dims: tuple[int, ...]) -> None:
    rows: list[dict[str, Any]] = []
    for dim in dims:
        filled, cp = FilledTable.make(dim, capacity), cupy()
        rates: dict[str, Any] = {"dim": dim}
        rates["update"] = filled.write_rate("update", 20)
        rates["contains"] = CALL / filled.fetch_time(CALL, form=launch.NUMBERS) / 1e9
        rates["insert, load 0.75"] = filled.write_rate("insert", 4, new=True)
        rates["export"] = filled.export_rate(20)
        rates["find_or_insert, load 0.75"] = filled.write_rate("find_or_insert", 4, new=True)
        cp.get_default_memory_pool().free_all_blocks()
        filled.overfill(capacity)
        rates["insert, full"] = filled.write_rate("insert", 20, new=True)
        rates["find_or_insert, full"] = filled.write_rate("find_or_insert", 20, new=True)
        rows.append(rates)
        filled.close()
    report.tables[f"B rows/s, {CALL:,} keys a call, {capacity >> 20} M rows"] = rows
    theirs = {
        row["dim"]: row for row in report.tables.get("HierarchicalKV, B keys/s, 64 M rows", [])
    }
    for row in rows:
        for ours, (name, _, _) in WRITES.items():
            if hkv := theirs.get(row["dim"]):
                report.values[f"hkv_{name}_{row['dim']}"] = row[ours] / hkv[name]


def measure_pinned(report: Report) -> None:
    """Fetches of rows in pinned host memory.

    The bar is the copy of one large block; a gather by known row numbers shows the bus rate for random
    rows."""
    rows = []
    for name, dim, host_rows in (
        ("no rows in pinned host memory", 32, 0),
        ("all rows there", 32, SMALL),
        ("all rows there", 64, SMALL),
        ("half of the rows there", 64, SMALL // 2),
    ):
        filled = FilledTable.make(dim, SMALL, host_rows=host_rows)
        filled.settle()
        rate = CALL / filled.fetch_time(CALL) / 1e9
        all_there = host_rows == SMALL
        first = filled.cache.held(filled.table).shape.device_rows if all_there else 0
        gathered = CALL / filled.gather_time(CALL, first) / 1e9
        filled.close()
        row = {"table": name, "dim": dim, "fetch B/s": rate, "gather B/s": gathered}
        row |= {"fetch / gather": rate / gathered, "HKV B/s": "–"}
        rows.append(row)
        if all_there:
            copied = bus_rate(filled)
            report.figures["copy from pinned memory, GB/s"] = copied
            report.values[f"pinned_{dim}"] = rate * 4 * dim / copied
        elif host_rows and (hkv := peers.figures("hkv", dim, SMALL, "half")):
            row["HKV B/s"] = hkv["find"]
            report.values["hybrid_hkv"] = rate / max(hkv["find"], HKV_HYBRID)
    report.tables["rows in pinned host memory, 4 M rows, three quarters full"] = rows


def bus_rate(filled: FilledTable) -> float:
    """GB/s of a large copy from pinned host memory."""
    cp, size = cupy(), 1 << 28
    pinned, there = cp.cuda.alloc_pinned_memory(size), cp.empty(size, np.uint8)
    stream = cp.cuda.get_current_stream()
    took = filled.clock.median(
        lambda: None,
        lambda _: cp.cuda.runtime.memcpyAsync(there.data.ptr, pinned.ptr, size, 1, stream.ptr),
    )
    return size / took / 1e9


def measure_host(report: Report) -> None:
    """Lookups with host keys and vectors on the device; misses come from the CPU cache by the host bridge."""
    cp, rng = cupy(), np.random.default_rng(1)
    table = EmbeddingTable.make("bench", 16)
    gpu, cpu = GpuCache({table: 1_300_000}), CpuCache({table: 2_000_000})
    bridge = HostBridge(cpu)
    keys = np.arange(1_000_000)
    rows = rng.random((len(keys), 16), np.float32)
    stamps = np.full(len(keys), NOW, np.uint64)
    cpu.insert(table, keys, rows, stamps)
    gpu.insert(table, keys[:850_000], rows[:850_000], stamps[:850_000])
    stream, times = cp.cuda.get_current_stream(), []
    parts = [device_part(table, np.unique(rng.choice(len(keys), 2002))) for _ in range(400)]
    for part in parts:
        stream.synchronize()
        start, context = time.perf_counter(), FetchContext()
        gpu.fetch([part], context)
        bridge.fetch([part], context)
        stream.synchronize()
        times.append(time.perf_counter() - start)
    assert len(part.missing) == 0
    report.values["host_2000"] = percentiles(times)["p50 ms"]
    report.figures["host_2000_p99_ms"] = percentiles(times)["p99 ms"]


def run(options: Options) -> Report:
    cp = cupy()
    cp.random.seed(options.seed)
    report = Report()
    name = cp.cuda.runtime.getDeviceProperties(0)["name"].decode()
    report.figures["device"] = name
    report.figures["versions"] = versions(
        "numpy", "cupy-cuda12x", "cupy-cuda13x", "onnxruntime-gpu"
    )
    for peer, why in peers.build().items():
        report.notes.append(f"{peer} was not run: {why}.")
    dims = (8, 32) if options.quick else DIMS
    for capacity in (SMALL,) if options.quick else (SMALL, LARGE):
        measure_fetch(report, capacity, dims)
        measure_planned(report, capacity, dims)
    measure_writes(report, SMALL if options.quick else LARGE, dims[:3])
    measure_policies(report, SMALL)
    measure_pinned(report)
    measure_hit_rates(report, options.seed)
    measure_host(report)
    return report


BENCHMARK = Benchmark(
    name="gpu_cache",
    title="The GPU cache against the row gather, NVE, HierarchicalKV and HPS",
    run=run,
    bars=BARS,
    measured=(
        "hps/cuda",
        "hps/tiers/gpu",
    ),
    helpers=(
        *("benchmarks/common.py", "benchmarks/measure.py", "benchmarks/gpu.py"),
        *("benchmarks/gpu_gather.py", "benchmarks/gpu_gather.cu"),
        "benchmarks/gpu_fetch_during_writes.py",
        "benchmarks/gpu_policies.py",
        *(f"benchmarks/peers/gpu{name}" for name in (".py", "_common.cuh")),
        *(f"benchmarks/peers/gpu_{peer.name}.cu" for peer in peers.PEERS),
    ),
    missing_requirement=missing_requirement,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
