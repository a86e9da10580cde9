"""The GPU server beside a real Triton, and the native load generator beside NVIDIA's perf_analyzer.

Both servers run one after the other on the same cores, with model ``m`` of `benchmarks.gpu_server_scene`,
under the same load by `benchmarks.native_load`. Samples of the answers of both are compared with NumPy and
ONNX Runtime. Triton serves the ensemble that `hps triton export` writes: rows by our lookup backend, attached
to a node with all rows in its shared CPU cache, then the network in ONNX Runtime in Triton's python backend,
on the GPU if there is one (``--triton-network cpu``: never). It joins requests dynamically, and each run of
the network has as many requests as Triton passes on together.

The generators are compared in two ways. The requests that the native one reports must be those that the
server's statistics count. And perf_analyzer loads the same server with as many requests in flight, from the
same cores, with binary tensors; it needs more CPU time for a request, so it reaches less. It repeats 128
samples; the native generator draws fresh keys.

    make bench-peers
    python -m benchmarks.gpu_server_peers --workers 8 --json benchmarks/results/gpu_server_peers.json
    python -m benchmarks.gpu_server_peers --quick --force    # on a machine without a GPU: both on the CPU
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import HELPERS, Bar, Benchmark, Options, Report, main
from benchmarks.gpu_server import measure_predictions
from benchmarks.gpu_server import missing_requirement as gpu_missing
from benchmarks.gpu_server_cells import Bench, Cells, Extent, Target
from benchmarks.gpu_server_scene import (
    DENSE,
    PROTOCOLS,
    Cores,
    Scene,
    on_cores,
    running_server,
    write_scene,
)
from benchmarks.gpu_server_triton import Instances, running_triton
from benchmarks.gpu_serving import NAMES
from benchmarks.measure import versions
from benchmarks.native_load import Callers, run_load
from benchmarks.peers.environments import ENVIRONMENTS
from benchmarks.peers.perf_analyzer import Tensors, perf_analyzer

BATCHES, CALLERS = (1, 64, 1024), (1, 8, 32)
GENERATOR_BATCHES, GENERATOR_CALLERS = (1, 64), (1, 8, 64)
SAMPLES = 128
"""Of perf_analyzer: it copies all of them for each request in flight before it begins."""
PERF_ANALYZER_PROTOCOL = {"rest": "http", "grpc": "grpc"}


def _bars() -> Iterator[Bar]:
    for protocol in PROTOCOLS:
        for batch in BATCHES:
            title = f"{protocol}, batch {batch}: ours / Triton's"
            yield Bar(
                f"rate_{batch}_{protocol}", f"{title} requests/s, best of all callers", at_least=1.0
            )
            yield Bar(f"p50_{batch}_{protocol}", f"{title} p50, one caller", at_most=1.0)
        title = f"{protocol}: share of the native generator's requests not counted by the server"
        yield Bar(f"counted_{protocol}", title, at_most=0.01)
    yield Bar("wrong", "failed requests and wrong answers", at_most=0.0)


def perf_analyzer_steps(rows: int) -> list[tuple[Tensors, Tensors]]:
    """Random samples of model ``m``: a key below ``rows`` per table and 13 numbers."""
    rng = np.random.default_rng(0)

    def sample() -> Tensors:
        keys = {name: rng.integers(0, rows, 1) for name in NAMES}
        return keys | {"dense": rng.standard_normal(DENSE, np.float32)}

    return [(sample(), {}) for _ in range(SAMPLES)]


def answered(target: Target, model: str) -> int:
    """Number of requests that the server has answered, from its statistics."""
    url = f"http://{target.addresses['rest']}/v2/models/{model}/stats"
    with urllib.request.urlopen(url, timeout=10) as answer:
        stats = json.load(answer)["model_stats"]
    return int(stats[0]["inference_stats"]["success"]["count"]) if stats else 0


@dataclass(frozen=True)
class Load:
    """``callers`` requests of ``batch`` samples in flight."""

    protocol: str
    batch: int
    callers: int


def measure_generators(bench: Bench, target: Target, scene: Scene, callers: Sequence[int]) -> None:
    """Both load generators on one server, one after the other, with as many requests in flight."""
    rows: list[Mapping[str, Any]] = []
    missed = dict.fromkeys(PROTOCOLS, 0.0)
    steps = perf_analyzer_steps(scene.rows)
    for batch in GENERATOR_BATCHES:
        for protocol in PROTOCOLS:
            for count in callers:
                load = Load(protocol, batch, count)
                row, uncounted = measure_native(bench, target, scene, load)
                missed[protocol] = max(missed[protocol], uncounted)
                other = measure_perf_analyzer(bench, target, scene, load, steps)
                rows.append(
                    {"protocol": protocol, "batch": batch, "in flight": count} | row | other
                )
    bench.report.values |= {f"counted_{protocol}": most for protocol, most in missed.items()}
    bench.report.tables["load generators, the same server"] = rows


def measure_native(
    bench: Bench, target: Target, scene: Scene, load: Load
) -> tuple[dict[str, Any], float]:
    """A row, and the share of its requests that the server's statistics do not confirm.

    The last request of each caller may be counted after the time is up."""
    before, seconds, cores = answered(target, scene.model), bench.extent.seconds, bench.cores
    asked = Callers(load.callers, seconds, cores=cores.load[: load.callers], spin=cores.spin)
    address = target.addresses[load.protocol]
    found = run_load(address, scene.template(load.protocol, load.batch), asked)
    counted = answered(target, scene.model) - before
    bench.faults += found.errors
    row = {
        "native /s": found.per_second,
        "native p50 ms": found.p50_ms,
        "native p99 ms": found.p99_ms,
        "counted / reported": counted / max(1, found.requests),
    }
    return row, max(0, abs(found.requests - counted) - load.callers) / max(1, counted)


def measure_perf_analyzer(
    bench: Bench,
    target: Target,
    scene: Scene,
    load: Load,
    steps: Sequence[tuple[Tensors, Tensors]],
) -> dict[str, float]:
    """A row of three windows; of NaN, with a note, if perf_analyzer fails."""
    window_ms = max(400, round(bench.extent.seconds * 400))
    try:
        row = perf_analyzer(
            target.addresses[load.protocol],
            scene.model,
            steps,
            *("-b", str(load.batch), "--max-trials", "3"),
            *("--measurement-interval", str(window_ms)),
            protocol=PERF_ANALYZER_PROTOCOL[load.protocol],
            requests=None,
            concurrency=load.callers,
            timeout_s=60.0,
        )
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        bench.report.notes.append(f"perf_analyzer, {load}: {str(error)[-300:]}")
        row = dict.fromkeys(("Inferences/Second", "p50 latency", "p99 latency"), math.nan)
    return {
        # It counts samples.
        "perf_analyzer /s": row["Inferences/Second"] / load.batch,
        "perf_analyzer p50 ms": row["p50 latency"] / 1e3,
        "perf_analyzer p99 ms": row["p99 latency"] / 1e3,
    }


def measure_triton(bench: Bench, scene: Scene, ours: Cells, instances: Instances) -> None:
    """Triton's cells beside ``ours``; a note if it does not start."""
    with ExitStack() as stack:
        try:
            target = stack.enter_context(running_triton(scene, bench.cores, instances))
        except RuntimeError as error:
            bench.report.notes.append(f"Triton was not measured: {error}")
            return
        warm_up(bench, target, scene)
        judge(bench.report.values, ours, measure_predictions(bench, target, scene))


