"""Requests of the Open Inference Protocol with fresh keys in each, for `benchmarks.native_load`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2 as pb

from benchmarks.load import http_request
from benchmarks.native_load import Patch, Template

METHOD = "/inference.GRPCInferenceService/ModelInfer"


@dataclass(frozen=True)
class PatchedTensor:
    """An input that differs in each request: INT64 keys below ``limit``, with ``skew`` as for `Patch`; FP32
    without one, which repeat the keys of tensor number ``source``, or are random."""

    name: str
    shape: tuple[int, ...]
    limit: int = 0
    source: int = -1
    skew: int = 0

    @property
    def datatype(self) -> str:
        return "INT64" if self.limit else "FP32"

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        return self.size * (8 if self.limit else 4)

    def patch(self, offset: int) -> Patch:
        return Patch(offset, self.size, self.limit, self.source, self.skew)


def make_template(
    protocol: str, model: str, tensors: Sequence[PatchedTensor], outputs: Sequence[str] = ()
) -> Template:
    """A request for ``outputs`` (empty: all); all tensors are binary in both directions."""
    make = rest_template if protocol == "rest" else grpc_template
    return make(model, tensors, outputs)


def rest_template(model: str, tensors: Sequence[PatchedTensor], outputs: Sequence[str]) -> Template:
    header: dict[str, Any] = {"parameters": {"binary_data_output": True}}
    header["inputs"] = [
        {
            "name": each.name,
            "shape": each.shape,
            "datatype": each.datatype,
            "parameters": {"binary_data_size": each.nbytes},
        }
        for each in tensors
    ]
    if outputs:
        header["outputs"] = [{"name": name} for name in outputs]
    head = orjson.dumps(header)
    body = head + bytes(sum(each.nbytes for each in tensors))
    sizes = {"Inference-Header-Content-Length": str(len(head))}
    sizes["Content-Type"] = "application/octet-stream"
    message = http_request(f"/v2/models/{model}/infer", body, sizes)
    patches, at = [], len(message) - len(body) + len(head)
    for each in tensors:
        patches.append(each.patch(at))
        at += each.nbytes
    return Template("http", message, patches)


def grpc_template(model: str, tensors: Sequence[PatchedTensor], outputs: Sequence[str]) -> Template:
    """The places of tensors in the message are found by random contents."""
    message, contents = pb.ModelInferRequest(model_name=model), []
    for each in tensors:
        message.inputs.add(name=each.name, datatype=each.datatype, shape=each.shape)
        contents.append(np.random.default_rng(len(contents)).bytes(each.nbytes))
        message.raw_input_contents.append(contents[-1])
    for name in outputs:
        message.outputs.add(name=name)
    data = message.SerializeToString()
    framed = b"\0" + len(data).to_bytes(4, "big") + data
    patches = [
        each.patch(framed.index(content)) for each, content in zip(tensors, contents, strict=True)
    ]
    return Template("grpc", framed, patches, METHOD)


def sent_tensors(template: Template, message: bytes) -> list[NDArray[Any]]:
    """Keys and numbers of a request made from ``template``, flat, in the template's order."""
    return [
        np.frombuffer(message, np.int64 if each.limit else np.float32, each.count, each.offset)
        for each in template.patches
    ]


def answered_tensors(template: Template, answer: bytes) -> dict[str, NDArray[np.float32]]:
    """The FP32 outputs of an answer with binary tensors, flat."""
    if template.protocol == "grpc":
        message = pb.ModelInferResponse.FromString(answer[5:])
        names = [each.name for each in message.outputs]
        raw = message.raw_output_contents
        return {n: np.frombuffer(each, np.float32) for n, each in zip(names, raw, strict=True)}
    head, _, body = answer.partition(b"\r\n\r\n")
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    at = int(fields[b"inference-header-content-length"])
    outputs = {}
    for each in orjson.loads(body[:at])["outputs"]:
        size = each["parameters"]["binary_data_size"]
        outputs[each["name"]] = np.frombuffer(body[at : at + size], np.float32)
        at += size
    return outputs
