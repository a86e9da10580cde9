"""Parts of `benchmarks.gpu_server`: the extent of a run, servers under test, and measured cells."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from benchmarks.common import Options, Report
from benchmarks.gpu_server_scene import Cores, Reference
from benchmarks.native_load import Callers, LoadSummary, Template, run_load
from benchmarks.peers.hps_server import Hps

BATCHES = {1: (25_000, 0.30), 64: (12_000, 0.45), 1024: (4_000, 0.70)}
"""Batch -> requests/s at a p99 of at most 5 ms, and one caller's p50 over REST in ms."""
CALLERS = (1, 8, 32, 64)


@dataclass(frozen=True)
class Extent:
    """Cells of a run: seconds of each, batches and numbers of callers."""

    seconds: float
    batches: tuple[int, ...]
    callers: tuple[int, ...]

    @staticmethod
    def of(options: Options) -> Extent:
        if options.quick:
            return Extent(0.8, (1, 64), (1, 8))
        return Extent(float(options.extra.get("seconds") or 1.0), tuple(BATCHES), CALLERS)


@dataclass(frozen=True)
class Target:
    """A server under test: its title, its address by protocol; its process and admin port, if it is ours."""

    title: str
    addresses: Mapping[str, str]
    process: psutil.Process | None = None
    admin: str = ""

    @staticmethod
    def of(title: str, server: Hps) -> Target:
        return Target(
            title, {"rest": server.address, "grpc": server.grpc}, server.process, server.admin
        )

    def cpu_seconds(self) -> tuple[float, float]:
        """CPU time until now of the node's process and of its workers, in seconds."""
        if self.process is None:
            return 0.0, 0.0
        times = [each.cpu_times() for each in (self.process, *self.process.children(True))]
        node, *workers = (each.user + each.system for each in times)
        return node, sum(workers)


@dataclass(frozen=True)
class Measured:
    """A run of the load generator, and the cores that the node and its workers used meanwhile."""

    load: LoadSummary
    node_cores: float
    worker_cores: float

    def row(self) -> dict[str, Any]:
        load = self.load
        return {
            "requests/s": load.per_second,
            "p50 ms": load.p50_ms,
            "p99 ms": load.p99_ms,
            "max ms": load.max_ms,
            "errors": load.errors,
            "node cores": self.node_cores,
            "worker cores": self.worker_cores,
            "load cores": load.client_cpu_s / load.seconds,
        }


@dataclass
class Bench:
    """A run's parts; counts wrong answers and failed requests in ``faults``."""

    report: Report
    extent: Extent
    cores: Cores
    workers: int
    faults: int = 0

    def load(self, address: str, template: Template, callers: int) -> LoadSummary:
        asked = Callers(
            callers,
            self.extent.seconds,
            warm_up=self.extent.seconds / 4,
            cores=self.cores.load[:callers],
            spin=self.cores.spin,
            samples=2,
        )
        return run_load(address, template, asked)

    def measure(self, target: Target, protocol: str, template: Template, callers: int) -> Measured:
        """Cores are averages over the run and its warm-up."""
        before, start = target.cpu_seconds(), time.monotonic()
        load = self.load(target.addresses[protocol], template, callers)
        seconds = time.monotonic() - start
        node, workers = (
            (now - then) / seconds for now, then in zip(target.cpu_seconds(), before, strict=True)
        )
        return Measured(load, node, workers)

    def check(
        self, title: str, template: Template, summary: LoadSummary, reference: Reference
    ) -> None:
        wrong = sum(reference.wrong(template, *sample) for sample in summary.samples)
        self.faults += wrong + summary.errors
        if wrong or summary.errors or not summary.samples:
            self.report.notes.append(
                f"{title}: {summary.errors} failed requests ({summary.error}), {wrong} wrong answers of "
                f"{len(summary.samples)} compared"
            )


Cells = dict[tuple[str, int, int], LoadSummary]
"""Protocol, batch, callers -> measured."""