def warm_up(bench: Bench, target: Target, scene: Scene) -> None:
    """Load the server with each batch, since CUDA's first runs of a size are slow."""
    for batch in bench.extent.batches:
        bench.load(target.addresses["rest"], scene.template("rest", batch), bench.extent.callers[1])


def judge(values: dict[str, float], ours: Cells, triton: Cells) -> None:
    """The best rate of all callers, and one caller's p50: ours over Triton's."""
    for batch in {batch for _, batch, _ in ours}:
        for protocol in PROTOCOLS:
            best = [
                max(c.per_second for (p, b, _), c in cells.items() if (p, b) == (protocol, batch))
                for cells in (ours, triton)
            ]
            values[f"rate_{batch}_{protocol}"] = best[0] / (best[1] or 1.0)
            p50 = [cells[protocol, batch, 1].p50_ms for cells in (ours, triton)]
            values[f"p50_{batch}_{protocol}"] = p50[0] / (p50[1] or 1.0)


def run(options: Options) -> Report:
    """On a machine without a GPU (``--force``), both servers on the CPU."""
    report, cores = Report(), Cores.of(sorted(os.sched_getaffinity(0)))
    asked, has_gpu = options.extra.get("workers"), gpu_missing() is None
    workers = min(8, len(cores.workers)) if asked is None else int(asked)
    in_flight: tuple[int, ...] = (1, 8)
    extent = Extent(0.3, (1, 64), in_flight)
    if not options.quick:
        in_flight = GENERATOR_CALLERS
        extent = Extent(float(options.extra.get("seconds") or 1.0), BATCHES, CALLERS)
    bench = Bench(report, extent, cores, workers)
    parts = str(options.extra.get("parts") or "generators,triton").split(",")
    lookups, networks = str(options.extra.get("triton_instances") or "4,2").split(",")
    network_on_gpu = has_gpu and options.extra.get("triton_network") != "cpu"
    instances = Instances(int(lookups), int(networks), network_on_gpu)
    report.figures |= {
        "cores": {"server": cores.server, "load generators": cores.load},
        "workers": workers,
        "Triton's instances": asdict(instances),
        "versions": versions("numpy", "onnxruntime", "onnxruntime-gpu", "grpcio", "uvicorn"),
    }
    with tempfile.TemporaryDirectory() as folder:
        scene = write_scene(Path(folder))
        with (
            running_server(scene, cores, gpu=has_gpu, workers=workers) as server,
            on_cores(cores.load),
        ):
            target = Target.of("ours", server)
            ours = measure_predictions(bench, target, scene) if "triton" in parts else {}
            if "generators" in parts:
                measure_generators(bench, target, scene, in_flight)
        if "triton" in parts:
            measure_triton(bench, scene, ours, instances)
    report.values["wrong"] = float(bench.faults)
    return report


