"""Clients of the data port over HTTP and gRPC, for tests that are the same for both."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import uvloop
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from hps.config.server_settings import Listener
from services.frontend.auth import Authorizer
from services.frontend.http.app import data_app
from services.frontend.http.server import HttpPortOptions, HttpServer
from services.frontend.listening import listen
from tests.support.fallbacks import HTTP_PROTOCOL
from tests.support.server_thread import Running
from tests.unit.services.frontend.grpc.conftest import running

TIMEOUT_S = 60
INPUTS = {
    "ctr": {
        **{name: ("INT64", [1, 1], [1]) for name in ("user", "item", "history")},
        "dense": ("FP32", [1, 3], [1.0, 2.0, 3.0]),
    },
    "words.lookup": {"left": ("INT64", [1, 1], [1])},
}
# HTTP's status of each status of gRPC.
STATUSES = {
    grpc.StatusCode.OK: 200,
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}


@dataclass(frozen=True)
class Reply:
    """A reply; ``status`` is HTTP's for both protocols."""

    status: int
    error: str = ""
    retry_after_s: float | None = None


class SentRequest(Protocol):
    def reply(self) -> Reply:
        """Wait for the reply."""
        ...

    def cancel(self) -> None: ...


class HttpRequest:
    """A request on a connection of its own."""

    def __init__(self, address: str, path: str, body: Any, headers: Mapping[str, str]) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
        self._connection.request("POST", path, json.dumps(body), headers)

    def reply(self) -> Reply:
        response = self._connection.getresponse()
        body = json.loads(response.read())
        self._connection.close()
        retry_after = response.headers["retry-after"]
        return Reply(
            response.status,
            body.get("error", ""),
            None if retry_after is None else int(retry_after),
        )

    def cancel(self) -> None:
        self._connection.close()


class HttpClient:
    def __init__(self, address: str) -> None:
        self._address = address

    def send(self, model: str = "ctr", key: str = "", timeout_us: int | None = None) -> HttpRequest:
        parameters = {} if timeout_us is None else {"timeout": timeout_us}
        return self._send(model, {**infer_body(model), "parameters": parameters}, key)

    def send_invalid(self) -> list[HttpRequest]:
        """Send requests that cannot be parsed, or not be submitted."""
        return [self._send("ctr", body) for body in ({"inputs": []}, {"inputs": "?"})]

    def _send(self, model: str, body: Any, key: str = "") -> HttpRequest:
        headers = {"X-API-Key": key} if key else {}
        return HttpRequest(self._address, f"/v2/models/{model}/infer", body, headers)

    def is_ready(self) -> bool:
        connection = http.client.HTTPConnection(self._address, timeout=TIMEOUT_S)
        connection.request("GET", "/v2/health/ready")
        status = connection.getresponse().status
        connection.close()
        return status == 200


class GrpcRequest:
    def __init__(self, call: Any) -> None:
        self._call = call

    def reply(self) -> Reply:
        status = STATUSES[self._call.code()]
        pushback = dict(self._call.trailing_metadata()).get("grpc-retry-pushback-ms")
        return Reply(
            status, self._call.details() or "", None if pushback is None else int(pushback) / 1e3
        )

    def cancel(self) -> None:
        self._call.cancel()


class GrpcClient:
    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = GRPCInferenceServiceStub(channel)

    def send(self, model: str = "ctr", key: str = "", timeout_us: int | None = None) -> GrpcRequest:
        request = infer_request(model)
        if timeout_us is not None:
            request.parameters["timeout"].int64_param = timeout_us
        return self._send(request, key)

    def send_invalid(self) -> list[GrpcRequest]:
        """Send requests that cannot be parsed, or not be submitted."""
        request = infer_request("ctr")
        request.inputs[0].shape[0] = 7
        return [self._send(each) for each in (pb.ModelInferRequest(model_name="ctr"), request)]

    def _send(self, request: pb.ModelInferRequest, key: str = "") -> GrpcRequest:
        metadata = [("x-api-key", key)] if key else []
        return GrpcRequest(
            self._stub.ModelInfer.future(request, timeout=TIMEOUT_S, metadata=metadata)
        )

    def is_ready(self) -> bool:
        return self._stub.ServerReady(pb.ServerReadyRequest(), timeout=TIMEOUT_S).ready


def infer_body(model: str) -> dict[str, Any]:
    """The JSON of a request of one sample."""
    inputs = [
        {"name": name, "datatype": datatype, "shape": shape, "data": data}
        for name, (datatype, shape, data) in INPUTS[model].items()
    ]
    return {"inputs": inputs}


def infer_request(model: str = "ctr") -> pb.ModelInferRequest:
    """A request of one sample."""
    request = pb.ModelInferRequest(model_name=model)
    for name, (datatype, shape, data) in INPUTS[model].items():
        contents = {"INT64": "int64_contents", "FP32": "fp32_contents"}[datatype]
        tensor = request.inputs.add(name=name, datatype=datatype, shape=shape)
        getattr(tensor.contents, contents).extend(data)
    return request


@contextmanager
def running_http(small: Any, guard: Any = None) -> Iterator[str]:
    """The address of a data port for ``small``."""
    app = data_app(small.state, small.settings, guard or Authorizer())
    server = HttpServer(
        app,
        listen(Listener(port=0).host, 0, "server.http"),
        HttpPortOptions(TIMEOUT_S, protocol=HTTP_PROTOCOL),
    )
    serving = Running(server, uvloop.new_event_loop())
    try:
        yield server.url.removeprefix("http://")
    finally:
        serving.stop(force=True)
        serving.join()


@contextmanager
def http_client(small: Any, guard: Any = None) -> Iterator[HttpClient]:
    with running_http(small, guard) as address:
        yield HttpClient(address)


@contextmanager
def grpc_client(small: Any, guard: Any = None) -> Iterator[GrpcClient]:
    with running(small, guard) as server, grpc.insecure_channel(server.server.url) as channel:
        yield GrpcClient(channel)
