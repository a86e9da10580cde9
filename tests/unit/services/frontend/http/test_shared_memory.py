"""Tensors in shared memory over HTTP: requests that no client sends; see test_shared_memory_protocols.py."""

from __future__ import annotations

import orjson
import pytest

from services.frontend.shared_memory import SharedMemoryRegistry

PATH = "/v2/models/words.lookup/infer"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"key": 1, "byte_size": 8}, "requires 'key' (string)"),
        ({"key": "/x", "byte_size": 8.5}, "'byte_size' (integer)"),
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
