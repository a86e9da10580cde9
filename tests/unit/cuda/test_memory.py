"""Errors of failed allocations, with an allocator that fails; no GPU is needed."""

import subprocess
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from hps.cuda import loader, memory, table
from hps.cuda.layout import EvictionPolicy, plan_table_shape
from hps.cuda.table import GpuTable, GpuTableOptions
from hps.errors import ConfigError, GpuUnavailable
from hps.node.gpu_caches import device_count
from hps.types import EmbeddingTable

FREE, FREE_HOST = 10**9, 10**10
TABLE = EmbeddingTable.make("t", 64)


class NoMemory(Exception):
    """CUDA's error for a failed allocation."""

    status = 2


class OtherCudaError(Exception):
    """A CUDA error that is not about memory."""

    status = 700


class Array:
    """An allocation, which is freed with its last reference."""

    def __init__(self, device, size):
        self._device, self._size = device, size
        device.free -= size

    def __del__(self):
        self._device.free += self._size


class Device:
    """A twin of CuPy whose allocation number ``failing`` (from 1; 0: none) fails despite free memory."""

    def __init__(self, failing):
        self.free, self._failing, self.allocations = FREE, failing, 0
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(
                memGetInfo=lambda: (self.free, FREE), CUDARuntimeError=NoMemory
            ),
            memory=SimpleNamespace(OutOfMemoryError=MemoryError),
            PinnedMemory=self._pin,
            PinnedMemoryPointer=None,
        )

    def get_default_memory_pool(self):
        return SimpleNamespace(free_bytes=lambda: 0)

    def empty(self, size, dtype):
        self.allocations += 1
        if self.allocations == self._failing:
            raise MemoryError("fragmented")
        return Array(self, int(size) * np.dtype(dtype).itemsize)

    zeros = empty

    def arange(self, first, end, dtype):
        return self.empty(end - first, dtype)

    def _pin(self, size):
        raise NoMemory("cudaErrorMemoryAllocation: out of memory")


@pytest.fixture
def device(monkeypatch):
    def make(failing):
        made = Device(failing)
        for module in (memory, table):
            monkeypatch.setattr(module, "cupy", lambda: made)
        monkeypatch.setattr(memory, "free_host_bytes", lambda: FREE_HOST)
        return made

    return make


def suggested_rows(error):
    return int(str(error.value).split("at most ")[1].split()[0].replace(",", ""))


@pytest.mark.parametrize("failing", [1, 2, 3, 4, 5])
def test_failed_device_allocation_reports_a_smaller_capacity(device, failing):
    """The arrays allocated before are released and count as free; the suggestion is below the request."""
    device(failing)
    shape = plan_table_shape(TABLE, 1_000_000, scored=True)
    assert shape.bytes < FREE
    with pytest.raises(ConfigError) as error:
        GpuTable(TABLE, 1_000_000, GpuTableOptions(EvictionPolicy.SCORE))
    message = f"needs {shape.bytes:,} bytes for 1,000,000 rows, and {FREE:,} are free on the device"
    assert message in str(error.value)
    suggested = suggested_rows(error)
    assert 900_000 < suggested < 1_000_000
    assert plan_table_shape(TABLE, suggested, scored=True).bytes < shape.bytes


def test_table_larger_than_free_memory_is_rejected_before_allocation(device):
    made = device(0)
    with pytest.raises(ConfigError, match=r"and 1,000,000,000 are free on the device") as error:
        GpuTable(TABLE, 10_000_000)
    assert made.allocations == 0
    assert 0.9 * FREE < plan_table_shape(TABLE, suggested_rows(error)).bytes < FREE


@pytest.mark.parametrize("host_rows", [100_000, 50_000_000], ids=["fails", "more than is free"])
def test_failed_pinned_allocation_reports_rows_that_fit(device, host_rows):
    device(0)
    rows, size = host_rows, 256 * host_rows
    shape = plan_table_shape(TABLE, rows, rows)
    with pytest.raises(ConfigError) as error:
        memory.pinned(TABLE, shape)
    message = (
        f"needs {size:,} bytes of pinned host memory for {rows:,} rows, and {FREE_HOST:,} are free"
    )
    assert message in str(error.value)
    assert "lower tiers.gpu.host_bytes" in str(error.value)
    refused = "the driver refused them (cudaErrorMemoryAllocation: out of memory), and this process may lock"
    assert (refused in str(error.value)) == (size < FREE_HOST)
    assert suggested_rows(error) == int(min(size, FREE_HOST) * 0.95) // 256


