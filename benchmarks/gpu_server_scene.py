"""Models, requests, servers and reference answers of `benchmarks.gpu_server`.

Model ``m`` is the one of `benchmarks.gpu_serving`. Model ``dlrm`` is the network of Ray Serve's published
benchmark (github.com/anyscale/serve-performance-blog, ``recsys/``): 26 tables of dim 64, a bottom MLP
13-256-64, the dot products of all pairs, a top MLP 415-256-128-64-1. Ray's server makes up the 32 samples of
a request itself; ours gets all keys and numbers in the request.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks.gpu_serving import DIM, NAMES, ROWS, write_model
from benchmarks.native_load import Template
from benchmarks.peers.hps_server import Hps, start_hps
from benchmarks.request_templates import (
    PatchedTensor,
    answered_tensors,
    make_template,
    sent_tensors,
)
from hps.config.model_schema import DenseSpec, FeatureSpec, ModelSpec, TableSpec, TensorSpec
from hps.models.version_writer import write_version

DENSE = 13
ANCHOR_DIM, ANCHOR_BATCH = 64, 32
PROTOCOLS = ("rest", "grpc")


@dataclass(frozen=True)
class Cores:
    """Cores of the node, of its workers and of the load generator; node and workers may share theirs."""

    node: tuple[int, ...]
    workers: tuple[int, ...]
    load: tuple[int, ...]

    @staticmethod
    def of(available: Sequence[int], node: int | None = None) -> Cores:
        """Three eighths for the load generator, ``node`` (default: an eighth) for the node, the rest for the
        workers."""
        found = tuple(sorted(available))
        if len(found) == 1:
            return Cores(found, found, found)
        load = max(1, len(found) * 3 // 8)
        server = found[:-load]
        if len(found) < 8:
            return Cores(server, server, found[-load:])
        node = min(len(found) // 8 if node is None else node, len(server) - 1)
        return Cores(server[:node], server[node:], found[-load:])

    @property
    def server(self) -> tuple[int, ...]:
        return tuple(sorted({*self.node, *self.workers}))

    @property
    def spin(self) -> bool:
        """True if polling without sleep takes nothing from others."""
        return len(self.server) > 1


@dataclass(frozen=True)
class Scene:
    """A model in ``folder/models``: ``rows`` per table, ``dim`` values per row."""

    folder: Path
    model: str
    rows: int
    dim: int

    def template(
        self, protocol: str, batch: int, *, lookup: bool = False, skew: int = 0
    ) -> Template:
        """A prediction of ``batch`` samples, or a lookup of as many keys in each of the 26 tables.

        ``skew`` of the keys as for `benchmarks.native_load.Patch`."""
        tensors = [PatchedTensor(name, (batch, 1), limit=self.rows, skew=skew) for name in NAMES]
        if not lookup:
            tensors.append(PatchedTensor("dense", (batch, DENSE)))
        return make_template(protocol, f"{self.model}.lookup" if lookup else self.model, tensors)

    def table(self, name: str) -> NDArray[np.float32]:
        vectors = self.folder / "models" / self.model / "1/tables" / name / "emb_vector"
        return np.memmap(vectors, np.float32, "r").reshape(self.rows, self.dim)


class Reference:
    """Answers of NumPy and ONNX Runtime on the CPU to the requests of ``scene``."""

    def __init__(self, scene: Scene) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._scene = scene
        network = next((scene.folder / "models" / scene.model / "1").rglob("*.onnx"))
        self._network = onnxruntime.InferenceSession(
            str(network), options, providers=["CPUExecutionProvider"]
        )

    def wrong(self, template: Template, request: bytes, answer: bytes) -> int:
        """1 if the answer is wrong: vectors bit by bit, scores by more than 1e-4; else 0."""
        sent = sent_tensors(template, request)
        outputs = answered_tensors(template, answer)
        vectors = {
            name: self._scene.table(name)[keys] for name, keys in zip(NAMES, sent, strict=False)
        }
        if len(sent) == len(NAMES):
            return int(any((outputs[n] != rows.ravel()).any() for n, rows in vectors.items()))
        feed = vectors | {"dense": sent[-1].reshape(-1, DENSE)}
        score = self._network.run(["score"], feed)[0].ravel()
        return int(
            len(score) != len(outputs["score"])
            or not np.allclose(outputs["score"], score, rtol=0, atol=1e-4)
        )


def write_scene(folder: Path) -> Scene:
    """Model ``m``."""
    write_model(folder)
    return Scene(folder, "m", ROWS, DIM)


def write_anchor(folder: Path, rows: int = 100_000) -> Scene:
    """Model ``dlrm``, Ray's; ``rows`` per table."""
    rng = np.random.default_rng(0)
    spec = ModelSpec(
        name="dlrm",
        tables=[TableSpec(name=name, dim=ANCHOR_DIM) for name in NAMES],
        features=[FeatureSpec(name=name, table=name, hotness=1) for name in NAMES],
        dense=DenseSpec(
            inputs=[TensorSpec(name="dense", shape=[-1, DENSE])],
            outputs=[TensorSpec(name="score", shape=[-1, 1])],
        ),
    )
    keys = np.arange(rows)
    tables = {n: (keys, rng.standard_normal((rows, ANCHOR_DIM), np.float32) / 8) for n in NAMES}
    write_version(folder / "models", spec, 1, tables, dense=dlrm_network(rng))
    return Scene(folder, "dlrm", rows, ANCHOR_DIM)


