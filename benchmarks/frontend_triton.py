"""Our front end and a real Triton's, asked by NVIDIA's perf_analyzer.

One of `benchmarks.frontend`'s two halves; what is asked and of whom stands in `benchmarks/frontend_scene.py`.
hps serves with its defaults and ``server.shared_memory`` from one process, Triton 2.51 with python models
(one instance each, dynamic batching on but for the large answers, which it makes slower), predictions by an
ensemble lookup → dense. They and perf_analyzer share the machine's cores, nothing is pinned; perf_analyzer is
synchronous, its default: with ``--async`` its one thread for HTTP is what is measured.

Sides take turns, several rounds; ratios are taken round by round, and the median over the rounds is judged.
Large answers are measured in system shared memory, too, over gRPC; no bar is on that.

infer/s is what was answered within three windows of time over their length (``--measurement-interval``, three
``--max-trials`` merged), not ``--request-count``, whose time perf_analyzer looks at so seldom that short runs
give 2,000, 2,400, 3,000 or 4,000. p50 and p99 are over the same answers. CPU is user + system time of the
server's processes over the requests that the server's own statistics counted meanwhile.
"""

from __future__ import annotations

import json
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.common import Bar, Benchmark, Options, Report, main
from benchmarks.frontend_scene import BATCH, WIDE, Side, Work, sides, works, write_scene
from benchmarks.measure import Spread, alternate, ratio, versions
from benchmarks.peers.environments import ENVIRONMENTS
from benchmarks.peers.perf_analyzer import Tensors, perf_analyzer

CONCURRENCY = (1, 8, 32, 128)
WAYS = {"http": "REST", "grpc": "gRPC"}
LARGE = 8
"""In flight, of the large answers."""
SAMPLES = 512
"""The most that perf_analyzer is given: it copies all of them for each request in flight before it begins,
which takes 25 s for 4,096 at 32 in flight."""
SHARED = ("--shared-memory", "system", "--output-shared-memory-size", str(1024 * WIDE * 4))
"""Tensors in memory that perf_analyzer and the server share."""


def _bars() -> tuple[Bar, ...]:
    found = []
    for work, title, least in (("26", "26 keys", 1.5), ("predict", "predict", 1.3)):
        for n in CONCURRENCY:
            head = f"{title}, {n} in flight: hps REST / Triton HTTP"
            found.append(Bar(f"rest_{work}_{n}", f"{head}, infer/s", at_least=least))
            if work == "26":
                found.append(Bar(f"rest_{work}_{n}_p99", f"{head}, p99", at_most=1.0))
        for n in (8, 32):
            head = f"{title}, {n} in flight: hps gRPC / Triton gRPC"
            found.append(Bar(f"grpc_{work}_{n}", f"{head}, infer/s", at_least=1.0))
            if work == "26":
                found.append(Bar(f"grpc_{work}_{n}_p99", f"{head}, p99", at_most=1.3))
    text = f"answers of 3.4 MB, {LARGE} in flight: hps REST / Triton HTTP, infer/s"
    found.append(Bar(f"rest_large_{LARGE}", text, at_least=1.5))
    return tuple(found)


BARS = _bars()
JUDGED = {bar.name for bar in BARS}


def bar_of(way: str, work: str, n: int) -> str:
    """The name of the bar on a work's throughput, where there is one."""
    return f"{way.lower()}_{work}_{n}"


@dataclass(frozen=True)
class Measured:
    """One run."""

    per_second: float
    p50_ms: float
    p99_ms: float
    cpu_us: float


