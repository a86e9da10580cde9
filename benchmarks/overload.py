"""A server that is asked for four times of what it can do.

Predictions of 1,024 samples (26 features, 13 dense numbers, a network of 0.5 M parameters in the process).
The server has one core, the load generator another. Its capacity is what it answers with as many requests in
flight as `server.admission` lets be worked at, closed loop. Overload is requests that come at random at four
times that rate, whether answered or not; over REST and over gRPC. First capacity and overload take turns of a
few seconds, since a shared machine is not as fast in one minute as in the next. Then overload lasts for a
minute, and capacity is measured once more. A run in which fewer than 3.8 times of it were sent fails.

* goodput: answers a second / capacity, each over all of its turns;
* recovery: capacity after the minute / in the turns;
* p99: 99th percentile of the minute's accepted / of capacity's, both from the instant a request was to be
  sent;
* refused: the slowest refusal since its request was sent, and whether all had the right code (503,
  UNAVAILABLE);
* memory: the server's resident bytes at most in the second half of the minute / in its first quarter;
* health: the slowest answer to a readiness probe, one a second meanwhile.

Another server has the default admission settings (`overload_defaults.py`):

* refused: part of the requests that are refused at 0.8 times the capacity, as few as there are;
* goodput: answers within half a second, at four times the capacity / capacity.

There is no peer: the floor is the same server asked for no more than it can do.
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
from benchmarks.open_loop import Seen, closed_loop, open_loop, poisson
from benchmarks.overload_scene import BATCH, grpc_request, rest_request, write_model
from benchmarks.peers.hps_server import Hps, start_hps
from benchmarks.peers.process import cores

TIMES, DISTINCT = 4.0, 16
# Of capacity, so much must really have been asked for.
OFFERED = 3.8
REFUSED = {"rest": 503, "grpc": grpc.StatusCode.UNAVAILABLE.value[0]}
METHOD = "/inference.GRPCInferenceService/ModelInfer"
# As docs/overload.md says for a network that runs in the process: twice the cores, a short wait.
RUNNING, MAX_WAIT_MS = 2, 10.0

BARS = tuple(
    bar
    for way, name in (("rest", "REST"), ("grpc", "gRPC"))
    for bar in (
        Bar(f"goodput_{way}", f"{name}: goodput / capacity, by turns", at_least=0.9),
        Bar(f"recovery_{way}", f"{name}: capacity after the minute / before", at_least=0.9),
        Bar(f"p99_{way}", f"{name}: accepted p99 / p99 at capacity", at_most=2.0),
        Bar(f"refused_ms_{way}", f"{name}: slowest refusal, ms", at_most=50.0),
        Bar(f"codes_{way}", f"{name}: refusals with the right code", at_least=1.0),
        Bar(f"memory_{way}", f"{name}: resident memory, later / early", at_most=1.05),
        Bar(f"health_ms_{way}", f"{name}: slowest readiness probe, ms", at_most=100.0),
        Bar(f"default_refused_{way}", f"{name}, defaults: refused at 0.8", at_most=0.01),
        Bar(f"default_goodput_{way}", f"{name}, defaults: in time at 4 / capacity", at_least=0.9),
    )
)


class Watch:
    """Looks at the server once a second while it is entered: its memory, and how long a readiness probe
    takes."""

    def __init__(self, server: Hps) -> None:
        self._server = server
        self.rss: list[int] = []
        self.health_s: list[float] = []
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(1, "watch")

    def __enter__(self) -> Watch:
        self._looking = self._pool.submit(self._run)
        return self

    def __exit__(self, *_: object) -> None:
        """Raises what kept it from looking."""
        self._over.set()
        self._pool.shutdown()
        self._looking.result()

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
            for way, asked in requests.items():
                _measure(report, Load(server, way, asked), options)
        with start_hps(folder, core=core) as server:
            for way, asked in requests.items():
                _measure_defaults(report, Load(server, way, asked), options)
    report.figures["versions"] = versions("numpy", "onnxruntime", "grpcio", "uvicorn")
    return report


def _measure(report: Report, load: Load, options: Options) -> None:
    seconds = 10.0 if options.quick else 60.0
    before, by_turns = in_turns(load, *((3, 2.0) if options.quick else (12, 4.0)))
    arrivals = poisson(TIMES * before.goodput, seconds, options.seed)
    with Watch(load.server) as watch:
        minute = load.open(arrivals)
    after = load.capacity(seconds / 6)
    record(report, load.way, before, by_turns, minute, after, watch)


def _measure_defaults(report: Report, load: Load, options: Options) -> None:
    load.capacity(1.0)
    turns = overload_defaults.in_turns(load, 1 if options.quick else 3, 8.0)
    report.values[f"default_refused_{load.way}"] = turns.refused
    report.values[f"default_goodput_{load.way}"] = turns.goodput
    report.tables[f"default admission, {load.way}"] = [turns.row()]


@dataclass(frozen=True)
class Load:
    """The requests of one protocol to ``server``."""

    server: Hps
    way: str
    requests: list[bytes]

    def open(self, arrivals: list[float]) -> Seen:
        if self.way == "grpc":
            return grpc_open(self.server.grpc, METHOD, self.requests, arrivals)
        return open_loop(self.server.address, self.requests, arrivals)

    def capacity(self, seconds: float) -> Seen:
        if self.way == "grpc":
            seen = grpc_closed(self.server.grpc, METHOD, self.requests, RUNNING, seconds)
        else:
            seen = closed_loop(self.server.address, self.requests, RUNNING, seconds)
        if set(seen.statuses) != {200}:
            raise RuntimeError(f"refused without overload: {set(seen.statuses)}")
        return seen


def in_turns(load: Load, turns: int, seconds: float) -> tuple[Seen, Seen]:
    """Capacity and overload over ``turns`` turns each; those of capacity take half of ``seconds`` each and
    lie around the others."""
    last = load.capacity(seconds / 4)
    able, asked = last, Seen()
    for turn in range(turns):
        asked += load.open(poisson(TIMES * last.goodput, seconds, turn))
        last = load.capacity(seconds / (4 if turn == turns - 1 else 2))
        able += last
    return able, asked


def record(
    report: Report,
    way: str,
    before: Seen,
    by_turns: Seen,
    minute: Seen,
    after: Seen,
    watch: Watch,
) -> None:
    """Raises RuntimeError when the load generator has not kept up."""
    offered = len(minute.statuses) / minute.wall_s
    if offered < OFFERED * before.goodput:
        raise RuntimeError(
            f"{way}: {offered:.0f} requests a second were sent, {offered / before.goodput:.2f} times of "
            f"{before.goodput:.0f}: the load generator has not kept up"
        )
    taken, refused, floor = minute.of(ok=True), minute.refusals, before.of(ok=True)
    codes = {status for status in by_turns.statuses + minute.statuses if status != 200}
    values = {
        "goodput": by_turns.goodput / before.goodput,
        "recovery": after.goodput / before.goodput,
        "p99": float(np.quantile(taken, 0.99) / np.quantile(floor, 0.99)),
        "refused_ms": float(refused.max() * 1e3),
        "codes": float(codes <= {REFUSED[way]}),
        "memory": watch.growth,
        "health_ms": max(watch.health_s) * 1e3,
    }
    report.values |= {f"{name}_{way}": value for name, value in values.items()}
    report.tables[f"predictions of {BATCH} samples, {way}"] = [
        {"load": f"capacity, {RUNNING} in flight", **_row(before, floor, floor)},
        {
            "load": f"{TIMES:g} × capacity, by turns with it",
            **_row(by_turns, by_turns.of(ok=True), by_turns.refusals),
        },
        {"load": f"{TIMES:g} × capacity, the minute", **_row(minute, taken, refused)},
    ]
    report.figures[way] = {
        "answers": len(taken),
        "refusals": len(refused),
        "codes": sorted(codes),
        "generator_lag_ms": max(minute.late) * 1e3,
        "rss": watch.rss,
        "health_ms": [round(s * 1e3, 2) for s in watch.health_s],
        "capacity": {"before": before.goodput, "after": after.goodput},
        "offered": offered,
    }


def _row(seen: Seen, taken: np.ndarray, refused: np.ndarray) -> dict[str, str]:
    p50, p99 = np.quantile(taken, [0.5, 0.99]) * 1e3
    row = {"answers/s": f"{seen.goodput:.1f}", "p50 ms": f"{p50:.1f}", "p99 ms": f"{p99:.1f}"}
    if refused is taken:
        return {**row, "refused/s": "0", "p50, p99, max ms": "", "generator's lag ms": ""}
    p50, p99, most = np.quantile(refused, [0.5, 0.99, 1]) * 1e3
    return {
        **row,
        "refused/s": f"{len(refused) / seen.wall_s:.0f}",
        "p50, p99, max ms": f"{p50:.1f}, {p99:.1f}, {most:.1f}",
        "generator's lag ms": f"{max(seen.late) * 1e3:.1f}",
    }


BENCHMARK = Benchmark(
    name="overload",
    title="Four times of what the server can do",
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
