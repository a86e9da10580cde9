"""Ejection of failing nodes: conditions, durations and the largest number."""

from collections import Counter
from types import SimpleNamespace

import grpc
import pytest

from hps.lookup.remote.outlier_ejection import OutlierEjection

OK, UNAVAILABLE = grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE
LATE, REFUSED = grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED


class Setup:
    """``count`` nodes, and a clock."""

    def __init__(self, count):
        self.now = 100.0
        self.nodes = [Node(f"node-{i}:8001") for i in range(count)]
        self.outliers = OutlierEjection(
            lambda: self.nodes, failures=3, base_s=1.0, most_s=3.0, clock=lambda: self.now
        )

    def record(self, node, code, times=1, seconds=0.5):
        for _ in range(times):
            self.outliers.record(node, code, seconds)

    def picked(self):
        return {self.outliers.pick(self.nodes).address for _ in range(2 * len(self.nodes))}


class Node(SimpleNamespace):
    def __init__(self, address):
        super().__init__(address=address, in_flight=0, standing="ready", answers=Counter(OK=1))

    __hash__ = object.__hash__
    __eq__ = object.__eq__


@pytest.fixture
def three():
    return Setup(3)


def test_failing_node_is_ejected_and_readmitted(three):
    bad, *others = three.nodes
    three.record(bad, UNAVAILABLE, 2)
    assert bad.address in three.picked()
    three.record(bad, UNAVAILABLE)
    assert three.picked() == {node.address for node in others}
    assert three.outliers.is_out(bad)
    three.now += 1.01
    assert bad.address in three.picked()
    assert not three.outliers.is_out(bad)
    assert [three.outliers.ejections(node) for node in three.nodes] == [1, 0, 0]


def test_ejections_in_a_row_grow_until_the_node_did_well_for_long(three):
    bad = three.nodes[0]
    for out_s in (1.0, 2.0, 3.0, 3.0):
        three.record(bad, UNAVAILABLE, 3)
        three.now += out_s - 0.01
        assert bad.address not in three.picked()
        three.now += 0.02
        assert bad.address in three.picked()
    three.now += 3.0
    three.record(bad, UNAVAILABLE, 3)
    three.now += 1.01
    assert bad.address in three.picked()
    assert three.outliers.ejections(bad) == 5


def test_failures_among_successes_count(three):
    bad = three.nodes[0]
    for _ in range(2):
        three.record(bad, OK, 3)
        three.record(bad, UNAVAILABLE)
    three.record(bad, OK, 9)  # they are forgotten
    three.record(bad, UNAVAILABLE)
    assert bad.address in three.picked()
    three.record(bad, UNAVAILABLE, 2)
    assert bad.address not in three.picked()


def test_overload_and_short_deadlines_do_not_count_as_failures(three):
    bad = three.nodes[0]
    three.record(bad, REFUSED, 9)  # it has too much to do
    three.record(bad, LATE, 9, seconds=0.05)  # the request was in a hurry
    assert bad.address in three.picked()
    three.record(bad, LATE, 3)
    assert bad.address not in three.picked()


@pytest.mark.parametrize(("count", "most"), [(1, 0), (2, 1), (3, 1), (4, 2)])
def test_at_most_half_of_the_nodes_are_ejected(count, most):
    setup = Setup(count)
    for node in setup.nodes:
        setup.record(node, UNAVAILABLE, 9)
    assert len(setup.picked()) == count - most


def test_no_node_is_ejected_when_all_fail(three):
    """As all are slow under overload: each keeps its share, until one does worse than the others."""
    for _ in range(20):
        for node in three.nodes:
            three.record(node, LATE)
    assert len(three.picked()) == 3
    slow, *others = three.nodes
    for node in others:
        three.record(node, OK, 6)
    three.record(slow, LATE)
    assert three.picked() == {node.address for node in others}


@pytest.mark.parametrize("idle", [{"standing": "not ready"}, {"answers": Counter()}])
def test_node_without_answers_is_not_a_reference_for_ejection(three, idle):
    """It starts still, or has other models."""
    vars(three.nodes[2]).update(idle)
    for _ in range(10):
        for node in three.nodes[:2]:
            three.record(node, LATE)
    assert len(three.picked()) == 3


def test_readmitted_node_is_not_a_reference_for_ejection(three):
    slow, *others = three.nodes
    three.record(slow, LATE, 3)
    three.now += 1.01
    three.outliers.pick(three.nodes)
    for _ in range(10):
        for node in others:
            three.record(node, LATE)
    assert len(three.picked()) == 3


def test_ejected_nodes_are_picked_when_no_other_is_left(three):
    bad = three.nodes[0]
    three.record(bad, UNAVAILABLE, 3)
    assert three.outliers.pick([bad]) is bad


def test_records_of_removed_nodes_are_dropped_at_a_failure(three):
    bad = three.nodes[0]
    three.record(bad, UNAVAILABLE, 3)
    three.nodes.remove(bad)
    three.record(three.nodes[0], UNAVAILABLE, 3)
    assert len(three.picked()) == 1
    assert three.outliers.ejections(bad) == 0


def test_ejections_of_removed_nodes_are_dropped(three):
    """Also one that was out, while no other may be left out in its place."""
    gone, *others = three.nodes
    three.record(gone, UNAVAILABLE, 3)
    three.nodes[:] = others[:1]
    three.record(others[0], UNAVAILABLE, 3)
    assert three.picked() == {others[0].address}
    three.record(gone, UNAVAILABLE)  # the last call that was in flight to it
    three.nodes[:] = [Node(f"later-{i}:8001") for i in range(2)]
    for each in three.nodes:
        three.record(each, UNAVAILABLE)
    assert three.outliers._records.keys() == set(three.nodes)
