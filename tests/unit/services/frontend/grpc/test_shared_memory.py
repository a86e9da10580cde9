"""Tensors in shared memory, as Triton's client has them."""

from __future__ import annotations

import os
import secrets

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException
from tritonclient.utils import shared_memory as shm

from hps.config.server_settings import ServerSettings
from hps.errors import BadRequest
from services.frontend.datatypes import INTEGERS, InputRule
from services.frontend.grpc import request as module
from services.frontend.grpc.request import GrpcRequestParser, address
from services.frontend.shared_memory import SharedMemoryRegistry
from services.frontend.state import FrontendState


class Memory:
    """Memory of a client's own, registered as ``r``: two keys for each table, then room for their rows."""

    key = f"/hps_test_{secrets.token_hex(8)}"

    def __init__(self, client):
        self.client = client
        self.handle = shm.create_shared_memory_region("r", self.key, 4096)
        shm.set_shared_memory_region(self.handle, [np.array([1, 2, 3, 4])])
        client.register_system_shared_memory("r", self.key, 4096)

    def read(self, shape, offset):
        return shm.get_contents_as_numpy(self.handle, np.float32, shape, offset).tolist()

    def close(self):
        shm.destroy_shared_memory_region(self.handle)


@pytest.fixture
def client(small, serve):
    small.state.regions = SharedMemoryRegistry(on=True, most_bytes=1 << 20)
    with triton.InferenceServerClient(serve().server.url) as client:
        yield client


@pytest.fixture
def memory(client):
    memory = Memory(client)
    yield memory
    memory.close()


def in_region(name, offset, size=16):
    sent = triton.InferInput(name, [2, 1], "INT64")
    sent.set_shared_memory("r", size, offset)
    return sent


def wanted(name, size, offset=0):
    output = triton.InferRequestedOutput(name)
    output.set_shared_memory("r", size, offset)
    return output


def row(key, dim):
    return [key + i / 8 for i in range(dim)]


@pytest.mark.parametrize("times", [1, 3])
def test_a_lookup_in_shared_memory(client, memory, times):
    for _ in range(times):  # the first is read by protobuf, the others look like it
        result = client.infer(
            "words.lookup",
            [in_region("left", 0), in_region("right", 16)],
            outputs=[wanted("left", 100, 1024), triton.InferRequestedOutput("right")],
            request_id="a7",
        )
        assert memory.read([2, 3], 1024) == [row(1, 3), row(2, 3)]
        assert result.as_numpy("right").tolist() == [row(3, 2), row(4, 2)]
        told = result.get_response()
        assert [len(raw) for raw in told.raw_output_contents] == [0, 16]
        assert told.id == "a7"
        assert told.outputs[0].parameters["shared_memory_region"].string_param == "r"
        assert told.outputs[0].parameters["shared_memory_byte_size"].int64_param == 24
        assert told.outputs[0].parameters["shared_memory_offset"].int64_param == 1024
        assert not told.outputs[1].parameters
        shm.set_shared_memory_region(memory.handle, [np.zeros(6, np.float32)], 1024)


def test_beside_tensors_that_are_sent(client, memory):
    sent = triton.InferInput("left", [2, 1], "INT64").set_data_from_numpy(np.array([[7], [8]]))
    for _ in range(2):
        outputs = [triton.InferRequestedOutput("left"), wanted("right", 16)]
        result = client.infer("words.lookup", [sent, in_region("right", 16)], outputs=outputs)
        assert result.as_numpy("left").tolist() == [row(7, 3), row(8, 3)]
        assert memory.read([2, 2], 0) == [row(3, 2), row(4, 2)]
        shm.set_shared_memory_region(memory.handle, [np.array([1, 2, 3, 4])])


def test_what_is_told_of_regions(client, memory):
    assert "system_shared_memory" in client.get_server_metadata().extensions
    (found,) = client.get_system_shared_memory_status().regions.values()
    assert (found.name, found.key, found.offset, found.byte_size) == ("r", memory.key, 0, 4096)
    assert client.get_system_shared_memory_status("r").regions["r"] == found
    client.unregister_system_shared_memory("r")
    assert not client.get_system_shared_memory_status().regions
    client.unregister_cuda_shared_memory()  # as perf_analyzer does
    for call in (client.get_cuda_shared_memory_status, client.unregister_cuda_shared_memory):
        assert refused(call, "x")[0] == "UNIMPLEMENTED"


def refused(call, *args, **kwargs):
    with pytest.raises(InferenceServerException) as caught:
        call(*args, **kwargs)
    return caught.value.status().removeprefix("StatusCode."), caught.value.message()


def test_faults_of_requests(client, memory):
    both = [in_region("left", 0), in_region("right", 16)]
    ask = client.infer
    code, message = refused(ask, "words.lookup", both, outputs=[wanted("left", 8)])
    assert (code, "at least 24 bytes" in message) == ("INVALID_ARGUMENT", True)
    code, message = refused(ask, "words.lookup", [in_region("left", 4090)])
    assert (code, "Invalid offset" in message) == ("INVALID_ARGUMENT", True)
    code, message = refused(ask, "words.lookup", [in_region("left", 0, 8)])
    assert (code, "Expected 16, got 8" in message) == ("INVALID_ARGUMENT", True)
    os.truncate(f"/dev/shm{memory.key}", 8)
    code, message = refused(ask, "words.lookup", both)
    assert (code, "shorter than when it was registered" in message) == ("INVALID_ARGUMENT", True)
    client.unregister_system_shared_memory()
    code, message = refused(ask, "words.lookup", both)
    assert (code, "Unable to find" in message) == ("NOT_FOUND", True)
    sent = triton.InferInput("left", [1, 1], "INT64").set_data_from_numpy(np.array([[7]]))
    assert refused(ask, "words.lookup", [sent], outputs=[wanted("left", 24)])[0] == "NOT_FOUND"
    assert client.is_server_live()


def test_where_it_is_off(small, serve):
    assert FrontendState().regions.on is ServerSettings().shared_memory is False
    with triton.InferenceServerClient(serve().server.url) as client:
        assert "system_shared_memory" not in client.get_server_metadata().extensions
        for call, arguments in (
            (client.register_system_shared_memory, ("r", "/r", 8)),
            (client.unregister_system_shared_memory, ()),
            (client.get_system_shared_memory_status, ()),
            (client.unregister_cuda_shared_memory, ()),
        ):
            assert refused(call, *arguments)[0] == "UNIMPLEMENTED"
        _, message = refused(client.get_system_shared_memory_status)
        assert "set server.shared_memory" in message
        code, message = refused(client.infer, "words.lookup", [in_region("left", 0)])
        assert (code, "server.shared_memory" in message) == ("INVALID_ARGUMENT", True)
        sent = triton.InferInput("left", [1, 1], "INT64").set_data_from_numpy(np.array([[7]]))
        code, message = refused(client.infer, "words.lookup", [sent], outputs=[wanted("left", 24)])
        assert (code, "server.shared_memory" in message) == ("INVALID_ARGUMENT", True)


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
    assert first.form.elsewhere.inputs["f"][0] == ("r", 16, 0)
    monkeypatch.undo()
    tensor.contents.int64_contents.extend([1, 2])
    message = request.SerializeToString()
    with pytest.raises(BadRequest, match="both contents and shared memory"):
        parser.parse(message, address(message))
