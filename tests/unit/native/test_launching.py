"""Repeated launches of fetches: the arguments that they write, and the wait for their report.

The launch itself needs a GPU."""

import numpy as np
import pytest

from hps.cuda.launch import COUNT_ARGS, FETCH_ARGS, PARTS
from hps.native import WorkerPool, dedup
from hps.native.launching import FetchLaunch, hold_back, order_after, waited_ns

NO_DRIVER = r"no CUDA driver|cuLaunchKernel failed: CUDA_ERROR"


class Arguments:
    """Arguments of both kernels, with the memory for their report."""

    def __init__(self, tables):
        self.fetch, self.count = np.zeros((), FETCH_ARGS), np.zeros((), COUNT_ARGS)
        self.result = np.zeros(2, np.uint32)
        self.count["result"] = self.result.ctypes.data
        self.now = np.arange(100, 100 + tables, dtype=np.uint32)
        cells = [self.now.ctypes.data + 4 * i for i in range(tables)]
        at = self.fetch.ctypes.data, 0, self.count.ctypes.data
        self.launch = FetchLaunch.make(*at, cells)
        self.parts = self.fetch["part"][:tables]


@pytest.mark.parametrize("behind", [False, True])
def test_a_launch_into_a_block_writes_the_fields_that_change_and_reports_errors(behind):
    arguments = Arguments(3)
    arguments.launch.prepare_block(0, 5, 64, behind, [0, 512, 1024], [2, 0])
    for turn in range(2):
        arguments.now += 1
        with pytest.raises(RuntimeError, match=NO_DRIVER):
            arguments.launch.run_block(4096 * (turn + 1), [turn + 100, 200], 0, 0)
        outs = 4096 * (turn + 1) + np.array([0, 512, 1024])
        np.testing.assert_array_equal(arguments.parts["out"], outs)
        np.testing.assert_array_equal(arguments.parts["keys"], [200, 0, turn + 100])
        np.testing.assert_array_equal(arguments.parts["now"], arguments.now)
        sequences = int(arguments.fetch["sequence"]), int(arguments.count["sequence"])
        assert sequences == (turn + 1, turn + 1)
        assert int(arguments.fetch["result"]) == (0 if behind else arguments.result.ctypes.data)
    with pytest.raises(ValueError, match="an address per table"):
        arguments.launch.run_block(0, [1], 0, 0)


