"""More requests over gRPC than can be answered, and clients that ask too much."""

from __future__ import annotations

import gc
import threading
from weakref import ref

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from hps.config import Settings
from hps.config.admission_settings import AdmissionSettings
from hps.config.server_settings import ServerSettings
from hps.observability import metric_names as m
from hps.v1 import lookup_pb2
from services.frontend.admission.queue import AdmissionQueue
from services.frontend.auth import NoAuthorizer
from services.frontend.grpc import infer
from services.frontend.grpc import listener as port
from services.frontend.grpc.core import probe
from services.frontend.grpc.core import unary_call as unary
from services.frontend.http.app import data_app
from services.frontend.state import FrontendState
from tests.support.waiting import until


@pytest.fixture
def stub(small, serve):
    """``stub(**settings)``: a client of a server with these of `server.admission`; two requests are worked at
    and three wait."""
    channels = []

    def make(guard=None, **settings):
        admission = AdmissionSettings(
            **{"running": 2, "queue": 3, "max_wait_ms": 60_000, **settings}
        )
        small.state = FrontendState(settings=Settings(server=ServerSettings(admission=admission)))
        small.state.serve(small.node)
        arguments = [guard] if guard else []
        url = serve(*arguments).server.url
        channels.append(grpc.insecure_channel(url))
        service = GRPCInferenceServiceStub(channels[-1])
        service.url = url
        return service

    yield make
    for channel in channels:
        channel.close()


def predict():
    request = pb.ModelInferRequest(model_name="ctr")
    for name in ("user", "item", "history"):
        tensor = request.inputs.add(name=name, datatype="INT64", shape=[1, 1])
        tensor.contents.int64_contents.append(1)
    dense = request.inputs.add(name="dense", datatype="FP32", shape=[1, 3])
    dense.contents.fp32_contents.extend([1, 2, 3])
    return request


def refused(small):
    counted = small.node.metrics.numbers()[m.REQUESTS_REFUSED]
    return {labels[0]: n for labels, n in counted.items()}


