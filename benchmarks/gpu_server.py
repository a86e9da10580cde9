"""Requests a second of a server on a GPU, as clients see them: predictions and lookups over REST and gRPC.

`hps serve` runs as processes, once with rows and network on the GPU and once on the CPU alone, with the same
number of workers on the same cores. `benchmarks/native_load` sends requests with fresh keys from cores apart.
A sample of the answers of every cell is compared with NumPy and ONNX Runtime.

A cell is a batch, a number of callers and a protocol. Its request has 26 keys and 13 numbers per sample, its
network is 845-1024-1024-512-1; both protocols send binary tensors. Lookups of 26 × 64 keys are compared with
a bare peer that exchanges the same bytes over the loopback. The published anchor is the DLRM of Ray Serve
2.55: the same network, with all keys and numbers in the request, while its server makes them up itself.
Predictions over REST are repeated with 95 % and 70 % of the rows on the GPU, and the others in the CPU cache.

Triton is measured with ``--triton HOST:HTTP_PORT:GRPC_PORT``, if one runs beside us that serves the model
``m`` with the same tensors (`hps triton export` writes its repository). `benchmarks.gpu_server_peers` starts
the Triton of `make bench-peers`.

    python -m benchmarks.gpu_server --workers 8 --json benchmarks/results/gpu_server.json
    python -m benchmarks.gpu_server --quick --force    # on a machine without a GPU: the CPU server alone
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.common import Bar, Benchmark, Options, Report, main
from benchmarks.gpu_server_cells import BATCHES, Bench, Cells, Extent, Measured, Target
from benchmarks.gpu_server_misses import measure_misses
from benchmarks.gpu_server_scene import (
    ANCHOR_BATCH,
    PROTOCOLS,
    Cores,
    Reference,
    Scene,
    on_cores,
    running_server,
    write_anchor,
    write_scene,
)
from benchmarks.measure import versions
from benchmarks.native_load import LoadSummary, Template, sink

LOOKUP_BATCH, LOOKUPS, OF_LOOPBACK = 64, 20_000, 0.8
ANSWER_HEAD = 400
"""Bytes of an answer's HTTP head and JSON, about."""
RAY = 1_573
"""Requests/s of Ray Serve 2.55 with its optimizations on one L4 (anyscale.com/blog,
"ray-serve-inference-lower-latency-higher-throughput-haproxy")."""
MOST_P99_MS = 5.0
PAIRS, PAIR_S = 9, 0.4


def _bars() -> Iterator[Bar]:
    for batch, (rate, p50) in BATCHES.items():
        for protocol in PROTOCOLS:
            title = f"{protocol}, batch {batch}"
            yield Bar(
                f"predict_{batch}_{protocol}", f"{title}: predictions/s, p99 ≤ 5 ms", at_least=rate
            )
        yield Bar(f"p50_{batch}", f"rest, batch {batch}, one caller: p50 ms", at_most=p50)
        yield Bar(f"grpc_{batch}", f"batch {batch}, one caller: p50 grpc / rest", at_most=1.25)
        for protocol in PROTOCOLS:
            title = f"{protocol}, batch {batch}, one caller: p99 / p50"
            yield Bar(f"tail_{batch}_{protocol}", title, at_most=2.0)
        if batch >= 64:
            yield Bar(
                f"machine_{batch}", f"batch {batch}: best GPU rate / best CPU rate", at_least=5.0
            )
    for protocol in PROTOCOLS:
        title = (
            f"{protocol}, 26 × 64 keys: the larger of lookups/s / 20,000 and share of loopback / .8"
        )
        yield Bar(f"lookup_{protocol}", title, at_least=1.0)
    yield Bar("cells", "GPU / CPU requests/s, smallest of all cells", at_least=1.0)
    yield Bar("anchor", "DLRM of Ray Serve: ours / its 1,573 requests/s", at_least=10.0)
    yield Bar("wrong", "failed requests and wrong answers", at_most=0.0)


def measure_predictions(bench: Bench, target: Target, scene: Scene) -> Cells:
    """All cells of one server, recorded as a table."""
    cells: Cells = {}
    rows, reference = [], Reference(scene)
    for protocol in PROTOCOLS:
        for batch in bench.extent.batches:
            template = scene.template(protocol, batch)
            for callers in bench.extent.callers:
                measured = bench.measure(target, protocol, template, callers)
                title = f"{target.title}, {protocol}, batch {batch}, {callers} callers"
                bench.check(title, template, measured.load, reference)
                cells[protocol, batch, callers] = replace(measured.load, samples=[])
                row = {"protocol": protocol, "batch": batch, "callers": callers}
                rows.append(row | measured.row())
    bench.report.tables[f"predictions, {target.title}"] = rows
    return cells


