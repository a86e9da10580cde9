"""OpenTelemetry spans: recording, parents, links, and trace headers sent to Triton."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import (
    GRPCInferenceServiceServicer,
    add_GRPCInferenceServiceServicer_to_server,
)

from hps.client.trace import trace_headers
from hps.dense.base import NetworkTensor
from hps.dense.triton import TritonModel, TritonRunOptions
from hps.dense.triton.grpc import GrpcTransport
from hps.dense.triton.http import HttpTransport
from hps.dense.triton.transport import TritonTransport
from hps.environment import traces_exporter
from hps.errors import ConfigError
from hps.observability import otel
from hps.observability.meters import UpdateMeter
from hps.observability.metrics import Metrics
from hps.tracing import RequestContext, current_context, set_recorder, span_until_done
from hps.updates.ingestor import Ingestor
from hps.updates.kafka.message_decoder import traceparents
from hps.updates.source import UpdateBatch
from hps.updates.stream_positions import StoreStreamPositions
from tests.support.letters import Letters

export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = CALLER[:-2] + "00"


@pytest.fixture
def spans():
    """Return the ended spans by name; its `tracer` records them."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    exporter = export.InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    def ended():
        return {span.name: span for span in exporter.get_finished_spans()}

    ended.tracer = otel.Tracer(provider)
    return ended


def test_request_span_joins_the_callers_trace_and_has_child_spans(spans):
    request = spans.tracer.request("infer m", 0, "r-1", CALLER, "v=1")
    assert request.is_recorded
    assert request.trace_id == CALLER[3:35]
    assert request.tracestate == "v=1"
    with request.part("dense") as part:
        assert current_context() is part
        assert part.headers() == {"traceparent": part.traceparent, "tracestate": "v=1"}
        assert part.request_id == "r-1"
    assert current_context() is None
    with pytest.raises(ValueError, match="broken"), request.part("broken"):
        raise ValueError("broken")
    request.stage("decode", 10, 20)
    request.note(model="m")
    request.end()
    ended = spans()
    server = ended["infer m"]
    assert f"{server.parent.span_id:016x}" == CALLER[36:52]
    assert server.attributes == {"hps.request_id": "r-1", "hps.model": "m"}
    for name in ("dense", "broken", "decode"):
        assert ended[name].parent.span_id == server.context.span_id
    assert ended["decode"].end_time - ended["decode"].start_time == pytest.approx(10, abs=1e6)
    assert not ended["broken"].status.is_ok


def test_unsampled_caller_is_not_recorded(spans):
    unsampled = spans.tracer.request("infer m", 0, "r-1", UNSAMPLED, "")
    assert not unsampled.is_recorded
    assert unsampled.trace_id == CALLER[3:35]
    assert unsampled.traceparent.endswith("-00")
    with unsampled.part("dense"):
        pass
    unsampled.end()
    assert spans() == {}


def test_batch_span_links_the_traces_of_its_requests(spans):
    batch = spans.tracer.batch("ingest", [CALLER, "", CALLER, "nonsense"])
    batch.end(RuntimeError("no"))
    (link,) = spans()["ingest"].links
    assert f"{link.context.trace_id:032x}" == CALLER[3:35]


def test_span_ends_with_its_future(spans):
    request = spans.tracer.request("r", 0, "", "", "")
    done, failed = Future(), Future()
    for name, future in {"done": done, "failed": failed}.items():
        assert (
            span_until_done(request.begin(name), lambda f=future: f, lambda n: {"n": n}) is future
        )
    done.set_result(7)
    failed.set_exception(ValueError("x"))
    with pytest.raises(KeyError):
        span_until_done(request.begin("refused"), lambda: {}["x"], dict)
    ended = spans()
    assert ended["done"].attributes == {"hps.n": 7}
    assert not ended["failed"].status.is_ok
    assert not ended["refused"].status.is_ok


class Message:
    """A Kafka message with ``headers``."""

    def __init__(self, *headers):
        self._headers = list(headers) or None

    def headers(self):
        return self._headers


def test_ingest_span_links_the_traces_of_its_messages(spans):
    other = CALLER.replace("0af7", "1af7")
    messages = [
        Message(("traceparent", CALLER.encode()), ("x", None)),
        Message(),
        Message(("traceparent", CALLER.encode())),
        Message(("traceparent", b"nonsense"), ("traceparent", None)),
        Message(("traceparent", other.encode())),
    ]
    assert traceparents(messages) == [CALLER, other]

    batches = [UpdateBatch((), (), (), traceparents(messages)), UpdateBatch(()), None]

    class Source:
        def poll(self, timeout_s):
            return batches.pop(0)

        def commit(self, batch):
            pass

    positions = StoreStreamPositions([], lambda topic: ())
    ingestor = Ingestor(Source(), {}, positions, None, Letters(), UpdateMeter(Metrics()))
    set_recorder(spans.tracer)
    try:
        for _ in range(3):
            ingestor.step()
    finally:
        set_recorder(None)
    span = spans()["ingest"]
    assert [f"{link.context.trace_id:032x}" for link in span.links] == [CALLER[3:35], other[3:35]]
    assert span.attributes == {"hps.rows": 0, "hps.dead": 0}


