"""Another version of a model, or another model, is loaded while a server answers: what do its callers notice?

Two versions of a model of 2 GB (26 features over four tables, a network), whose rows carry their version; see
`benchmarks/switch_scene.py`. Lookups of 26 keys and predictions of 16 samples (3 : 1) arrive as a Poisson
process at 70 % of the server's capacity, which closed loops measure between rounds of five switches. Rounds
after which it is lower than before, and answers of times in which other machines took the processors, are
not judged.
At a switch the other version is loaded and served in place of the current one, which is then freed
(``models.rollback_s: 0``). Latencies count from the instant a request was due, and are compared with those of
the three seconds before the switch, since a shared machine is a third slower for seconds.

* p99: the median over the switches of with / before; p99.9: of all answers together.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import HELPERS, Bar, Benchmark, Options, Report, main
from benchmarks.measure import versions
from benchmarks.peers.environments import ENVIRONMENTS
from benchmarks.switch_rounds import QUIET_S, Half, Measured, measure
from benchmarks.switch_scene import (
    MODEL,
    OTHER,
    Side,
    hps_side,
    read_mapped,
    rows_of,
    triton_side,
    write_versions,
)
from hps.cuda.loader import has_gpu

GIGABYTES, OTHER_GIGABYTES, QUICK_GIGABYTES = 2.0, 5.0, 0.05
SWITCHES, QUICK_SWITCHES, SWITCHES_A_ROUND = 500, 8, 5
OTHER_LOADS, TRITON_LOADS, LOADS_A_ROUND = 20, 12, 4
PAUSE_S = 0.5

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


class Switch:
    """A load of the other version of the model."""

    def __init__(self, side: Side) -> None:
        self._side, self._version = side, 1

    def __call__(self, half: Half) -> None:
        self._version = 3 - self._version
        begin = time.monotonic_ns()
        self._side.load(self._version)
        half.changes.append((begin, time.monotonic_ns(), self._version))


class OtherLoad:
    """A load and an unload of another model."""

    def __init__(self, side: Side) -> None:
        self._side = side

    def __call__(self, half: Half) -> None:
        begin = time.monotonic_ns()
        self._side.load(1, OTHER)
        half.changes.append((begin, time.monotonic_ns(), 1))
        time.sleep(PAUSE_S)
        self._side.post(f"/v2/repository/models/{OTHER}/unload", {})


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
        os.sync()  # else the disk is busy for a minute
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
    workers = options.extra.get("workers") or 0
    # Caches and allocators reach their size first.
    measure(side, rows, load, 1, 2, Switch(side), 1.0, workers)
    measured = measure(
        side, rows, load, total // each, each, Switch(side), _quiet_s(options), workers
    )
    memory, descriptors = measured.growth("anonymous MB"), measured.growth("descriptors")
    report.values |= {
        "mixed": measured.mixed,
        "memory": memory[1] / memory[0],
        "descriptors": descriptors[1] - descriptors[0],
        "stale": measured.stale,
    }
    report.figures["capacities"] = measured.capacities
    report.figures["resources"] = measured.resources
    report.figures["p99 by switch"] = [
        [float(np.percentile(measured.latencies([half]), 99)) for half in halves]
        for halves in zip(measured.quiet, measured.busy, strict=True)
    ]
    if judged := _judged(report, lines, "hps, switches", measured):
        report.values |= {
            "failed": judged.failed,
            "p99": judged.ratio(99),
            "p999": judged.pooled(99.9),
            "latency": judged.slower(),
        }


def _quiet_s(options: Options) -> float:
    return 1.0 if options.quick else options.extra.get("seconds") or QUIET_S


def _judged(
    report: Report, lines: list[dict[str, Any]], title: str, measured: Measured
) -> Measured | None:
    """Return the pairs that were not disturbed, None if there are none, and add a row for them."""
    judged = measured.without_disturbed()
    quiet, busy = (
        float(np.mean([half.disturbed for half in halves]))
        for halves in (measured.quiet, measured.busy)
    )
    left_out = len(measured.quiet) - len(judged.quiet)
    report.notes.append(
        f"{title}: other machines disturbed {quiet:.0%} of the time without, and {busy:.0%} of that with "
        f"changes, and this one was slower after {sum(measured.slowed)} of {len(measured.slowed)} rounds. "
        f"Answers of these times, and {left_out} of {len(measured.quiet)} pairs, are not judged; "
        f"{measured.failed - judged.failed} requests failed in these. All answers: p99 "
        f"{measured.ratio(99):.2f}, p99.9 {measured.pooled(99.9):.2f}"
    )
    if measured.error:
        report.notes.append(f"{title}: {measured.error[:500]}")
    if not judged.quiet:
        return None
    lines += judged.rows(title)
    return judged


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
    workers, quiet_s = options.extra.get("workers") or 0, _quiet_s(options)
    measured = measure(side, rows, load, total // each, each, OtherLoad(side), quiet_s, workers)
    if judged := _judged(report, lines, "hps, another model", measured):
        report.values["other_failed"] = judged.failed + measured.mixed
        report.values["other_p99"] = judged.ratio(99)


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
        each = LOADS_A_ROUND if not options.quick else 2
        rounds = 1 if options.quick else TRITON_LOADS // each
        measured = measure(side, rows, load, rounds, each, Switch(side), _quiet_s(options))
    report.figures["Triton's capacities"] = measured.capacities
    judged = _judged(report, lines, "Triton, reloads", measured)
    if judged is None:
        return
    report.figures["Triton"] = {
        "failed": judged.failed,
        "mixed": measured.mixed,
        "stale": measured.stale,
        "p99": judged.ratio(99),
        "p99.9": judged.pooled(99.9),
        "resources": measured.resources,
    }
    report.notes.append(
        f"Triton: p99 with reloads / without {judged.ratio(99):.2f}, p99.9 {judged.pooled(99.9):.2f}, "
        f"{judged.failed} requests failed, {measured.mixed} mixed, {measured.stale} stale"
    )


BENCHMARK = Benchmark(
    name="switch",
    title="Switches of versions, and loads, beside requests",
    run=run,
    bars=BARS,
    measured=("hps", "services"),
    helpers=(
        *HELPERS,
        *("benchmarks/switch_rounds.py", "benchmarks/switch_scene.py", "benchmarks/switch_triton"),
        "benchmarks/stolen_time.py",
        *("benchmarks/open_load", "benchmarks/native_load"),
    ),
    arguments={
        "--switches": {"type": int, "help": f"in all (default {SWITCHES})"},
        "--loads": {"type": int, "help": f"of the other model (default {OTHER_LOADS})"},
        "--gigabytes": {"type": float, "help": f"of each version (default {GIGABYTES:g})"},
        "--seconds": {
            "type": float,
            "help": f"without a change before each one ({QUIET_S:g})",
        },
        "--workers": {"type": int, "help": "worker processes of the server (default 0)"},
        "--no-gpu": {"action": "store_true", "help": "serve from the CPU on a machine with a GPU"},
        "--folder": {"help": "for the models: 20 GB by default"},
        "--without-triton": {"action": "store_true", "help": "do not measure Triton"},
    },
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
