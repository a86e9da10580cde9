"""Another version of a model, or another model, is loaded while a server answers: what do its callers notice?

Two versions of a model of 2 GB (26 features over four tables, a network), whose rows carry their version; see
`benchmarks/switch_scene.py`. Lookups of 26 keys and predictions of 16 samples (3 : 1) arrive as a Poisson
process at 70 % of the server's capacity, which is measured first with closed loops. Halves of rounds without
and with switches alternate: in the latter the other version is loaded and served in place of the current
one, which is then freed (``models.rollback_s: 0``), again and again. Latencies count from the instant a
request was due; a ratio is that of the two halves of one round.

* p99: the median over the rounds of switches / none; p99.9: of all rounds' answers together.
* mixed: answers with rows of two versions, or with rows and network of two.
* stale: answers of the replaced version to requests that were due after the switch was reported as done.
* At the end: anonymous memory, descriptors and the halves without switches, the last quarter of the
  rounds / the first.

Then another model of 5 GB is loaded and unloaded beside the first one; and the same switches with Triton's
model control (``load`` of a version, which ends the other one), whose python model has the rows in memory
and the same network. With a GPU, the node has a GPU cache and the network on it."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import HELPERS, Bar, Benchmark, Options, Report, main
from benchmarks.measure import versions
from benchmarks.open_load import open_load
from benchmarks.peers.environments import ENVIRONMENTS
from benchmarks.switch_scene import (
    MODEL,
    OTHER,
    Side,
    hps_side,
    kinds,
    read_mapped,
    rows_of,
    triton_side,
    write_versions,
)
from hps.cuda.loader import has_gpu

GIGABYTES, OTHER_GIGABYTES, QUICK_GIGABYTES = 2.0, 5.0, 0.05
SWITCHES, QUICK_SWITCHES, SWITCHES_A_ROUND = 500, 8, 10
OTHER_LOADS, TRITON_LOADS, LOADS_A_ROUND = 20, 12, 4
SHARE, CALLERS, ROUND_S, PAUSE_S, SETTLE_S = 0.7, 8, 5.0, 0.5, 0.3
CAPACITY_RUNS, CAPACITY_S, CAPACITY_PAUSE_S = 5, 2.0, 1.0

BARS = (
    Bar("failed", "requests that failed, or got defaults for rows", at_most=0),
    Bar("mixed", "answers that mix versions", at_most=0),
    Bar("stale", "answers of the replaced version after the switch", at_most=0),
    Bar("p99", "p99: with switches / without", at_most=1.1),
    Bar("p999", "p99.9: with switches / without", at_most=1.5),
    Bar("memory", "anonymous memory: end / beginning", at_most=1.05),
    Bar("descriptors", "descriptors: end − beginning", at_most=0),
    Bar("latency", "p50 without switches: end / beginning", at_most=1.1),
    Bar("other_failed", "requests that failed beside loads of another model", at_most=0),
    Bar("other_p99", "p99: beside loads of another model of 5 GB / without", at_most=1.1),
)


@dataclass
class Half:
    """Half of a round, from ``begin`` to ``end`` (`time.monotonic_ns`), and its loads."""

    begin: int
    end: int = 0
    changes: list[tuple[int, int, int]] = field(default_factory=list)  # begin, end, version


@dataclass
class Measured:
    """Rounds of one load: halves without and with changes, the answers, resources after each round."""

    quiet: list[Half] = field(default_factory=list)
    busy: list[Half] = field(default_factory=list)
    records: NDArray[Any] = field(default_factory=lambda: np.empty(0))
    resources: list[dict[str, float]] = field(default_factory=list)
    error: str = ""

    def latencies(self, halves: list[Half]) -> NDArray[np.float64]:
        """Latencies in ms of requests that were due in ``halves``."""
        due, found = self.records["due"], np.zeros(len(self.records), bool)
        for half in halves:
            found |= (due >= half.begin) & (due < half.end)
        late: NDArray[np.float64] = (self.records["end"] - due)[found] / 1e6
        return late

    def ratio(self, percent: float) -> float:
        """The median over the rounds of a percentile with changes / without."""
        return float(
            np.median(
                [
                    np.percentile(self.latencies([busy]), percent)
                    / np.percentile(self.latencies([quiet]), percent)
                    for quiet, busy in zip(self.quiet, self.busy, strict=True)
                ]
            )
        )

    def pooled(self, percent: float) -> float:
        """A percentile of all rounds' answers, with changes / without."""
        busy, quiet = (np.percentile(self.latencies(h), percent) for h in (self.busy, self.quiet))
        return float(busy / quiet)

    @property
    def failed(self) -> int:
        """Errors, and answers with defaults in place of rows, which the server flags as degraded."""
        return int(((self.records["status"] != 200) | (self.records["wrong"] == 2)).sum())

    @property
    def mixed(self) -> int:
        return int((self.records["wrong"] == 1).sum())

    @property
    def stale(self) -> int:
        """Answers of another version than the current one to requests due between two changes."""
        changes = [change for half in self.busy for change in half.changes]
        due, value, count = self.records["due"], self.records["value"], 0
        answered = (self.records["status"] == 200) & (self.records["wrong"] == 0)
        for i, (_, end, version) in enumerate(changes):
            until = changes[i + 1][0] if i + 1 < len(changes) else due.max() + 1
            count += int((answered & (due > end) & (due < until) & (value != version)).sum())
        return count

    def growth(self, what: str) -> tuple[float, float]:
        """The highest of ``what`` in the first and in the last quarter of the rounds."""
        values = [each[what] for each in self.resources]
        n = max(1, len(values) // 4)
        return max(values[:n]), max(values[-n:])

    def slower(self) -> float:
        """p50 without changes: the last quarter of the rounds / the first."""
        n = max(1, len(self.quiet) // 4)
        last, first = (np.median(self.latencies(h)) for h in (self.quiet[-n:], self.quiet[:n]))
        return float(last / first)

    def rows(self, name: str) -> Iterator[dict[str, Any]]:
        took = [(end - begin) / 1e9 for half in self.busy for begin, end, _ in half.changes]
        for title, halves in (("without", self.quiet), ("with", self.busy)):
            late = self.latencies(halves)
            p50, p99, p999 = np.percentile(late, [50, 99, 99.9])
            yield {
                "": f"{name}, {title}",
                "requests": len(late),
                "p50 ms": float(p50),
                "p99 ms": float(p99),
                "p99.9 ms": float(p999),
                "max ms": float(late.max()),
                "changes": len(took) if title == "with" else 0,
                "s a change, median": float(np.median(took)) if title == "with" else 0.0,
                "s, most": max(took) if title == "with" else 0.0,
            }


def capacity(side: Side, rows: int, load: list[str], workers: int = 0) -> float:
    """Requests a second of closed loops: of several runs the fewest, which the machine manages at any time.

    Shared machines are a quarter slower for seconds; 70 % of the most would then be all there is."""
    callers = max(CALLERS, 4 * workers)
    found = []
    for _ in range(CAPACITY_RUNS):
        time.sleep(CAPACITY_PAUSE_S)
        made = kinds(rows, ours=side.name == "hps")
        with open_load(side.address, made, 0, connections=callers, prefix=load) as running:
            time.sleep(CAPACITY_S)
        ends = np.sort(running.records["end"])
        found.append(len(ends) / (ends[-1] - running.records["sent"].min()) * 1e9)
    return min(found)


def measure(
    side: Side,
    rows: int,
    rate: float,
    load: list[str],
    rounds: int,
    change: Callable[[Half], None],
    round_s: float = ROUND_S,
) -> Measured:
    """Alternate ``rounds`` halves without and with ``change``, which records what it changes."""
    measured = Measured()
    made = kinds(rows, ours=side.name == "hps")
    with open_load(side.address, made, rate, prefix=load, idle_s=side.idle_s) as running:
        time.sleep(1)
        for number in range(rounds):
            quiet = Half(time.monotonic_ns())
            time.sleep(round_s)
            quiet.end = time.monotonic_ns()
            busy = Half(quiet.end)
            change(busy)
            time.sleep(SETTLE_S)  # the replaced version is freed
            busy.end = time.monotonic_ns()
            measured.quiet.append(quiet)
            measured.busy.append(busy)
            measured.resources.append(side.resources())
            print(f"{side.name}: round {number + 1} of {rounds}", file=sys.stderr)
    measured.records, measured.error = running.records, running.error
    return measured


class Switches:
    """Loads of the other version of the model, ``count`` in each round."""

    def __init__(self, side: Side, count: int) -> None:
        self._side, self._count, self._version = side, count, 1

    def __call__(self, half: Half) -> None:
        for _ in range(self._count):
            self._version = 3 - self._version
            begin = time.monotonic_ns()
            self._side.load(self._version)
            half.changes.append((begin, time.monotonic_ns(), self._version))
            time.sleep(PAUSE_S)


class OtherLoads:
    """Loads and unloads of another model, ``count`` in each round."""

    def __init__(self, side: Side, count: int) -> None:
        self._side, self._count = side, count

    def __call__(self, half: Half) -> None:
        for _ in range(self._count):
            begin = time.monotonic_ns()
            self._side.load(1, OTHER)
            half.changes.append((begin, time.monotonic_ns(), 1))
            time.sleep(PAUSE_S)
            self._side.post(f"/v2/repository/models/{OTHER}/unload", {})
            time.sleep(PAUSE_S)


@contextmanager
def placed() -> Iterator[list[str]]:
    """Keep one core for the load generator if there are many; yields its command's prefix."""
    found = sorted(os.sched_getaffinity(0))
    if len(found) < 8:
        yield []
        return
    os.sched_setaffinity(0, found[:-1])
    try:
        yield ["taskset", "--cpu-list", str(found[-1])]
    finally:
        os.sched_setaffinity(0, found)


@contextmanager
def finished_parts_kept(report: Report, part: str) -> Iterator[None]:
    """Note the failure of a part; its bars are missed then."""
    try:
        yield
    except OSError as error:
        report.notes.append(f"{part} failed: {str(error)[:500]}")


def run(options: Options) -> Report:
    """Switches, loads of another model, Triton; each part in its own server."""
    extra, quick = options.extra, options.quick
    size = QUICK_GIGABYTES if quick else extra.get("gigabytes") or GIGABYTES
    rows = rows_of(size)
    other = QUICK_GIGABYTES if quick else size * OTHER_GIGABYTES / GIGABYTES
    gpu = has_gpu() and not extra.get("no_gpu")
    report = Report(
        figures={"rows": rows, "gpu": gpu, "versions": versions("numpy", "onnxruntime")}
    )
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=extra.get("folder")) as name, placed() as load:
        folder = Path(name)
        began = time.monotonic()
        write_versions(folder / "models", MODEL, rows, (1, 2))
        write_versions(folder / "models", OTHER, rows_of(other), (1,))
        report.figures["write_s"] = time.monotonic() - began
        read_mapped(folder / "models", MODEL)
        with hps_side(folder, gpu=gpu, workers=extra.get("workers") or 0) as side:
            _switches(report, lines, side, rows, load, options)
            with finished_parts_kept(report, "another model"):
                _other(report, lines, side, rows, load, options)
        if not extra.get("without_triton"):
            with finished_parts_kept(report, "Triton"):
                _triton(report, lines, folder, rows, load, options)
    report.tables["latencies without and with changes"] = lines
    return report


def _switches(
    report: Report,
    lines: list[dict[str, Any]],
    side: Side,
    rows: int,
    load: list[str],
    options: Options,
) -> None:
    total = QUICK_SWITCHES if options.quick else options.extra.get("switches") or SWITCHES
    each = min(SWITCHES_A_ROUND, total // 4)
    rate = SHARE * capacity(side, rows, load, options.extra.get("workers") or 0)
    report.figures["rate"] = rate
    # Caches and allocators reach their size first.
    measure(side, rows, rate, load, 1, Switches(side, 2), 1.0)
    round_s = 1.0 if options.quick else options.extra.get("seconds") or ROUND_S
    measured = measure(side, rows, rate, load, total // each, Switches(side, each), round_s)
    lines += measured.rows("hps, switches")
    memory, descriptors = measured.growth("anonymous MB"), measured.growth("descriptors")
    report.values |= {
        "failed": measured.failed,
        "mixed": measured.mixed,
        "stale": measured.stale,
        "p99": measured.ratio(99),
        "p999": measured.pooled(99.9),
        "memory": memory[1] / memory[0],
        "descriptors": descriptors[1] - descriptors[0],
        "latency": measured.slower(),
    }
    report.figures["resources"] = measured.resources
    report.figures["p99 by round"] = [
        [float(np.percentile(measured.latencies([half]), 99)) for half in halves]
        for halves in zip(measured.quiet, measured.busy, strict=True)
    ]
    if measured.error:
        report.notes.append(f"hps: {measured.error[:500]}")


def _other(
    report: Report,
    lines: list[dict[str, Any]],
    side: Side,
    rows: int,
    load: list[str],
    options: Options,
) -> None:
    total = LOADS_A_ROUND if options.quick else options.extra.get("loads") or OTHER_LOADS
    each = min(LOADS_A_ROUND, total)
    rate = report.figures["rate"]
    round_s = 1.0 if options.quick else options.extra.get("seconds") or ROUND_S
    measured = measure(side, rows, rate, load, total // each, OtherLoads(side, each), round_s)
    lines += measured.rows("hps, another model")
    report.values["other_failed"] = measured.failed + measured.mixed
    report.values["other_p99"] = measured.ratio(99)
    if measured.error:
        report.notes.append(f"hps, another model: {measured.error[:500]}")


def _triton(
    report: Report,
    lines: list[dict[str, Any]],
    folder: Path,
    rows: int,
    load: list[str],
    options: Options,
) -> None:
    if not ENVIRONMENTS["triton"].ready():
        report.notes.append("Triton was not measured: run `make bench-peers`")
        return
    with triton_side(folder) as side:
        rate = SHARE * capacity(side, rows, load)
        report.figures["Triton's rate"] = rate
        each = LOADS_A_ROUND if not options.quick else 2
        rounds = 1 if options.quick else TRITON_LOADS // each
        round_s = 1.0 if options.quick else ROUND_S
        measured = measure(side, rows, rate, load, rounds, Switches(side, each), round_s)
    lines += measured.rows("Triton, reloads")
    report.figures["Triton"] = {
        "failed": measured.failed,
        "mixed": measured.mixed,
        "stale": measured.stale,
        "p99": measured.ratio(99),
        "p99.9": measured.pooled(99.9),
        "resources": measured.resources,
    }
    report.notes.append(
        f"Triton: p99 with reloads / without {measured.ratio(99):.2f}, p99.9 {measured.pooled(99.9):.2f}, "
        f"{measured.failed} requests failed, {measured.mixed} mixed, {measured.stale} stale"
    )
    if measured.error:
        report.notes.append(f"Triton: {measured.error[:500]}")


BENCHMARK = Benchmark(
    name="switch",
    title="Switches of versions, and loads, beside requests",
    run=run,
    bars=BARS,
    measured=("hps", "services"),
    helpers=(
        *HELPERS,
        *("benchmarks/switch_scene.py", "benchmarks/switch_triton", "benchmarks/open_load"),
        "benchmarks/native_load",
    ),
    arguments={
        "--switches": {"type": int, "help": f"in all (default {SWITCHES})"},
        "--loads": {"type": int, "help": f"of the other model (default {OTHER_LOADS})"},
        "--gigabytes": {"type": float, "help": f"of each version (default {GIGABYTES:g})"},
        "--seconds": {
            "type": float,
            "help": f"of the half of a round without changes ({ROUND_S:g})",
        },
        "--workers": {"type": int, "help": "worker processes of the server (default 0)"},
        "--no-gpu": {"action": "store_true", "help": "serve from the CPU on a machine with a GPU"},
        "--folder": {"help": "for the models: 20 GB by default"},
        "--without-triton": {"action": "store_true", "help": "do not measure Triton"},
    },
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
