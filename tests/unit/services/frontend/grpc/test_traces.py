"""Request ids and traces over both protocols, from the client's to the spans of a request's parts."""

from __future__ import annotations

import contextlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import (
    GRPCInferenceServiceServicer,
    add_GRPCInferenceServiceServicer_to_server,
)
from tritonclient.utils import InferenceServerException

from hps.client import Client
from hps.dense.triton import TritonModel, TritonRunOptions
from hps.dense.triton.grpc import GrpcTransport
from hps.lookup.base import LookupModel
from hps.lookup.remote import Candidates, NodeRegistry, RemoteLookup
from hps.observability import otel
from hps.tracing import RequestContext
from hps.types import JaggedKeys, LookupRequest
from services.frontend.request_observer import RequestObserver
from tests.support.waiting import until
from tests.unit.services.conftest import Adder

export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NAMED = {"traceparent": CALLER, "x-request-id": "r-1"}
# One key in memory, one in the store.
CTR = {
    "user": np.array([[1], [12]]),
    "item": np.array([[1], [2]]),
    "history": np.array([[1, 2], [3, 4]]),
    "dense": np.ones((2, 3), np.float32),
}
TYPES = {np.dtype(np.int64): "INT64", np.dtype(np.float32): "FP32"}


class Http:
    def __init__(self, small, ask, _serve):
        self._ask = lambda *args: ask(small.app(), *args)

    def __call__(self, model, tensors, headers, request_id=""):
        inputs = [
            {"name": n, "shape": list(a.shape), "datatype": TYPES[a.dtype], "data": a.tolist()}
            for n, a in tensors.items()
        ]
        body = {"inputs": inputs, "id": request_id}
        reply = self._ask("POST", f"/v2/models/{model}/infer", body, headers)
        return reply.status, reply.headers.get("x-request-id")


class Grpc:
    def __init__(self, _small, _ask, serve):
        self._url = serve().server.url

    def __call__(self, model, tensors, headers, request_id=""):
        inputs = [
            triton.InferInput(n, list(a.shape), TYPES[a.dtype]).set_data_from_numpy(a)
            for n, a in tensors.items()
        ]
        with triton.InferenceServerClient(self._url) as client:
            try:
                answer = client.infer(model, inputs, headers=headers, request_id=request_id)
            except InferenceServerException as error:
                return error.status(), None
        return 200, answer.get_response().id or None


@pytest.fixture(params=[Http, Grpc], ids=["http", "grpc"])
def infer(request, small, ask, serve):
    return request.param(small, ask, serve)


@pytest.fixture
def spans(small):
    """``spans()``: the ended spans of the small server, by name."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    exporter = export.InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    small.state.observer = RequestObserver(0.0, otel.Tracer(provider))
    return lambda: {span.name: span for span in exporter.get_finished_spans()}


def test_request_id_is_returned_the_messages_before_the_headers(infer):
    word = {"left": np.array([[1]])}
    assert infer("words.lookup", word, NAMED) == (200, "r-1")
    assert infer("words.lookup", word, {}, "r-2") == (200, "r-2")
    assert infer("words.lookup", word, {}) == (200, None)


def test_prediction_has_a_span_with_all_its_parts(infer, spans):
    assert infer("ctr", CTR, NAMED)[0] == 200
    found = spans()
    request = found.pop("infer ctr")
    assert f"{request.context.trace_id:032x}" == CALLER[3:35]
    assert f"{request.parent.span_id:016x}" == CALLER[36:52]
    assert request.attributes["hps.request_id"] == "r-1"
    assert request.attributes["hps.model"] == "ctr"
    tier = found.pop("rocksdb")
    assert tier.parent.span_id == found["lookup"].context.span_id
    assert tier.attributes == {"hps.asked": 1, "hps.found": 1}
    assert found["lookup"].attributes["hps.keys"] == 8
    assert found.keys() == {"decode", "lookup", "dense", "encode"}
    for part in found.values():
        assert part.parent.span_id == request.context.span_id


class Recording(GRPCInferenceServiceServicer):
    """A Triton that scores everything 1, and records the metadata of its requests."""

    def __init__(self):
        self.received = []

    def ModelMetadata(self, request, context):
        answer = pb.ModelMetadataResponse(name=request.name)
        for tensor in Adder.inputs:
            answer.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        for tensor in Adder.outputs:
            answer.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        return answer

    def ModelConfig(self, request, context):
        return pb.ModelConfigResponse()

    def ModelInfer(self, request, context):
        self.received.append((request.id, dict(context.invocation_metadata())["traceparent"]))
        answer = pb.ModelInferResponse(model_name=request.model_name)
        for name, shape in {"score": [1, 1], "logit": [1]}.items():
            answer.outputs.add(name=name, datatype="FP32", shape=shape)
            answer.raw_output_contents.append(np.ones(1, np.float32).tobytes())
        return answer


@pytest.fixture
def recording(small):
    """The small server's network, run by a recording Triton."""
    made = Recording()
    server = grpc.server(ThreadPoolExecutor(2))
    add_GRPCInferenceServiceServicer_to_server(made, server)
    url = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    expected = Adder.inputs, Adder.outputs
    network = TritonModel(
        "n", url, GrpcTransport(url, "n", "", channels=1), expected, TritonRunOptions(30)
    )
    small.node.models["ctr"].pipeline.dense = network
    yield made
    network.close()
    server.stop(0).wait(30)


