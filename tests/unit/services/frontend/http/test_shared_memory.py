"""Tensors in shared memory over HTTP, as Triton's client has them."""

from __future__ import annotations

import os
import secrets

import numpy as np
import orjson
import pytest
import tritonclient.http as triton
import uvloop
from tritonclient.utils import InferenceServerException
from tritonclient.utils import shared_memory as shm

from hps.config.server_settings import Listener
from services.frontend.auth import NoAuthorizer
from services.frontend.http.app import data_app
from services.frontend.http.server import HttpServer, listen
from services.frontend.shared_memory import SharedMemoryRegistry
from tests.unit.services.frontend.grpc.conftest import Running

PATH = "/v2/models/words.lookup/infer"
KEY = f"/hps_test_{secrets.token_hex(8)}"


@pytest.fixture
def client(small):
    small.state.regions = SharedMemoryRegistry(on=True, most_bytes=1 << 20)
    at = Listener(port=0)
    answers = data_app(small.state, small.settings, NoAuthorizer())
    server = HttpServer(answers, listen(at.host, 0, "server.http"), 60)
    running = Running(server, uvloop.new_event_loop())
    with triton.InferenceServerClient(server.url.removeprefix("http://")) as client:
        yield client
    running.stop(at_once=True)
    running.join()


@pytest.fixture
def memory(client):
    """A client's own, registered as ``r``: two keys for each table, then room for their rows."""
    handle = shm.create_shared_memory_region("r", KEY, 4096)
    shm.set_shared_memory_region(handle, [np.array([1, 2, 3, 4])])
    client.register_system_shared_memory("r", KEY, 4096)
    yield handle
    shm.destroy_shared_memory_region(handle)


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


def read(memory, shape, offset):
    return shm.get_contents_as_numpy(memory, np.float32, shape, offset).tolist()


def test_all_of_a_lookup(client, memory):
    for _ in range(2):
        both = [in_region("left", 0), in_region("right", 16)]
        outputs = [wanted("left", 100, 1024), wanted("right", 16, 2048)]
        told = client.infer("words.lookup", both, outputs=outputs, request_id="a7").get_response()
        assert read(memory, [2, 3], 1024) == [row(1, 3), row(2, 3)]
        assert read(memory, [2, 2], 2048) == [row(3, 2), row(4, 2)]
        assert told["id"] == "a7"
        assert told["outputs"][0] == {
            "name": "left",
            "datatype": "FP32",
            "shape": [2, 3],
            "parameters": {
                "shared_memory_region": "r",
                "shared_memory_byte_size": 24,
                "shared_memory_offset": 1024,
            },
        }
        shm.set_shared_memory_region(memory, [np.zeros(300, np.float32)], 1024)


@pytest.mark.parametrize("binary", [True, False])
def test_beside_tensors_that_are_sent(client, memory, binary):
    sent = triton.InferInput("left", [2, 1], "INT64")
    sent.set_data_from_numpy(np.array([[7], [8]]), binary_data=binary)
    for _ in range(2):  # the second looks like the first
        outputs = [triton.InferRequestedOutput("left", binary_data=binary), wanted("right", 16)]
        result = client.infer("words.lookup", [in_region("right", 16), sent], outputs=outputs)
        assert result.as_numpy("left").tolist() == [row(7, 3), row(8, 3)]
        assert read(memory, [2, 2], 0) == [row(3, 2), row(4, 2)]
        shm.set_shared_memory_region(memory, [np.array([1, 2, 3, 4])])


def test_what_is_told_of_regions(client, memory):
    assert "system_shared_memory" in client.get_server_metadata()["extensions"]
    found = {"name": "r", "key": KEY, "offset": 0, "byte_size": 4096}
    assert client.get_system_shared_memory_status() == [found]
    assert client.get_system_shared_memory_status("r") == [found]
    assert refused(client.get_system_shared_memory_status, "x")[0] == "404"
    client.unregister_system_shared_memory("r")
    assert client.get_system_shared_memory_status() == []
    client.unregister_cuda_shared_memory()  # as perf_analyzer does
    assert refused(client.unregister_cuda_shared_memory, "x")[0] == "501"


def refused(call, *args, **kwargs):
    with pytest.raises(InferenceServerException) as caught:
        call(*args, **kwargs)
    return caught.value.status(), caught.value.message()


def test_faults_of_requests(client, memory):
    both = [in_region("left", 0), in_region("right", 16)]
    ask = client.infer
    status, message = refused(ask, "words.lookup", both, outputs=[wanted("left", 8)])
    assert (status, "at least 24 bytes" in message) == ("400", True)
    status, message = refused(ask, "words.lookup", [in_region("left", 4090)])
    assert (status, "Invalid offset" in message) == ("400", True)
    status, message = refused(ask, "words.lookup", [in_region("left", 0, 8)])
    assert (status, "Expected 16, got 8" in message) == ("400", True)
    os.truncate(f"/dev/shm{KEY}", 8)
    status, message = refused(ask, "words.lookup", both)
    assert (status, "shorter than when it was registered" in message) == ("400", True)
    client.unregister_system_shared_memory()
    status, message = refused(ask, "words.lookup", both)
    assert (status, "Unable to find" in message) == ("404", True)
    assert client.is_server_live()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"key": 1, "byte_size": 8}, "its 'key', a string"),
        ({"key": "/x", "byte_size": 8.5}, "whole numbers"),
        ({"key": "/x"}, "'byte_size'"),
        ({"key": "../x", "byte_size": 8}, "a plain name"),
        ({"key": "/hps_not_there", "byte_size": 8}, "Unable to open"),
    ],
)
def test_what_can_not_be_registered(small, data, call, error, body, says):
    small.state.regions = SharedMemoryRegistry(on=True, most_bytes=1 << 20)
    reply = call(data, "POST", "/v2/systemsharedmemory/region/r/register", json=body)
    assert reply.status_code == 400
    assert says in error(reply)


def test_where_it_is_off(data, call, error):
    assert "system_shared_memory" not in call(data, "GET", "/v2").json()["extensions"]
    place = {"shared_memory_region": "r", "shared_memory_byte_size": 8}
    left = {"name": "left", "shape": [1, 1], "datatype": "INT64"}
    body = {"inputs": [{**left, "parameters": place}]}
    for path, given in (
        ("/v2/systemsharedmemory/region/r/register", {"key": "/x", "byte_size": 8}),
        ("/v2/systemsharedmemory/unregister", {}),
        ("/v2/cudasharedmemory/unregister", {}),
    ):
        reply = call(data, "POST", path, json=given)
        assert reply.status_code == 501
    assert "set server.shared_memory" in error(call(data, "GET", "/v2/systemsharedmemory/status"))
    assert "server.shared_memory" in error(call(data, "POST", PATH, json=body))
    body = {
        "inputs": [{**left, "data": [1]}],
        "outputs": [{"name": "left", "parameters": {**place, "shared_memory_byte_size": 12}}],
    }
    reply = call(data, "POST", PATH, content=orjson.dumps(body))
    assert (reply.status_code, "server.shared_memory" in error(reply)) == (400, True)
