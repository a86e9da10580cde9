"""The GPU cache's public calls against its kernel alone: fetches, lookups and predictions on a device.

Keys are random among all rows of a table, on the device or on the host; vectors stay on the device. Times
are those of whole calls by the host's clock, medians, with an idle device before each. `direct` is
`cache.direct`, which launches the kernel for device keys, and a wait for its end. The host's time of a call
is its time less the time in which it waits for the device, while calls follow one another; `bare launch` is
that of the driver's calls alone, a launch and an event, which the machine decides. Calls with host keys are
compared with `direct` and a copy of the keys over the bus before it: from pinned memory, or from ordinary
memory (`cupy.asarray`), where callers have them. Rows missing on the device are in the CPU cache."""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import hps
from benchmarks.common import Bar, Benchmark, Options, Report, main
from benchmarks.gpu import DeviceClock
from benchmarks.gpu_public_fill import BARS as FILL_BARS
from benchmarks.gpu_public_fill import measure_fill
from benchmarks.gpu_public_predict import BARS as PREDICT_BARS
from benchmarks.gpu_public_predict import measure_predictions
from benchmarks.host_clock import host_us, median_us
from benchmarks.measure import versions
from hps.config.model_schema import FeatureSpec, ModelSpec, TableSpec
from hps.cuda.loader import cupy, missing_requirement
from hps.models.version_writer import write_version
from hps.tiers.base import FetchContext, Part

ROWS = {32: 2_000_000, 128: 500_000}
SIZES = (1000, 10_000, 100_000, 1_000_000)
LARGE = 100_000
MISSING = (0.0, 0.05, 0.3)
SETS = 8
FILL_PAUSE_S = 1.0

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
            f"{memory}_{call}_{dim}_{n}",
            f"{call}, host keys / (bus copy from {memory} memory + direct), dim {dim}, {n:,} keys",
            at_most=1.1,
        )
        for memory in ("ordinary", "pinned")
        for call in ("fetch", "lookup")
        for dim in ROWS
        for n in SIZES
        if n >= LARGE
    ),
    Bar("missing_30", "lookup_on_device, dim 32, 30 % missing, M keys/s", at_least=400.0),
    *PREDICT_BARS,
    *FILL_BARS,
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
        opened = Opened(node, cache, node.model("m").tables["t"], ROWS[dim])
        opened.wait_for_fill()
        return opened

    def wait_for_fill(self) -> None:
        """Wait until the cache, which a node fills in the background, gets no more rows."""
        before, now = -1, self.cache.size(self.table)
        while now != before:
            time.sleep(FILL_PAUSE_S)
            before, now = now, self.cache.size(self.table)


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


class Calls:
    """The compared calls for ``n`` keys of ``opened``."""

    def __init__(self, opened: Opened, n: int, seed: int) -> None:
        cp, rng = cupy(), np.random.default_rng(seed)
        self.opened, self.n, self.count = (
            opened,
            n,
            20 if n > LARGE else 100,
        )
        self.held = opened.cache.held(opened.table)
        self.host = [rng.integers(0, opened.rows, n) for _ in range(SETS)]
        self.device = [cp.asarray(keys) for keys in self.host]
        self.copied = cp.empty(n, np.int64)
        self.pinned = cp.cuda.alloc_pinned_memory(8 * n)
        self.out = cp.empty((n, opened.table.dim), np.float32)
        self.misses = cp.zeros(4 + n, np.uint32)
        self.missing = np.arange(n)
        self.stream = cp.cuda.get_current_stream()
        self.prepared = opened.cache.prepare_vectors([(opened.table, n)], [0], [True])

    def direct(self, keys: Any) -> None:
        self.opened.cache.direct.fetch(self.held, keys, self.out, self.misses)
        self.stream.synchronize()

    def fetch(self, keys: Any) -> None:
        unused: Any = None
        part = Part(self.opened.table, keys, self.out, unused, unused, self.missing)
        self.opened.cache.fetch([part], FetchContext())

    def lookup(self, keys: Any) -> None:
        self.opened.node.lookup_on_device("m", {"t": keys})

    def bare_launch(self, keys: Any) -> None:
        self.prepared.launch(self.stream, self.out.data.ptr, [keys])
        self.prepared.chunks[0].wait(self.stream)

    def bus_copy(self, _keys: Any) -> None:
        copy = cupy().cuda.runtime.memcpyAsync
        copy(self.copied.data.ptr, self.pinned.ptr, 8 * self.n, 1, self.stream.ptr)
        self.stream.synchronize()

    def plain_copy(self, keys: Any) -> None:
        cupy().asarray(keys)
        self.stream.synchronize()

    def kernel_us(self) -> float:
        """Return microseconds of the kernel on the device."""
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
        row = {"dim": dim, "keys": n, "kernel µs": kernel, "direct µs": direct}
        row |= {"bus copy, pinned memory, µs": bus, "bus copy, ordinary memory, µs": plain}
        row["bare launch µs"] = median_us(calls.bare_launch, calls.device, calls.count)
        row["bare launch: host's µs"] = host_us(calls.bare_launch, calls.device, calls.count)
        for name, call in (("fetch", calls.fetch), ("lookup", calls.lookup)):
            on_device = median_us(call, calls.device, calls.count)
            on_host = median_us(call, calls.host, calls.count)
            row |= {f"{name}, device keys µs": on_device, f"{name}, host keys µs": on_host}
            if n >= LARGE:
                report.values[f"{name}_{dim}_{n}"] = on_device / direct
                for memory, copied in (("ordinary", plain), ("pinned", bus)):
                    report.values[f"{memory}_{name}_{dim}_{n}"] = on_host / (copied + direct)
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
    measure_predictions(report, options.seed, quick=options.quick)
    with tempfile.TemporaryDirectory() as folder:
        measure_fill(report, Path(folder), options.seed, quick=options.quick)
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
        *("hps/native/src/fetch_launch.cpp", "hps/native/src/miss_gather.cpp"),
        *("hps/native/src/worker_pool.cpp", "hps/predict", "hps/dense"),
        *("hps/node/node.py", "hps/array_inputs.py"),
    ),
    helpers=(
        *("benchmarks/common.py", "benchmarks/measure.py", "benchmarks/gpu.py"),
        *(
            "benchmarks/gpu_public_fill.py",
            "benchmarks/gpu_public_predict.py",
            "benchmarks/gpu_serving.py",
            "benchmarks/host_clock.py",
        ),
    ),
    missing_requirement=missing_requirement,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