def test_an_overloaded_model_refuses_at_once_and_answers_the_others(small, slow, stub):
    service = stub()
    line = small.state.entries["ctr"].endpoint
    taken = [service.ModelInfer.future(predict(), timeout=60) for _ in range(5)]
    until(lambda: (line.running, line.queued) == (2, 3))
    # All of this while not one prediction has ended.
    for call in [service.ModelInfer.future(predict(), timeout=60) for _ in range(80)]:
        assert call.code() is grpc.StatusCode.UNAVAILABLE
        assert "Exceeds maximum queue size" in call.details()
        assert dict(call.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"
    assert service.ServerReady(pb.ServerReadyRequest(), timeout=60).ready
    slow.leave.set()
    for call in taken:
        assert call.result().outputs[0].name == "score"
    until(lambda: line.running == 0)
    assert refused(small) == {"queue_full": 80}


def test_large_requests_are_refused_without_a_thread_of_their_own(small, slow, stub, monkeypatch):
    monkeypatch.setattr(unary, "_LARGE", 8)
    service = stub()
    line = small.state.entries["ctr"].endpoint
    taken = [service.ModelInfer.future(predict(), timeout=60) for _ in range(5)]
    until(lambda: (line.running, line.queued) == (2, 3))
    asked, refusal = [], type(line).rejection

    def noted(self, size=0):
        asked.append(threading.current_thread().name)
        return refusal(self, size)

    monkeypatch.setattr(type(line), "rejection", noted)
    for call in [service.ModelInfer.future(predict(), timeout=60) for _ in range(9)]:
        assert call.code() is grpc.StatusCode.UNAVAILABLE
    slow.leave.set()
    assert all(call.result().outputs for call in taken)
    assert asked
    assert not any(name.startswith("grpc-large") for name in asked)


def test_large_requests_have_their_places_before_they_are_read(small, slow, stub, monkeypatch):
    """On another thread, where those that came meanwhile would be read in vain."""
    monkeypatch.setattr(unary, "_LARGE", 8)
    reading, read = [], threading.Event()
    parse = infer.GrpcRequestParser.parse

    def slowly(self, message, to):
        reading.append(to.id)
        assert read.wait(60)
        return parse(self, message, to)

    monkeypatch.setattr(infer.GrpcRequestParser, "parse", slowly)
    service = stub()
    taken = [service.ModelInfer.future(predict(), timeout=60) for _ in range(5)]
    until(lambda: len(reading) == 5)  # two will be worked at, three will wait
    for call in [service.ModelInfer.future(predict(), timeout=60) for _ in range(9)]:
        assert call.code() is grpc.StatusCode.UNAVAILABLE
        assert "Exceeds maximum queue size" in call.details()
    assert len(reading) == 5
    slow.leave.set()
    read.set()
    assert all(call.result().outputs for call in taken)
    assert not small.state.entries["ctr"].endpoint.is_saturated


def test_what_cannot_be_read_gives_its_place_back(small, slow, stub):
    service = stub(queue=0)
    wrong = predict()
    wrong.inputs[0].shape[0] = 7
    for _ in range(5):
        call = service.ModelInfer.future(wrong, timeout=60)
        assert call.code() is grpc.StatusCode.INVALID_ARGUMENT
    slow.leave.set()
    assert service.ModelInfer(predict(), timeout=60).outputs


def test_what_waited_in_vain_holds_nothing(small, slow, stub, monkeypatch):
    service = stub(max_wait_ms=50)
    held = []
    submit = AdmissionQueue.submit

    def noted(self, call, *args, **kwargs):
        held.append(ref(call.inputs["user"]))
        return submit(self, call, *args, **kwargs)

    taken = [service.ModelInfer.future(predict(), timeout=60) for _ in range(2)]
    until(lambda: small.state.entries["ctr"].endpoint.running == 2)
    monkeypatch.setattr(AdmissionQueue, "submit", noted)
    gc.disable()
    try:
        late = service.ModelInfer.future(predict(), timeout=60)
        assert "has waited for 50 ms" in late.details()
        until(lambda: held[0]() is None)
    finally:
        gc.enable()
    slow.leave.set()
    assert all(call.result().outputs for call in taken)


def test_lookups_for_other_nodes_wait_in_the_same_line(small, stub):
    url = stub(running=1).url
    entry = small.state.entries["words.lookup"]
    small.store.gate.clear()
    names = [lookup_pb2.Keys(name="left", count=1)]
    said = lookup_pb2.Asked(model="words", names=names).SerializeToString()
    asked = lookup_pb2.LookupRequest(asked=said, keys=np.array([12]).tobytes())
    with grpc.insecure_channel(url) as channel:
        lookup = channel.unary_unary(
            "/hps.v1.Lookup/Lookup",
            lookup_pb2.LookupRequest.SerializeToString,
            lookup_pb2.LookupResponse.FromString,
        )
        calls = [lookup.future(asked, timeout=60) for _ in range(2)]
        until(lambda: (entry.endpoint.running, entry.endpoint.queued) == (1, 1))
        small.store.gate.set()
        for call in calls:
            assert len(call.result().vectors) == 3 * 4
    until(lambda: entry.statistics.success_count == 2)
    assert entry.statistics.queue_ns > 0  # and not the network's


def test_the_bounds_are_those_of_all_ports_together(small, slow, stub, call):
    """What waits over gRPC leaves no room over HTTP, where health is told all the same."""
    service = stub()
    line = small.state.entries["ctr"].endpoint
    taken = [service.ModelInfer.future(predict(), timeout=60) for _ in range(5)]
    until(lambda: (line.running, line.queued) == (2, 3))
    app = data_app(small.state, small.settings, NoAuthorizer())
    inputs = [
        {"name": name, "shape": [1, 1], "datatype": "INT64", "data": [1]}
        for name in ("user", "item", "history")
    ]
    inputs.append({"name": "dense", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]})
    reply = call(app, "POST", "/v2/models/ctr/infer", json={"inputs": inputs})
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert "Exceeds maximum queue size" in reply.json()["error"]
    assert call(app, "GET", "/v2/health/ready").status_code == 200
    slow.leave.set()
    assert all(each.result().outputs for each in taken)
    assert refused(small) == {"queue_full": 1}


def test_deadlines_and_clients_that_leave_while_they_wait(small, slow, stub):
    service = stub()
    line = small.state.entries["ctr"].endpoint
    taken = [service.ModelInfer.future(predict(), timeout=60) for _ in range(2)]
    until(lambda: line.running == 2)
    late = service.ModelInfer.future(predict(), timeout=0.05)
    assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    leaves = service.ModelInfer.future(predict(), timeout=60)
    until(lambda: line.queued == 1)
    leaves.cancel()
    until(lambda: line.queued == 0)
    slow.leave.set()
    assert all(call.result().outputs for call in taken)
    assert slow.runs == 2