def test_trace_continues_from_the_client_to_triton(small, serve, spans, recording):
    tracer = small.state.observer._tracer.tracer
    one = {name: values[:1] for name, values in CTR.items()}
    dense = {"dense": one.pop("dense")}
    with (
        Client(f"grpc://{serve().server.url}") as client,
        tracer.start_as_current_span("mine") as mine,
    ):
        client.predict("ctr", one, dense, request_id="r-7")
    found = spans()
    chain = ["mine", "infer ctr", "dense", "triton_infer"]
    for above, below in pairwise(chain):
        assert found[below].parent.span_id == found[above].context.span_id
    ((request_id, traceparent),) = recording.received
    assert request_id == "r-7"
    assert traceparent[3:35] == f"{mine.get_span_context().trace_id:032x}"
    assert traceparent[36:52] == f"{found['triton_infer'].context.span_id:016x}"


def test_trace_continues_at_the_lookup_node(small, serve, spans):
    """The node and its caller record to the same place here."""
    served = small.node.models["words"]
    model = LookupModel(served.name, served.version, served.tables, served.engine.features)
    with (
        contextlib.closing(NodeRegistry([serve().server.url])) as nodes,
        contextlib.closing(Candidates(model, nodes)) as candidates,
    ):
        remote = RemoteLookup(candidates)
        sent = RequestContext("r-8", CALLER)
        origin = small.state.observer.begin("words", time.perf_counter_ns(), "r-8", sent)
        keys = {"left": JaggedKeys(np.array([1, 12]), 2)}
        remote.lookup(LookupRequest(keys, origin=origin))
        origin.end()

    def chained():
        """Of the two lookups, the caller's ends last."""
        found = spans()
        chain = [found.get(name) for name in ("infer words", "lookup", "infer words.lookup")]
        return None not in chain and all(
            below.parent.span_id == above.context.span_id for above, below in pairwise(chain)
        )

    until(chained)
    found = spans()
    assert all(f"{span.context.trace_id:032x}" == CALLER[3:35] for span in found.values())
    assert found["rocksdb"].attributes == {"hps.asked": 1, "hps.found": 1}


def test_each_lookup_of_a_prepared_form_has_a_span(infer, spans):
    for i in range(3):
        infer("words.lookup", {"left": np.array([[i]])}, {"x-request-id": f"r-{i}"})
    found = spans()
    assert found.keys() == {"infer words.lookup", "decode", "lookup", "encode"}
    assert found["infer words.lookup"].attributes["hps.request_id"] == "r-2"


def test_failed_request_has_a_failed_span(infer, spans):
    infer("words.lookup", {"lift": np.array([[1]])}, NAMED)
    infer("ctr", {"user": np.array([[1]])}, NAMED)
    for name in ("infer words.lookup", "infer ctr"):
        assert not spans()[name].status.is_ok
        assert f"{spans()[name].context.trace_id:032x}" == CALLER[3:35]


def test_requests_are_logged_with_their_trace(infer, small, caplog):
    small.state.observer = RequestObserver(1.0)
    caplog.set_level(logging.INFO, "hps.access")
    infer("words.lookup", {"left": np.array([[1], [99]])}, NAMED)
    infer("words.lookup", {"left": np.array([[1]])}, {})
    infer("words.lookup", {"lift": np.array([[1]])}, NAMED)
    logged = [record.args for record in caplog.records if record.name == "hps.access"]
    assert [each["request_id"] for each in logged] == ["r-1", logged[1]["request_id"], "r-1"]
    assert len(logged[1]["request_id"]) == 16
    assert (logged[0]["keys"], logged[0]["misses"]) == (2, 1)
    assert logged[0]["trace_id"] == CALLER[3:35]
    assert "unexpected inference input" in logged[2]["error"]
