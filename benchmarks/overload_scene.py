"""Model of overload.py and others, and prediction requests for it over REST and gRPC."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from tritonclient.grpc import service_pb2 as pb

from benchmarks.load import http_request
from hps.models.version_writer import write_version
from hps.tools.generate.model import model_spec

FEATURES, DENSE, DIM, ROWS, BATCH, HIDDEN = 26, 13, 16, 20_000, 1024, 512


def network() -> bytes:
    """Two hidden layers over all inputs, 0.5 M parameters, as ONNX."""
    from onnx import TensorProto, helper, numpy_helper

    names = [f"f{i}" for i in range(FEATURES)]
    widths = dict.fromkeys(names, DIM) | {"dense": DENSE}
    random = np.random.default_rng(1)
    sizes = [sum(widths.values()), HIDDEN, HIDDEN, 1]
    weights = [
        (random.standard_normal((a, b)) / a**0.5).astype(np.float32) for a, b in pairwise(sizes)
    ]
    nodes = [helper.make_node("Concat", list(widths), ["x0"], axis=1)]
    for i in range(3):
        nodes.append(helper.make_node("MatMul", [f"x{i}", f"w{i}"], [f"y{i}"]))
        last = "Sigmoid" if i == 2 else "Relu"
        nodes.append(helper.make_node(last, [f"y{i}"], ["score" if i == 2 else f"x{i + 1}"]))

    def tensor(name: str, width: int) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", width])

    graph = helper.make_graph(
        nodes,
        "dlrm",
        [tensor(name, width) for name, width in widths.items()],
        [tensor("score", 1)],
        [numpy_helper.from_array(w, f"w{i}") for i, w in enumerate(weights)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    model.ir_version = 8
    return bytes(model.SerializeToString())


def write_model(root: Path) -> None:
    spec = model_spec("ctr", FEATURES, DIM, 1, DENSE, 65_536)
    random = np.random.default_rng(2)
    tables = {
        table.name: iter([(np.arange(ROWS), random.random((ROWS, DIM), dtype=np.float32))])
        for table in spec.tables
    }
    write_version(root, spec, 1, tables, dense=network())


def tensors(seed: int, batch: int = BATCH) -> dict[str, tuple[str, np.ndarray]]:
    random = np.random.default_rng(seed)
    asked: dict[str, tuple[str, np.ndarray]] = {
        f"f{i}": ("INT64", random.integers(0, ROWS, (batch, 1))) for i in range(FEATURES)
    }
    asked["dense"] = "FP32", random.random((batch, DENSE), dtype=np.float32)
    return asked


def rest_request(seed: int, batch: int = BATCH) -> bytes:
    inputs, body = [], b""
    for name, (datatype, array) in tensors(seed, batch).items():
        size = {"binary_data_size": array.nbytes}
        inputs.append(
            {"name": name, "shape": array.shape, "datatype": datatype, "parameters": size}
        )
        body += array.tobytes()
    head = orjson.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}})
    sizes = {"Inference-Header-Content-Length": str(len(head))}
    return http_request("/v2/models/ctr/infer", head + body, sizes)


def grpc_request(seed: int) -> bytes:
    request = pb.ModelInferRequest(model_name="ctr")
    for name, (datatype, array) in tensors(seed).items():
        request.inputs.add(name=name, datatype=datatype, shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
    return bytes(request.SerializeToString())
