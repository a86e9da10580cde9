"""The GPU cache's public calls against its kernel alone: `GpuCache.fetch` and `Node.lookup_on_device`.

Keys are random among all rows of a table, on the device or on the host; vectors stay on the device. Times
are those of whole calls by the host's clock, medians, with an idle device before each. `direct` is
`cache.direct`, which launches the kernel for device keys, and a wait for its end. The host's time of a call
is its time less the time in which it waits for the device. Calls with host keys are compared with a copy of
the keys from pinned memory and `direct`; a copy from ordinary memory, where callers have them, is shown
beside it. Rows missing on the device are in the CPU cache."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import hps
from benchmarks.common import Bar, Benchmark, Options, Report, main
from benchmarks.gpu import DeviceClock
from benchmarks.measure import versions
from hps.config.model_schema import FeatureSpec, ModelSpec, TableSpec
from hps.cuda import fetch, vector_fetch
from hps.cuda.loader import cupy, missing_requirement
from hps.models.version_writer import write_version
from hps.tiers.base import FetchContext, Part

ROWS = {32: 2_000_000, 128: 500_000}
SIZES = (1000, 10_000, 100_000, 1_000_000)
LARGE = 100_000
MISSING = (0.0, 0.05, 0.3)
SETS = 8

BARS = (
    *(
        Bar(f"{call}_{dim}_{n}", f"{text} / direct, dim {dim}, {n:,} keys", at_most=1.1)
        for call, text in (
            ("fetch", "fetch, device keys"),
            ("lookup", "lookup_on_device, device keys"),
        )
        for dim in ROWS
        for n in SIZES
        if n >= LARGE
    ),
    *(
        Bar(f"{call}_us", f"{text}: host's time below {LARGE:,} keys, µs", at_most=15.0)
        for call, text in (("fetch", "fetch"), ("lookup", "lookup_on_device"))
    ),
    *(
        Bar(
            f"host_{call}_{dim}_{n}",
            f"{call}, host keys / bus copy + direct, dim {dim}, {n:,} keys",
            at_most=1.1,
        )
        for call in ("fetch", "lookup")
        for dim in ROWS
        for n in SIZES
        if n >= LARGE
    ),
    Bar("missing_30", "lookup_on_device, dim 32, 30 % missing, M keys/s", at_least=400.0),
)


@dataclass
class Opened:
    """A node on one table, ``m.t``, and its parts."""

    node: Any
    cache: Any
    table: Any
    rows: int

    @staticmethod
    def make(folder: str, dim: int, gpu: dict[str, Any], name: str) -> Opened:
        tiers = {
            "gpu": {"use": "required", "capacity_bytes": 1 << 32, **gpu},
            "cpu_cache": {"share": 1.0},
            "rocksdb": {"path": f"{folder}/{name}"},
        }
        node = hps.open({"models": {"repository": f"{folder}/{dim}"}, "tiers": tiers})
        cache = node.model("m").on_devices[0].cache
        return Opened(node, cache, node.model("m").tables["t"], ROWS[dim])


def write_model(folder: Path, dim: int) -> None:
    rng = np.random.default_rng(dim)
    spec = ModelSpec(
        name="m",
        max_batch_size=max(SIZES),
        tables=[TableSpec(name="t", dim=dim)],
        features=[FeatureSpec(name="t", table="t", hotness=1)],
    )
    keys = np.arange(ROWS[dim])
    write_version(
        folder / str(dim), spec, 1, {"t": (keys, rng.random((len(keys), dim), np.float32))}
    )


def median_us(call: Callable[[Any], Any], sets: list[Any], calls: int) -> float:
    """Median microseconds of ``call`` on the host's clock, the device idle before each call."""
    times, stream = [], cupy().cuda.get_current_stream()
    for i in range(calls + 10):
        stream.synchronize()
        start = time.perf_counter()
        call(sets[i % len(sets)])
        times.append(time.perf_counter() - start)
    return statistics.median(times[10:]) * 1e6


def host_us(call: Callable[[Any], Any], sets: list[Any], calls: int) -> float:
    """Median microseconds of ``call`` in which the host does not wait for the device."""
    from hps.native import launching  # of the compiled core

    modules, waits, times = (fetch, vector_fetch), [0.0], []
    wait_for_event = launching.wait_for_event

    def timed_wait(event: int) -> None:
        start = time.perf_counter()
        wait_for_event(event)
        waits[0] += time.perf_counter() - start

    for module in modules:
        setattr(module, "wait_for_event", timed_wait)  # noqa: B010 # for type checkers
    try:
        for i in range(calls + 10):
            waits[0], start = 0.0, time.perf_counter()
            call(sets[i % len(sets)])
            times.append(time.perf_counter() - start - waits[0])
    finally:
        for module in modules:
            setattr(module, "wait_for_event", wait_for_event)  # noqa: B010 # likewise
    return statistics.median(times[10:]) * 1e6


