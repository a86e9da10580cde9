"""A server under four times the load that it can answer.

Predictions of 1,024 samples (26 features, 13 dense numbers, a network of 0.5 M parameters in the process).
The server has one core, the load generator another. Its capacity is its closed-loop rate with as many
requests in flight as `server.admission` runs. Overload is a Poisson process of four times that rate, open
loop; over REST and over gRPC. First capacity and overload alternate every few seconds, since a shared machine
is not as fast in one minute as in the next. Then overload lasts for a minute, and capacity is measured again.
A run in which fewer than 3.8 times the capacity were sent fails.

* goodput: answers a second / capacity, each over all of its intervals;
* recovery: capacity after the minute / in the intervals;
* p99: 99th percentile of the minute's accepted / of capacity's, both from the instant a request was
  due;
* refused: the slowest rejection since its request was sent, and whether all had the right code (503,
  UNAVAILABLE);
* memory: the server's most resident bytes in the second half of the minute / in its first quarter;
* health: the slowest answer to a readiness probe, one a second during the minute.

Another server has the default admission settings (`overload_defaults.py`):

* refused: share of the requests that are rejected at 0.8 times the capacity;
* goodput: answers within half a second, at four times the capacity / capacity.

There is no peer: the floor is the same server at its capacity.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np

from benchmarks import overload_defaults
from benchmarks.common import Bar, Benchmark, Options, Report, main
from benchmarks.grpc_load import grpc_closed, grpc_open
from benchmarks.measure import versions
from benchmarks.open_loop import LoadResult, closed_loop, open_loop, poisson
from benchmarks.overload_scene import BATCH, grpc_request, rest_request, write_model
from benchmarks.peers.hps_server import Hps, start_hps
from benchmarks.peers.process import cores

OVERLOAD_FACTOR, DISTINCT = 4.0, 16
# Least load of a valid run, relative to capacity.
OFFERED = 3.8
REJECTED = {"rest": 503, "grpc": grpc.StatusCode.UNAVAILABLE.value[0]}
METHOD = "/inference.GRPCInferenceService/ModelInfer"
# As docs/overload.md recommends for a network in the process: twice the cores, a short wait.
RUNNING, MAX_WAIT_MS = 2, 10.0

BARS = tuple(
    bar
    for protocol, name in (("rest", "REST"), ("grpc", "gRPC"))
    for bar in (
        Bar(f"goodput_{protocol}", f"{name}: goodput / capacity, alternating", at_least=0.9),
        Bar(f"recovery_{protocol}", f"{name}: capacity after the minute / before", at_least=0.9),
        Bar(f"p99_{protocol}", f"{name}: accepted p99 / p99 at capacity", at_most=2.0),
        Bar(f"refused_ms_{protocol}", f"{name}: slowest rejection, ms", at_most=50.0),
        Bar(f"codes_{protocol}", f"{name}: rejections with the right code", at_least=1.0),
        Bar(f"memory_{protocol}", f"{name}: resident memory, later / early", at_most=1.05),
        Bar(f"health_ms_{protocol}", f"{name}: slowest readiness probe, ms", at_most=100.0),
        Bar(f"default_refused_{protocol}", f"{name}, defaults: rejected at 0.8", at_most=0.01),
        Bar(
            f"default_goodput_{protocol}",
            f"{name}, defaults: in time at 4 / capacity",
            at_least=0.9,
        ),
    )
)


class ServerSampler:
    """Sampler of the server's memory and of the time of a readiness probe, once a second in a ``with``
    block."""

    def __init__(self, server: Hps) -> None:
        self._server = server
        self.rss: list[int] = []
        self.health_s: list[float] = []
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(1, "watch")

    def __enter__(self) -> ServerSampler:
        self._sampling = self._pool.submit(self._run)
        return self

    def __exit__(self, *_: object) -> None:
        """Raises the error of a failed sample."""
        self._over.set()
        self._pool.shutdown()
        self._sampling.result()

    def _run(self) -> None:
        while not self._over.wait(1):
            self.rss.append(self._server.process.memory_info().rss)
            start = time.monotonic()
            url = f"http://{self._server.address}/v2/health/ready"
            with urllib.request.urlopen(url, timeout=10):
                self.health_s.append(time.monotonic() - start)

    @property
    def growth(self) -> float:
        quarter, half = max(1, len(self.rss) // 4), len(self.rss) // 2
        return max(self.rss[half:]) / max(self.rss[:quarter])


def run(options: Options) -> Report:
    report = Report()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_model(folder / "models")
        core, client = cores()
        if client is not None:
            stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
            os.sched_setaffinity(0, {client})
        requests = {
            "rest": [rest_request(seed) for seed in range(DISTINCT)],
            "grpc": [grpc_request(seed) for seed in range(DISTINCT)],
        }
        limits = {"admission": {"running": RUNNING, "max_wait_ms": MAX_WAIT_MS}}
        with start_hps(folder, limits=limits, core=core) as server:
            closed_loop(server.address, requests["rest"], RUNNING, 3.0)
            for protocol, messages in requests.items():
                _measure(report, Load(server, protocol, messages), options)
        with start_hps(folder, core=core) as server:
            for protocol, messages in requests.items():
                _measure_defaults(report, Load(server, protocol, messages), options)
    report.figures["versions"] = versions("numpy", "onnxruntime", "grpcio", "uvicorn")
    return report


def _measure(report: Report, load: Load, options: Options) -> None:
    seconds = 10.0 if options.quick else 60.0
    before, alternating = alternate_with_capacity(load, *((3, 2.0) if options.quick else (12, 4.0)))
    arrivals = poisson(OVERLOAD_FACTOR * before.goodput, seconds, options.seed)
    with ServerSampler(load.server) as sampler:
        minute = load.open(arrivals)
    after = load.capacity(seconds / 6)
    runs = OverloadRuns(before, alternating, minute, after)
    record(report, load.protocol, runs, sampler)


def _measure_defaults(report: Report, load: Load, options: Options) -> None:
    load.capacity(1.0)
    result = overload_defaults.alternate_with_capacity(load, 1 if options.quick else 3, 8.0)
    report.values[f"default_refused_{load.protocol}"] = result.rejected_share
    report.values[f"default_goodput_{load.protocol}"] = result.goodput
    report.tables[f"default admission, {load.protocol}"] = [result.row()]


@dataclass(frozen=True)
class Load:
    """The requests of one protocol to ``server``."""

    server: Hps
    protocol: str
    requests: list[bytes]

    def open(self, arrivals: list[float]) -> LoadResult:
        if self.protocol == "grpc":
            return grpc_open(self.server.grpc, METHOD, self.requests, arrivals)
        return open_loop(self.server.address, self.requests, arrivals)

    def capacity(self, seconds: float) -> LoadResult:
        if self.protocol == "grpc":
            result = grpc_closed(self.server.grpc, METHOD, self.requests, RUNNING, seconds)
        else:
            result = closed_loop(self.server.address, self.requests, RUNNING, seconds)
        if set(result.statuses) != {200}:
            raise RuntimeError(f"rejected without overload: {set(result.statuses)}")
        return result


def alternate_with_capacity(
    load: Load, turns: int, seconds: float
) -> tuple[LoadResult, LoadResult]:
    """Results at capacity and under overload, alternating ``turns`` times.

    An interval of overload takes ``seconds``; half of that is spent at capacity around it."""
    last = load.capacity(seconds / 4)
    capacity, overload = last, LoadResult()
    for turn in range(turns):
        overload += load.open(poisson(OVERLOAD_FACTOR * last.goodput, seconds, turn))
        last = load.capacity(seconds / (4 if turn == turns - 1 else 2))
        capacity += last
    return capacity, overload


@dataclass(frozen=True)
class OverloadRuns:
    """Capacity before, overload alternating with it, the minute of overload, capacity after."""

    before: LoadResult
    alternating: LoadResult
    minute: LoadResult
    after: LoadResult


def record(report: Report, protocol: str, runs: OverloadRuns, sampler: ServerSampler) -> None:
    """Add the results to ``report``. Raises RuntimeError when the load generator has not kept up."""
    before, minute = runs.before, runs.minute
    offered = len(minute.statuses) / minute.wall_s
    if offered < OFFERED * before.goodput:
        raise RuntimeError(
            f"{protocol}: the load generator has not kept up: it sent {offered:.0f} requests a second, "
            f"{offered / before.goodput:.2f} times the capacity of {before.goodput:.0f}"
        )
    taken, rejected, floor = minute.of(ok=True), minute.rejection_times, before.of(ok=True)
    codes = {status for status in runs.alternating.statuses + minute.statuses if status != 200}
    values = {
        "goodput": runs.alternating.goodput / before.goodput,
        "recovery": runs.after.goodput / before.goodput,
        "p99": float(np.quantile(taken, 0.99) / np.quantile(floor, 0.99)),
        "refused_ms": float(rejected.max() * 1e3),
        "codes": float(codes <= {REJECTED[protocol]}),
        "memory": sampler.growth,
        "health_ms": max(sampler.health_s) * 1e3,
    }
    report.values |= {f"{name}_{protocol}": value for name, value in values.items()}
    report.tables[f"predictions of {BATCH} samples, {protocol}"] = [
        {"load": f"capacity, {RUNNING} in flight", **_row(before, floor, floor)},
        {
            "load": f"{OVERLOAD_FACTOR:g} × capacity, alternating with it",
            **_row(
                runs.alternating, runs.alternating.of(ok=True), runs.alternating.rejection_times
            ),
        },
        {"load": f"{OVERLOAD_FACTOR:g} × capacity, the minute", **_row(minute, taken, rejected)},
    ]
    report.figures[protocol] = {
        "answers": len(taken),
        "rejections": len(rejected),
        "codes": sorted(codes),
        "generator_lag_ms": max(minute.late) * 1e3,
        "rss": sampler.rss,
        "health_ms": [round(s * 1e3, 2) for s in sampler.health_s],
        "capacity": {"before": before.goodput, "after": runs.after.goodput},
        "offered": offered,
    }


def _row(result: LoadResult, taken: np.ndarray, rejected: np.ndarray) -> dict[str, str]:
    p50, p99 = np.quantile(taken, [0.5, 0.99]) * 1e3
    row = {"answers/s": f"{result.goodput:.1f}", "p50 ms": f"{p50:.1f}", "p99 ms": f"{p99:.1f}"}
    if rejected is taken:
        return {**row, "rejected/s": "0", "p50, p99, max ms": "", "generator's lag ms": ""}
    p50, p99, most = np.quantile(rejected, [0.5, 0.99, 1]) * 1e3
    return {
        **row,
        "rejected/s": f"{len(rejected) / result.wall_s:.0f}",
        "p50, p99, max ms": f"{p50:.1f}, {p99:.1f}, {most:.1f}",
        "generator's lag ms": f"{max(result.late) * 1e3:.1f}",
    }


BENCHMARK = Benchmark(
    name="overload",
    title="Four times the load that a server can answer",
    run=run,
    bars=BARS,
    measured=(
        "hps",
        "services",
        "benchmarks/open_loop.py",
        "benchmarks/grpc_load.py",
        "benchmarks/overload_defaults.py",
        "benchmarks/overload_scene.py",
    ),
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
