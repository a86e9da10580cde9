"""CUDA shared memory for tensors of this process and a Triton server on the same machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.cuda.loader import cupy
from hps.dense.triton.host_memory import unused_name
from hps.dense.triton.transport import CudaSharedMemory
from hps.errors import Unavailable


class DeviceRegion:
    """A `TritonRegion` in the memory of GPU number ``device``; Triton must use the same number.

    It is freed once Triton has unregistered it; CUDA leaves undefined what happens otherwise.
    Raises Unavailable if the GPU has no memory left, or shares none with other processes."""

    def __init__(self, device: int, size: int) -> None:
        cp = self._cupy = cupy()
        self._device = cp.cuda.Device(device)
        self.name = unused_name()
        self.size = size
        self.registered = False
        with self._device:
            self._stream = cp.cuda.Stream(non_blocking=True)
            try:
                # Not from CuPy's pool: a CUDA handle stands for a whole allocation.
                self._memory = cp.cuda.Memory(size)
            except cp.cuda.runtime.CUDARuntimeError as error:
                raise Unavailable(
                    f"GPU {device} has no {size} bytes to share with Triton ({error}); leave it more "
                    "memory, or set dense.triton.shared_memory to system"
                ) from None
            try:
                handle = cp.cuda.runtime.ipcGetMemHandle(self._memory.ptr)
            except cp.cuda.runtime.CUDARuntimeError as error:
                raise Unavailable(
                    f"GPU {device} shares no memory with other processes ({error}); start the container "
                    "with --ipc=host, or set dense.triton.shared_memory to system"
                ) from None
        self.key: str | CudaSharedMemory = CudaSharedMemory(handle, device)

    def put(self, tensors: Iterable[tuple[int, Any]]) -> None:
        """Write host or device arrays; device arrays must be C-contiguous and complete."""
        with self._device:
            kept = []
            for offset, array in tensors:
                if isinstance(array, np.ndarray):
                    kept.append(np.ascontiguousarray(array))
                    source = kept[-1].ctypes.data
                else:
                    source = array.data.ptr
                self._copy(self._memory.ptr + offset, source, array.nbytes)
            self._stream.synchronize()

    def get(self, offset: int, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        array: NDArray[Any] = np.empty(shape, dtype)
        with self._device:
            self._copy(array.ctypes.data, self._memory.ptr + offset, array.nbytes)
            self._stream.synchronize()
        return array

    def drop(self) -> None:
        """Keep the memory: Triton may still use it."""

    def release(self) -> None:
        self._memory = None

    def _copy(self, to: int, source: int, nbytes: int) -> None:
        runtime = self._cupy.cuda.runtime
        runtime.memcpyAsync(to, source, nbytes, runtime.memcpyDefault, self._stream.ptr)


__all__ = ["DeviceRegion"]
