"""Tensors in shared memory, as Triton's clients send them, over each protocol."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException
from tritonclient.utils import shared_memory as shm

from hps.config.server_settings import ServerSettings
from services.frontend.shared_memory import SharedMemoryRegistry
from services.frontend.state import FrontendState
from tests.unit.services.conftest import row
from tests.unit.services.frontend.grpc.conftest import running
from tests.unit.services.frontend.protocol_clients import running_http


@dataclass(frozen=True)
class Protocol:
    """A protocol's client, and its status codes."""

    triton: ModuleType
    invalid: str
    not_found: str
    not_implemented: str
    unauthenticated: str

    def extensions(self, client: Any) -> list[str]:
        metadata = client.get_server_metadata()
        return metadata["extensions"] if self is REST else list(metadata.extensions)

    def regions(self, client: Any, *name: str, **options: Any) -> list[dict[str, Any]]:
        status = client.get_system_shared_memory_status(*name, **options)
        if self is REST:
            return status
        fields = ("name", "key", "offset", "byte_size")
        return [{f: getattr(each, f) for f in fields} for each in status.regions.values()]

    def parameters(self, result: Any, name: str) -> dict[str, Any]:
        """The parameters of one output; empty where it was sent."""
        output = result.get_output(name)
        if self is REST:
            return {
                k: v for k, v in output.get("parameters", {}).items() if k != "binary_data_size"
            }
        return {
            k: getattr(v, v.WhichOneof("parameter_choice")) for k, v in output.parameters.items()
        }

    def id(self, result: Any) -> str:
        response = result.get_response()
        return response["id"] if self is REST else response.id


REST = Protocol(tritonclient.http, "400", "404", "501", "401")
GRPC = Protocol(
    tritonclient.grpc,
    "StatusCode.INVALID_ARGUMENT",
    "StatusCode.NOT_FOUND",
    "StatusCode.UNIMPLEMENTED",
    "StatusCode.UNAUTHENTICATED",
)


@pytest.fixture(params=[REST, GRPC], ids=["rest", "grpc"])
def protocol(request: pytest.FixtureRequest) -> Protocol:
    return request.param


@pytest.fixture
def connect(small: Any, protocol: Protocol) -> Iterator[Callable[..., Any]]:
    """``connect(guard)``: start a server of the small node; return Triton's client of it."""
    with ExitStack() as stack:

        def start(guard: Any = None) -> Any:
            if protocol is GRPC:
                url = stack.enter_context(running(small, guard)).server.url
            else:
                url = stack.enter_context(running_http(small, guard))
            return stack.enter_context(protocol.triton.InferenceServerClient(url))

        yield start


class Memory:
    """Memory of a client, registered as ``r``: two keys for each table, then space for their rows."""

    def __init__(self, client: Any) -> None:
        self.key = f"/hps_test_{secrets.token_hex(8)}"
        self.handle = shm.create_shared_memory_region("r", self.key, 4096)
        self.write([1, 2, 3, 4])
        client.register_system_shared_memory("r", self.key, 4096)

    def write(self, values: Any, offset: int = 0) -> None:
        shm.set_shared_memory_region(self.handle, [np.array(values)], offset)

    def read(self, shape: list[int], offset: int) -> Any:
        return shm.get_contents_as_numpy(self.handle, np.float32, shape, offset).tolist()


@pytest.fixture
def enabled(small: Any) -> None:
    small.state.regions = SharedMemoryRegistry(on=True, most_bytes=1 << 20)


@pytest.fixture
def client(enabled: None, connect: Callable[..., Any]) -> Any:
    return connect()


@pytest.fixture
def memory(client: Any) -> Iterator[Memory]:
    memory = Memory(client)
    yield memory
    shm.destroy_shared_memory_region(memory.handle)


