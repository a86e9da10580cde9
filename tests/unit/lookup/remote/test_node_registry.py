"""Notifications of the registry of lookup nodes."""

from contextlib import closing
from types import SimpleNamespace

import grpc

from hps.lookup.remote import lookup_node as targets
from hps.lookup.remote import node_registry as module
from hps.lookup.remote.lookup_node import LookupNode
from hps.v1 import lookup_pb2 as pb
from tests.support.waiting import until


def test_watchers_are_notified_when_a_node_is_late_for_too_long(monkeypatch):
    """The state that the node reports does not change then."""

    class Late(LookupNode):
        """Has answered once."""

        answered = False

        def start_poll(self, _timeout_s):
            code = grpc.StatusCode.DEADLINE_EXCEEDED if self.answered else grpc.StatusCode.OK
            self.answered = True
            poll = SimpleNamespace(
                code=lambda: code, details=str, result=lambda: pb.ServingResponse(ready=True)
            )
            poll.add_done_callback = lambda seen: seen(poll)
            return poll

    monkeypatch.setattr(module, "LookupNode", Late)
    monkeypatch.setattr(module, "LATE_S", 0.3)
    monkeypatch.setattr(targets, "LATE_S", 0.3)
    with closing(module.NodeRegistry(["127.0.0.1:1"])) as nodes:
        (target,), seen = nodes.all, []
        nodes.watch(lambda: seen.append((target.standing, target.may_serve)))
        until(lambda: ("unreachable", False) in seen)
