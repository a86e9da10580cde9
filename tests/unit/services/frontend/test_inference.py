"""The lifecycle of an inference request, apart from any protocol."""

from __future__ import annotations

import pytest

from hps.config import Settings
from hps.config.admission_settings import AdmissionSettings, ClientSettings
from hps.config.server_settings import ServerSettings
from hps.errors import Unavailable
from hps.observability import metric_names as m
from services.frontend.errors import Overloaded, TooManyRequests
from services.frontend.inference import (
    NO_IDENTITY,
    Inference,
    InferencePort,
    request_identity,
)
from services.frontend.state import FrontendState

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def port(small):
    """A port of `small` whose clients may have one request in flight."""
    admission = AdmissionSettings(client=ClientSettings(running=1))
    state = FrontendState(settings=Settings(server=ServerSettings(admission=admission)))
    state.serve(small.node)
    return InferencePort(state, "grpc", "infer", 60_000)


class Request(Inference):
    """A request to `ctr` from ``10.0.0.1``."""

    def identify(self):
        return NO_IDENTITY

    def address(self):
        return "10.0.0.1"


def begin(port):
    return Request(port, port.state.entries["ctr"])


def test_client_slot_is_freed_once_when_the_failure_follows_an_unsent_answer(port):
    request = begin(port)
    request.enter("")
    with pytest.raises(TooManyRequests):
        begin(port).enter("")
    request.leave()
    request.fail(Unavailable("not sent"))
    begin(port).enter("10.0.0.1")
    with pytest.raises(TooManyRequests):
        begin(port).enter("10.0.0.1")


def test_undone_request_frees_the_client_slot(port):
    request = begin(port)
    request.enter("me")
    request.undo()
    begin(port).enter("me")


def test_undecodable_request_frees_its_reservation(port):
    request = begin(port)
    endpoint = request.entry.endpoint
    assert endpoint.is_long
    assert request.admit(100) is None
    assert port.state.admission.byte_budget.held == 100
    request.fail(ValueError("no tensors"))
    assert port.state.admission.byte_budget.held == 0
    assert not endpoint.is_saturated


def test_request_that_is_handled_again_frees_its_reservation(port):
    request = begin(port)
    assert request.admit(100) is None
    request.undo()
    assert port.state.admission.byte_budget.held == 0


def test_failure_is_counted_with_status_and_reason(port, small):
    request = begin(port)
    answer = request.fail(Overloaded("full", "queue_full"))
    assert isinstance(answer, Overloaded)
    counted = small.node.metrics.numbers()
    assert counted[m.REQUESTS_REFUSED]["queue_full",] == 1
    labels = "grpc", "infer", "ctr", "1", "UNAVAILABLE"
    assert labels in counted[m.REQUEST_SECONDS]
    assert request.entry.statistics.fail_count == 1


def test_unexpected_error_reaches_the_client_without_its_text(port):
    answer = begin(port).fail(RuntimeError("secret"))
    assert "secret" not in str(answer)
    assert "internal error" in str(answer)


@pytest.mark.parametrize(
    ("sent", "identity"),
    [
        (("", "", ""), ("", "", "")),
        (("", "invalid", "a=1"), ("", "", "")),
        (("r-1", "", "a=1"), ("r-1", "", "")),
        (("", TRACE, "a=1"), ("", TRACE, "a=1")),
        (("r-1", TRACE, "\n"), ("r-1", TRACE, "")),
    ],
)
def test_identity_holds_only_valid_trace_headers(sent, identity):
    found = request_identity(*sent)
    assert (found.request_id, found.traceparent, found.tracestate) == identity
    assert (found is NO_IDENTITY) == (not any(identity))
