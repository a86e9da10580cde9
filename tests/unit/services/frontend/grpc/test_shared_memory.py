"""Tensors in shared memory over gRPC: callers and the parser; see test_shared_memory_protocols.py."""

from __future__ import annotations

import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException

from hps.errors import BadRequest
from services.frontend.datatypes import INTEGERS, InputRule
from services.frontend.grpc import request as module
from services.frontend.grpc.request import GrpcRequestParser, address
from services.frontend.shared_memory import SharedMemoryRegistry


def refused(call, *args, **kwargs):
    with pytest.raises(InferenceServerException) as caught:
        call(*args, **kwargs)
    return caught.value.status().removeprefix("StatusCode."), caught.value.message()


def test_only_callers_with_a_key(small, serve, key_guard):
    small.state.regions = SharedMemoryRegistry(on=True, most_bytes=1 << 20)
    with triton.InferenceServerClient(serve(key_guard).server.url) as client:
        assert refused(client.get_system_shared_memory_status)[0] == "UNAUTHENTICATED"
        key = {"x-api-key": "r" * 16}
        assert not client.get_system_shared_memory_status(headers=key).regions


def test_a_description_seen_before_is_not_read_again(monkeypatch):
    parser = GrpcRequestParser("m", {"f": InputRule(INTEGERS, is_keys=True)}, 1000)
    request = pb.ModelInferRequest(model_name="m")
    tensor = request.inputs.add(name="f", datatype="INT64", shape=[2, 1])
    tensor.parameters["shared_memory_region"].string_param = "r"
    tensor.parameters["shared_memory_byte_size"].int64_param = 16
    message = request.SerializeToString()
    first = parser.parse(message, address(message))
    monkeypatch.setattr(module, "_parsed", None)
    assert parser.parse(message, address(message)).form is first.form
    assert first.form.memory_refs.inputs["f"][0] == ("r", 16, 0)
    monkeypatch.undo()
    tensor.contents.int64_contents.extend([1, 2])
    message = request.SerializeToString()
    with pytest.raises(BadRequest, match="both contents and shared memory"):
        parser.parse(message, address(message))