@pytest.fixture
def in_region(protocol: Protocol) -> Callable[..., Any]:
    """``in_region(name, offset, size)``: an input with two keys in the region."""

    def make(name: str, offset: int, size: int = 16) -> Any:
        tensor = protocol.triton.InferInput(name, [2, 1], "INT64")
        tensor.set_shared_memory("r", size, offset)
        return tensor

    return make


@pytest.fixture
def target(protocol: Protocol) -> Callable[..., Any]:
    """``target(name, size, offset)``: an output that the server writes into the region."""

    def make(name: str, size: int, offset: int = 0) -> Any:
        output = protocol.triton.InferRequestedOutput(name)
        output.set_shared_memory("r", size, offset)
        return output

    return make


def rejection(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, str]:
    with pytest.raises(InferenceServerException) as caught:
        call(*args, **kwargs)
    return caught.value.status(), caught.value.message()


@pytest.mark.parametrize("right_in_region", [True, False])
def test_lookup_reads_keys_and_writes_rows_in_region(
    client, protocol, memory, in_region, target, right_in_region
):
    right = target("right", 16, 2048)
    if not right_in_region:
        right = protocol.triton.InferRequestedOutput("right")
    for _ in range(3):  # the first is parsed in full, the others by its template
        result = client.infer(
            "words.lookup",
            [in_region("left", 0), in_region("right", 16)],
            outputs=[target("left", 100, 1024), right],
            request_id="a7",
        )
        assert memory.read([2, 3], 1024) == [row(1, 3), row(2, 3)]
        if right_in_region:
            assert memory.read([2, 2], 2048) == [row(3, 2), row(4, 2)]
        else:
            assert result.as_numpy("right").tolist() == [row(3, 2), row(4, 2)]
            assert protocol.parameters(result, "right") == {}
        assert protocol.id(result) == "a7"
        left = result.get_output("left")
        described = (
            left
            if protocol is REST
            else {"name": left.name, "datatype": left.datatype, "shape": [*left.shape]}
        )
        assert {k: described[k] for k in ("name", "datatype", "shape")} == {
            "name": "left",
            "datatype": "FP32",
            "shape": [2, 3],
        }
        assert protocol.parameters(result, "left") == {
            "shared_memory_region": "r",
            "shared_memory_byte_size": 24,
            "shared_memory_offset": 1024,
        }
        if protocol is GRPC:
            sizes = [len(raw) for raw in result.get_response().raw_output_contents]
            assert sizes == [0, 0 if right_in_region else 16]
        memory.write(np.zeros(300, np.float32), 1024)


@pytest.mark.parametrize(
    ("protocol", "binary"),
    [(REST, True), (REST, False), (GRPC, True)],
    ids=["rest-binary", "rest-json", "grpc"],
)
def test_request_has_tensors_in_region_and_in_body(
    client, protocol, memory, in_region, target, binary
):
    form = {"binary_data": binary} if protocol is REST else {}
    sent = protocol.triton.InferInput("left", [2, 1], "INT64")
    sent.set_data_from_numpy(np.array([[7], [8]]), **form)
    inputs = [in_region("right", 16), sent] if protocol is REST else [sent, in_region("right", 16)]
    for _ in range(2):  # the second is parsed by the template of the first
        outputs = [
            protocol.triton.InferRequestedOutput("left", **form),
            target("right", 16),
        ]
        result = client.infer("words.lookup", inputs, outputs=outputs)
        assert result.as_numpy("left").tolist() == [row(7, 3), row(8, 3)]
        assert memory.read([2, 2], 0) == [row(3, 2), row(4, 2)]
        memory.write([1, 2, 3, 4])


def test_registered_regions_are_listed(client, protocol, memory):
    assert "system_shared_memory" in protocol.extensions(client)
    region = {"name": "r", "key": memory.key, "offset": 0, "byte_size": 4096}
    assert protocol.regions(client) == protocol.regions(client, "r") == [region]
    if protocol is REST:
        assert rejection(client.get_system_shared_memory_status, "x")[0] == protocol.not_found
    client.unregister_system_shared_memory("r")
    assert protocol.regions(client) == []


