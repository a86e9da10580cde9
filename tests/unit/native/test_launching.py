"""Repeated kernel launches: the arguments that they write; the launch itself needs a GPU."""

import numpy as np
import pytest

from hps.native.launching import KernelLaunch, launch, order_after, wait_for_event


def test_a_launch_writes_the_fields_that_change_and_reports_errors():
    fields, now = np.zeros(5, np.uint64), np.array([7], np.uint32)
    at = fields.ctypes.data
    launch = KernelLaunch.make(
        function=0,
        blocks=1,
        threads=32,
        arguments=at,
        outs=[(at, 16), (at + 8, 512)],
        keys=[at + 16, at + 24],
        fresh=[(at + 32, now.ctypes.data)],
    )
    for turn in range(2):
        now[0] = 7 + turn
        with pytest.raises(RuntimeError, match=r"no CUDA driver|cuLaunchKernel failed: CUDA_ERROR"):
            launch.run(0, 0, 4096 * (turn + 1), [turn + 100, 200])
        expected = [4096 * (turn + 1) + 16, 4096 * (turn + 1) + 512, turn + 100, 200, 7 + turn]
        assert fields.tolist() == expected
    with pytest.raises(ValueError, match="an address per table"):
        launch.run(0, 0, 0, [1])


def test_a_launch_of_many_tables_takes_all_their_keys():
    fields = np.zeros(100, np.uint64)
    keys = [fields.ctypes.data + 8 * i for i in range(100)]
    launch = KernelLaunch.make(0, 1, 32, fields.ctypes.data, [], keys, [])
    with pytest.raises(RuntimeError):
        launch.run(0, 0, 0, list(range(100)))
    assert fields.tolist() == list(range(100))


def test_calls_without_a_driver_are_errors():
    calls = (
        lambda: order_after(0, 0, 0),
        lambda: wait_for_event(0),
        lambda: launch(0, 1, 32, 0, 0, 0),
    )
    for call in calls:
        with pytest.raises(RuntimeError, match=r"no CUDA driver|failed: CUDA_ERROR"):
            call()
