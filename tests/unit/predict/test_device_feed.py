"""Vectors passed from a device to a Triton on the same machine.

A twin of NumPy arrays stands for the device, a network in this process for Triton; they share memory."""

from __future__ import annotations

from multiprocessing import get_context
from typing import Any, ClassVar

import numpy as np
import pytest

from hps.cuda.loader import cupy
from hps.dense import network_factory
from hps.dense.fallback import FallbackModel
from hps.dense.onnx import OnnxModel
from hps.dense.triton import TritonModel, TritonRunOptions
from hps.dense.triton.device_memory import DeviceRegion
from hps.dense.triton.host_memory import unused_name
from hps.dense.triton.shared_regions import ThreadRegions
from hps.dense.triton.transport import CudaSharedMemory, TritonModelInfo, TritonUnavailable
from hps.node.gpu_caches import device_count
from tests.support.twin_device import Array
from tests.unit.node.test_gpu_caches import (  # noqa: F401 # the fixtures too
    HELD,
    open_node,
    repository,
    request_of,
    same,
)


class Region:
    """A twin of `DeviceRegion` in host memory; asserts that all inputs but the price are device arrays."""

    made: ClassVar[dict[str, Region]] = {}

    def __init__(self, size: int) -> None:
        self.name = self.key = unused_name()
        self.size = size
        self.registered = False
        self.memory = np.zeros(size, np.uint8)
        self.made[self.name] = self

    def put(self, tensors: Any) -> None:
        for offset, array in tensors:
            assert array.flags.c_contiguous
            assert isinstance(array, Array) == (array.shape[1:] != (1,))  # (n, 1): the price
            self.memory[offset : offset + array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)

    def get(self, offset: int, shape: Any, dtype: Any) -> Any:
        return np.frombuffer(self.memory.tobytes(), dtype, int(np.prod(shape)), offset).reshape(
            shape
        )

    def drop(self) -> None:
        pass

    def release(self) -> None:
        del self.made[self.name]


