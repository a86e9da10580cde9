"""Overload over gRPC: threads, memory, deadlines and streams; the rest is in ../test_overload.py."""

from __future__ import annotations

import gc
import threading
from contextlib import ExitStack
from weakref import ref

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from hps.v1 import lookup_pb2
from services.frontend.admission.queue import AdmissionQueue
from services.frontend.grpc import inference_service, listener, responders
from tests.support.waiting import until
from tests.unit.services.frontend.conftest import load, rejections
from tests.unit.services.frontend.protocol_clients import infer_request


@pytest.fixture
def start(small, serve, limit):
    """``start(**settings)``: the stub of a server with these settings of `server.admission`."""
    with ExitStack() as stack:

        def start(**settings):
            limit(**settings)
            url = serve().server.url
            service = GRPCInferenceServiceStub(stack.enter_context(grpc.insecure_channel(url)))
            service.url = url
            return service

        yield start


def send(service, count):
    return [service.ModelInfer.future(infer_request(), timeout=60) for _ in range(count)]


def test_large_requests_are_rejected_on_the_thread_that_received_them(
    small, slow, start, monkeypatch
):
    monkeypatch.setattr(responders, "LARGE_BYTES", 8)
    service = start()
    admitted = send(service, 5)
    until(lambda: load(small) == (2, 3))
    threads, reserve = [], AdmissionQueue.reserve

    def record(self, size):
        threads.append(threading.current_thread().name)
        return reserve(self, size)

    monkeypatch.setattr(AdmissionQueue, "reserve", record)
    for call in send(service, 9):
        assert call.code() is grpc.StatusCode.UNAVAILABLE
    slow.leave.set()
    assert all(call.result().outputs for call in admitted)
    assert len(threads) == 9
    assert not any(name.startswith("grpc-large") for name in threads)


def test_large_requests_reserve_slots_before_they_are_parsed(small, slow, start, monkeypatch):
    """A thread of the pool parses them. Without a slot, their parsing could be wasted."""
    monkeypatch.setattr(responders, "LARGE_BYTES", 8)
    parsing, parsed = [], threading.Event()
    parse = inference_service.GrpcRequestParser.parse

    def slow_parse(self, message, to):
        parsing.append(to.id)
        assert parsed.wait(60)
        return parse(self, message, to)

    monkeypatch.setattr(inference_service.GrpcRequestParser, "parse", slow_parse)
    service = start()
    admitted = send(service, 5)
    until(lambda: len(parsing) == 5)  # two will run, three will be queued
    for call in send(service, 9):
        assert call.code() is grpc.StatusCode.UNAVAILABLE
        assert "Exceeds maximum queue size" in call.details()
    assert len(parsing) == 5
    slow.leave.set()
    parsed.set()
    assert all(call.result().outputs for call in admitted)
    assert not small.state.entries["ctr"].endpoint.is_saturated


def test_request_that_timed_out_in_queue_is_freed_without_garbage_collection(
    small, slow, start, monkeypatch
):
    service = start(max_wait_ms=50)
    inputs = []
    submit = AdmissionQueue.submit

    def record(self, call, *args, **kwargs):
        inputs.append(ref(call.inputs["user"]))
        return submit(self, call, *args, **kwargs)

    admitted = send(service, 2)
    until(lambda: load(small) == (2, 0))
    monkeypatch.setattr(AdmissionQueue, "submit", record)
    gc.disable()
    try:
        late = send(service, 1)[0]
        assert "has waited for 50 ms" in late.details()
        until(lambda: inputs[0]() is None)
    finally:
        gc.enable()
    slow.leave.set()
    assert all(call.result().outputs for call in admitted)


def test_lookups_of_other_nodes_use_the_same_queue(small, start):
    url = start(running=1).url
    entry = small.state.entries["words.lookup"]
    small.store.gate.clear()
    names = [lookup_pb2.Keys(name="left", count=1)]
    said = lookup_pb2.Asked(model="words", names=names).SerializeToString()
    request = lookup_pb2.LookupRequest(asked=said, keys=np.array([12]).tobytes())
    with grpc.insecure_channel(url) as channel:
        lookup = channel.unary_unary(
            "/hps.v1.Lookup/Lookup",
            lookup_pb2.LookupRequest.SerializeToString,
            lookup_pb2.LookupResponse.FromString,
        )
        calls = [lookup.future(request, timeout=60) for _ in range(2)]
        until(lambda: load(small, entry.name) == (1, 1))
        small.store.gate.set()
        for call in calls:
            assert len(call.result().vectors) == 3 * 4
    until(lambda: entry.statistics.success_count == 2)
    assert entry.statistics.queue_ns > 0  # the name's own, not that of the name with a network


def test_queued_request_ends_at_the_deadline_of_its_call(small, slow, start):
    service = start()
    admitted = send(service, 2)
    until(lambda: load(small) == (2, 0))
    late = service.ModelInfer.future(infer_request(), timeout=0.05)
    assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    until(lambda: load(small) == (2, 0))
    slow.leave.set()
    assert all(call.result().outputs for call in admitted)
    assert slow.runs == 2


def test_health_calls_are_accepted_while_inference_calls_reach_their_limit(
    small, slow, start, monkeypatch
):
    monkeypatch.setattr(listener, "_REQUESTS", 2)
    monkeypatch.setattr(listener, "_AUXILIARY", 1)
    service = start()
    for _ in range(2):
        slow.leave.clear()
        admitted = send(service, 2)
        until(lambda: load(small) == (2, 0))
        more = send(service, 1)[0]
        assert more.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "2 calls are in flight" in more.details()
        assert service.ServerReady(pb.ServerReadyRequest(), timeout=60).ready
        slow.leave.set()
        assert all(call.result().outputs for call in admitted)
        until(lambda: load(small) == (0, 0))


def test_client_limits_count_each_request_of_a_stream(small, start):
    service = start(client={"per_second": 1e-3, "burst": 2})
    answers = list(service.ModelStreamInfer(iter([infer_request()] * 3), timeout=60))
    assert [bool(each.error_message) for each in answers] == [False, False, True]
    assert "per second" in answers[2].error_message
    assert rejections(small) == {"client_rate": 1}


def test_calls_without_a_request_do_not_delay_others(small, start):
    """They do not occupy a thread each."""
    service = start()

    def never():
        until(lambda: over)
        yield from ()

    over = []
    with grpc.insecure_channel(service.url) as channel:
        stalled = channel.stream_unary("/inference.GRPCInferenceService/ModelInfer")
        calls = [stalled.future(never(), timeout=60) for _ in range(80)]
        with triton.InferenceServerClient(service.url) as client:
            assert client.is_server_ready(client_timeout=60)
        assert service.ModelInfer(infer_request(), timeout=60).outputs
        over.append(True)
        for call in calls:
            call.cancel()