def measure_one_caller(bench: Bench, target: Target, scene: Scene) -> dict[str, float]:
    """Bars of one caller: medians of short runs of REST and gRPC in turn, each on a new connection.

    On a shared machine, runs half a minute apart differ by more than the protocols, and a pause of some
    milliseconds is all of a run's tail."""
    short = replace(bench, extent=replace(bench.extent, seconds=PAIR_S))
    values = {}
    for batch in bench.extent.batches:
        templates = {protocol: scene.template(protocol, batch) for protocol in PROTOCOLS}
        pairs = [
            [short.load(target.addresses[p], templates[p], 1) for p in PROTOCOLS]
            for _ in range(PAIRS)
        ]
        values[f"p50_{batch}"] = median(rest.p50_ms for rest, _ in pairs)
        values[f"grpc_{batch}"] = median(grpc.p50_ms / (rest.p50_ms or 1) for rest, grpc in pairs)
        for protocol, runs in zip(PROTOCOLS, zip(*pairs, strict=True), strict=True):
            values[f"tail_{batch}_{protocol}"] = median(r.p99_ms / (r.p50_ms or 1) for r in runs)
    return values


def measure_lookups(bench: Bench, target: Target, scene: Scene) -> None:
    """Lookups of 26 × 64 keys, beside a bare exchange of the same bytes."""
    rows, reference = [], Reference(scene)
    for protocol in PROTOCOLS:
        template = scene.template(protocol, LOOKUP_BATCH, lookup=True)
        for callers in bench.extent.callers[1:]:
            measured = bench.measure(target, protocol, template, callers)
            bench.check(f"{target.title}, {protocol}, lookups", template, measured.load, reference)
            bare = measure_loopback(bench, template, measured.load, callers)
            share = measured.load.per_second / (bare.per_second or 1.0)
            row = {"protocol": protocol, "callers": callers, **measured.row()}
            rows.append(row | {"loopback /s": bare.per_second, "of loopback": share})
        if target.title == "GPU":
            bench.report.values[f"lookup_{protocol}"] = max(
                max(row["requests/s"] / LOOKUPS, row["of loopback"] / OF_LOOPBACK)
                for row in rows
                if row["protocol"] == protocol
            )
    bench.report.tables[f"lookups of 26 × {LOOKUP_BATCH} keys, {target.title}"] = rows


def measure_bare_exchange(bench: Bench, scene: Scene) -> None:
    """The requests' bytes answered by a peer that does nothing else: the floor of latency and tail, and the
    ceiling of the load generator."""
    rows = []
    for batch in bench.extent.batches:
        template = scene.template("rest", batch)
        size = ANSWER_HEAD + 4 * batch
        bare = replace(template, protocol="raw", answer_bytes=size)
        with sink(len(template.message), size, bench.cores.workers) as address:
            for callers in bench.extent.callers:
                load = bench.load(address, bare, callers)
                rows.append({"batch": batch, "callers": callers, **Measured(load, 0.0, 0.0).row()})
    bench.report.tables["bare exchange of the predictions' bytes"] = rows


def measure_loopback(
    bench: Bench, template: Template, like: LoadSummary, callers: int
) -> LoadSummary:
    """The same bytes in both directions, answered by a peer that does nothing else on the workers' cores."""
    size = max(1, round(like.answer_bytes))
    with sink(len(template.message), size, bench.cores.workers) as address:
        return bench.load(address, replace(template, protocol="raw", answer_bytes=size), callers)


