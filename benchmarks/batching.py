"""Throughput of dynamic batching, and its cost where there is nothing to batch.

Predictions of few samples by a network of 0.5 M parameters in the process (overload_scene.py), one and 32 in
flight, are sent to servers that differ in `server.batching`:

* off, the default;
* on: batches of the requests that are already queued;
* on with a delay of 1 ms for further requests;

and lookups of 26 keys from memory, which never wait, one in flight. The servers share one core, the load
generator has another; the servers run alternately. The floor is the server without batching. The bars require
that batching costs nothing here. Networks with a fixed cost per run (a GPU, another process) are not
measured."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from benchmarks.common import Bar, Benchmark, Options, Report, main
from benchmarks.load import http_request
from benchmarks.measure import Spread, alternate, ratio, versions
from benchmarks.open_loop import LoadResult, closed_loop
from benchmarks.overload_scene import FEATURES, ROWS, rest_request, write_model
from benchmarks.peers.hps_server import start_hps
from benchmarks.peers.process import cores

SAMPLES, MANY = 8, 32
SERVERS: dict[str, Any] = {
    "off": None,
    "on": {"max_delay_us": 0},
    "on, 1 ms": {"max_delay_us": 1000},
}

BARS = (
    Bar("many", f"{MANY} in flight: predictions/s, on / off", at_least=0.95),
    Bar("one", "one in flight: median, on / off", at_most=1.05),
    Bar("lookup", "lookup from memory: median, on / off", at_most=1.05),
)


def lookup_request(seed: int) -> bytes:
    keys = np.random.default_rng(seed).integers(0, ROWS, (FEATURES, 1))
    inputs = [
        {
            "name": f"f{i}",
            "shape": [1, 1],
            "datatype": "INT64",
            "parameters": {"binary_data_size": 8},
        }
        for i in range(FEATURES)
    ]
    head = orjson.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}})
    sizes = {"Inference-Header-Content-Length": str(len(head))}
    return http_request("/v2/models/ctr.lookup/infer", head + keys.tobytes(), sizes)


def run(options: Options) -> Report:
    rounds, seconds = (3, 1.0) if options.quick else (7, 2.0)
    report = Report()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        core, client = cores()
        addresses: dict[str, str] = {}
        for i, (name, batching) in enumerate(SERVERS.items()):
            home = folder / str(i)
            write_model(home / "models")
            server = start_hps(home, limits={"batching": batching}, core=core)
            addresses[name] = stack.enter_context(server).address
        if client is not None:
            stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
            os.sched_setaffinity(0, {client})
        scores = [rest_request(seed, SAMPLES) for seed in range(64)]
        keys = [lookup_request(seed) for seed in range(64)]
        for value, title, requests, connections in (
            ("many", f"predictions of {SAMPLES} samples, {MANY} in flight", scores, MANY),
            ("one", f"predictions of {SAMPLES} samples, one in flight", scores, 1),
            ("lookup", f"lookups of {FEATURES} keys, one in flight", keys, 1),
        ):
            runs: dict[str, Callable[[], LoadResult]] = {
                name: partial(closed_loop, address, requests, connections, seconds)
                for name, address in addresses.items()
            }
            for each in runs.values():
                each()
            record(report, value, title, alternate(runs, rounds))
    report.figures["versions"] = versions("numpy", "onnxruntime", "uvicorn")
    return report


def record(report: Report, value: str, title: str, results: dict[str, list[LoadResult]]) -> None:
    rates = {name: [run.goodput for run in runs] for name, runs in results.items()}
    medians = {
        n: [float(np.median(run.of(ok=True))) for run in runs] for n, runs in results.items()
    }
    judged = rates if value == "many" else medians
    report.values[value] = ratio(judged["on"], judged["off"]).median
    report.tables[title] = [
        {
            "batching": name,
            "answers/s": f"{Spread.of(rates[name]).median:.0f}",
            "/ off": f"{ratio(rates[name], rates['off']).median:.2f}",
            "p50 ms": f"{Spread.of(medians[name]).median * 1e3:.3f}",
            "p99 ms": f"{np.median([np.quantile(r.of(ok=True), 0.99) for r in runs]) * 1e3:.3f}",
        }
        for name, runs in results.items()
    ]
    report.figures[value] = {"per_second": rates, "median_s": medians}


BENCHMARK = Benchmark(
    name="batching",
    title="Requests answered together",
    run=run,
    bars=BARS,
    measured=("hps", "services", "benchmarks/open_loop.py", "benchmarks/overload_scene.py"),
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
