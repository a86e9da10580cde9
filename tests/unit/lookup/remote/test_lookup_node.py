"""What is known of a lookup node."""

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


def told(target, code, ready=True):
    target.finish_poll(
        SimpleNamespace(
            code=lambda: code, details=lambda: "", result=lambda: pb.ServingResponse(ready=ready)
        )
    )
    return target.standing, target.may_serve


def test_late_node_may_serve_for_a_while(target, clock):
    assert told(target, _Code.DEADLINE_EXCEEDED) == ("unreachable", False)
    assert told(target, _Code.OK) == ("ready", True)
    assert told(target, _Code.DEADLINE_EXCEEDED) == ("unreachable", True)
    clock.s += LATE_S - 1
    assert told(target, _Code.DEADLINE_EXCEEDED) == ("unreachable", True)
    clock.s += 1.01
    assert not target.may_serve
    assert told(target, _Code.DEADLINE_EXCEEDED) == ("unreachable", False)


@pytest.mark.parametrize("code", [_Code.UNAVAILABLE, _Code.OK])
def test_node_that_is_not_ready_or_unreachable_may_not_serve(target, clock, code):
    told(target, _Code.OK)
    told(target, _Code.DEADLINE_EXCEEDED)
    assert not told(target, code, ready=False)[1]
