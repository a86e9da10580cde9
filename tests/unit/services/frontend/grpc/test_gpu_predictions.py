"""Predictions in a GPU's common batches over gRPC: what the thread that receives them does."""

from __future__ import annotations

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2 as pb

from hps.config.server_settings import ServerSettings
from services.frontend import inference_request
from services.frontend.auth import Authorizer
from services.frontend.grpc import inference_service, responders
from services.frontend.state import FrontendState
from tests.support.waiting import until
from tests.unit.node.test_gpu_caches import open_node, pair  # noqa: F401 # fixtures
from tests.unit.node.test_gpu_scheduler import repository  # noqa: F401 # fixture
from tests.unit.services.frontend.test_prepared_predictions import tensors


class Reply:
    """A responder and call context that records the sizes of requests and the answers."""

    caller = ""

    def __init__(self, metadata=()):
        self.context, self.metadata = self, metadata
        self.sizes, self.answers, self.errors = [], [], []
        self.answer, self.fail = self.answers.append, self.errors.append

    def invocation_metadata(self):
        return self.metadata

    def time_remaining(self):
        return 30.0

    def waits_for(self, future):
        pass

    def run(self, work, size):
        self.sizes.append(size)
        work()


@pytest.fixture
def state(pair):  # noqa: F811
    state = FrontendState()
    state.serve(pair[0])
    return state


@pytest.fixture
def service(state):
    return inference_service.GrpcInferenceService(state, ServerSettings(), Authorizer())


@pytest.fixture
def message():
    request = pb.ModelInferRequest(model_name="m")
    for each in tensors(triton, np.arange(100), 20):
        request.inputs.append(each._get_tensor())
        request.raw_input_contents.append(each._get_content())
    return request.SerializeToString()


def send(service, message, metadata=()):
    """Answer a request; return its responder."""
    reply = Reply(metadata)
    service.begin(message, reply)
    until(lambda: reply.answers or reply.errors)
    assert not reply.errors
    return reply


def test_large_prepared_request_stays_on_the_thread_that_received_it(service, message, monkeypatch):
    assert send(service, message).sizes == [len(message)]
    send(service, message)
    monkeypatch.setattr(responders, "LARGE_BYTES", len(message) - 1)
    assert send(service, message).sizes == [0]
    monkeypatch.setattr(inference_service, "_MAX_COPIED_BYTES", len(message) - 1)
    assert send(service, message).sizes == [len(message)]


def test_large_request_of_another_form_goes_to_another_thread(service, message, monkeypatch):
    monkeypatch.setattr(responders, "LARGE_BYTES", 8)
    for _ in range(3):
        send(service, message)
    other = pb.ModelInferRequest.FromString(message)
    other.parameters["top_k"].int64_param = 3
    message = other.SerializeToString()
    assert send(service, message).sizes == [len(message)]


def test_only_observed_requests_make_arrays(service, message, monkeypatch):
    for _ in range(2):
        send(service, message)
    made, elements = [], inference_request._elements
    monkeypatch.setattr(
        inference_request, "_elements", lambda *args: (made.append(1), elements(*args))[1]
    )
    send(service, message)
    assert not made
    send(service, message, (("x-request-id", "r-1"),))
    assert made


def test_more_scheduled_predictions_than_lookups_run(state, pair):  # noqa: F811
    prediction, lookup = (state.entries[name].endpoint for name in ("m", "m.lookup"))
    assert prediction.max_running == 32
    assert lookup.max_running < 32
    plain = FrontendState()
    plain.serve(pair[1])
    assert plain.entries["m"].endpoint.max_running < 32
