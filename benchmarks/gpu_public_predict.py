"""`Node.predict` on a GPU against its parts: the rows' fetch and the network, run alone.

The model is that of `benchmarks.gpu_serving`; all rows are on the device. `direct` is a `cache.direct` of
each table, launched one after the other, and one wait; `one launch` is a prepared fetch of all tables' rows
in one launch, the faster of the two. `network` is ONNX Runtime's run of the same network on memory of the
device, as one CUDA graph. A prediction takes its keys and dense inputs from the host and answers there; its
parts have both on the device."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Bar, Report
from benchmarks.gpu_serving import DIM, NAMES, ROWS, open_node, write_model
from benchmarks.host_clock import median_us
from hps.cuda.loader import cupy

BATCHES = (64, 1024, 16_384)
SETS = 8

BARS = (
    *(
        Bar(f"{parts}_{batch}", f"predict / ({text} + network), {batch:,} samples", at_most=1.1)
        for parts, text in (("predict", "direct"), ("one_launch", "one launch"))
        for batch in BATCHES
    ),
    Bar("scores", "scores of predict and of its parts differ by at most", at_most=1e-5),
)


class PredictionParts:
    """The compared calls for ``batch`` samples."""

    def __init__(self, node: Any, batch: int, seed: int) -> None:
        cp, rng = cupy(), np.random.default_rng(seed)
        self.node, self.batch = node, batch
        served = node.model("m")
        self.cache = served.on_devices[0].cache
        self.tables = [served.tables[name] for name in NAMES]
        self.host = [{name: rng.integers(0, ROWS, batch) for name in NAMES} for _ in range(SETS)]
        self.dense = rng.standard_normal((batch, 13), np.float32)
        self.device = [[cp.asarray(keys[name]) for name in NAMES] for keys in self.host]
        self.block = cp.empty((len(NAMES), batch, DIM), np.float32)
        self.misses = [cp.zeros(4 + batch, np.uint32) for _ in NAMES]
        self.stream = cp.cuda.get_current_stream()
        each = batch * DIM * 4
        self.prepared = self.cache.prepare_vectors(
            [(table, batch) for table in self.tables],
            [each * i for i in range(len(NAMES))],
            [True] * len(NAMES),
        )
        self.session, self.binding = self._bind(served.pipeline.dense.path)

    def _bind(self, path: Path) -> tuple[Any, Any]:
        """Open the network with its inputs and output bound to memory of the device."""
        import onnxruntime as ort

        cp = cupy()
        cuda = {"enable_cuda_graph": "1", "use_tf32": "0"}
        session = ort.InferenceSession(path, providers=[("CUDAExecutionProvider", cuda)])
        binding = session.io_binding()
        self.inputs = {**dict(zip(NAMES, self.block, strict=True)), "dense": cp.asarray(self.dense)}
        self.score = cp.empty((self.batch, 1), np.float32)
        for name, array in self.inputs.items():
            binding.bind_input(name, "cuda", 0, np.float32, array.shape, array.data.ptr)
        binding.bind_output("score", "cuda", 0, np.float32, self.score.shape, self.score.data.ptr)
        return session, binding

    def direct(self, keys: Any) -> None:
        for table, own, rows, misses in zip(
            self.tables, self.device[keys], self.block, self.misses, strict=True
        ):
            self.cache.direct.fetch(self.cache.held(table), own, rows, misses)
        self.stream.synchronize()

    def one_launch(self, keys: Any) -> None:
        self.prepared.launch(self.stream, self.block.data.ptr, self.device[keys])
        self.prepared.chunks[0].wait(self.stream)

    def network(self, _keys: Any) -> None:
        self.session.run_with_iobinding(self.binding)

    def predict(self, keys: Any) -> None:
        self.node.predict("m", self.host[keys], {"dense": self.dense})

    def check(self) -> float:
        """Return by how much the scores of both ways differ."""
        self.one_launch(0)
        self.network(0)
        mine = self.node.predict("m", self.host[0], {"dense": self.dense}).outputs["score"]
        return float(np.abs(mine.reshape(-1) - self.score.get().reshape(-1)).max())


def measure_predictions(report: Report, seed: int, *, quick: bool) -> None:
    """Add the table, bars and checks of predictions to ``report``."""
    rows: list[Mapping[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        gpu = {"use": "required", "capacity_bytes": 1 << 33, "static": True}
        node = open_node(folder, "db", gpu)
        try:
            report.figures["dense provider"] = node.model("m").pipeline.dense.provider
            for batch in BATCHES[: 2 if quick else None]:
                parts = PredictionParts(node, batch, seed)
                rows.append(_measure(report, parts))
        finally:
            node.close()
    report.tables["predictions, all rows on the device, median µs of a call"] = rows


def _measure(report: Report, parts: PredictionParts) -> dict[str, Any]:
    batch, sets = parts.batch, list(range(SETS))
    report.values["scores"] = max(report.values.get("scores", 0.0), parts.check())
    calls = 30 if batch > 2048 else 100
    row: dict[str, Any] = {"samples": batch}
    for name, call in (
        ("direct", parts.direct),
        ("one launch", parts.one_launch),
        ("network", parts.network),
        ("predict", parts.predict),
    ):
        row[f"{name} µs"] = median_us(call, sets, calls)
    row["predict / (direct + network)"] = row["predict µs"] / (row["direct µs"] + row["network µs"])
    row["predict / (one launch + network)"] = row["predict µs"] / (
        row["one launch µs"] + row["network µs"]
    )
    report.values[f"predict_{batch}"] = row["predict / (direct + network)"]
    report.values[f"one_launch_{batch}"] = row["predict / (one launch + network)"]
    return row