def _missing_requirement() -> str | None:
    missing = [each for each in ("triton", "perf_analyzer") if not ENVIRONMENTS[each].ready()]
    if missing:
        return f"{' and '.join(missing)} not set up: run `make bench-peers`"
    return gpu_missing()


BENCHMARK = Benchmark(
    name="gpu_server_peers",
    title="A server on a GPU beside Triton, and two load generators",
    run=run,
    bars=tuple(_bars()),
    measured=("hps", "services"),
    helpers=(
        *HELPERS,
        *(
            "benchmarks/gpu_server.py",
            "benchmarks/gpu_server_scene.py",
            "benchmarks/gpu_serving.py",
        ),
        *("benchmarks/gpu_server_cells.py", "benchmarks/gpu_server_triton.py"),
        *("benchmarks/grpc_load.py", "benchmarks/request_templates.py", "benchmarks/native_load"),
    ),
    missing_requirement=_missing_requirement,
    arguments={
        "--workers": {"type": int, "help": "of our server (default: as benchmarks.gpu_server)"},
        "--seconds": {"type": float, "help": "of each cell (default 1)"},
        "--parts": {"help": "generators, triton or both, separated by a comma (default: both)"},
        "--triton-instances": {
            "metavar": "LOOKUPS,NETWORKS",
            "help": "of lookups and of the network in Triton (default 4,2)",
        },
        "--triton-network": {"choices": ("cpu", "gpu"), "help": "where Triton runs the network"},
    },
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