class Triton:
    """A TritonTransport that runs the network on tensors in the shared memory; batches of at most 8."""

    def __init__(self, network: OnnxModel) -> None:
        self.network = network
        self.runs = 0
        self.unreachable = False

    def describe(self, timeout_s: float) -> TritonModelInfo:
        return TritonModelInfo(self.network.inputs, self.network.outputs, 8)

    def register(self, region: str, key: str, size: int, timeout_s: float) -> None:
        assert Region.made[region].size == size

    def unregister(self, region: str, key: str, timeout_s: float) -> None:
        assert region in Region.made

    def infer(self, inputs: Any, outputs: Any, timeout_s: float, shared: Any = None) -> Any:
        if self.unreachable:
            raise TritonUnavailable("unreachable")
        self.runs += 1
        memory = Region.made[shared.region]
        types = {tensor.name: tensor.dtype for tensor in self.network.inputs}
        fed = {
            name: memory.get(shared.places[name][0], array.shape, types[name])
            for name, _, array in inputs
        }
        assert all(shared.places[name][1] == fed[name].nbytes for name in fed)
        for name, array in self.network.predict(fed, tuple(outputs)).items():
            at = shared.places[name][0]
            memory.memory[at : at + array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
        return {}

    def close(self) -> None:
        pass


@pytest.fixture
def pair(open_node, monkeypatch):  # noqa: F811
    """``pair(**dense)`` opens a node with a twin GPU and such a Triton, and a node with neither.

    Returns both nodes and the Triton."""

    def pair(**dense: Any) -> Any:
        tritons: list[Triton] = []
        plain, _ = open_node(gpus=None, gpu={"use": "off"})
        path = plain.model("m").pipeline.dense.path

        def open_twin(target: Any, triton: Any, network: Any, device: int) -> TritonModel:
            tritons.append(Triton(OnnxModel(path, "cpu")))
            expected = (tuple(network.fed.values()), network.served)
            regions = ThreadRegions(Region, on_device=True)
            options = TritonRunOptions(60.0, regions=regions)
            return TritonModel(
                target.name, "triton:1", tritons[0], expected, options, network.check
            )

        monkeypatch.setattr(network_factory, "_in_triton", open_twin)
        dense = {"triton": {"url": "localhost:1", "shared_memory": "cuda", **dense}}
        node, _ = open_node(gpu={"share": 0.5}, dense=dense)
        return node, plain, tritons[0]

    yield pair
    assert not Region.made


@pytest.mark.parametrize("last", [200, HELD, 3 * HELD], ids=["gpu", "cpu", "default"])
def test_device_scores_equal_host_scores(pair, last):
    node, plain, triton = pair()
    for batch in (1, 5, 8, 20):
        request = request_of(np.arange(last), batch)
        same(node.predict("m", *request), plain.predict("m", *request))
    assert triton.runs == 1 + 1 + 1 + 3
    node.close()


def test_context_is_repeated_on_the_device_and_sources_are_reported(pair):
    node, plain, _ = pair()
    features, dense = request_of(np.arange(200), 6)
    features["user"] = features["user"][:1]
    one, other = (n.predict("m", features, dense, top_k=2) for n in (node, plain))
    same(one, other)
    sources = node.predict("m", features, dense, want_source=True).sources
    assert sources.keys() == features.keys()
    node.close()


def test_fallback_copies_device_arrays_to_the_host(pair, monkeypatch):
    node, plain, triton = pair(fallback=True)
    network = node.model("m").pipeline.dense
    assert isinstance(network, FallbackModel)
    triton.unreachable = True
    request = request_of(np.arange(200), 4)
    same(node.predict("m", *request), plain.predict("m", *request))

    class DeviceArray:
        """An array with CuPy's method to copy it to the host."""

        def __init__(self, array: Any) -> None:
            self._array = array

        def get(self) -> Any:
            return self._array

    fed = {t.name: np.ones((2, *t.shape[1:]), np.float32) for t in network.inputs}
    expected = network.predict(fed)
    outputs = network.predict({name: DeviceArray(array) for name, array in fed.items()})
    assert all(np.array_equal(outputs[name], expected[name]) for name in expected)
    node.close()


class ProcessTriton(Triton):
    """Runs the network in another process, which maps a real GPU's memory as Triton does."""

    def __init__(self, network: OnnxModel, processes: Any) -> None:
        super().__init__(network)
        self.processes = processes
        self.keys: dict[str, CudaSharedMemory] = {}

    def register(self, region: str, key: Any, size: int, timeout_s: float) -> None:
        self.keys[region] = key

    def unregister(self, region: str, key: Any, timeout_s: float) -> None:
        assert self.keys.pop(region) == key

    def infer(self, inputs: Any, outputs: Any, timeout_s: float, shared: Any = None) -> Any:
        self.runs += 1
        types = {tensor.name: tensor.dtype for tensor in self.network.inputs}
        fed = {
            name: (shared.places[name][0], array.shape, types[name]) for name, _, array in inputs
        }
        places = {name: shared.places[name][0] for name in outputs}
        arguments = (self.network.path, self.keys[shared.region], fed, places)
        self.processes.apply(run_in_process, arguments)
        return {}


def run_in_process(path: Any, key: CudaSharedMemory, fed: Any, places: Any) -> None:
    cp, network = cupy(), OnnxModel(path, "cpu")
    with cp.cuda.Device(key.device):
        at = cp.cuda.runtime.ipcOpenMemHandle(key.handle)

        def array_at(offset: int, shape: Any, dtype: Any) -> Any:
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            memory = cp.cuda.UnownedMemory(at + offset, size, None)
            return cp.ndarray(shape, dtype, cp.cuda.MemoryPointer(memory, 0))

        inputs = {name: array_at(*where).get() for name, where in fed.items()}
        for name, array in network.predict(inputs, tuple(places)).items():
            array_at(places[name], array.shape, array.dtype).set(array)
        cp.cuda.Device().synchronize()
        cp.cuda.runtime.ipcCloseMemHandle(at)


@pytest.mark.gpu
def test_real_gpus_pass_vectors_to_triton_without_a_host_copy(open_node, monkeypatch):  # noqa: F811
    """Rows of every device go to the one whose memory is shared; only the price is a host array."""
    put = DeviceRegion.put

    def checked(self: Any, tensors: Any) -> None:
        tensors = list(tensors)
        assert all(isinstance(a, np.ndarray) == (a.shape[1:] == (1,)) for _, a in tensors)
        put(self, tensors)

    monkeypatch.setattr(DeviceRegion, "put", checked)
    plain, _ = open_node(gpus=None, gpu={"use": "off"}, dense={"provider": "cpu"})
    network = OnnxModel(plain.model("m").pipeline.dense.path, "cpu")
    with get_context("spawn").Pool(1) as processes:
        triton = ProcessTriton(network, processes)
        monkeypatch.setattr("hps.dense.triton.grpc.GrpcTransport", lambda *_, **__: triton)
        devices = list(range(device_count()))
        node, _ = open_node(
            gpus=None,
            gpu={"use": "required", "devices": devices, "share": 0.5},
            dense={"triton": {"url": "localhost:1", "shared_memory": "cuda", "timeout_ms": 60_000}},
        )
        for last in (200, HELD, 2 * HELD):
            for batch in (1, 20):
                for _ in devices:
                    request = request_of(np.arange(last), batch)
                    same(node.predict("m", *request), plain.predict("m", *request))
        assert triton.runs == 3 * (1 + 3) * len(devices)
        node.close()
    assert not triton.keys
