"""The client against a stub: its requests, and its results for every kind of answer."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from hps.client import Admin, Client
from hps.errors import (
    BadRequest,
    ConfigError,
    DeadlineExceeded,
    Forbidden,
    HpsError,
    NotFound,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from hps.types import JaggedKeys

Reply = tuple[int, bytes]
Stub = Callable[[dict[str, Reply]], tuple[str, list[dict[str, Any]]]]


@pytest.fixture
def stub() -> Iterator[Stub]:
    """Starts a server that answers paths with the given replies and records requests."""
    servers: list[ThreadingHTTPServer] = []

    def start(replies: dict[str, Reply]) -> tuple[str, list[dict[str, Any]]]:
        seen: list[dict[str, Any]] = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                head = int(self.headers.get("Inference-Header-Content-Length") or len(body))
                seen.append(
                    {
                        "verb": self.command,
                        "path": self.path,
                        "headers": dict(self.headers.items()),
                        "json": json.loads(body[:head]) if body else None,
                        "binary": body[head:],
                    }
                )
                status, reply = replies.get(self.path, (404, b'{"error": "Not Found"}'))
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            do_GET = do_POST = answer

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}", seen

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def outputs(**arrays: list[Any]) -> bytes:
    tensors = [
        {"name": name, "datatype": "FP32", "shape": list(np.shape(value)), "data": value}
        for name, value in arrays.items()
    ]
    body = {"model_name": "m", "model_version": "3", "outputs": tensors}
    body["parameters"] = {"hps_defaulted": 2, "hps_degraded": "rocksdb,redis"}
    return json.dumps(body).encode()


METADATA = json.dumps(
    {
        "name": "m",
        "inputs": [{"name": "depth", "datatype": "FP32", "shape": [-1, 1]}],
        "outputs": [],
    }
).encode()


def test_predict_sends_keys_bit_by_bit_and_dense_in_the_models_type(stub: Stub) -> None:
    url, seen = stub(
        {
            "/v2/models/m/infer": (200, outputs(click=[[0.5], [0.25]])),
            "/v2/models/m": (200, METADATA),
        }
    )
    jagged = JaggedKeys(
        np.array([7, -8, 9]), 2, np.array([0, 1, 3]), np.array([1, 2, 3], np.float32)
    )
    with Client(url) as client:
        got = client.predict(
            "m",
            {"user": np.array([2**64 - 1, 5], np.uint64), "tags": jagged},
            {"depth": [[1], [2]]},
            top_k=1,
        )
    assert got.outputs["click"].tolist() == [[0.5], [0.25]]
    assert got.defaulted == 2
    assert got.degraded == ("rocksdb", "redis")
    sent = seen[-1]
    shapes = {t["name"]: (t["datatype"], t["shape"]) for t in sent["json"]["inputs"]}
    assert shapes == {
        "user": ("INT64", [2, 1]),
        "tags": ("INT64", [3]),
        "tags.offsets": ("INT64", [3]),
        "tags.weights": ("FP32", [3]),
        "depth": ("FP32", [2, 1]),
    }
    keys = np.frombuffer(sent["binary"][:40], np.int64)
    assert keys.tolist() == [-1, 5, 7, -8, 9]
    assert sent["json"]["parameters"]["top_k"] == 1


def test_lookup_requests_sources(stub: Stub) -> None:
    body = {
        "outputs": [
            {"name": "f", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]},
            {"name": "f.source", "datatype": "UINT8", "shape": [1], "data": [4]},
        ]
    }
    url, seen = stub({"/v2/models/m.lookup/infer": (200, json.dumps(body).encode())})
    with Client(url) as client:
        got = client.lookup("m", {"f": [1]}, want_source=True)
    assert got.vectors["f"].tolist() == [[1, 2]]
    assert got.sources["f"].tolist() == [4]
    assert [o["name"] for o in seen[-1]["json"]["outputs"]] == ["f", "f.source"]


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_empty_batches_are_sent(stub: Stub, shape: tuple[int, ...]) -> None:
    url, seen = stub({"/v2/models/m/infer": (200, outputs(click=[]))})
    with Client(url) as client:
        client.predict("m", {"user": np.empty(shape, np.int64)})
    assert seen[-1]["json"]["inputs"][0]["shape"][0] == shape[0]


ERRORS: list[tuple[int, type[HpsError]]] = [
    (400, BadRequest),
    (401, Unauthenticated),
    (403, Forbidden),
    (404, NotFound),
    (413, BadRequest),
    (429, Unavailable),
    (500, HpsError),
    (501, Unsupported),
    (503, Unavailable),
    (504, DeadlineExceeded),
]


@pytest.mark.parametrize(("status", "kind"), ERRORS)
def test_server_error_becomes_an_hps_error(stub: Stub, status: int, kind: type[HpsError]) -> None:
    reply = (status, b'{"error": "because of this"}')
    url, _ = stub({"/v2/models/m/infer": reply, "/v1/status": reply})
    with Client(url, retries=0) as client, Admin(url) as admin:
        for call in (lambda: client.predict("m", {"f": [1]}), admin.status):
            with pytest.raises(HpsError, match=r"^because of this$") as error:
                call()
            assert type(error.value) is kind


def test_unreachable_server_error_names_a_remedy() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with Client(url) as client, Admin(url) as admin:
        for call in (lambda: client.predict("m", {"f": [1]}), admin.status, client.ready):
            with pytest.raises(Unavailable, match=f"nothing listens at {url}; start a server"):
                call()


def test_readiness_is_read_from_the_status(stub: Stub) -> None:
    url, seen = stub({"/v2/health/ready": (200, b"")})
    with Client(url) as client:
        assert client.ready()
    assert [each["path"] for each in seen] == ["/v2/health/ready"]


def test_hanging_server_times_out() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with Client(url, timeout_s=0.2) as client, Admin(url, timeout_s=0.2) as admin:
            for call in (lambda: client.predict("m", {"f": [1]}), admin.status):
                with pytest.raises(DeadlineExceeded, match=r"did not answer in time"):
                    call()


def test_other_servers_are_detected(stub: Stub) -> None:
    url, _ = stub({"/v1/status": (200, b"<html>"), "/v2": (200, b'{"name": "triton"}')})
    with Client(url) as client, Admin(url) as admin:
        with pytest.raises(HpsError, match="did not answer with JSON"):
            admin.status()
        assert not client.is_hps()
    ours, _ = stub({"/v2": (200, b'{"name": "hps"}'), "/v2/health/ready": (503, b'{"error": "x"}')})
    with Client(ours) as client:
        assert client.is_hps()
        assert client.ready() is False


def test_api_key_is_sent_with_every_call(stub: Stub) -> None:
    url, seen = stub({"/v2/models/m/infer": (200, outputs(click=[1])), "/v1/status": (200, b"{}")})
    with Client(url, api_key="secret") as client, Admin(url, api_key="secret") as admin:
        client.predict("m", {"f": [1]})
        admin.status()
    assert [sent["headers"]["Authorization"] for sent in seen] == ["Bearer secret"] * 2


def test_metrics_are_parsed(stub: Stub) -> None:
    text = b'# HELP x y\nx_total{a="1",b="q\\"}"} 3\nplain 1e-3\ninf_bucket{le="+Inf"} 5.0\n'
    url, _ = stub({"/metrics": (200, text)})
    with Admin(url) as admin:
        got = admin.metrics()
    assert [(s.name, s.labels, s.value) for s in got] == [
        ("x_total", {"a": "1", "b": 'q\\"}'}, 3),
        ("plain", {}, 1e-3),
        ("inf_bucket", {"le": "+Inf"}, 5),
    ]


@pytest.mark.parametrize("url", ["ftp://x", "http://", ""])
def test_invalid_address_is_rejected_before_connecting(url: str) -> None:
    with pytest.raises(ConfigError, match="must look like http://host:port"):
        Client(url)


def test_address_without_a_scheme_means_http() -> None:
    assert Client("localhost:8000").url == "http://localhost:8000"
    assert Client("https://host/base/").url == "https://host/base"


def test_keys_that_are_not_integers_name_their_feature() -> None:
    with Client() as client, pytest.raises(BadRequest, match="feature 'f': keys must be integers"):
        client.predict("m", {"f": [0.5]})
    # Not a 64-bit integer: rejected, not rounded.
    with Client() as client, pytest.raises(BadRequest, match="feature 'f': keys must be integers"):
        client.predict("m", {"f": [2**64, 5]})


def test_tls_to_a_plain_server_names_the_remedy(stub: Stub) -> None:
    url, _ = stub({})
    secured = url.replace("http", "https")
    with Client(secured) as client, pytest.raises(HpsError, match=f"not use TLS; write {url}"):
        client.ready()


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "grpc://127.0.0.1:1"])
@pytest.mark.parametrize("key", ["a b", "planted\r\nX-More: 1", "planted-\u00fc"])
def test_invalid_api_keys_are_rejected(url: str, key: str) -> None:
    with pytest.raises(ConfigError, match="the API key has characters that no key has") as caught:
        Client(url, api_key=key)
    assert key not in str(caught.value)
    with pytest.raises(ConfigError):
        Admin("http://127.0.0.1:1", api_key=key)


def test_request_id_cannot_inject_a_header(stub: Stub) -> None:
    url, seen = stub({})
    with Client(url) as client, pytest.raises(BadRequest, match="printable ASCII"):
        client.infer("m", {"f": np.zeros((1, 1), np.int64)}, request_id="x\r\nX-More: 1")
    assert not seen
