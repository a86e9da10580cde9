"""Latency of a run of the dense network: in the process, or in Triton over each transport.

A network of half a million parameters (845 inputs, of which 832 are pooled vectors; layers of 512, 128 and 1)
is run for batches of 1, 64 and 1,024 samples by

* process: ONNX Runtime in this process, one thread, the floor;
* HTTP, gRPC: the same network in a real Triton 2.51 on this machine, its tensors in the messages;
* HTTP + memory, gRPC + memory: its tensors in memory shared with Triton.

Triton runs it in a Python model over the same ONNX Runtime with one thread (`hps triton export --dense
python`), dynamic batching on; `make bench-peers` sets it up. There is one caller at a time, so the figure is
a request's latency. The transports alternate for several rounds; a round's figure is the median of its runs,
and ratios are taken round by round."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import Bar, Benchmark, Options, Report, main
from benchmarks.measure import Spread, alternate, ratio, versions
from benchmarks.peers.environments import ENVIRONMENTS
from benchmarks.peers.triton import start_triton
from hps.config.model_schema import ModelSpec
from hps.dense.base import DenseModel
from hps.dense.onnx import OnnxModel
from hps.dense.triton import TritonModel, TritonRunOptions
from hps.dense.triton.grpc import GrpcTransport
from hps.dense.triton.http import HttpTransport
from hps.dense.triton.shared_regions import ThreadRegions
from hps.models.repository import Repository
from hps.models.version_writer import write_version
from hps.triton.export import export_dense

BATCHES = (1, 64, 1024)
VECTORS, NUMBERS, LAYERS = 832, 13, (512, 128, 1)
Inputs = dict[str, NDArray[np.float32]]
SPEC = {
    "name": "dlrm",
    "tables": [{"name": "vectors", "dim": VECTORS}],
    "features": [{"name": "vectors", "table": "vectors"}],
    "dense": {
        "inputs": [{"name": "numbers", "shape": [-1, NUMBERS]}],
        "outputs": [{"name": "score", "shape": [-1, 1]}],
    },
    "max_batch_size": max(BATCHES),
}

# The advice of docs/triton.md.
BARS = (
    Bar("small", "batch 1: HTTP / gRPC", at_most=1.0),
    Bar("middle", "batch 64: HTTP / gRPC", at_most=1.0),
    Bar("large", "batch 1,024: gRPC + memory / gRPC", at_most=0.9),
    Bar("exact", "largest difference of a score from that of the process, in 1e-6", at_most=1.0),
)


def network(random: np.random.Generator) -> bytes:
    """An MLP with ReLU between its layers and a sigmoid at the end, as ONNX."""
    from onnx import TensorProto, helper, numpy_helper

    def tensor(name: str, width: int) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", width])

    widths = (VECTORS + NUMBERS, *LAYERS)
    nodes, weights, last = [], [], "x"
    nodes.append(helper.make_node("Concat", ["vectors", "numbers"], [last], axis=1))
    for i, shape in enumerate(pairwise(widths)):
        rows = random.standard_normal(shape, np.float32) / np.sqrt(shape[0], dtype=np.float32)
        weights.append(numpy_helper.from_array(rows, f"w{i}"))
        nodes.append(helper.make_node("MatMul", [last, f"w{i}"], [f"m{i}"]))
        final = i == len(LAYERS) - 1
        last = "score" if final else f"r{i}"
        nodes.append(helper.make_node("Sigmoid" if final else "Relu", [f"m{i}"], [last]))
    inputs = [tensor("vectors", VECTORS), tensor("numbers", NUMBERS)]
    graph = helper.make_graph(nodes, "dlrm", inputs, [tensor("score", 1)], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


@contextmanager
def transports(random: np.random.Generator) -> Iterator[dict[str, DenseModel]]:
    """The same network by the name of its transport."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        rows = {"vectors": (np.arange(1), np.zeros((1, VECTORS), np.float32))}
        spec = ModelSpec.model_validate(SPEC)
        write_version(folder / "models", spec, 1, rows, dense=network(random))
        version = Repository(folder / "models").open("dlrm")
        name = export_dense(version, folder / "triton", "python").name
        server = stack.enter_context(start_triton(folder / "triton"))
        assert version.dense is not None
        here = OnnxModel(version.dense, "cpu")
        found: dict[str, DenseModel] = {"process": here}
        for memory in (False, True):
            for kind in ("HTTP", "gRPC"):
                transport = (
                    HttpTransport(server.address, name, "")
                    if kind == "HTTP"
                    else GrpcTransport(server.grpc, name, "", channels=1)
                )
                url = server.address if kind == "HTTP" else server.grpc
                there = TritonModel(
                    name,
                    url,
                    transport,
                    (here.inputs, here.outputs),
                    TritonRunOptions(10, regions=ThreadRegions() if memory else None),
                )
                stack.callback(there.close)
                found[kind + (" + memory" if memory else "")] = there
        yield found


def timed(model: DenseModel, inputs: Inputs, seconds: float) -> float:
    """Median time of a run, ms."""
    took: list[float] = []
    until = time.perf_counter() + seconds
    while (begun := time.perf_counter()) < until or len(took) < 5:
        model.predict(inputs)
        took.append(time.perf_counter() - begun)
    return float(np.median(took)) * 1e3


def run(options: Options) -> Report:
    rounds, seconds = (3, 0.2) if options.quick else (9, 0.5)
    random = np.random.default_rng(options.seed)
    report = Report()
    found: dict[int, Mapping[str, list[float]]] = {}
    worst = 0.0
    with transports(random) as models:
        for batch in BATCHES:
            inputs = {
                "vectors": random.standard_normal((batch, VECTORS), np.float32),
                "numbers": random.standard_normal((batch, NUMBERS), np.float32),
            }
            expected = models["process"].predict(inputs)["score"]
            for model in models.values():
                score = model.predict(inputs)["score"]
                worst = max(worst, float(np.abs(score - expected).max()))
            sides = {name: partial(timed, m, inputs, seconds) for name, m in models.items()}
            found[batch] = alternate(sides, rounds)
    report.tables["ms a run, median (smallest…largest round)"] = [
        {
            "": name,
            **{f"batch {batch:,}": f"{Spread.of(found[batch][name]):.3g}" for batch in BATCHES},
        }
        for name in found[1]
    ]
    report.values = {
        "small": ratio(found[1]["HTTP"], found[1]["gRPC"]).median,
        "middle": ratio(found[64]["HTTP"], found[64]["gRPC"]).median,
        "large": ratio(found[1024]["gRPC + memory"], found[1024]["gRPC"]).median,
        "exact": worst * 1e6,
    }
    report.figures["ms"] = {str(batch): dict(sides) for batch, sides in found.items()}
    report.figures["versions"] = versions("numpy", "onnxruntime", "tritonclient", "grpcio")
    return report


def _missing_requirement() -> str | None:
    return (
        None if ENVIRONMENTS["triton"].ready() else "Triton is not set up: run `make bench-peers`"
    )


BENCHMARK = Benchmark(
    name="dense_transports",
    title="A run of the dense network: in the process, in Triton",
    run=run,
    bars=BARS,
    measured=("hps/dense", "hps/triton"),
    missing_requirement=_missing_requirement,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
