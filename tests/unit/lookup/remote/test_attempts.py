"""What a lookup does with nodes that answer before the call that asks them has returned."""

from types import SimpleNamespace

import grpc
import numpy as np
import pytest

from hps.lookup.base import Feature, LookupModel
from hps.lookup.remote import RemoteLookup
from hps.types import EmbeddingTable, JaggedKeys, LookupRequest


class Node:
    """``start`` does what it is told to, and notes when what it began is cancelled."""

    def __init__(self, address, meanwhile=lambda told: None):
        self.address, self.in_flight = address, 0
        self.meanwhile = meanwhile
        self.cancelled = 0

    def start(self, _message, _timeout_s, _headers, told):
        self.meanwhile(told)
        return self.cancel

    def cancel(self):
        self.cancelled += 1

    def passed_over(self):
        pass


@pytest.fixture
def asking():
    """Starts a lookup at these nodes."""

    def ask(*nodes):
        feature = Feature("f", EmbeddingTable.make("t", 2, model="m", version=1), hotness=1)
        model = LookupModel("m", 1, {"t": feature.table}, {"f": feature}, 8)
        several = SimpleNamespace(look=lambda: None)
        candidates = SimpleNamespace(model=model, ready=nodes, others=(), nodes=several)
        keys = JaggedKeys(np.array([1]), 1)
        return RemoteLookup(candidates).submit(LookupRequest({"f": keys}))

    return ask


def test_the_last_that_was_asked_is_cancelled(asking):
    fails = Node("first", lambda told: told(grpc.StatusCode.UNAVAILABLE, "gone", None))
    works = Node("second")
    answer = asking(fails, works)
    assert answer.cancel()
    assert works.cancelled == 1


def test_what_is_cancelled_while_it_begins_does_not_go_on(asking):
    def cancel(told):
        call = told.args[0]
        assert call.answer.cancel()

    node = Node("only", cancel)
    assert asking(node).cancelled()
    assert node.cancelled == 1