def test_no_host_rows_need_no_pinned_memory(device):
    device(0)
    assert memory.pinned(TABLE, plan_table_shape(TABLE, 1000)) is None


def test_failed_buffer_allocation_names_the_buffers(device):
    device(0)
    for failure in (MemoryError("allocating 8,388,608 bytes"), NoMemory("out of memory")):
        with (
            pytest.raises(
                ConfigError, match=rf"no memory for 4 workspaces: .*{FREE:,} bytes are free"
            ),
            memory.allocate_buffers("4 workspaces"),
        ):
            raise failure


def test_other_cuda_errors_are_not_reported_as_out_of_memory(device, monkeypatch):
    made = device(0)
    monkeypatch.setattr(made.cuda.runtime, "CUDARuntimeError", OtherCudaError)
    with pytest.raises(OtherCudaError), memory.allocate_buffers("4 workspaces"):
        raise OtherCudaError("cudaErrorIllegalAddress")


def test_gpu_that_cannot_be_used_is_named(monkeypatch):
    def use(_device):
        raise NoMemory("cudaErrorMemoryAllocation: out of memory")

    runtime = SimpleNamespace(CUDARuntimeError=NoMemory)
    twin = SimpleNamespace(cuda=SimpleNamespace(Device=use, runtime=runtime))
    monkeypatch.setattr(memory, "cupy", lambda: twin)
    with pytest.raises(GpuUnavailable, match=r"GPU 3 cannot be used: cudaErrorMemoryAllocation"):
        memory.free_bytes_on(3)


def test_gpu_that_is_too_old_is_refused_before_anything_is_allocated(monkeypatch):
    @contextmanager
    def use(_device):
        yield

    def refuse(device):
        raise GpuUnavailable(f"GPU {device} has compute capability 7.5")

    runtime = SimpleNamespace(CUDARuntimeError=NoMemory)
    twin = SimpleNamespace(cuda=SimpleNamespace(Device=use, runtime=runtime))
    monkeypatch.setattr(memory, "cupy", lambda: twin)
    monkeypatch.setattr(memory, "check_architecture", refuse)
    with pytest.raises(GpuUnavailable, match="GPU 1 has compute capability"):
        memory.free_bytes_on(1)


def test_unused_memory_is_released_on_every_device_after_a_garbage_collection(monkeypatch):
    freed = []

    class Cycle:
        def __init__(self):
            self.itself = self

        def __del__(self):
            freed.append("garbage")

    class Current:
        def __init__(self, number):
            self.number = number

        def __enter__(self):
            freed.append(self.number)

        def __exit__(self, *_error):
            pass

    def pool(name):
        return SimpleNamespace(free_all_blocks=lambda: freed.append(name))

    twin = SimpleNamespace(
        cuda=SimpleNamespace(Device=Current),
        get_default_memory_pool=lambda: pool("device"),
        get_default_pinned_memory_pool=lambda: pool("host"),
    )
    monkeypatch.setattr(memory, "cupy", lambda: twin)
    Cycle()
    memory.release_unused([0, 2])
    assert freed == ["garbage", 0, "device", 2, "device", "host"]


@pytest.mark.gpu
def test_pinned_rows_beyond_host_memory_are_rejected_with_the_rows_that_fit():
    table = EmbeddingTable.make("t", 1024)
    rows = 2 * memory.free_host_bytes() // 4096
    with pytest.raises(
        ConfigError, match=r"needs [\d,]+ bytes of pinned .* at most [\d,]+ rows fit"
    ):
        memory.pinned(table, plan_table_shape(table, rows, rows))


@pytest.mark.gpu
def test_device_memory_reports_uuid_and_bytes_of_nvidia_smi():
    query = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    uuids = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
    for device in range(device_count()):
        before = memory.device_memory(device)
        with loader.cupy().cuda.Device(device):
            allocation = loader.cupy().cuda.Memory(1 << 28)
            uuid, used, total = memory.device_memory(device)
        assert uuid in uuids
        assert used >= before[1] + (1 << 28) - (1 << 24)
        assert 1 << 28 < used < total == before[2]
        del allocation