def test_a_request_has_so_much_time_in_the_line(small, slow, stub):
    """By its parameter `timeout`, in microseconds, whatever the call's deadline."""
    service = stub()
    line = small.state.entries["ctr"].endpoint
    taken = [service.ModelInfer.future(predict(), timeout=60) for _ in range(2)]
    until(lambda: line.running == 2)
    hasty = predict()
    hasty.parameters["timeout"].int64_param = 50_000
    late = service.ModelInfer.future(hasty, timeout=60)
    assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    until(lambda: line.queued == 0)
    slow.leave.set()
    assert all(call.result().outputs for call in taken)
    assert slow.runs == 2


@pytest.mark.skipif(not probe.is_supported(), reason="calls run on grpc's threads")
def test_requests_take_no_call_from_health_and_the_like(small, slow, stub, monkeypatch):
    monkeypatch.setattr(port, "_REQUESTS", 2)
    monkeypatch.setattr(port, "_AUXILIARY", 1)
    service = stub()
    line = small.state.entries["ctr"].endpoint
    for _ in range(2):
        slow.leave.clear()
        taken = [service.ModelInfer.future(predict(), timeout=60) for _ in range(2)]
        until(lambda: line.running == 2)
        more = service.ModelInfer.future(predict(), timeout=60)
        assert more.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "2 calls are in flight" in more.details()
        assert service.ServerReady(pb.ServerReadyRequest(), timeout=60).ready
        slow.leave.set()
        assert all(call.result().outputs for call in taken)
        until(lambda: line.running == 0)


def test_a_client_that_asks_too_much(small, slow, stub, key_guard):
    service = stub(key_guard, running=8, client={"running": 1})
    reader, writer = ([("x-api-key", key * 16)] for key in "rw")
    line = small.state.entries["ctr"].endpoint
    first = service.ModelInfer.future(predict(), timeout=60, metadata=reader)
    until(lambda: line.running == 1)
    again = service.ModelInfer.future(predict(), timeout=60, metadata=reader)
    assert again.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(again.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"
    other = service.ModelInfer.future(predict(), timeout=60, metadata=writer)
    until(lambda: line.running == 2)
    slow.leave.set()
    assert first.code() is other.code() is grpc.StatusCode.OK
    for _ in range(3):
        service.ModelInfer(predict(), timeout=60, metadata=reader)
    assert refused(small) == {"client_running": 1}


def test_what_there_is_no_room_for_is_not_counted_as_sent(small, slow, stub):
    service = stub(queue=0, client={"per_second": 1e-3, "burst": 3})
    line = small.state.entries["ctr"].endpoint
    taken = [service.ModelInfer.future(predict(), timeout=60) for _ in range(2)]
    until(lambda: line.running == 2)
    for _ in range(5):
        call = service.ModelInfer.future(predict(), timeout=60)
        assert call.code() is grpc.StatusCode.UNAVAILABLE
    slow.leave.set()
    assert all(call.result().outputs for call in taken)
    assert service.ModelInfer(predict(), timeout=60).outputs
    last = service.ModelInfer.future(predict(), timeout=60)
    assert last.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_streams_requests_are_counted_one_by_one(small, stub):
    service = stub(client={"per_second": 1e-3, "burst": 2})
    answers = list(service.ModelStreamInfer(iter([predict()] * 3), timeout=60))
    assert [bool(each.error_message) for each in answers] == [False, False, True]
    assert "per second" in answers[2].error_message
    assert refused(small) == {"client_rate": 1}


def test_calls_without_a_body_hold_up_nobody(small, stub):
    """Nor do they take a thread each."""
    service = stub()

    def never():
        until(lambda: over)
        yield from ()

    over = []
    with grpc.insecure_channel(service.url) as channel:
        stalled = channel.stream_unary("/inference.GRPCInferenceService/ModelInfer")
        calls = [stalled.future(never(), timeout=60) for _ in range(80)]
        with triton.InferenceServerClient(service.url) as client:
            assert client.is_server_ready(client_timeout=60)
        assert service.ModelInfer(predict(), timeout=60).outputs
        over.append(True)
        for call in calls:
            call.cancel()
