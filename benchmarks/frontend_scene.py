"""The models, requests and servers of `benchmarks.frontend`: the same work for each of them.

Two tables, 200,000 rows × 16 and 20,000 × 832 (1,024 rows of it are an answer of 3.4 MB), and a network of
two layers over 8 features' vectors of 16. Ours finds rows by their keys in its CPU cache; the peers' custom
models do the minimal lookup, ``table[row_numbers]`` in NumPy, and run the network in ONNX Runtime with
one thread, as ours does.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2 as pb

from benchmarks.load import http_request
from benchmarks.measure import zipf_keys
from benchmarks.peers.environments import PeerMissing, require
from benchmarks.peers.hps_server import start_hps, write_lookup_model
from benchmarks.peers.process import Server, free_ports, serving
from benchmarks.peers.triton import start_triton
from hps.config.model_schema import ModelSpec
from hps.models.version_writer import write_version

HERE = Path(__file__).parents[1]
MODELS = HERE / "benchmarks/peers/triton_frontend"
ROWS, DIM, WIDE_ROWS, WIDE = 200_000, 16, 20_000, 832
FEATURES, BATCH, HIDDEN, DISTINCT = 8, 64, 64, 64
SHARED = 128 << 20
"""Initial bytes of memory shared by Triton and a Python model, so that it need not grow for large answers."""
Keys = dict[str, NDArray[np.int64]]
SPEC = {
    "name": "ctr",
    "tables": [{"name": "rows", "dim": DIM}],
    "features": [{"name": f"f{i}", "table": "rows", "hotness": 1} for i in range(FEATURES)],
    "dense": {"inputs": [], "outputs": [{"name": "score", "shape": [-1, 1]}]},
    "max_batch_size": 1024,
}


@dataclass(frozen=True)
class Work:
    """Requests: the model's name at hps and at the peers, and the tensors of each request, with their batch
    dimension. The single tensor of a lookup is named KEYS at the peers."""

    title: str
    ours: str
    theirs: str
    requests: Sequence[Keys]

    def tensors(self, request: Keys, *, ours: bool) -> Keys:
        return request if ours or "f" not in request else {"KEYS": request["f"]}

    def model(self, *, ours: bool) -> str:
        return self.ours if ours else self.theirs

    def http(self, *, ours: bool, binary: bool = True) -> list[bytes]:
        """The bytes of its HTTP requests; MLServer accepts and returns only JSON."""
        path = f"/v2/models/{self.model(ours=ours)}/infer"
        return [_http(path, self.tensors(each, ours=ours), binary) for each in self.requests]

    def grpc(self, *, ours: bool) -> list[bytes]:
        """Its gRPC messages."""
        return [
            _grpc(self.model(ours=ours), self.tensors(each, ours=ours)) for each in self.requests
        ]


def _http(path: str, tensors: Keys, binary: bool) -> bytes:
    inputs: list[dict[str, Any]] = []
    for name, array in tensors.items():
        data = (
            {"parameters": {"binary_data_size": array.nbytes}}
            if binary
            else {"data": array.ravel().tolist()}
        )
        inputs.append({"name": name, "shape": array.shape, "datatype": "INT64", **data})
    if not binary:
        return http_request(
            path, orjson.dumps({"inputs": inputs}), {"Content-Type": "application/json"}
        )
    head = orjson.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}})
    sizes = {
        "Inference-Header-Content-Length": str(len(head)),
        "Content-Type": "application/octet-stream",
    }
    return http_request(path, head + b"".join(a.tobytes() for a in tensors.values()), sizes)


def _grpc(model: str, tensors: Keys) -> bytes:
    message = pb.ModelInferRequest(model_name=model)
    for name, array in tensors.items():
        message.inputs.add(name=name, datatype="INT64", shape=array.shape)
        message.raw_input_contents.append(array.tobytes())
    return bytes(message.SerializeToString())


def works(seed: int) -> dict[str, Work]:
    """The four workloads by name."""
    random = np.random.default_rng(seed)

    def lookup(table: str, rows: int, n: int, title: str, distinct: int = DISTINCT) -> Work:
        keys = zipf_keys(random, rows, (distinct, 1, n))
        return Work(title, f"{table}.lookup", table, [{"f": each} for each in keys])

    ids = zipf_keys(random, ROWS, (DISTINCT, FEATURES, BATCH, 1))
    predict = [{f"f{i}": each[i] for i in range(FEATURES)} for each in ids]
    return {
        "26": lookup("rows", ROWS, 26, "lookup, 26 keys"),
        "1024": lookup("rows", ROWS, 1024, "lookup, 1,024 keys"),
        "predict": Work(f"predict, {FEATURES} ids × batch {BATCH}", "ctr", "ctr", predict),
        "large": lookup("wide", WIDE_ROWS, 1024, "lookup, 3.4 MB answered", 16),
    }


def write_scene(folder: Path, seed: int) -> dict[str, NDArray[np.float32]]:
    """Write tables, networks and all servers' models; returns the tables."""
    random = np.random.default_rng(seed)
    tables = {
        "rows": random.standard_normal((ROWS, DIM), dtype=np.float32),
        "wide": random.standard_normal((WIDE_ROWS, WIDE), dtype=np.float32),
    }
    for name, table in tables.items():
        np.save(folder / f"{name}.npy", table)
        write_lookup_model(folder / "models", name, "f", table)
    weights = [
        random.standard_normal(shape, np.float32) / np.sqrt(shape[0], dtype=np.float32)
        for shape in ((FEATURES * DIM, HIDDEN), (HIDDEN, 1))
    ]
    (folder / "network.onnx").write_bytes(network(weights, ()))
    rows = {"rows": iter([(np.arange(ROWS), tables["rows"])])}
    dense = network(weights, tuple(f"f{i}" for i in range(FEATURES)))
    write_version(folder / "models", ModelSpec.model_validate(SPEC), 1, rows, dense=dense)
    write_triton(folder)
    return tables