def test_a_launch_of_parts_writes_all_fields_of_a_fetch():
    arguments = Arguments(PARTS)
    numbers = [(i, i + 1000, i + 2000, i + 3000, i + 4000, i + 5000, 100 * i) for i in range(PARTS)]
    with pytest.raises(RuntimeError, match=NO_DRIVER):
        arguments.launch.run_parts(0, 64, numbers, 77, 0, 0, False)
    names = ("keys", "positions", "out", "versions", "source", "oldest_tombstone", "n")
    for name, values in zip(names, zip(*numbers, strict=True), strict=True):
        np.testing.assert_array_equal(arguments.parts[name], values)
    n = arguments.parts["n"].astype(int)
    np.testing.assert_array_equal(arguments.parts["base"], np.cumsum(n) - n)
    blocks = -(-n // 64)
    np.testing.assert_array_equal(arguments.parts["first_block"], np.cumsum(blocks) - blocks)
    assert int(arguments.fetch["misses"]) == 77


def test_wrong_arguments_of_a_launch_are_rejected():
    arguments = Arguments(2)
    with pytest.raises(ValueError, match="one per table"):
        arguments.launch.run_parts(0, 64, [(0,) * 7], 0, 0, 0, False)
    with pytest.raises(ValueError, match="7 numbers"):
        arguments.launch.run_parts(0, 64, [(0,) * 7, (0,) * 6], 0, 0, 0, False)
    with pytest.raises(ValueError, match="one per part"):
        arguments.launch.prepare_block(0, 1, 64, False, [0], [])
    with pytest.raises(ValueError, match="numbers of parts"):
        arguments.launch.prepare_block(0, 1, 64, False, [0, 0], [2])
    with pytest.raises(ValueError, match="too many"):
        FetchLaunch.make(0, 0, 0, [0] * (PARTS + 1))


@pytest.mark.parametrize("threads", [1, 3])
def test_keys_are_copied_for_launches_in_chunks(threads):
    """Without a driver the first launch fails; the copies end before the error is raised."""
    arguments, rng = Arguments(3), np.random.default_rng(1)
    arrays = [rng.integers(0, 1 << 60, n) for n in (30_000, 5, 50_000)]
    arrays[0] = dedup(arrays[0])[0]  # int64 by its other name
    copied = [np.zeros(len(array), np.int64) for array in arrays]
    parts = [(own.ctypes.data, 0, 1000 * i, 0, 2000, 5, len(own)) for i, own in enumerate(copied)]
    pool = WorkerPool(threads)
    with pytest.raises(RuntimeError, match=NO_DRIVER):
        arguments.launch.run_parts_copied(0, 64, parts, 77, arrays, 16_384, 0, 0, pool)
    for own, array in zip(copied, arrays, strict=True):
        np.testing.assert_array_equal(own, array)
        own[:] = 0
    assert len(arrays[0]) == 30_000
    np.testing.assert_array_equal(arguments.parts["base"], [0, 30_000, 30_005])
    assert int(arguments.count["sequence"]) == 0  # of the last chunk's launch
    arguments.launch.prepare_block(0, 5, 64, False, [0, 64, 128], [])
    with pytest.raises(RuntimeError, match=NO_DRIVER):
        arguments.launch.run_block_copied(4096, arrays, 1 << 20, 0, 0, pool)
    for own, array in zip(copied, arrays, strict=True):
        np.testing.assert_array_equal(own, array)
    np.testing.assert_array_equal(arguments.parts["out"], [4096, 4160, 4224])
    assert int(arguments.count["sequence"]) == 1


@pytest.mark.parametrize(
    ("part", "arrays", "chunk", "reason"),
    [
        ((0, 0, 0, 0, 0, 0, 10), [np.zeros(11, np.int64)], 5, "int64"),
        ((0, 0, 0, 0, 0, 0, 10), [np.zeros(10, np.int32)], 5, "int64"),
        ((0, 0, 0, 0, 0, 0, 10), [np.zeros(10, np.int64)], 0, "one per table"),
        ((0, 0, 0, 0, 0, 0, 10), [], 5, "one per table"),
        ((0, 1, 0, 0, 0, 0, 10), [np.zeros(10, np.int64)], 5, "of all keys"),
    ],
)
def test_wrong_keys_of_chunks_are_rejected(part, arrays, chunk, reason):
    arguments = Arguments(1)  # holds the memory that the launch writes to
    with pytest.raises(ValueError, match=reason):
        arguments.launch.run_parts_copied(0, 64, [part], 0, arrays, chunk, 0, 0)


def test_a_wait_takes_the_report_of_the_last_launch_alone():
    arguments, waited = Arguments(1), waited_ns()
    arguments.count["sequence"] = 7
    arguments.result.view(np.uint64)[0] = 6 << 32 | 1  # of the launch before
    with pytest.raises(RuntimeError, match=r"no CUDA driver|cuEventSynchronize failed: CUDA_ERROR"):
        arguments.launch.wait()
    arguments.result.view(np.uint64)[0] = 7 << 32 | 12345
    assert arguments.launch.wait() == 12345
    assert waited_ns() >= waited


def test_order_without_a_driver_is_an_error():
    with pytest.raises(RuntimeError, match=r"no CUDA driver|failed: CUDA_ERROR"):
        order_after(0, 0, 0)
    with pytest.raises(RuntimeError, match=r"no CUDA driver|failed: CUDA_ERROR"):
        hold_back(0, [0])
