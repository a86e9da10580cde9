"""Available memory of devices and host, allocation, and its error messages."""

from __future__ import annotations

import ctypes
import gc
import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from hps.cgroups import free_host_bytes
from hps.cuda import layout
from hps.cuda.layout import GpuTableShape
from hps.cuda.loader import check_architecture, cupy
from hps.errors import ConfigError, GpuUnavailable
from hps.types import EmbeddingTable

_NO_MEMORY = 2  # cudaErrorMemoryAllocation
_KEEP_FREE = 0.05
"""The share of free memory, or of a failed allocation, that a suggested capacity leaves."""


def free_bytes() -> int:
    """Return the free bytes of the current device, CuPy's unused memory included."""
    cp = cupy()
    free, _total = cp.cuda.runtime.memGetInfo()
    return int(free + cp.get_default_memory_pool().free_bytes())


def free_bytes_on(device: int) -> int:
    """Return the free bytes of ``device``, as `free_bytes` does.

    Raises GpuUnavailable if this process cannot use the device: a context alone takes half a gigabyte, and an
    old device does not run the kernels."""
    cp = cupy()
    try:
        with cp.cuda.Device(device):
            check_architecture(device)
            return free_bytes()
    except cp.cuda.runtime.CUDARuntimeError as error:
        raise GpuUnavailable(
            f"GPU {device} cannot be used: {error}. End other processes there, or name another GPU in "
            "tiers.gpu.devices"
        ) from error


def device_memory(device: int) -> tuple[str, int, int]:
    """Return a device's UUID as NVIDIA's tools show it, and its used and total bytes of memory."""
    cp = cupy()
    with cp.cuda.Device(device):
        free, total = cp.cuda.runtime.memGetInfo()
    return f"GPU-{_uuid_of(device)}", int(total - free), int(total)


def _uuid_of(device: int) -> UUID:
    """Read the UUID from the driver: CuPy's `getDeviceProperties` cuts it at the first zero byte."""
    driver = ctypes.CDLL("libcuda.so.1")
    handle, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    failed = driver.cuDeviceGet(ctypes.byref(handle), device)
    if failed or (failed := driver.cuDeviceGetUuid_v2(uuid, handle)):
        raise RuntimeError(f"the CUDA driver did not give device {device}'s UUID (error {failed})")
    return UUID(bytes=bytes(uuid))


def release_unused(devices: Iterable[int]) -> None:
    """Give the memory that CuPy keeps for later allocations back to ``devices`` and the host.

    Collects garbage first: cycles, such as those of exceptions, may hold arrays."""
    cp = cupy()
    gc.collect()
    for device in devices:
        with cp.cuda.Device(device):
            cp.get_default_memory_pool().free_all_blocks()
    cp.get_default_pinned_memory_pool().free_all_blocks()


def pinned(table: EmbeddingTable, shape: GpuTableShape) -> Any:
    """Allocate pinned host memory for the host rows of ``shape``, which kernels can read and write.

    None if there are none. Raises ConfigError if the allocation fails."""
    cp, size = cupy(), shape.host_bytes
    if not size:
        return None
    if size > free_host_bytes():
        raise _too_much_pinned(table, shape)
    try:
        return cp.cuda.PinnedMemoryPointer(cp.cuda.PinnedMemory(size), 0)
    except cp.cuda.runtime.CUDARuntimeError as error:
        allowed = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        limit = "any number" if allowed == resource.RLIM_INFINITY else f"{allowed:,}"
        why = f"; the driver refused them ({error}), and this process may lock {limit} (ulimit -l)"
        raise _too_much_pinned(table, shape, why) from error


def out_of_memory_error(table: EmbeddingTable, shape: GpuTableShape) -> GpuUnavailable:
    """Make the error for arrays of ``shape`` that do not fit on the device."""
    free = free_bytes()
    fitting = layout.fitting_capacity(
        table, suggested_bytes(free, shape.bytes), scored=shape.scored, load=shape.load
    )
    return GpuUnavailable(
        f"the GPU cache of table {table.id} needs {shape.bytes:,} bytes for "
        f"{shape.capacity:,} rows, and {free:,} are free on the device; at most "
        f"{fitting:,} rows fit"
    )


def _too_much_pinned(table: EmbeddingTable, shape: GpuTableShape, why: str = "") -> ConfigError:
    size, free = shape.host_bytes, free_host_bytes()
    fitting = suggested_bytes(free, size)
    return ConfigError(
        f"the GPU cache of table {table.id} needs {size:,} bytes of pinned host memory for "
        f"{shape.host_rows:,} rows, and {free:,} are free on the host{why}; at most "
        f"{fitting // shape.stride:,} rows fit, in {fitting:,} bytes: lower tiers.gpu.host_bytes (or "
        "host_rows) to that"
    )


@contextmanager
def allocate_buffers(what: str) -> Iterator[None]:
    """Convert failed allocations of ``what``, on the device or in pinned host memory, to GpuUnavailable."""
    cp = cupy()
    try:
        yield
    except (cp.cuda.memory.OutOfMemoryError, cp.cuda.runtime.CUDARuntimeError) as error:
        if getattr(error, "status", _NO_MEMORY) != _NO_MEMORY:
            raise
        raise GpuUnavailable(
            f"the GPU cache finds no memory for {what}: {error}; {free_bytes():,} bytes are free on the "
            f"device, {free_host_bytes():,} on the host. Lower tiers.gpu.workspaces, or leave the device more"
        ) from error


def suggested_bytes(free: int, requested: int) -> int:
    """Return the bytes to suggest after an allocation of ``requested`` bytes has failed."""
    return int(min(free, requested) * (1 - _KEEP_FREE))
