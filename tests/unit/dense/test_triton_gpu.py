"""Tensors in GPU memory that another process maps, as a Triton on this machine does."""

from __future__ import annotations

import gc
from functools import partial
from multiprocessing import get_context

import numpy as np
import pytest

from hps.cuda.loader import cupy
from hps.dense.base import NetworkTensor
from hps.dense.triton import TritonModel, TritonRunOptions
from hps.dense.triton.device_memory import DeviceRegion
from hps.dense.triton.shared_regions import ThreadRegions
from hps.dense.triton.transport import CudaSharedMemory, TritonModelInfo
from hps.errors import DeadlineExceeded

pytestmark = pytest.mark.gpu
IN, OUT = NetworkTensor("x", "FP32", (-1, 2)), NetworkTensor("y", "FP32", (-1, 2))


def double(key: CudaSharedMemory, x: tuple[int, int], y: tuple[int, int]) -> None:
    """Do as Triton does: map the memory, read x from it and write y = 2 x to it."""
    cp = cupy()
    with cp.cuda.Device(key.device):
        at = cp.cuda.runtime.ipcOpenMemHandle(key.handle)
        n = x[1] // 4

        def array_at(offset):
            memory = cp.cuda.UnownedMemory(at + offset, 4 * n, None)
            return cp.ndarray(n, np.float32, cp.cuda.MemoryPointer(memory, 0))

        array_at(y[0])[...] = array_at(x[0]) * 2
        cp.cuda.Device().synchronize()
        cp.cuda.runtime.ipcCloseMemHandle(at)


class Triton:
    """A TritonTransport whose network doubles its input, in another process.

    ``fail_next``: the next run raises DeadlineExceeded."""

    def __init__(self, processes):
        self.processes = processes
        self.regions = {}
        self.registrations = []
        self.fail_next = False

    def describe(self, timeout_s):
        return TritonModelInfo((IN,), (OUT,), 0)

    def register(self, region, key, size, timeout_s):
        self.regions[region] = key
        self.registrations.append(region)

    def unregister(self, region, key, timeout_s):
        assert self.regions.pop(region) == key

    def infer(self, inputs, outputs, timeout_s, shared=None):
        if self.fail_next:
            self.fail_next = False
            raise DeadlineExceeded("late")
        places = shared.places
        self.processes.apply(double, (self.regions[shared.region], places["x"], places["y"]))
        return {}

    def close(self):
        pass


def test_another_process_reads_and_writes_tensors_in_gpu_memory():
    cp = cupy()
    before = cp.cuda.Device().id
    with get_context("spawn").Pool(1) as processes:
        triton = Triton(processes)
        regions = ThreadRegions(partial(DeviceRegion, 0))
        network = TritonModel(
            "n", "triton:1", triton, ((IN,), (OUT,)), TritonRunOptions(60.0, regions=regions)
        )
        for batch in (1, 7, 1 << 16, 3):
            x = np.random.default_rng(batch).random((batch, 2), np.float32)
            np.testing.assert_array_equal(network.predict({"x": x})["y"], 2 * x)
            on_device = cp.asarray(x)
            cp.cuda.Device().synchronize()
            np.testing.assert_array_equal(network.predict({"x": on_device})["y"], 2 * x)
        assert len(triton.registrations) == 2  # one for small batches, one for the large one
        triton.fail_next = True
        with pytest.raises(DeadlineExceeded):
            network.predict({"x": x})
        np.testing.assert_array_equal(network.predict({"x": x})["y"], 2 * x)
        assert len(triton.registrations) == 3
        network.close()
        assert not triton.regions
    gc.collect()
    assert cp.cuda.Device().id == before