def network(weights: Sequence[NDArray[np.float32]], parts: tuple[str, ...]) -> bytes:
    """Two layers over ``x``, or over ``parts`` concatenated, as ONNX."""
    from onnx import TensorProto, helper, numpy_helper

    def tensor(name: str, width: int) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", width])

    width = len(weights[0])
    nodes = [helper.make_node("Concat", list(parts), ["x"], axis=1)] if parts else []
    nodes += [
        helper.make_node("MatMul", ["x", "w0"], ["y"]),
        helper.make_node("Relu", ["y"], ["z"]),
        helper.make_node("MatMul", ["z", "w1"], ["logit"]),
        helper.make_node("Sigmoid", ["logit"], ["score"]),
    ]
    inputs = [tensor(name, width // len(parts)) for name in parts] or [tensor("x", width)]
    held = [numpy_helper.from_array(array, f"w{i}") for i, array in enumerate(weights)]
    graph = helper.make_graph(nodes, "ctr", inputs, [tensor("score", 1)], held)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(made.SerializeToString())


def write_triton(folder: Path) -> None:
    """Write Python models, and the ensemble that `hps triton export` would write with this lookup.

    Dynamic batching is on, because several requests then share a hop to Python, which makes Triton cheaper;
    it is off for answers of megabytes, which it makes more expensive."""
    ids = [(f"f{i}", "INT64", 1) for i in range(FEATURES)]
    vectors, score = ("x", "FP32", FEATURES * DIM), ("score", "FP32", 1)
    dense = HERE / "hps/triton/files/dense_model.py"
    for name, source, inputs, output in (
        ("rows", MODELS / "rows.py", [("KEYS", "INT64", -1)], ("VECTORS", "FP32", -1, DIM)),
        ("wide", MODELS / "rows.py", [("KEYS", "INT64", -1)], ("VECTORS", "FP32", -1, WIDE)),
        ("ctr.lookup", MODELS / "features.py", ids, vectors),
        ("ctr.dense", dense, [vectors], score),
    ):
        model = folder / "triton" / name / "1"
        model.mkdir(parents=True)
        shutil.copy(source, model / "model.py")
        most = 1024 if name.startswith("ctr") else 64
        batching = "" if name == "wide" else "dynamic_batching { }"
        text = f'name: "{name}" backend: "python" max_batch_size: {most} {batching}\n'
        text += "instance_group [ { kind: KIND_CPU count: 1 } ]\n"
        (model.parent / "config.pbtxt").write_text(text + _tensors(inputs, [output]))
    shutil.copy(folder / "network.onnx", folder / "triton/ctr.dense/1/dense.onnx")
    (folder / "triton/ctr/1").mkdir(parents=True)
    maps = " ".join(f'input_map {{ key: "{name}" value: "{name}" }}' for name, *_ in ids)
    (folder / "triton/ctr/config.pbtxt").write_text(
        f'name: "ctr" platform: "ensemble" max_batch_size: 1024\n{_tensors(ids, [score])}'
        "ensemble_scheduling { step [\n"
        f'{{ model_name: "ctr.lookup" model_version: -1 {maps} output_map {{ key: "x" value: "x" }} }},\n'
        '{ model_name: "ctr.dense" model_version: -1 input_map { key: "x" value: "x" }'
        ' output_map { key: "score" value: "score" } } ] }\n'
    )


def _tensors(inputs: Sequence[tuple[Any, ...]], outputs: Sequence[tuple[Any, ...]]) -> str:
    return "".join(
        f'{side} {{ name: "{name}" data_type: TYPE_{datatype} dims: {list(dims)} }}\n'
        for side, tensors in (("input", inputs), ("output", outputs))
        for name, datatype, *dims in tensors
    )


@dataclass(frozen=True)
class Side:
    """A running server, and its address for gRPC. ``binary``: whether its HTTP has binary tensors."""

    server: Server
    grpc: str
    ours: bool = False
    binary: bool = True


@contextmanager
def sides(
    folder: Path, names: Sequence[str], core: int | None, notes: list[str]
) -> Iterator[Mapping[str, Side]]:
    """Start ``names`` of hps, Triton, KServe and MLServer on ``folder``'s models; a peer that is not set up
    is skipped, with an entry in ``notes``."""
    env = {"BENCH_FOLDER": str(folder), "BENCH_PACKAGES": sysconfig.get_path("purelib")}
    with ExitStack() as stack:
        running: dict[str, Side] = {}
        for name in names:
            try:
                running[name] = stack.enter_context(_start(name, folder, env, core))
            except PeerMissing as missing:
                notes.append(f"{name} was not measured: {missing}")
        yield running


@contextmanager
def _start(name: str, folder: Path, env: Mapping[str, str], core: int | None) -> Iterator[Side]:
    if name == "hps":
        with start_hps(folder, core=core, limits={"shared_memory": True}) as hps:
            yield Side(hps, hps.grpc, ours=True)
    elif name == "Triton":
        arguments = (f"--backend-config=python,shm-default-byte-size={SHARED}",)
        triton_of = start_triton(folder / "triton", core=core, env=env, arguments=arguments)
        with triton_of as triton:
            yield Side(triton, triton.grpc)
    else:
        module = name.lower()
        ports = free_ports(3 if module == "mlserver" else 2)
        command = [str(require(module).python), "-m", f"benchmarks.peers.{module}_server"]
        command += map(str, ports)
        path = {"PYTHONPATH": str(HERE), **env}
        with serving(
            command, ports[0], ready_path="/v2/health/ready", env=path, core=core
        ) as server:
            yield Side(server, f"127.0.0.1:{ports[1]}", binary=module != "mlserver")


def client_on(stack: ExitStack, core: int | None) -> None:
    """Keep this process to ``core`` until ``stack`` ends."""
    if core is not None:
        stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
        os.sched_setaffinity(0, {core})
