"""Servers that tell of themselves otherwise than ours does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from typer.testing import CliRunner

from hps.cli.conformance import _judged, app
from hps.errors import ConfigError, Unavailable
from hps.tools.conformance import CheckedServer, Deviation
from hps.tools.conformance.checks import CHECKS
from hps.tools.conformance.grpc_wire import is_raw, tensors_of
from hps.tools.conformance.http_checks import SUITE
from hps.tools.conformance.known_deviations import known_of, reasons
from hps.tools.conformance.sampling import samples_of
from hps.tools.conformance.target import unknown_version

TENSOR = {"name": "x", "datatype": "FP32", "shape": [-1, 2]}
MODEL = {"inputs": [TENSOR], "outputs": [{**TENSOR, "name": "y"}]}
HEALTH = next(check for check in SUITE.checks if check.name == "http: health")
ABOUT = {
    "/v2/models/good": {**MODEL, "name": "good", "versions": ["77", "latest"]},
    "/v2/models/bare": {**MODEL, "name": "bare"},
    "/v2/models/bad": {**MODEL, "name": "bad", "versions": ["1"]},
    "/v2/models/json": {**MODEL, "name": "json", "versions": None},
    "/v2": {"name": "odd", "version": "1", "extensions": []},
}
READY = {
    *("/v2/health/live", "/v2/health/ready", "/v2/models/good/ready", "/v2/models/bare/ready"),
    *("/v2/models/good/versions/77/ready", "/v2/models/good/versions/latest/ready"),
}
INFERS = {"/v2/models/good/infer", "/v2/models/bare/infer"}


class Odd(BaseHTTPRequestHandler):
    """``good`` has versions with names, ``bare`` tells none, ``bad`` answers nothing, ``json`` has tensors in
    JSON alone, and closes the connection after what it refuses; there is no index."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(ABOUT.get(self.path, {} if self.path in READY else None))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/v2/models/json/infer":
            self.answer_json(body)
        else:
            self.answer({} if self.path in INFERS else None)

    def answer_json(self, body: bytes) -> None:
        try:
            request = json.loads(body)
            (tensor,) = request["inputs"]
            flat = np.ravel(tensor["data"]).tolist()
        except (ValueError, LookupError):
            self.answer({"error": "no JSON"}, 422)
            self.close_connection = True
            return
        output = {**tensor, "name": "y", "data": flat, "parameters": None}
        self.answer({"model_name": "json", "id": request.get("id", "made up"), "outputs": [output]})

    def answer(self, reply: object, status: int = 200) -> None:
        body = json.dumps(reply if reply is not None else {"error": "none such"}).encode()
        self.send_response(status if reply is not None else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def odd() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Odd) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_named_models_need_no_index(odd):
    server = CheckedServer(odd, "", ())
    with pytest.raises(Deviation, match="404"):
        samples_of(server)
    samples, left_out = samples_of(server, ["good", "bad", "none", "bare"])
    assert [sample.model for sample in samples] == ["good", "bare"]
    assert left_out.keys() == {"bad", "none"}
    assert all("404" in why for why in left_out.values())


def test_servers_may_have_several_named_or_unknown_versions(odd):
    samples, _ = samples_of(CheckedServer(odd, "", ()), ["good", "bare"])
    for sample in samples:
        HEALTH.run(CheckedServer(odd, "", (sample,)))
    assert unknown_version(["77", "latest", "78"]) == "79"


def test_missing_extensions_are_not_deviations(odd):
    done = CliRunner().invoke(app, [odd, "--model", "json", "--json"])
    verdicts = {row["check"]: row["verdict"] for row in json.loads(done.stdout)}
    for check in ("equivalent forms", "request ids", "compressed answers", "parameters"):
        assert verdicts[f"http: {check}"] == "as it should"
    not_offered = {check for check, verdict in verdicts.items() if verdict == "not offered"}
    assert not_offered >= {
        *("http: server metadata", "http: model configuration", "http: compressed requests"),
        *("http: raw bodies", "http: wrong lengths", "http: repository index"),
        *("http: tritonclient http", "http: tritonclient http aio", "http: statistics"),
    }
    found = {row["check"]: row["found"] for row in json.loads(done.stdout)}
    closed = "it closed a connection without announcing it in the answer"
    assert verdicts["http: tensor in two forms"] == "differs"
    assert found["http: tensor in two forms"]
    assert set(found["http: tensor in two forms"]) <= {
        closed,
        "an error of the type ''",
    }, "422 is as good as 400"


def test_rejecting_named_binary_tensors_is_a_deviation(odd, monkeypatch):
    metadata_reply = {"name": "odd", "version": "1", "extensions": ["binary_tensor_data"]}
    monkeypatch.setitem(ABOUT, "/v2", metadata_reply)
    metadata = next(check for check in SUITE.checks if check.name == "http: server metadata")
    with pytest.raises(Deviation, match="rejects binary tensors"):
        metadata.run(CheckedServer(odd, "", (), binary=False))


def test_grpc_outputs_may_be_typed():
    answer = pb.ModelInferResponse(model_name="m")
    output = answer.outputs.add(name="y", datatype="FP32", shape=[2, 1])
    output.contents.fp32_contents.extend([1.5, 2.5])
    assert not is_raw(answer)
    np.testing.assert_array_equal(tensors_of(answer)["y"], np.array([[1.5], [2.5]], np.float32))
    output.shape[0] = 3
    with pytest.raises(Deviation, match="2 elements"):
        tensors_of(answer)


def test_skipped_models_are_reported(odd):
    done = CliRunner().invoke(app, [odd, odd, "--model", "bad", "--model", "none"])
    printed = " ".join(done.stderr.split())
    assert "bad skipped" in printed
    assert "none skipped" in printed
    assert isinstance(done.exception, Unavailable)


@pytest.mark.parametrize(
    "address", ["localhost", "localhost:", ":8000", "ftp://localhost:8000", "h:65536", "h:x"]
)
def test_an_address_without_host_or_port(address):
    for given in ([address, "h:1"], ["h:1", address]):
        done = CliRunner().invoke(app, given)
        assert done.exit_code == 2
        assert "is not host:port" in " ".join(done.stderr.replace("│", " ").split())


def test_one_of_each_protocol() -> None:
    for words in (["h:1", "h:2", "h:3"], ["http://h:1", "https://h:2"]):
        done = CliRunner().invoke(app, words)
        assert isinstance(done.exception, ConfigError), words


def test_only_given_protocols_are_checked(odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = [check for check in CHECKS if "tritonclient" not in check.name]
    monkeypatch.setattr("hps.tools.conformance.checks.CHECKS", ours)
    done = CliRunner().invoke(app, [f"http://{odd}", "--model", "good", "--json"])
    assert done.exit_code == 1
    rows = json.loads(done.stdout)
    assert {row["check"].partition(":")[0] for row in rows} == {"http"}
    assert {"as it should", "differs"} <= {row["verdict"] for row in rows}


def test_known_deviation_is_shown_with_its_reason() -> None:
    known = known_of("triton")
    known_one, other = "500 instead of 400: b'failed to parse x'", "200 instead of 400: b''"
    assert reasons(known, "http: invalid json", [known_one, other])[1] == ""
    assert "at fault" in reasons(known, "http: invalid json", [known_one])[0]
    assert _judged("http: invalid json", "differs", (known_one,), known)["verdict"] == "known"
    assert (
        _judged("http: invalid json", "differs", (known_one, other), known)["verdict"] == "differs"
    )
    assert (
        _judged("http: invalid json", "differs", (known_one,), known_of("hps"))["verdict"]
        == "differs"
    )
