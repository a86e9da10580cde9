"""The front ends of hps and of a real Triton under NVIDIA's perf_analyzer.

One of the two halves of `benchmarks.frontend`; `benchmarks/frontend_scene.py` has requests and servers. hps
serves with its defaults and ``server.shared_memory`` from one process, Triton 2.51 with python models (one
instance each, dynamic batching on except for the large answers, which it makes slower), predictions by an
ensemble lookup → dense. They and perf_analyzer share the machine's cores, nothing is pinned; perf_analyzer is
synchronous, its default: with ``--async`` its single thread for HTTP would be the limit.

Sides alternate for several rounds; ratios are taken round by round, and the median over the rounds is judged.
Large answers are measured in system shared memory, too, over gRPC, without a bar.

infer/s is the number of answers in three time windows over their length (``--measurement-interval``, three
``--max-trials`` merged). ``--request-count`` is not used: perf_analyzer reads its clock so rarely then that
short runs report 2,000, 2,400, 3,000 or 4,000. p50 and p99 are over the same answers. CPU is user + system
time of the server's processes over the requests that the server's statistics counted in that time."""

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
PROTOCOLS = {"http": "REST", "grpc": "gRPC"}
LARGE = 8
"""Requests in flight with the large answers."""
SAMPLES = 512
"""Most samples for perf_analyzer: it first copies all of them for each request in flight, which takes 25 s
for 4,096 samples at 32 in flight."""
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


def bar_of(protocol: str, work: str, n: int) -> str:
    """The name of the bar on a workload's throughput, if it has one."""
    return f"{protocol.lower()}_{work}_{n}"


@dataclass(frozen=True)
class Measured:
    """Throughput, latencies and server CPU time per request of one run."""

    per_second: float
    p50_ms: float
    p99_ms: float
    cpu_us: float


def perf_analyzer_steps(work: Work, *, ours: bool) -> tuple[list[tuple[Tensors, Tensors]], int]:
    """The requests as perf_analyzer expects them, sample by sample, and the samples of a request."""
    batch = len(next(iter(work.requests[0].values())))
    requests = [work.tensors(each, ours=ours) for each in work.requests[: SAMPLES // batch]]
    samples = [{k: v[i] for k, v in each.items()} for each in requests for i in range(batch)]
    return [(sample, {}) for sample in samples], batch


def as_table_lookup(work: Work) -> Work:
    """The same lookup by table, as in HPS's interface.

    perf_analyzer sizes outputs by the model's metadata: a vector for each sample of a feature; the output of
    a lookup by table may have any size."""
    keys = [request["f"] for request in work.requests]
    requests = [{"KEYS": each, "NUMKEYS": np.array([[each.size]])} for each in keys]
    return replace(work, ours=work.ours.removesuffix(".lookup"), requests=requests)


def measure(
    side: Side, work: Work, protocol: str, concurrency: int, window_ms: int, *arguments: str
) -> Measured:
    """Load ``side`` for three windows.

    Raises RuntimeError for a failed request, or after three attempts with a window without an answer: a busy
    host may stop the machine for that long."""
    steps, batch = perf_analyzer_steps(work, ours=side.ours)
    model = work.model(ours=side.ours)
    cpu, count = side.server.cpu_seconds(), answered(side, model)
    run_once = partial(
        perf_analyzer,
        side.grpc if protocol == "grpc" else side.server.address,
        model,
        steps,
        *("-b", str(batch)),
        *("--measurement-interval", str(window_ms), "--max-trials", "3"),
        *arguments,
        protocol=protocol,
        requests=None,
        concurrency=concurrency,
    )
    row = None
    for last in (False, False, True):
        try:
            row = run_once()
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
    """Number of requests that the server has answered, from its statistics."""
    url = f"http://{side.server.address}/v2/models/{model}/stats"
    with urllib.request.urlopen(url, timeout=10) as answer:
        stats = json.load(answer)["model_stats"]
    return int(stats[0]["inference_stats"]["success"]["count"]) if stats else 0


def run(options: Options) -> Report:
    """All workloads and protocols; with ``--quick`` only those with bars."""
    return measured(options, ("26", "1024", "predict", "large"), 1 if options.quick else 3)


def measured(options: Options, names: tuple[str, ...], rounds: int) -> Report:
    window_ms = 200 if options.quick else 500
    report = Report()
    found = works(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_scene(folder, options.seed)
        with sides(folder, ("hps", "Triton"), None, report.notes) as running:
            for name in names:
                for n in (LARGE,) if name == "large" else CONCURRENCY:
                    runs: dict[str, Callable[[], Measured]] = {
                        f"{server} {title}": partial(measure, side, found[name], key, n, window_ms)
                        for server, side in running.items()
                        for key, title in PROTOCOLS.items()
                        if not options.quick or bar_of(title, name, n) in JUDGED
                    }
                    if name == "large" and not options.quick:
                        for server, side in running.items():
                            work = as_table_lookup(found[name]) if side.ours else found[name]
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
    for protocol in PROTOCOLS.values():
        ours, theirs = runs.get(f"hps {protocol}"), runs.get(f"Triton {protocol}")
        name = bar_of(protocol, work, n)
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


def _missing_requirement() -> str | None:
    missing = [each for each in ("triton", "perf_analyzer") if not ENVIRONMENTS[each].ready()]
    return f"{' and '.join(missing)} not set up: run `make bench-peers`" if missing else None


BENCHMARK = Benchmark(
    name="frontend_triton",
    title=f"The front end and Triton's: lookups, predictions of {BATCH} samples, large answers",
    run=run,
    bars=BARS,
    measured=("hps", "services", "benchmarks/frontend_scene.py"),
    missing_requirement=_missing_requirement,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