def dlrm_network(rng: np.random.Generator) -> bytes:
    """Bottom MLP, dot products of all pairs of the 27 vectors, top MLP, sigmoid."""
    from onnx import TensorProto, helper, numpy_helper

    held: list[Any] = []
    nodes: list[Any] = []

    def constant(name: str, values: Any) -> str:
        held.append(numpy_helper.from_array(values, name))
        return name

    def layers(x: str, widths: Sequence[int], title: str) -> str:
        for i, (width, out) in enumerate(pairwise(widths)):
            weights = rng.standard_normal((width, out), np.float32) / np.float32(width**0.5)
            inputs = [x, constant(f"{title}w{i}", weights)]
            inputs.append(constant(f"{title}b{i}", np.zeros(out, np.float32)))
            nodes.append(helper.make_node("Gemm", inputs, [f"{title}y{i}"]))
            x = f"{title}y{i}"
            if out > 1:
                nodes.append(helper.make_node("Relu", [x], [f"{title}x{i}"]))
                x = f"{title}x{i}"
        return x

    count = len(NAMES) + 1
    bottom = layers("dense", (DENSE, 256, ANCHOR_DIM), "bottom")
    pairs = np.flatnonzero(np.triu(np.ones((count, count)), 1)).astype(np.int64)
    shape = constant("shape", np.array([-1, count, ANCHOR_DIM]))
    flat = constant("flat", np.array([-1, count * count]))
    nodes += [
        helper.make_node("Concat", [bottom, *NAMES], ["joined"], axis=1),
        helper.make_node("Reshape", ["joined", shape], ["vectors"]),
        helper.make_node("Transpose", ["vectors"], ["turned"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["vectors", "turned"], ["products"]),
        helper.make_node("Reshape", ["products", flat], ["row"]),
        helper.make_node("Gather", ["row", constant("pairs", pairs)], ["upper"], axis=1),
        helper.make_node("Concat", [bottom, "upper"], ["features"], axis=1),
    ]
    logit = layers("features", (ANCHOR_DIM + len(pairs), 256, 128, 64, 1), "top")
    nodes.append(helper.make_node("Sigmoid", [logit], ["score"]))

    def tensor(name: str, width: int) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", width])

    inputs = [*(tensor(name, ANCHOR_DIM) for name in NAMES), tensor("dense", DENSE)]
    graph = helper.make_graph(nodes, "dlrm", inputs, [tensor("score", 1)], held)
    opset = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=8)
    return bytes(model.SerializeToString())


@contextmanager
def running_server(
    scene: Scene, cores: Cores, *, gpu: bool, workers: int, share: float | None = None
) -> Iterator[Hps]:
    """``hps serve --workers N`` on the scene's models, with rows and network on the GPU or on the CPU alone.

    ``share``: of each table's rows on the GPU; None: all. It starts on all of the server's cores; then the
    node and the workers are pinned to theirs."""
    size: dict[str, Any] = {"capacity_bytes": 4 << 30} if share is None else {"share": share}
    # As many as the node's cores, less that of its scheduler: it is pinned to them after its start.
    size["miss_threads"] = max(1, len(cores.node if workers else cores.server) - 1)
    rows = {"use": "required", **size} if gpu else {"use": "off"}
    tiers = {"gpu": rows, "cpu_cache": {"share": 1.0}}
    dense = {"provider": "cuda" if gpu else "cpu"}
    # Closed-loop callers wait for their answers: nothing is to be rejected.
    patient = {"max_wait_ms": 30_000.0}
    limits = {"workers": workers, "request_timeout_ms": 60_000.0, "admission": patient}
    with on_cores(cores.server):
        server_of = start_hps(
            scene.folder, tiers=tiers, dense=dense, limits=limits, timeout_s=300.0
        )
        server = server_of.__enter__()
    try:
        if workers:
            pin(server.process, cores.node)
            for worker in server.process.children(recursive=True):
                pin(worker, cores.workers)
        yield server
    finally:
        server_of.__exit__(None, None, None)


@contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Run this thread, and what it starts, on ``cores``."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def pin(process: psutil.Process, cores: Sequence[int]) -> None:
    """Pin all threads of ``process``."""
    for thread in process.threads():
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(thread.id, cores)
