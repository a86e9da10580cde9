"""Leases of lanes, on NumPy twins of a device."""

import threading

import pytest
from onnx import helper as h

from hps.dense.lanes import DeviceLanes
from hps.dense.onnx import OnnxModel
from hps.errors import Unavailable
from tests.support import onnx_networks
from tests.support.twin_device import Space
from tests.support.waiting import until


@pytest.fixture
def lanes(tmp_path):
    network = onnx_networks.network([h.make_node("Add", ["a", "a"], ["y"])], {"a": 3}, {"y": 3})
    (tmp_path / "dense.onnx").write_bytes(network)
    return DeviceLanes(OnnxModel(tmp_path / "dense.onnx", "cpu"), Space(), 0, frozenset(), 1)


def test_close_waits_for_the_running_lane_and_refuses_later_and_waiting_leases(lanes):
    refused = []

    def wait_for_a_lane():
        try:
            with lanes.lease():
                refused.append(False)
        except Unavailable:
            refused.append(True)

    closing = threading.Thread(target=lanes.close)
    with lanes.lease() as lane:
        closing.start()
        until(lambda: lanes.closed)
        assert closing.is_alive()
        assert lane.session is not None
        wait_for_a_lane()
        assert refused == [True]
        closing.join(0.1)
        assert closing.is_alive()
    closing.join(10)
    assert not closing.is_alive()
    assert lane.session is None
    wait_for_a_lane()
    lanes.close()
    assert refused == [True, True]
