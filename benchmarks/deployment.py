"""One process against front ends and lookup nodes on the same machine: the cost of the network hop.

Requests over REST, on keep-alive connections:

* predictions of 8 samples (26 features, 13 dense numbers, a network of 0.5 M parameters) and lookups of 26
  keys, one in flight: the time that the hop adds to the median;
* lookups of 26 × 256 keys, one in flight: the same for large answers (416 KiB of vectors);
* predictions, 16 in flight: CPU time of all processes a request, and answers a second, of one process and of
  a front end over 1, 2 and 4 lookup nodes.

All servers share one core, the load generator has another; the servers run alternately. Several lookup nodes
cannot be faster here, since the core switches between more processes: the bars require that spreading lookups
over them costs the front end nothing. Rows are in every node's memory.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import orjson

from benchmarks.common import Bar, Benchmark, Options, Report, main
from benchmarks.load import http_request
from benchmarks.measure import Spread, alternate, ratio, versions
from benchmarks.open_loop import LoadResult, closed_loop
from benchmarks.overload_scene import FEATURES, ROWS, rest_request, write_model
from benchmarks.peers.hps_server import Hps, start_hps
from benchmarks.peers.process import cores

SAMPLES, MANY, KEYS = 8, 16, 256
NODES = (1, 2, 4)
ALONE = "one process"

BARS = (
    Bar("hop_ms", "predictions, one in flight: median, split - one process, ms", at_most=1.0),
    Bar("hop_lookup_ms", "lookups of 26 keys: the same, ms", at_most=1.0),
    Bar("cpu", f"predictions, {MANY} in flight: CPU a request, split / one process", at_most=3.0),
    Bar("two", "the front end's CPU a request, over 2 lookup nodes / over 1", at_most=1.2),
    Bar("four", "the front end's CPU a request, over 4 lookup nodes / over 1", at_most=1.2),
)


@dataclass(frozen=True)
class Side:
    """A front end, or a server that does everything, and the lookup nodes behind it."""

    server: Hps
    nodes: Sequence[Hps] = ()

    def run(self, requests: Sequence[bytes], connections: int, seconds: float) -> Run:
        before = [server.cpu_seconds() for server in (self.server, *self.nodes)]
        load = closed_loop(self.server.address, requests, connections, seconds)
        after = [server.cpu_seconds() for server in (self.server, *self.nodes)]
        front, *nodes = [b - a for a, b in zip(before, after, strict=True)]
        return Run(load, front, sum(nodes))


@dataclass(frozen=True)
class Run:
    """Result of a run; CPU seconds of the process that received the requests, and of the nodes together."""

    load: LoadResult
    front_s: float
    nodes_s: float

    def __post_init__(self) -> None:
        if set(self.load.statuses) != {200}:
            raise RuntimeError(f"answers other than 200: {set(self.load.statuses)}")

    @property
    def median_s(self) -> float:
        return float(np.median(self.load.latencies))

    @property
    def cpu_us(self) -> float:
        return (self.front_s + self.nodes_s) / len(self.load.statuses) * 1e6

    @property
    def nodes_us(self) -> float:
        return self.nodes_s / len(self.load.statuses) * 1e6


def lookup_request(seed: int, keys: int) -> bytes:
    drawn = np.random.default_rng(seed).integers(0, ROWS, (FEATURES, keys, 1))
    inputs = [
        {
            "name": f"f{i}",
            "shape": [keys, 1],
            "datatype": "INT64",
            "parameters": {"binary_data_size": 8 * keys},
        }
        for i in range(FEATURES)
    ]
    head = orjson.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}})
    sizes = {"Inference-Header-Content-Length": str(len(head))}
    return http_request("/v2/models/ctr.lookup/infer", head + drawn.tobytes(), sizes)


def start(folder: Path, core: int | None, stack: ExitStack) -> dict[str, Side]:
    """Every side by its name; the lookup nodes are the same for all front ends."""
    write_model(folder / "models")
    models = {"repository": str(folder / "models")}

    def server(name: str, role: str, **settings: object) -> Hps:
        home = folder / name
        home.mkdir()
        started = start_hps(home, limits={"role": role}, models=models, core=core, **settings)  # type: ignore[arg-type]
        return stack.enter_context(started)

    sides = {ALONE: Side(server("alone", "all"))}
    nodes = [server(f"lookup-{i}", "lookup") for i in range(max(NODES))]
    for count in NODES:
        lookup = {"nodes": [node.grpc for node in nodes[:count]]}
        front = server(f"frontend-{count}", "frontend", lookup=lookup)
        sides[f"split, {count} lookup node{'s' * (count > 1)}"] = Side(front, nodes[:count])
    return sides


def run(options: Options) -> Report:
    rounds, seconds = (3, 0.7) if options.quick else (7, 1.5)
    report = Report()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        core, client = cores()
        sides = start(folder, core, stack)
        if client is not None:
            stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
            os.sched_setaffinity(0, {client})
        alone, first, *more = sides
        scores = [rest_request(seed, SAMPLES) for seed in range(64)]
        for value, title, requests, connections, names in (
            ("hop_ms", f"predictions of {SAMPLES} samples, one in flight", scores, 1, [alone, first]),
            ("hop_lookup_ms", f"lookups of {FEATURES} keys, one in flight", lookups(1), 1, [alone, first]),
            ("", f"lookups of {FEATURES} × {KEYS} keys, one in flight", lookups(KEYS), 1, [alone, first]),
            ("cpu", f"predictions of {SAMPLES} samples, {MANY} in flight", scores, MANY, [*sides]),
        ):  # fmt: skip
            runs: dict[str, Callable[[], Run]] = {
                name: partial(sides[name].run, requests, connections, seconds) for name in names
            }
            for each in runs.values():
                each()
            found = alternate(runs, rounds)
            show(report, title, found)
            if value.endswith("_ms"):
                report.values[value] = Spread.of(added(found, alone, first)).median
            elif value:
                judge(report, found, alone, first, *more)
    report.figures["versions"] = versions("numpy", "onnxruntime", "grpcio", "uvicorn")
    return report


def lookups(keys: int) -> list[bytes]:
    return [lookup_request(seed, keys) for seed in range(64)]


def added(found: dict[str, list[Run]], alone: str, split: str) -> list[float]:
    """Ms that the hop adds to the median, round by round."""
    pairs = zip(found[split], found[alone], strict=True)
    return [(one.median_s - other.median_s) * 1e3 for one, other in pairs]


def judge(
    report: Report, found: dict[str, list[Run]], alone: str, one: str, two: str, four: str
) -> None:
    cpu = {name: [run.cpu_us for run in runs] for name, runs in found.items()}
    front = {name: [run.cpu_us - run.nodes_us for run in runs] for name, runs in found.items()}
    report.values["cpu"] = ratio(cpu[one], cpu[alone]).median
    report.values["two"] = ratio(front[two], front[one]).median
    report.values["four"] = ratio(front[four], front[one]).median


def show(report: Report, title: str, found: dict[str, list[Run]]) -> None:
    report.tables[title] = [
        {
            "": name,
            "p50 ms": f"{Spread.of([run.median_s * 1e3 for run in runs]):.3f}",
            "added ms": "" if name == ALONE else f"{Spread.of(added(found, ALONE, name)):.3f}",
            "p99 ms": f"{np.median([np.quantile(run.load.latencies, 0.99) for run in runs]) * 1e3:.3f}",
            "answers/s": f"{Spread.of([run.load.goodput for run in runs]).median:.0f}",
            "CPU µs": f"{Spread.of([run.cpu_us for run in runs]).median:.0f}",
            "at nodes": f"{Spread.of([run.nodes_us for run in runs]).median:.0f}",
        }
        for name, runs in found.items()
    ]
    report.figures[title] = {
        name: {
            "median_s": [run.median_s for run in runs],
            "per_second": [run.load.goodput for run in runs],
            "cpu_us": [run.cpu_us for run in runs],
            "nodes_us": [run.nodes_us for run in runs],
        }
        for name, runs in found.items()
    }


BENCHMARK = Benchmark(
    name="deployment",
    title="One process, or front ends and lookup nodes",
    run=run,
    bars=BARS,
    measured=("hps", "services", "benchmarks/open_loop.py", "benchmarks/overload_scene.py"),
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
