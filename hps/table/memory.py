"""The memory that a table's arrays are in: the host's or a device's."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hps import native
from hps.array_inputs import device_number, output_arrays, tensor
from hps.cgroups import free_host_bytes
from hps.errors import BadRequest
from hps.types import KeyArray


class Memory(Protocol):
    """Where a backend's arrays are. ``xp``: the module of these arrays, NumPy or CuPy."""

    @property
    def xp(self) -> Any: ...
    def take(self, name: str, array: Any) -> Any:
        """Return a caller's array in this memory, without a copy if it is there. Raises BadRequest."""

    def output(self, name: str, array: Any) -> Any:
        """Return the caller's output array, which must be in this memory. Raises BadRequest."""

    def to_host(self, array: Any) -> NDArray[Any]: ...
    def distinct(self, keys: KeyArray) -> int:
        """Return the number of different keys."""

    def free_bytes(self) -> int:
        """Return the bytes that a table could take. Raises OSError if they are unknown."""


def _require_host(name: str, array: Any) -> None:
    device = device_number(array)
    if device is not None:
        raise BadRequest(
            f"{name} are on CUDA device {device}, but this table is in host memory: copy them to the host "
            "first (cupy.asnumpy, or tensor.cpu())"
        )


class HostMemory:
    """The host's memory: NumPy arrays."""

    xp: Any = np

    def take(self, name: str, array: Any) -> NDArray[Any]:
        _require_host(name, array)
        return tensor(name, array)

    def output(self, name: str, array: Any) -> NDArray[Any]:
        _require_host(name, array)
        return (output_arrays({"rows": array}) or {})["rows"]

    def to_host(self, array: Any) -> NDArray[Any]:
        return np.asarray(array)

    def distinct(self, keys: KeyArray) -> int:
        return len(native.dedup(keys)[0])

    def free_bytes(self) -> int:
        return free_host_bytes()


class DeviceMemory:
    """The memory of the CUDA device that is current when this is made: CuPy arrays."""

    def __init__(self) -> None:
        from hps.cuda.loader import cupy

        self.xp: Any = cupy()
        self.device = int(self.xp.cuda.runtime.getDevice())

    def take(self, name: str, array: Any) -> Any:
        number = device_number(array)
        if number is None:
            host = tensor(name, array)
            return self.xp.asarray(host) if host.dtype.kind in "biuf" else host  # to be refused
        if number != self.device:
            raise BadRequest(
                f"{name} are on CUDA device {number}, but this table is on device {self.device}: copy them "
                "to that device or to the host"
            )
        if hasattr(array, "__cuda_array_interface__"):
            return self.xp.asarray(array)
        return self.xp.from_dlpack(array)

    def output(self, name: str, array: Any) -> Any:
        if device_number(array) is None:
            raise BadRequest(
                f"{name} are in host memory, but this table is on CUDA device {self.device}: give an array "
                "on that device"
            )
        return self.take(name, array)

    def to_host(self, array: Any) -> NDArray[Any]:
        host: NDArray[Any] = array.get()
        return host

    def distinct(self, keys: KeyArray) -> int:
        return len(self.xp.unique(keys))

    def free_bytes(self) -> int:
        pool = self.xp.get_default_memory_pool()
        return int(self.xp.cuda.runtime.memGetInfo()[0]) + int(pool.free_bytes())
