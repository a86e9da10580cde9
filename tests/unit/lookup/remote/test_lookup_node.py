"""State of a lookup node by the results of its polls."""

from types import SimpleNamespace

import grpc
import pytest

from hps.lookup.remote import lookup_node as targets
from hps.lookup.remote.addresses import NodeAddress
from hps.lookup.remote.lookup_node import LATE_S, LookupNode
from hps.v1 import lookup_pb2 as pb

_Code = grpc.StatusCode


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(targets, "time", SimpleNamespace(monotonic=lambda: now.s))
    return now


@pytest.fixture
def target():
    made = LookupNode(NodeAddress("127.0.0.1:1"))
    yield made
    made.close()


def state_after(target, code, ready=True):
    target.finish_poll(
        SimpleNamespace(
            code=lambda: code, details=lambda: "", result=lambda: pb.ServingResponse(ready=ready)
        )
    )
    return target.standing, target.may_serve


def test_late_node_may_serve_for_a_while(target, clock):
    assert state_after(target, _Code.DEADLINE_EXCEEDED) == ("unreachable", False)
    assert state_after(target, _Code.OK) == ("ready", True)
    assert state_after(target, _Code.DEADLINE_EXCEEDED) == ("unreachable", True)
    clock.s += LATE_S - 1
    assert state_after(target, _Code.DEADLINE_EXCEEDED) == ("unreachable", True)
    clock.s += 1.01
    assert not target.may_serve
    assert state_after(target, _Code.DEADLINE_EXCEEDED) == ("unreachable", False)


@pytest.mark.parametrize("code", [_Code.UNAVAILABLE, _Code.OK])
def test_node_that_is_not_ready_or_unreachable_may_not_serve(target, clock, code):
    state_after(target, _Code.OK)
    state_after(target, _Code.DEADLINE_EXCEEDED)
    assert not state_after(target, code, ready=False)[1]