def steps_of(work: Work, *, ours: bool) -> tuple[list[tuple[Tensors, Tensors]], int]:
    """The requests as perf_analyzer takes them, sample by sample, and the samples of a request."""
    batch = len(next(iter(work.requests[0].values())))
    requests = [work.tensors(each, ours=ours) for each in work.requests[: SAMPLES // batch]]
    samples = [{k: v[i] for k, v in each.items()} for each in requests for i in range(batch)]
    return [(sample, {}) for sample in samples], batch


def in_tables_form(work: Work) -> Work:
    """The same lookup of ours by table, as HPS has it. perf_analyzer makes room for an output by the model's
    metadata: a vector for each sample of a feature, while this form's output may have any size."""
    keys = [request["f"] for request in work.requests]
    requests = [{"KEYS": each, "NUMKEYS": np.array([[each.size]])} for each in keys]
    return replace(work, ours=work.ours.removesuffix(".lookup"), requests=requests)


def measure(
    side: Side, work: Work, way: str, concurrency: int, window_ms: int, *arguments: str
) -> Measured:
    """Ask ``side`` for three windows. Raises RuntimeError for any answer but a good one, and when nothing was
    answered within a window, three times over: a busy host may stop the machine for as long."""
    steps, batch = steps_of(work, ours=side.ours)
    model = work.model(ours=side.ours)
    cpu, count = side.server.cpu_seconds(), answered(side, model)
    ask = partial(
        perf_analyzer,
        side.grpc if way == "grpc" else side.server.address,
        model,
        steps,
        *("-b", str(batch)),
        *("--measurement-interval", str(window_ms), "--max-trials", "3"),
        *arguments,
        protocol=way,
        requests=None,
        concurrency=concurrency,
    )
    row = None
    for last in (False, False, True):
        try:
            row = ask()
            break
        except RuntimeError as error:
            if last or "Failed to obtain stable measurement" not in str(error):
                raise
    assert row is not None
    cpu, count = side.server.cpu_seconds() - cpu, answered(side, model) - count
    # It counts samples.
    rate = row["Inferences/Second"] / batch
    p50, p99 = (row[f"p{q} latency"] / 1e3 for q in (50, 99))
    return Measured(rate, p50, p99, cpu / count * 1e6)


def answered(side: Side, model: str) -> int:
    """Requests that the server has answered, by its own statistics."""
    url = f"http://{side.server.address}/v2/models/{model}/stats"
    with urllib.request.urlopen(url, timeout=10) as answer:
        stats = json.load(answer)["model_stats"]
    return int(stats[0]["inference_stats"]["success"]["count"]) if stats else 0


def run(options: Options) -> Report:
    """All works and ways; with ``--quick`` those that bars judge."""
    return measured(options, ("26", "1024", "predict", "large"), 1 if options.quick else 3)


def measured(options: Options, asked: tuple[str, ...], rounds: int) -> Report:
    window_ms = 200 if options.quick else 500
    report = Report()
    found = works(options.seed)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_scene(folder, options.seed)
        with sides(folder, ("hps", "Triton"), None, report.notes) as running:
            for name in asked:
                for n in (LARGE,) if name == "large" else CONCURRENCY:
                    runs: dict[str, Callable[[], Measured]] = {
                        f"{server} {way}": partial(measure, side, found[name], key, n, window_ms)
                        for server, side in running.items()
                        for key, way in WAYS.items()
                        if not options.quick or bar_of(way, name, n) in JUDGED
                    }
                    if name == "large" and not options.quick:
                        for server, side in running.items():
                            work = in_tables_form(found[name]) if side.ours else found[name]
                            runs[f"{server} gRPC, shared memory"] = partial(
                                measure, side, work, "grpc", n, window_ms, *SHARED
                            )
                    if runs:
                        record(report, name, found[name].title, n, alternate(runs, rounds))
    report.figures["versions"] = versions("numpy", "onnxruntime", "grpcio", "uvicorn")
    return report


def record(
    report: Report, work: str, title: str, n: int, runs: Mapping[str, list[Measured]]
) -> None:
    report.tables[f"{title}, {n} in flight"] = table(runs)
    report.figures[f"{work}_{n}"] = {k: [asdict(each) for each in v] for k, v in runs.items()}
    for way in WAYS.values():
        ours, theirs = runs.get(f"hps {way}"), runs.get(f"Triton {way}")
        name = bar_of(way, work, n)
        if ours is None or theirs is None or name not in JUDGED:
            continue
        report.values[name] = ratio(
            [each.per_second for each in ours], [each.per_second for each in theirs]
        ).median
        if f"{name}_p99" in JUDGED:
            report.values[f"{name}_p99"] = ratio(
                [each.p99_ms for each in ours], [each.p99_ms for each in theirs]
            ).median


def table(runs: Mapping[str, list[Measured]]) -> list[Mapping[str, str]]:
    """A row per side: medians, and the throughput's spread."""
    columns = {"infer/s": "per_second", "p50 ms": "p50_ms", "p99 ms": "p99_ms"}
    rows: list[Mapping[str, str]] = []
    for side, all_of in runs.items():
        spreads = {
            column: Spread.of([getattr(each, name) for each in all_of])
            for column, name in {**columns, "CPU µs/request": "cpu_us"}.items()
        }
        forms = {"infer/s": ".0f", "CPU µs/request": ".0f"}
        rows.append(
            {"": side, **{c: format(spread, forms.get(c, ".3g")) for c, spread in spreads.items()}}
        )
    return rows


def _lacking() -> str | None:
    missing = [each for each in ("triton", "perf_analyzer") if not ENVIRONMENTS[each].ready()]
    return f"{' and '.join(missing)} not set up: run `make bench-peers`" if missing else None


BENCHMARK = Benchmark(
    name="frontend_triton",
    title=f"The front end and Triton's: lookups, predictions of {BATCH} samples, large answers",
    run=run,
    bars=BARS,
    measured=("hps", "services", "benchmarks/frontend_scene.py"),
    lacking=_lacking,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
