"""Pinned host memory for arguments and results of kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.cuda.loader import cupy

IN_PLACE = 1 << 19
"""Up to this size a kernel reads and writes the memory where it is, over the bus: the latency of two
copies is worth more than the traffic."""
_ALIGN = 16

Copy = Callable[[NDArray[Any], NDArray[Any]], object]
"""Copies the second array to the first, which has its shape and dtype."""


class StagingBuffer:
    """One buffer of the current device, refilled for each launch. One thread at a time.

    ``copy`` copies a host array into the buffer."""

    def __init__(self, copy: Copy = np.copyto) -> None:
        self._copy = copy
        self._size = 0
        self._grow(1 << 16)

    def begin(self, needed: int, *, in_place: bool = False) -> None:
        """Start over with space for ``needed`` bytes, each array rounded up by `padded_bytes`.

        With ``in_place`` kernels read the buffer over the bus whatever its size: so a fetch takes the time
        of the bus or its own, not the sum. The last launch that used the buffer must have ended."""
        if needed > self._size:
            self._grow(1 << (needed - 1).bit_length())
        self.in_place = in_place or needed <= IN_PLACE
        self.base = self._pinned.ptr if self.in_place else self._device.data.ptr
        self.used = 0

    def allocate(self, count: int, dtype: Any) -> tuple[NDArray[Any], int]:
        """Allocate ``count`` values; return the array and its address for kernels."""
        start = self.used
        array: NDArray[Any] = np.frombuffer(self.host, dtype, count, start)
        self.used = start + padded_bytes(array.nbytes)
        return array, self.base + start

    def put(self, array: Any) -> int:
        """Return the address of ``array`` for kernels, after copying a host array into the buffer; 0 for
        None."""
        if array is None:
            return 0
        if not isinstance(array, np.ndarray):
            return int(array.data.ptr)
        copy, address = self.allocate(array.size, array.dtype)
        self._copy(copy, array)
        return address

    def send(self, stream: Any) -> None:
        """Copy the filled part to the device, unless kernels read it in place."""
        if not self.in_place:
            copy = cupy().cuda.runtime.memcpyAsync
            copy(self.base, self._pinned.ptr, self.used, 1, stream.ptr)

    def steps(self) -> list[Any]:
        """Return what `send` does as steps of the batch scheduler."""
        if self.in_place:
            return []
        from hps.native.scheduler import Step

        return [Step.copy_in(self.base, self._pinned.ptr, self.used)]

    def _grow(self, size: int) -> None:
        cp = cupy()
        self._size = size
        self._device = cp.empty(size, np.uint8)
        self._pinned = cp.cuda.alloc_pinned_memory(size)
        self.host: NDArray[np.uint8] = np.frombuffer(self._pinned, np.uint8, size)


def padded_bytes(nbytes: int) -> int:
    """Return the bytes of a buffer that ``nbytes`` take."""
    return -(-nbytes // _ALIGN) * _ALIGN


def staging_bytes(*arrays: Any) -> int:
    """Return the bytes of a buffer that the host arrays among ``arrays`` take."""
    return sum(padded_bytes(array.nbytes) for array in arrays if isinstance(array, np.ndarray))
