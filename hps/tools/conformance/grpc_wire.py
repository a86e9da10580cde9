"""Requests in the protocol's gRPC form, and parsed answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import grpc
import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub
from tritonclient.utils import deserialize_bytes_tensor, triton_to_np_dtype

from hps.client import Tls
from hps.tools.conformance.http_wire import encoded
from hps.tools.conformance.target import CheckedServer, SampleRequest, needs, note, require

TIMEOUT_S = 30.0
_CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


class GrpcProbe:
    """A channel and its stub."""

    def __init__(self, target: CheckedServer) -> None:
        self.metadata = [*target.headers.items()]
        options = [("grpc.max_receive_message_length", -1)]
        if target.grpc_tls is None:
            self.channel = grpc.insecure_channel(target.grpc, options)
        else:
            self.channel = grpc.secure_channel(target.grpc, credentials(target.grpc_tls), options)
        self._stub = GRPCInferenceServiceStub(self.channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.channel.close()

    def ask(self, call: str, request: Any = None, **options: Any) -> Any:
        """Make a call and return its answer; ``request`` None: an empty one."""
        request = getattr(pb, f"{call}Request")() if request is None else request
        options = {"timeout": TIMEOUT_S, "metadata": self.metadata, **options}
        return getattr(self._stub, call)(request, **options)

    def stream(self, requests: list[Any]) -> list[Any]:
        return list(
            self._stub.ModelStreamInfer(iter(requests), timeout=TIMEOUT_S, metadata=self.metadata)
        )

    def infer(self, request: Any, **options: Any) -> dict[str, NDArray[Any]]:
        return tensors_of(self.ask("ModelInfer", request, **options))

    def extensions(self) -> list[str]:
        return list(self.ask("ServerMetadata").extensions)


def credentials(tls: Tls) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(*tls.contents())


@contextmanager
def skip_unimplemented(what: str) -> Iterator[None]:
    """Raise NotOffered if a service that is not part of the protocol is UNIMPLEMENTED."""
    try:
        yield
    except grpc.RpcError as error:
        needs(error.code() is not grpc.StatusCode.UNIMPLEMENTED, what)
        raise


def expect_error(call: Callable[[], Any], *codes: str, what: str = "a request at fault") -> str:
    """Return the text of the error that ``call`` raises; note other codes, and a success."""
    try:
        call()
    except grpc.RpcError as error:
        found, text = error.code().name, str(error.details())
        note(found in codes, f"{what}: {found} instead of {' or '.join(codes)}: {text}")
        return text
    note(False, f"{what}: an answer instead of {' or '.join(codes)}")
    return ""


def request(sample: SampleRequest, *, raw: bool = True, **fields: Any) -> Any:
    """Build a request; ``raw``: all inputs raw, else in protobuf's types, which exclude FP16."""
    made = pb.ModelInferRequest(model_name=sample.model, **fields)
    for name, array in sample.inputs.items():
        datatype = sample.datatype(name)
        tensor = made.inputs.add(name=name, datatype=datatype, shape=array.shape)
        if raw:
            made.raw_input_contents.append(encoded(array))
        else:
            getattr(tensor.contents, _CONTENTS[datatype]).extend(array.reshape(-1).tolist())
    for name in sample.outputs:
        made.outputs.add(name=name)
    return made


def is_raw(response: Any) -> bool:
    """True if the outputs are raw, the only form that Triton's clients read."""
    return bool(response.raw_output_contents) or not response.outputs


def tensors_of(response: Any) -> dict[str, NDArray[Any]]:
    """Outputs, raw or in protobuf's types."""
    if not is_raw(response):
        return {output.name: _typed(output) for output in response.outputs}
    require(
        len(response.raw_output_contents) == len(response.outputs),
        f"{len(response.outputs)} outputs, {len(response.raw_output_contents)} raw contents",
    )
    found = {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        values = (
            deserialize_bytes_tensor(raw)
            if output.datatype == "BYTES"
            else np.frombuffer(raw, triton_to_np_dtype(output.datatype))
        )
        require(
            values.size == np.prod(output.shape, dtype=int),
            f"{output.name!r}: {values.size} elements for the shape {list(output.shape)}",
        )
        found[output.name] = values.reshape(tuple(output.shape))
    return found


def _typed(output: Any) -> NDArray[Any]:
    dtype = triton_to_np_dtype(output.datatype)
    require(output.datatype in _CONTENTS, f"{output.name!r}: no raw contents for {output.datatype}")
    values = np.array(getattr(output.contents, _CONTENTS[output.datatype]), dtype)
    shape = tuple(output.shape)
    fits = values.size == np.prod(shape, dtype=int)
    require(fits, f"{output.name!r}: {values.size} elements for the shape {list(shape)}")
    return values.reshape(shape)
