"""Compiles the .cu files in this folder, kernel by kernel, on first use.

CuPy caches compiled code on disk under a key that leaves out included headers, so a digest of all sources
is part of the options: a changed header never gets outdated code.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.errors import GpuUnavailable, Unsupported

FOLDER = Path(__file__).resolve().parent
DEVICES = Path("/dev")
FILES = {
    "fetch_kernel": "fetch.cu",
    "sweep_kernel": "fetch.cu",
    "count_kernel": "fetch.cu",
    "dedup_kernel": "write.cu",
    "write_kernel": "write.cu",
    "compact_kernel": "write.cu",
    "evict_kernel": "write.cu",
    "leave_kernel": "write.cu",
    "clear_kernel": "scan.cu",
    "export_kernel": "scan.cu",
    "gather_kernel": "scan.cu",
    "pool_kernel": "pool.cu",
    "pool_rows_kernel": "pool.cu",
    "pool_warp_kernel": "pool_warp.cu",
    "decode_warp_kernel": "pool_warp.cu",
    "partition_kernel": "partition.cu",
    "scatter_kernel": "scatter.cu",
    "place_kernel": "scatter.cu",
    "scored_link_kernel": "scored_write.cu",
    "scored_write_kernel": "scored_write.cu",
    "scored_find_kernel": "scored_table.cu",
    "scored_split_kernel": "scored_table.cu",
}
"""Kernel -> the file that holds it."""

BLOCK = 256
ARCHITECTURES = (80, 89, 90, 100, 120)
"""The compute capabilities, times ten, for which the tests compile every kernel. Devices below the first one
have no asynchronous copies to shared memory and no cache policies, which the kernels use."""


@cache
def cupy() -> Any:
    """Return the module `cupy` if a device is usable. Raises Unsupported naming what is missing."""
    try:
        import cupy as module
    except ImportError as error:
        raise Unsupported(
            "the GPU cache needs CuPy: pip install 'hps-server[gpu]', or configure the CPU cache"
        ) from error
    try:
        count = module.cuda.runtime.getDeviceCount()
    except module.cuda.runtime.CUDARuntimeError as error:
        raise Unsupported(f"the GPU cache needs a CUDA device: {error}") from error
    if not count:
        raise Unsupported("the GPU cache needs a CUDA device; none is visible")
    return module


@contextmanager
def keep_device() -> Iterator[None]:
    """Restore the thread's current device, which a library may change."""
    runtime = cupy().cuda.runtime
    device = runtime.getDevice()
    try:
        yield
    finally:
        if runtime.getDevice() != device:
            runtime.setDevice(device)


def missing_requirement() -> str | None:
    """Return the reason why the GPU cache cannot be used in this process; None if it can."""
    try:
        cupy()
    except Unsupported as error:
        return str(error)
    return None


def device_count() -> int:
    """Return the number of GPUs that this process sees. Raises Unsupported without any."""
    return int(cupy().cuda.runtime.getDeviceCount())


def check_architecture(device: int) -> None:
    """Raise GpuUnavailable unless the kernels can run on ``device``."""
    capability = int(cupy().cuda.Device(device).compute_capability)
    if capability < ARCHITECTURES[0]:
        found, least = (f"{each // 10}.{each % 10}" for each in (capability, ARCHITECTURES[0]))
        raise GpuUnavailable(
            f"GPU {device} has compute capability {found}, and the GPU cache's kernels need {least} (A100) "
            "or newer; name another GPU in tiers.gpu.devices, or set tiers.gpu.use: off"
        )


def missing_device(numbers: Iterable[int], count: int) -> str | None:
    """Return an error text for the first of ``tiers.gpu.devices`` that is not among ``count`` GPUs."""
    for number in numbers:
        if number >= count:
            found = f"this machine has {count}, numbered from 0"
            return f"GPU {number} of tiers.gpu.devices does not exist: {found}"
    return None


def has_gpu() -> bool:
    """Look for any GPU device, usable or not: in a container, devices keep the machine's numbers."""
    return any(DEVICES.glob("nvidia[0-9]*"))


@cache
def digest() -> str:
    """Return the digest of all CUDA sources, sixteen hexadecimal digits."""
    total = hashlib.sha256()
    for file in sorted(FOLDER.glob("*.cu*")):
        total.update(f"{file.name}\0".encode())
        total.update(hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()[:16]


def options() -> list[str]:
    """Return NVRTC's options except the architecture."""
    return ["-std=c++17", f"-I{FOLDER}", f"-DHPS_SOURCES=0x{digest()}"]


class KernelStruct:
    """A kernel's argument struct, zero-initialised; fields are set by name."""

    __slots__ = ("_pointers", "array", "at")

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.array: NDArray[Any] = np.zeros((), dtype)
        self._pointers = (ctypes.c_void_p * 1)(self.array.ctypes.data)
        self.at = ctypes.addressof(self._pointers)

    def __getitem__(self, name: str) -> Any:
        return self.array[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.array[name] = value


class CudaKernel:
    """A compiled kernel that takes one struct by value."""

    def __init__(self, pointer: int, owner: Any) -> None:
        self._pointer, self._owner = pointer, owner
        self._launch = cupy().cuda.driver.launchKernel

    @property
    def address(self) -> int:
        """The handle of the function (``CUfunction``), valid as long as this object."""
        return int(self._pointer)

    def launch(self, blocks: int, args: KernelStruct, stream: int) -> None:
        """Start ``blocks`` blocks of `BLOCK` threads with ``args`` on ``stream`` (a CUDA stream's pointer).
        ``args`` is read before this returns."""
        self._launch(self._pointer, blocks, 1, 1, BLOCK, 1, 1, 0, stream, args.at, 0)


def kernel(expression: str, defines: tuple[str, ...] = ()) -> CudaKernel:
    """Return a kernel by name, for example ``gather_kernel<8, 16>``, for the current device.

    ``defines`` (``NAME=VALUE``) make special builds for tests. Raises GpuUnavailable for a device that is too
    old.
    """
    return _kernel(cupy().cuda.runtime.getDevice(), expression, defines)


@cache
def _kernel(device: int, expression: str, defines: tuple[str, ...]) -> CudaKernel:
    check_architecture(device)
    code = (FOLDER / FILES[expression.partition("<")[0]]).read_text()
    flags = (*options(), *(f"-D{define}" for define in defines))
    module = cupy().RawModule(
        code=code, options=flags, name_expressions=(expression,), backend="nvrtc"
    )
    function = module.get_function(expression)
    return CudaKernel(function.kernel.ptr, (module, function))
