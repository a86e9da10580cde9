"""Requests for any server, made from the metadata of its models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import triton_to_np_dtype

from hps.tools.conformance import grpc_wire
from hps.tools.conformance.grpc_wire import GrpcProbe
from hps.tools.conformance.http_wire import HttpProbe, path_of
from hps.tools.conformance.target import CheckedServer, Deviation, SampleRequest, require

BATCH, WIDTH = 2, 3
Tensors = list[tuple[str, str, list[int]]]
"""Name, datatype and shape of each."""


def samples_of(
    target: CheckedServer, models: Sequence[str] = (), seed: int = 1
) -> tuple[tuple[SampleRequest, ...], dict[str, str]]:
    """A request for each of ``models``, by default all ready ones, those with most tensors first.

    Requests are in binary form if ``target`` has that. Also returns, by name, why others are left out: they
    reject a generated request. Uses HTTP if the server has it, else gRPC. Raises OSError, HTTPException,
    RpcError, and Deviation for a server without an index."""
    found, left_out = [], {}
    random = np.random.default_rng(seed)
    with HttpProbe(target) if target.http else GrpcProbe(target) as ask:
        by_http = isinstance(ask, HttpProbe)
        ready: Callable[[Any], list[str]] = _ready if by_http else _ready_by_grpc
        answered: Callable[..., SampleRequest] = _answered if by_http else _answered_by_grpc
        for model in models or ready(ask):
            try:
                found.append(answered(ask, model, random))
            except Deviation as error:
                left_out[model] = str(error)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    raise
                left_out[model] = f"{error.code().name}: {error.details()}"
            except (LookupError, TypeError, ValueError) as error:
                left_out[model] = f"its metadata cannot be read: {type(error).__name__}: {error}"
    found.sort(key=lambda sample: -len(sample.inputs) - len(sample.outputs))
    return tuple(found), left_out


def named(target: CheckedServer) -> str:
    """The server's name in its metadata, or ""."""
    try:
        if target.http:
            with HttpProbe(target) as http:
                return str(http.ask("GET", "/v2").json().get("name", ""))
        with GrpcProbe(target) as ask:
            return str(ask.ask("ServerMetadata").name)
    except (Deviation, AttributeError, grpc.RpcError):
        return ""


def _ready(ask: HttpProbe) -> list[str]:
    rows = ask.ask("POST", "/v2/repository/index", b"{}").json()  # MLServer requires a body
    return [row["name"] for row in rows if row.get("state", "READY") == "READY"]


def _ready_by_grpc(ask: GrpcProbe) -> list[str]:
    rows = ask.ask("RepositoryIndex", pb.RepositoryIndexRequest(ready=True)).models
    return [row.name for row in rows if row.state in ("", "READY")]


def _answered(ask: HttpProbe, model: str, random: np.random.Generator) -> SampleRequest:
    about = ask.ask("GET", path_of(model)).json()
    inputs = [(t["name"], t["datatype"], t["shape"]) for t in about["inputs"]]
    sample = _sample(model, inputs, [tensor["name"] for tensor in about["outputs"]], random)
    answer = ask.send(sample)
    require(answer.status == 200, f"status {answer.status}: {answer.body[:300]!r}")
    return sample


def _answered_by_grpc(ask: GrpcProbe, model: str, random: np.random.Generator) -> SampleRequest:
    about = ask.ask("ModelMetadata", pb.ModelMetadataRequest(name=model))
    inputs = [(t.name, t.datatype, list(t.shape)) for t in about.inputs]
    sample = _sample(model, inputs, [tensor.name for tensor in about.outputs], random)
    ask.infer(grpc_wire.request(sample))
    return sample


def _sample(
    model: str, inputs: Tensors, outputs: Sequence[str], random: np.random.Generator
) -> SampleRequest:
    made = {name: _tensor(random, datatype, shape) for name, datatype, shape in inputs}
    return SampleRequest(model, made, tuple(outputs))


def _tensor(random: np.random.Generator, datatype: str, shape: list[int]) -> NDArray[Any]:
    """Elements of any tensor ``shape``, whose first dimension is the batch when it is variable."""
    sizes = [size if size >= 0 else WIDTH if i else BATCH for i, size in enumerate(map(int, shape))]
    if datatype == "BYTES":
        return np.full(sizes, b"text", np.object_)
    dtype = np.dtype(triton_to_np_dtype(datatype))
    if dtype.kind == "f":
        return random.standard_normal(sizes).astype(dtype)
    return random.integers(0, 2 if dtype.kind == "b" else 100, sizes).astype(dtype)