@pytest.mark.parametrize(
    ("key", "says"), [("../x", "a plain name"), ("/hps_not_there", "Unable to open")]
)
def test_unusable_region_is_not_registered(client, protocol, key, says):
    code, message = rejection(client.register_system_shared_memory, "r", key, 8)
    assert (code, says in message) == (protocol.invalid, True)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"key": 1, "byte_size": 8}, "requires 'key' (string)"),
        ({"key": "/x", "byte_size": 8.5}, "'byte_size' (integer)"),
        ({"key": "/x"}, "'byte_size'"),
    ],
)
def test_rest_registration_with_invalid_fields_is_rejected(enabled, data, call, error, body, says):
    reply = call(data, "POST", "/v2/systemsharedmemory/region/r/register", json=body)
    assert (reply.status_code, says in error(reply)) == (400, True)


def test_registry_requires_an_api_key(enabled, connect, protocol, key_guard):
    client = connect(key_guard)
    assert rejection(client.get_system_shared_memory_status)[0] == protocol.unauthenticated
    assert protocol.regions(client, headers={"x-api-key": "r" * 16}) == []


def test_cuda_regions_are_not_implemented(client, protocol):
    client.unregister_cuda_shared_memory()  # as perf_analyzer does
    for call in (client.unregister_cuda_shared_memory, client.get_cuda_shared_memory_status):
        assert rejection(call, "x")[0] == protocol.not_implemented


def test_invalid_references_are_rejected(client, protocol, memory, in_region, target):
    both = [in_region("left", 0), in_region("right", 16)]
    ask = client.infer
    code, message = rejection(ask, "words.lookup", both, outputs=[target("left", 8)])
    assert (code, "at least 24 bytes" in message) == (protocol.invalid, True)
    code, message = rejection(ask, "words.lookup", [in_region("left", 4090)])
    assert (code, "Invalid offset" in message) == (protocol.invalid, True)
    code, message = rejection(ask, "words.lookup", [in_region("left", 0, 8)])
    assert (code, "Expected 16, got 8" in message) == (protocol.invalid, True)
    os.truncate(f"/dev/shm{memory.key}", 8)
    code, message = rejection(ask, "words.lookup", both)
    assert (code, "shorter than when it was registered" in message) == (protocol.invalid, True)
    client.unregister_system_shared_memory()
    code, message = rejection(ask, "words.lookup", both)
    assert (code, "Unable to find" in message) == (protocol.not_found, True)
    sent = protocol.triton.InferInput("left", [1, 1], "INT64")
    sent.set_data_from_numpy(np.array([[7]]))
    assert (
        rejection(ask, "words.lookup", [sent], outputs=[target("left", 24)])[0]
        == protocol.not_found
    )
    assert client.is_server_live()


def test_regions_are_rejected_by_default(connect, protocol, in_region, target):
    assert FrontendState().regions.on is ServerSettings().shared_memory is False
    client = connect()
    assert "system_shared_memory" not in protocol.extensions(client)
    for call, arguments in (
        (client.register_system_shared_memory, ("r", "/r", 8)),
        (client.unregister_system_shared_memory, ()),
        (client.get_system_shared_memory_status, ()),
        (client.unregister_cuda_shared_memory, ()),
    ):
        assert rejection(call, *arguments)[0] == protocol.not_implemented
    _, message = rejection(client.get_system_shared_memory_status)
    assert "set server.shared_memory" in message
    code, message = rejection(client.infer, "words.lookup", [in_region("left", 0)])
    assert (code, "server.shared_memory" in message) == (protocol.invalid, True)
    sent = protocol.triton.InferInput("left", [1, 1], "INT64")
    sent.set_data_from_numpy(np.array([[7]]))
    code, message = rejection(client.infer, "words.lookup", [sent], outputs=[target("left", 24)])
    assert (code, "server.shared_memory" in message) == (protocol.invalid, True)
