"""Remote lookups whose nodes answer before the call that starts the attempt has returned."""

from types import SimpleNamespace

import grpc
import numpy as np
import pytest

from hps.lookup.base import Feature, LookupModel
from hps.lookup.remote import RemoteLookup, lookup
from hps.lookup.remote.remote_call import RemoteLookupCall
from hps.types import EmbeddingTable, JaggedKeys, LookupRequest, LookupResult


class Node:
    """A node whose ``start`` runs a function of the test and records cancellations."""

    def __init__(self, address, meanwhile=lambda on_done: None):
        self.address, self.in_flight = address, 0
        self.meanwhile = meanwhile
        self.cancelled = 0
        self.timeouts = []

    def start(self, _message, timeout_s, _headers, on_done):
        self.timeouts.append(timeout_s)
        self.meanwhile(on_done)
        return self.cancel

    def cancel(self):
        self.cancelled += 1

    def count_retry(self):
        pass


@pytest.fixture
def submit():
    """Starts a lookup at these nodes."""

    def ask(*nodes, deadline=None):
        feature = Feature("f", EmbeddingTable.make("t", 2, model="m", version=1), hotness=1)
        model = LookupModel("m", 1, {"t": feature.table}, {"f": feature}, 8)
        several = SimpleNamespace(
            poll_soon=lambda: None, later=lambda _pause_s, then: then() or True
        )
        candidates = SimpleNamespace(model=model, ready=nodes, others=(), nodes=several)
        keys = JaggedKeys(np.array([1]), 1)
        return RemoteLookup(candidates).submit(LookupRequest({"f": keys}, deadline=deadline))

    return ask


def test_cancel_ends_the_latest_attempt(submit):
    fails = Node("first", lambda on_done: on_done(grpc.StatusCode.UNAVAILABLE, "gone", None))
    works = Node("second")
    answer = submit(fails, works)
    assert answer.cancel()
    assert works.cancelled == 1


def test_slow_node_is_tried_again_when_the_other_is_gone(submit, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(lookup, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def late(on_done):
        if len(held_up.timeouts) == 1:
            now[0] += held_up.timeouts[0]
            on_done(grpc.StatusCode.DEADLINE_EXCEEDED, "late", None)

    held_up = Node("held up", late)
    gone = Node("gone", lambda on_done: on_done(grpc.StatusCode.UNAVAILABLE, "refused", None))
    answer = submit(held_up, gone, deadline=10.0)
    assert held_up.timeouts == [1.0, 4.5]
    assert not answer.done()
    answer.cancel()


def test_attempt_cancelled_while_starting_does_not_continue(submit):
    def cancel(on_done):
        call = on_done.args[0]
        assert call.answer.cancel()

    node = Node("only", cancel)
    assert submit(node).cancelled()
    assert node.cancelled == 1


class CancelsWhileItIsWritten:
    """An array of a caller who cancels when the first bytes arrive."""

    def __init__(self):
        self.call = None
        self.written_when_done = False

    def __setitem__(self, _where, _rows):
        self.call.answer.cancel()
        self.written_when_done = self.call.answer.done()


def answer_of(out):
    """A call with this array for its vectors."""
    return RemoteLookupCall(None, b"", 0.0, 1.0, {"f": out}, None)


def test_finish_does_not_write_out_after_cancellation():
    out = CancelsWhileItIsWritten()
    out.call = call = answer_of(out)
    call.finish(LookupResult({"f": np.ones(2)}))
    assert not out.written_when_done
    assert call.answer.result(0).vectors["f"] is out


def test_out_of_a_cancelled_call_is_unchanged():
    out = np.zeros(2)
    call = answer_of(out)
    assert call.answer.cancel()
    call.finish(LookupResult({"f": np.ones(2)}))
    assert not out.any()


def test_unwritable_out_fails_the_call():
    call = answer_of(np.zeros(3))
    call.finish(LookupResult({"f": np.ones(2)}))
    with pytest.raises(ValueError, match="broadcast"):
        call.answer.result(0)