def measure_anchor(bench: Bench, *, quick: bool) -> None:
    """Ray's DLRM on our GPU server."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        scene = write_anchor(Path(folder), 1_000 if quick else 100_000)
        reference = Reference(scene)
        with _server(bench, scene, gpu=True) as target:
            for protocol in PROTOCOLS:
                template = scene.template(protocol, ANCHOR_BATCH)
                for callers in bench.extent.callers[1:]:
                    measured = bench.measure(target, protocol, template, callers)
                    bench.check(f"DLRM, {protocol}", template, measured.load, reference)
                    rows.append({"protocol": protocol, "callers": callers, **measured.row()})
    bench.report.tables[f"DLRM of Ray Serve, {ANCHOR_BATCH} samples a request"] = rows
    bench.report.values["anchor"] = max(row["requests/s"] for row in rows) / RAY


@contextmanager
def _server(
    bench: Bench, scene: Scene, *, gpu: bool, share: float | None = None
) -> Iterator[Target]:
    with (
        running_server(scene, bench.cores, gpu=gpu, workers=bench.workers, share=share) as server,
        on_cores(bench.cores.load),
    ):
        yield Target.of("GPU" if gpu else "CPU", server)


def judge(values: dict[str, float], gpu: Cells, cpu: Cells) -> None:
    """Bars of the cells that were measured."""
    for batch in {batch for _, batch, _ in gpu}:
        for protocol in PROTOCOLS:
            kept = [c for (p, b, _), c in gpu.items() if (p, b) == (protocol, batch)]
            fast = [c.per_second for c in kept if c.p99_ms <= MOST_P99_MS and not c.errors]
            values[f"predict_{batch}_{protocol}"] = max(fast, default=0.0)
        if batch >= 64 and cpu:
            best = [
                max(c.per_second for (_, b, _), c in cells.items() if b == batch)
                for cells in (gpu, cpu)
            ]
            values[f"machine_{batch}"] = best[0] / (best[1] or 1.0)
    if cpu:
        values["cells"] = min(gpu[cell].per_second / (cpu[cell].per_second or 1.0) for cell in gpu)


def run(options: Options) -> Report:
    """On a machine without a GPU (``--force``), the CPU server alone."""
    report, available = Report(), sorted(os.sched_getaffinity(0))
    cores = Cores.of(available, options.extra.get("node_cores"))
    asked = options.extra.get("workers")
    workers = min(8, len(cores.workers)) if asked is None else int(asked)
    bench = Bench(report, Extent.of(options), cores, workers)
    report.figures |= {
        "cores": {"node": cores.node, "workers": cores.workers, "load generator": cores.load},
        "workers": workers,
        "versions": versions("numpy", "onnxruntime", "onnxruntime-gpu", "grpcio", "uvicorn"),
    }
    has_gpu = missing_requirement() is None
    if has_gpu:
        report.figures["device"] = _device()
    parts = str(options.extra.get("parts") or "gpu,cpu,lookups,misses,anchor").split(",")
    gpu: Cells = {}
    cpu: Cells = {}
    with tempfile.TemporaryDirectory() as folder:
        scene = write_scene(Path(folder))
        measure_bare_exchange(bench, scene)
        if has_gpu and "gpu" in parts:
            with _server(bench, scene, gpu=True) as target:
                gpu = measure_predictions(bench, target, scene)
                report.values |= measure_one_caller(bench, target, scene)
                if "lookups" in parts:
                    measure_lookups(bench, target, scene)
        if has_gpu and "misses" in parts:
            measure_misses(bench, scene, lambda share: _server(bench, scene, gpu=True, share=share))
        if "cpu" in parts:
            with _server(bench, scene, gpu=False) as target:
                cpu = measure_predictions(bench, target, scene)
                if "lookups" in parts and not has_gpu:
                    measure_lookups(bench, target, scene)
        if triton := options.extra.get("triton"):
            host, http, grpc = triton.split(":")
            addresses = {"rest": f"{host}:{http}", "grpc": f"{host}:{grpc}"}
            measure_predictions(bench, Target("Triton", addresses), scene)
    if has_gpu and "anchor" in parts:
        measure_anchor(bench, quick=options.quick)
    if gpu:
        judge(report.values, gpu, cpu)
    if has_gpu:
        report.values["wrong"] = float(bench.faults)
    return report


def missing_requirement() -> str | None:
    from benchmarks.gpu_cache import missing_requirement as gpu_missing

    return gpu_missing()


def _device() -> str:
    from hps.cuda.loader import cupy

    return str(cupy().cuda.runtime.getDeviceProperties(0)["name"].decode())


BENCHMARK = Benchmark(
    name="gpu_server",
    title="A server on a GPU, over REST and gRPC",
    run=run,
    bars=tuple(_bars()),
    measured=("hps", "services"),
    helpers=(
        *("benchmarks/common.py", "benchmarks/measure.py", "benchmarks/gpu_server_scene.py"),
        *("benchmarks/gpu_server_cells.py", "benchmarks/gpu_server_misses.py"),
        *("benchmarks/gpu_serving.py", "benchmarks/native_load", "benchmarks/grpc_load.py"),
        "benchmarks/request_templates.py",
    ),
    missing_requirement=missing_requirement,
    arguments={
        "--workers": {
            "type": int,
            "help": "workers of the server (default: one per core of theirs, at most 8)",
        },
        "--node-cores": {"type": int, "help": "of the node's process (default: an eighth)"},
        "--seconds": {"type": float, "help": "of each cell (default 1)"},
        "--parts": {"help": "some of gpu,cpu,lookups,misses,anchor, with commas (default: all)"},
        "--triton": {"metavar": "HOST:HTTP:GRPC", "help": "measure this Triton beside it"},
    },
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
