"""Latency of a node on a GPU, from Python: lookups whose vectors stay there, and predictions.

26 tables of 32-wide rows as in DLRM-v2, one key each per sample, and an 845-1024-1024-512-1 network. Nodes
on the same files, on the GPU and on the CPU, alternate. `benchmarks/gpu_server.py` measures the same model
behind REST and gRPC.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import hps
from benchmarks.common import Bar, Benchmark, Options, Report, main
from benchmarks.gpu import percentiles
from benchmarks.measure import versions
from hps.config.model_schema import DenseSpec, FeatureSpec, ModelSpec, TableSpec, TensorSpec
from hps.cuda.loader import cupy, missing_requirement
from hps.models.version_writer import write_version

TABLES, DIM, ROWS = 26, 32, 30_000
LAYERS = (TABLES * DIM + 13, 1024, 1024, 512, 1)
BATCHES = (1, 64, 1024, 16_384)
ROUNDS, REST_S, WARM_UP_S, WARM_UPS = 4, 0.2, 0.3, 10
NAMES = [f"t{i}" for i in range(TABLES)]

BARS = (Bar("predict_1024", "whole prediction, batch 1,024, p50 ms", at_most=0.5),)


def run(options: Options) -> Report:
    report, seed = Report(), options.seed
    report.figures["device"] = cupy().cuda.runtime.getDeviceProperties(0)["name"].decode()
    report.figures["versions"] = versions(
        "numpy", "cupy-cuda12x", "cupy-cuda13x", "onnxruntime-gpu"
    )
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        gpu = {"use": "required", "capacity_bytes": 1 << 33}
        whole = open_node(folder, "whole", gpu | {"static": True})
        short = open_node(folder, "short", gpu | {"share": 0.85})
        host = open_node(folder, "host", {"use": "off"}, provider="cpu", threads=0)
        nodes = {"GPU": whole, "GPU, 85 % of the rows": short}
        try:
            provider = whole.model("m").pipeline.dense.provider
            report.figures["dense provider"] = provider
            measure_predictions(report, seed, nodes, host)
            measure_lookups(report, seed, nodes, host)
        finally:
            for node in (*nodes.values(), host):
                node.close()
    return report


def measure_predictions(report: Report, seed: int, nodes: dict[str, Any], host: Any) -> None:
    rows, rng = [], np.random.default_rng(seed)
    for batch in BATCHES:
        sides = {**{name: n.predict for name, n in nodes.items()}, "CPU": host.predict}
        times = _alternate_calls(
            sides, lambda b=batch: ("m", *_random_request(rng, b)), _calls(batch)
        )
        row: dict[str, Any] = {"batch": batch}
        for name, taken in times.items():
            row |= {f"{name} {key}": value for key, value in percentiles(taken).items()}
        row["CPU / GPU"] = row["CPU p50 ms"] / row["GPU p50 ms"]
        rows.append(row)
        if batch == 1024:
            report.values["predict_1024"] = row["GPU p50 ms"]
        asked = ("m", *_random_request(rng, batch))
        right = host.predict(*asked).outputs["score"]
        off = [
            np.abs(node.predict(*asked).outputs["score"] - right).max() for node in nodes.values()
        ]
        report.figures[f"scores differ from the CPU's by, batch {batch}"] = float(max(off))
    report.tables["whole prediction, host keys in, host scores out"] = rows


def measure_lookups(report: Report, seed: int, nodes: dict[str, Any], host: Any) -> None:
    rows, rng = [], np.random.default_rng(seed)
    for batch in BATCHES:
        sides: dict[str, Callable[..., Any]] = {
            "GPU": nodes["GPU"].lookup_on_device,
            "GPU, 85 % of the rows": nodes["GPU, 85 % of the rows"].lookup_on_device,
            "to the host, from the CPU cache": host.lookup,
        }
        times = _alternate_calls(
            sides, lambda b=batch: ("m", _random_request(rng, b)[0]), _calls(batch)
        )
        row: dict[str, Any] = {"batch": batch}
        for name, taken in times.items():
            row |= {f"{name} {key}": value for key, value in percentiles(taken).items()}
        rows.append(row)
    report.tables["26 tables x 32, host keys in, vectors out"] = rows


def open_node(folder: str, name: str, gpu: dict[str, Any], **dense: Any) -> Any:
    """A node on the model in ``folder`` with a separate database."""
    tiers = {"gpu": gpu, "cpu_cache": {"share": 1.0}, "rocksdb": {"path": f"{folder}/{name}"}}
    models = {"repository": f"{folder}/models"}
    return hps.open({"models": models, "tiers": tiers, "dense": {"inline_us": 1e6, **dense}})


def write_model(folder: Path) -> None:
    """Random rows and weights, such that scores are neither all zeros nor all ones."""
    rng = np.random.default_rng(0)
    spec = ModelSpec(
        name="m",
        tables=[TableSpec(name=name, dim=DIM) for name in NAMES],
        features=[FeatureSpec(name=name, table=name, hotness=1) for name in NAMES],
        dense=DenseSpec(
            inputs=[TensorSpec(name="dense", shape=[-1, 13])],
            outputs=[TensorSpec(name="score", shape=[-1, 1])],
        ),
    )
    keys = np.arange(ROWS)
    tables = {name: (keys, rng.standard_normal((ROWS, DIM), np.float32)) for name in NAMES}
    write_version(folder / "models", spec, 1, tables, dense=network(rng))


def network(rng: np.random.Generator) -> bytes:
    """All features concatenated, linear layers with ReLU between them, and a sigmoid."""
    from onnx import TensorProto, helper, numpy_helper

    def tensor(name: str, width: int) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", width])

    nodes = [helper.make_node("Concat", [*NAMES, "dense"], ["x0"], axis=1)]
    weights = []
    for i, (width, out) in enumerate(pairwise(LAYERS)):
        values = rng.standard_normal((width, out), np.float32) / np.float32(width**0.5)
        weights.append(numpy_helper.from_array(values, f"w{i}"))
        weights.append(numpy_helper.from_array(np.zeros(out, np.float32), f"b{i}"))
        nodes.append(helper.make_node("Gemm", [f"x{i}", f"w{i}", f"b{i}"], [f"y{i}"]))
        last = i == len(LAYERS) - 2
        name = "score" if last else f"x{i + 1}"
        nodes.append(helper.make_node("Sigmoid" if last else "Relu", [f"y{i}"], [name]))
    inputs = [*(tensor(name, DIM) for name in NAMES), tensor("dense", 13)]
    graph = helper.make_graph(nodes, "mlp", inputs, [tensor("score", 1)], weights)
    opset = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=8)
    return bytes(model.SerializeToString())


def _random_request(rng: np.random.Generator, batch: int) -> tuple[dict[str, Any], dict[str, Any]]:
    features = {name: rng.integers(0, ROWS, batch) for name in NAMES}
    return features, {"dense": rng.standard_normal((batch, 13), np.float32)}


def _calls(batch: int) -> int:
    return 100 if batch < 5000 else 10


def _alternate_calls(
    sides: dict[str, Callable[..., Any]], make: Callable[[], tuple[Any, ...]], calls: int
) -> dict[str, list[float]]:
    """Seconds of each call; the sides alternate, each with other requests, ``calls`` in a row.

    A rest before each side lets the previous one finish its background work: rows on their way to the GPU,
    threads that spin. An idle GPU takes a while to reach full speed, so all requests are made in advance:
    making one takes as long as answering it."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(ROUNDS):
        for name, call in sides.items():
            warming, asked = [[make() for _ in range(n)] for n in (WARM_UPS, calls)]
            time.sleep(REST_S)
            until = time.perf_counter() + WARM_UP_S
            while time.perf_counter() < until:
                for request in warming:
                    call(*request)
            for request in asked:
                start = time.perf_counter()
                call(*request)
                times[name].append(time.perf_counter() - start)
    return times


BENCHMARK = Benchmark(
    name="gpu_serving",
    title="A node on a GPU, from Python: predictions and lookups",
    run=run,
    bars=BARS,
    measured=(
        *("hps/cuda", "hps/tiers/gpu", "hps/lookup/gpu"),
        *("hps/predict", "hps/dense", "hps/node/node.py", "hps/array_inputs.py"),
    ),
    helpers=("benchmarks/common.py", "benchmarks/measure.py", "benchmarks/gpu.py"),
    missing_requirement=missing_requirement,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
