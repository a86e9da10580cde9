"""Restarts of Triton under load: errors that callers get, time to recovery, and leaked resources.

Nodes in this process score requests without a pause; their networks run in one real Triton on this machine:

* gRPC: without a fallback, so requests fail while Triton is down, each within its deadline and with a clear
  error;
* HTTP: the same over HTTP, its tensors in shared memory;
* fallback: over gRPC and shared memory, dense.onnx in the process while Triton is down: no request fails.

Triton is alternately killed (``kill -9``) and terminated (SIGTERM), is down for a second, and starts again.
Every answer is compared with that of the network in the process. After each round the process's memory, file
descriptors, threads and shared memory are measured.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import hps
from benchmarks.common import Bar, Benchmark, Options, Report, main
from benchmarks.peers.environments import ENVIRONMENTS
from benchmarks.peers.process import free_ports
from benchmarks.peers.triton import start_triton
from hps.errors import DeadlineExceeded, HpsError, Unavailable
from hps.models.repository import Repository
from hps.node.node import Node
from hps.triton.export import export_dense
from tests.integration.conftest import write_models

MODEL = "clicks"
ROUNDS, QUICK_ROUNDS = 20, 4
DOWN_S, TIMEOUT_MS = 1.0, 500.0
SHM = Path("/dev/shm")

BARS = (
    Bar("recovery", "s from Triton's return until each node uses it, the worst", at_most=2.0),
    Bar("wrong", "answers that differ by more than 1e-6, and unexpected errors", at_most=0.0),
    Bar("failed", "requests that failed although there is a fallback", at_most=0.0),
    Bar("late", "s that the slowest request took, of 0.5 allowed", at_most=0.75),
    Bar("memory", "MiB more at the end than after the first rounds", at_most=8.0),
    Bar("left", "descriptors, threads, regions more than after the first rounds", at_most=2.0),
)


class Caller:
    """A thread that repeatedly sends requests to one node."""

    def __init__(self, name: str, node: Node, request: dict[str, Any], expected: Any) -> None:
        self.name, self.node = name, node
        self._request, self._expected = request, expected
        self._fallbacks = node.metrics.counter("hps_dense_fallbacks_total", MODEL)
        self.outcomes: Counter[str] = Counter()
        self.faults: list[str] = []
        self.slowest_s = 0.0
        self.last_by_triton = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            before, begun = self._fallbacks.value, time.monotonic()
            outcome = self._once()
            self.slowest_s = max(self.slowest_s, time.monotonic() - begun)
            if outcome == "scored" and self._fallbacks.value > before:
                outcome = "fell back"
            if outcome == "scored":
                self.last_by_triton = time.monotonic()
            self.outcomes[outcome] += 1
            self._stop.wait(0.002)

    def _once(self) -> str:
        try:
            found = self.node.predict(MODEL, self._request["features"], self._request["dense"])
        except (Unavailable, DeadlineExceeded) as error:
            return type(error).__name__
        except HpsError as error:
            self.faults.append(f"{self.name}: {type(error).__name__}: {error}")
            return "another error"
        if not np.allclose(found.outputs["score"], self._expected, atol=1e-6):
            self.faults.append(f"{self.name}: other scores")
            return "wrong"
        return "scored"


@contextmanager
def callers(folder: Path, ports: tuple[int, int, int]) -> Iterator[list[Caller]]:
    http, grpc = (f"127.0.0.1:{port}" for port in ports[:2])
    kinds: dict[str, dict[str, Any]] = {
        "gRPC": {"url": grpc},
        "HTTP": {"url": http, "protocol": "http", "shared_memory": "system"},
        "fallback": {"url": grpc, "shared_memory": "system", "fallback": True},
    }
    random = np.random.default_rng(3)
    request: dict[str, Any] = {
        "features": {
            "user": random.integers(0, 110, (32, 1)),
            "item": random.integers(-60, 60, (32, 1)),
            "history": random.integers(-60, 60, (32, 3)),
        },
        "dense": {"dense": random.standard_normal((32, 3), np.float32)},
    }
    with ExitStack() as stack:

        def opened(name: str, dense: dict[str, Any]) -> Node:
            return stack.enter_context(
                hps.open(
                    {
                        "models": {"repository": str(folder / "models")},
                        "tiers": {"rocksdb": {"path": str(folder / name)}},
                        "dense": dense,
                    }
                )
            )

        here = opened("here", {})
        expected = here.predict(MODEL, request["features"], request["dense"]).outputs["score"]
        made = []
        for name, triton in kinds.items():
            node = opened(name, {"triton": {"timeout_ms": TIMEOUT_MS, **triton}})
            made.append(Caller(name, node, request, expected))
            stack.callback(made[-1].stop)
        yield made


def recovery_seconds(asking: list[Caller], since: float) -> float:
    """Wait until Triton has answered every caller; returns the seconds from ``since``."""
    while any(caller.last_by_triton < since for caller in asking):
        if time.monotonic() > since + 30:
            return float("inf")
        time.sleep(0.005)
    return time.monotonic() - since


def resource_usage(process: psutil.Process) -> dict[str, float]:
    own = f"hps-{process.pid}-"
    return {
        "MiB": process.memory_info().rss / 2**20,
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "regions": sum(each.name.startswith(own) for each in SHM.iterdir()),
    }


def run(options: Options) -> Report:
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    process, report = psutil.Process(), Report()
    ports: Any = tuple(free_ports(3))
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_models(folder / "models")
        export_dense(Repository(folder / "models").open(MODEL), folder / "triton", "python")
        with callers(folder, ports) as asking:
            for i in range(rounds):
                with start_triton(folder / "triton", ports) as server:
                    took = recovery_seconds(asking, time.monotonic())
                    time.sleep(0.5)
                    state = resource_usage(process)
                    kill = i % 2 == 0
                    if kill:
                        server.process.kill()
                lines.append(
                    {"round": i, "ended by": "kill" if kill else "SIGTERM", "s": took, **state}
                )
                time.sleep(DOWN_S)
        seen = {caller.name: caller.outcomes for caller in asking}
    first, last = lines[: max(2, rounds // 4)], lines[-max(2, rounds // 4) :]

    def more(what: str) -> float:
        return float(max(line[what] for line in last) - max(line[what] for line in first))

    faults = [fault for caller in asking for fault in caller.faults]
    report.values = {
        "recovery": max(line["s"] for line in lines),
        "wrong": float(len(faults)),
        "failed": float(sum(seen["fallback"][e] for e in ("Unavailable", "DeadlineExceeded"))),
        "late": max(caller.slowest_s for caller in asking),
        "memory": more("MiB"),
        "left": max(more(what) for what in ("descriptors", "threads", "regions")),
    }
    report.tables["Triton restarts"] = [*lines]
    outcomes = sorted({outcome for counts in seen.values() for outcome in counts})
    report.tables["requests"] = [
        {"node": name, **{outcome: counts[outcome] for outcome in outcomes}}
        for name, counts in seen.items()
    ]
    report.notes += faults[:10]
    report.figures["rounds"] = lines
    return report


def _missing_requirement() -> str | None:
    return (
        None if ENVIRONMENTS["triton"].ready() else "Triton is not set up: run `make bench-peers`"
    )


BENCHMARK = Benchmark(
    name="triton_restarts",
    title="Restarts of Triton under load",
    run=run,
    bars=BARS,
    measured=("hps/dense",),
    missing_requirement=_missing_requirement,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