class Calls:
    """The compared calls for ``n`` keys of ``opened``."""

    def __init__(self, opened: Opened, n: int, seed: int) -> None:
        cp, rng = cupy(), np.random.default_rng(seed)
        self.opened, self.n, self.count = opened, n, 20 if n > LARGE else 100
        self.held = opened.cache.held(opened.table)
        self.host = [rng.integers(0, opened.rows, n) for _ in range(SETS)]
        self.device = [cp.asarray(keys) for keys in self.host]
        self.copied = cp.empty(n, np.int64)
        self.pinned = cp.cuda.alloc_pinned_memory(8 * n)
        self.out = cp.empty((n, opened.table.dim), np.float32)
        self.misses = cp.zeros(4 + n, np.uint32)
        self.missing = np.arange(n)
        self.stream = cp.cuda.get_current_stream()

    def direct(self, keys: Any) -> None:
        self.opened.cache.direct.fetch(self.held, keys, self.out, self.misses)
        self.stream.synchronize()

    def fetch(self, keys: Any) -> None:
        unused: Any = None
        part = Part(self.opened.table, keys, self.out, unused, unused, self.missing)
        self.opened.cache.fetch([part], FetchContext())

    def lookup(self, keys: Any) -> None:
        self.opened.node.lookup_on_device("m", {"t": keys})

    def bus_copy(self, _keys: Any) -> None:
        copy = cupy().cuda.runtime.memcpyAsync
        copy(self.copied.data.ptr, self.pinned.ptr, 8 * self.n, 1, self.stream.ptr)
        self.stream.synchronize()

    def plain_copy(self, keys: Any) -> None:
        cupy().asarray(keys)
        self.stream.synchronize()

    def kernel_us(self) -> float:
        """Microseconds of the kernel on the device."""
        turn = iter(range(1 << 30))

        def launch(keys: Any) -> None:
            self.opened.cache.direct.fetch(self.held, keys, self.out, self.misses)

        return DeviceClock().median(lambda: self.device[next(turn) % SETS], launch) * 1e6


def measure_resident(report: Report, opened: Opened, seed: int) -> None:
    dim, rows = opened.table.dim, []
    for n in SIZES:
        calls = Calls(opened, n, seed)
        kernel = calls.kernel_us()
        direct = median_us(calls.direct, calls.device, calls.count)
        bus = median_us(calls.bus_copy, calls.host, calls.count)
        plain = median_us(calls.plain_copy, calls.host, calls.count)
        row = {"dim": dim, "keys": n, "kernel µs": kernel, "direct µs": direct, "bus copy µs": bus}
        row["bus copy, ordinary memory, µs"] = plain
        for name, call in (("fetch", calls.fetch), ("lookup", calls.lookup)):
            on_device = median_us(call, calls.device, calls.count)
            on_host = median_us(call, calls.host, calls.count)
            row |= {f"{name}, device keys µs": on_device, f"{name}, host keys µs": on_host}
            if n >= LARGE:
                report.values[f"{name}_{dim}_{n}"] = on_device / direct
                report.values[f"host_{name}_{dim}_{n}"] = on_host / (bus + direct)
            else:
                own = host_us(call, calls.device, calls.count)
                row[f"{name}, device keys: host's µs"] = own
                report.values[f"{name}_us"] = max(report.values.get(f"{name}_us", 0.0), own)
        rows.append(row)
    report.tables.setdefault("all rows on the device, median µs of a call", []).extend(rows)


def measure_missing(report: Report, opened: Opened, share: float, seed: int) -> None:
    rows = []
    for n in SIZES:
        calls = Calls(opened, n, seed)
        row: dict[str, Any] = {"missing": share, "keys": n}
        for where, sets in (("device", calls.device), ("host", calls.host)):
            took = median_us(calls.lookup, sets, calls.count)
            row |= {f"{where} keys µs": took, f"{where} keys, M/s": n / took}
        rows.append(row)
        if share == max(MISSING) and n == max(SIZES):
            report.values["missing_30"] = min(row["device keys, M/s"], row["host keys, M/s"])
    check_rows(opened, calls)
    report.tables.setdefault("lookup_on_device, dim 32, rows missing on the device", []).extend(
        rows
    )


def check_rows(opened: Opened, calls: Calls) -> None:
    """Compare the vectors of a large call with those of the host."""
    keys = calls.host[0][:LARGE]
    expected = opened.node.lookup("m", {"t": keys}).vectors["t"]
    for mine in (keys, calls.device[0][:LARGE]):
        got = opened.node.lookup_on_device("m", {"t": mine}).vectors["t"].get()
        np.testing.assert_array_equal(got, expected)


def run(options: Options) -> Report:
    report = Report()
    report.figures["device"] = cupy().cuda.runtime.getDeviceProperties(0)["name"].decode()
    report.figures["versions"] = versions("numpy", "cupy-cuda12x", "cupy-cuda13x")
    dims = (32,) if options.quick else tuple(ROWS)
    with tempfile.TemporaryDirectory() as folder:
        for dim in dims:
            write_model(Path(folder), dim)
        plan: list[tuple[int, dict[str, Any], float]] = [(d, {"static": True}, 0.0) for d in dims]
        plan += [(32, {"share": 1 - share}, share) for share in MISSING if share]
        for number, (dim, gpu, share) in enumerate(plan):
            with ExitStack() as stack:
                opened = Opened.make(folder, dim, gpu, f"db{number}")
                stack.callback(opened.node.close)
                if share:
                    measure_missing(report, opened, share, options.seed)
                else:
                    measure_resident(report, opened, options.seed)
                    if dim == 32:
                        measure_missing(report, opened, 0.0, options.seed)
    return report


BENCHMARK = Benchmark(
    name="gpu_public_path",
    title="The GPU cache's public calls against its kernel alone",
    run=run,
    bars=BARS,
    measured=(
        "hps/cuda",
        "hps/tiers/gpu",
        "hps/lookup/gpu",
        *("hps/native/src/miss_gather.cpp", "hps/native/src/worker_pool.cpp"),
        *("hps/node/node.py", "hps/array_inputs.py"),
    ),
    helpers=("benchmarks/common.py", "benchmarks/measure.py", "benchmarks/gpu.py"),
    missing_requirement=missing_requirement,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