class Triton(GRPCInferenceServiceServicer):
    """A gRPC Triton that keeps the request ID and trace headers of each inference in `received`."""

    def __init__(self):
        self.received = []

    def ModelMetadata(self, request, context):
        tensor = {"datatype": "FP32", "shape": [-1, 1]}
        answer = pb.ModelMetadataResponse(name=request.name)
        answer.inputs.add(name="x", **tensor)
        answer.outputs.add(name="y", **tensor)
        return answer

    def ModelConfig(self, request, context):
        return pb.ModelConfigResponse()

    def ModelInfer(self, request, context):
        metadata = dict(context.invocation_metadata())
        self.received.append((request.id, metadata.get("traceparent"), metadata.get("tracestate")))
        answer = pb.ModelInferResponse(model_name=request.model_name)
        answer.outputs.add(name="y", datatype="FP32", shape=[1, 1])
        answer.raw_output_contents.append(request.raw_input_contents[0])
        return answer


class HttpTriton(BaseHTTPRequestHandler):
    """The same over HTTP; the list is ``server.received``."""

    server: Any

    def do_GET(self):
        tensor = {"datatype": "FP32", "shape": [-1, 1]}
        metadata = {"inputs": [{"name": "x", **tensor}], "outputs": [{"name": "y", **tensor}]}
        self._answer({"max_batch_size": 0} if self.path.endswith("/config") else metadata)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        request = json.loads(body[: int(self.headers["inference-header-content-length"])])
        trace = self.headers.get("traceparent"), self.headers.get("tracestate")
        self.server.received.append((request.get("id", ""), *trace))
        output = {"name": "y", "datatype": "FP32", "shape": [1, 1], "data": [2]}
        self._answer({"model_name": "n", "outputs": [output]})

    def _answer(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def triton():
    servicer = Triton()
    server = grpc.server(ThreadPoolExecutor(2))
    add_GRPCInferenceServiceServicer_to_server(servicer, server)
    servicer.url = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield servicer
    server.stop(0).wait(30)


@pytest.fixture
def triton_by_http():
    with ThreadingHTTPServer(("127.0.0.1", 0), HttpTriton) as server:
        triton: Any = server
        triton.received, triton.url = [], f"127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield triton
        server.shutdown()
        thread.join(30)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_triton_receives_request_id_and_trace_headers(spans, protocol, request):
    x, y = NetworkTensor("x", "FP32", (-1, 1)), NetworkTensor("y", "FP32", (-1, 1))
    triton = request.getfixturevalue("triton" if protocol == "grpc" else "triton_by_http")
    transport: TritonTransport = (
        GrpcTransport(triton.url, "n", "", channels=1)
        if protocol == "grpc"
        else HttpTransport(triton.url, "n", "")
    )
    network = TritonModel("n", triton.url, transport, ((x,), (y,)), TritonRunOptions(30))
    values = {"x": np.ones((1, 1), np.float32)}
    network.predict(values)
    with RequestContext("r-1", CALLER, "v=1").part("dense"):
        network.predict(values)
    traced = spans.tracer.request("infer m", 0, "r-2", CALLER, "")
    with traced.part("dense"):
        network.predict(values)
    traced.end()
    network.close()
    ended = spans()
    infer = ended["triton_infer"]
    assert infer.parent.span_id == ended["dense"].context.span_id
    last = f"00-{CALLER[3:35]}-{infer.context.span_id:016x}-01"
    assert triton.received == [("", None, None), ("r-1", CALLER, "v=1"), ("r-2", last, None)]


def test_client_sends_its_current_span(spans):
    assert "traceparent" not in trace_headers()
    with spans.tracer.tracer.start_as_current_span("mine") as span:
        traceparent = trace_headers()["traceparent"]
    assert traceparent[36:52] == f"{span.get_span_context().span_id:016x}"


@pytest.mark.parametrize(
    ("variables", "exporter"),
    [
        ({}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318"}, "otlp_proto_http"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x:4318/v1/traces"}, "otlp_proto_http"),
        (
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "otlp_proto_grpc",
        ),
        ({"OTEL_TRACES_EXPORTER": "console"}, "console"),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, None),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "console"}, None),
    ],
)
def test_environment_selects_the_exporter(monkeypatch, variables, exporter):
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert traces_exporter() == exporter
    if exporter is None:
        assert otel.tracer("node") is None


def test_unknown_exporter_is_a_config_error(monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "nowhere")
    with pytest.raises(ConfigError, match="there is no exporter 'nowhere'"):
        otel.tracer("node")


SCRIPT = """
import sys
class MissingOpenTelemetry:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "opentelemetry": raise ImportError(name)
sys.meta_path.insert(0, MissingOpenTelemetry())
from hps.observability import otel
from hps.client.trace import trace_headers
assert trace_headers() == {}
try:
    otel.tracer("node")
except otel.ConfigError as error:
    print(error)
"""


def test_missing_opentelemetry_is_an_error_only_when_configured():
    configured = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318"}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=configured, capture_output=True, check=True
    )
    assert b"pip install 'hps-server[otel]'" in run.stdout
    unconfigured = {
        name: value for name, value in os.environ.items() if not name.startswith("OTEL_")
    }
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=unconfigured, capture_output=True, check=True
    )
    assert run.stdout == b""


def test_tracer_resource_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    tracer = otel.tracer("worker")
    attributes = tracer._provider.resource.attributes
    assert (attributes["service.name"], attributes["hps.role"]) == ("hps", "worker")
    tracer.close()
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ranking")
    tracer = otel.tracer("node")
    assert tracer._provider.resource.attributes["service.name"] == "ranking"
    tracer.close()
