"""Tensors in memory that this process and a Triton on the same machine share.

For large batches: what it saves is measured by `benchmarks/dense_transports.py`.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.shared_memory import SharedMemory
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hps.dense.base import TensorInfo
from hps.dense.triton.transport import OnDevice, Placed, Transport, Unreachable
from hps.errors import DeadlineExceeded, DenseModelError

_ALIGN = 64
_SMALLEST = 1 << 16
# Regions that Triton may still know and has to be told to forget: at most so many are remembered.
_STALE = 64
_CLOSE_S = 1.0


class Region(Protocol):
    """Memory of one thread, of ``size`` bytes. No other ever had its name, in Triton or on this machine."""

    name: str
    size: int
    registered: bool
    key: str | OnDevice
    """What Triton finds it by."""

    def put(self, tensors: Iterable[tuple[int, NDArray[Any]]]) -> None:
        """Write arrays at their offsets; they are there when this returns."""
        ...

    def get(self, offset: int, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        """A copy of the array there."""
        ...

    def drop(self) -> None:
        """Nobody here uses it any more, Triton may."""
        ...

    def release(self) -> None:
        """Triton does not know it any more."""
        ...


class HostRegion:
    """A `Region` of the host's memory."""

    def __init__(self, size: int) -> None:
        self.name = unused_name()
        self.key: str | OnDevice = f"/{self.name}"
        self.registered = False
        self._memory = SharedMemory(self.name, create=True, size=size)
        self.size = self._memory.size

    def put(self, tensors: Iterable[tuple[int, NDArray[Any]]]) -> None:
        for offset, array in tensors:
            self._array(offset, array.shape, array.dtype)[...] = array

    def get(self, offset: int, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        return self._array(offset, shape, dtype).copy()

    def drop(self) -> None:
        self._memory.close()
        self._memory.unlink()

    def release(self) -> None:
        """What Triton mapped was its own."""

    def _array(self, offset: int, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        return np.ndarray(shape, dtype, buffer=self._memory.buf, offset=offset)


def unused_name() -> str:
    return f"hps-{os.getpid()}-{secrets.token_hex(8)}"


class Regions:
    """A region for each thread that runs something; a larger one takes its place when it must hold more.

    Triton must allow them (``--allow-client-shm=true`` in newer ones). Outputs whose size cannot be told
    beforehand come in the answer. ``make`` makes a region of a size.
    """

    def __init__(self, make: Callable[[int], Region] = HostRegion) -> None:
        self._make = make
        self._own = threading.local()
        self._all: list[Region] = []
        self._stale: deque[Region] = deque(maxlen=_STALE)
        self._lock = threading.Lock()

    def infer(
        self,
        transport: Transport,
        inputs: Sequence[tuple[str, str, NDArray[Any]]],
        outputs: Sequence[TensorInfo],
        left_s: Callable[[], float],
    ) -> dict[str, NDArray[Any]]:
        """As ``transport.infer``. After an error the thread takes another region, for Triton may still write
        to the one it had; at once for a Triton that was started anew and knows of none."""
        try:
            return self._infer(transport, inputs, outputs, left_s)
        except BaseException as error:
            self._drop()
            if not isinstance(error, DenseModelError) or "shared memory region" not in str(error):
                raise
        try:
            return self._infer(transport, inputs, outputs, left_s)
        except BaseException:
            self._drop()
            raise

    def close(self, transport: Transport) -> None:
        """Nobody may run anything any more. A Triton that answers forgets the regions."""
        with self._lock:
            for region in self._all:
                self._stale.append(region)
                region.drop()
            self._all.clear()
        until = time.monotonic() + _CLOSE_S
        self._forget(transport, lambda: max(0.0, until - time.monotonic()))

    def _infer(
        self,
        transport: Transport,
        inputs: Sequence[tuple[str, str, NDArray[Any]]],
        outputs: Sequence[TensorInfo],
        left_s: Callable[[], float],
    ) -> dict[str, NDArray[Any]]:
        batch = len(inputs[0][2])
        places: dict[str, tuple[int, int]] = {}
        end = 0
        for name, _, array in inputs:
            places[name] = (end, array.nbytes)
            end += -(-array.nbytes // _ALIGN) * _ALIGN
        sized = {}
        for tensor in outputs:
            shape = (batch, *tensor.shape[1:])
            # The name of an input may be that of an output.
            if min(shape) < 0 or tensor.name in places:
                continue
            sized[tensor.name] = tensor, shape
            places[tensor.name] = (end, int(np.prod(shape)) * tensor.dtype.itemsize)
            end += -(-places[tensor.name][1] // _ALIGN) * _ALIGN
        region = self._region(end)
        if not region.registered:
            transport.register(region.name, region.key, region.size, left_s())
            region.registered = True
            self._forget(transport, left_s)
        region.put((places[name][0], array) for name, _, array in inputs)
        shared = Placed(region.name, places)
        answer = transport.infer(inputs, [tensor.name for tensor in outputs], left_s(), shared)
        for name, (tensor, shape) in sized.items():
            answer[name] = region.get(places[name][0], shape, tensor.dtype)
        return {tensor.name: answer[tensor.name] for tensor in outputs}

    def _region(self, size: int) -> Region:
        region: Region | None = getattr(self._own, "region", None)
        if region is not None and region.size >= size:
            return region
        self._drop()
        larger = self._make(max(_SMALLEST, 2 * size if region else size))
        self._own.region = larger
        with self._lock:
            self._all.append(larger)
        return larger

    def _drop(self) -> None:
        """This thread has no region any more. What Triton mapped stays its own until it is told."""
        region: Region | None = getattr(self._own, "region", None)
        if region is None:
            return
        self._own.region = None
        with self._lock:
            self._all.remove(region)
            self._stale.append(region)
        region.drop()

    def _forget(self, transport: Transport, left_s: Callable[[], float]) -> None:
        """Triton unregisters the regions that are no more; what it does not hear now is told another time."""
        while self._stale:
            try:
                region = self._stale.popleft()
            except IndexError:  # another thread was quicker
                return
            try:
                transport.unregister(region.name, region.key, left_s())
            except (Unreachable, DeadlineExceeded):
                self._stale.append(region)
                return
            except DenseModelError:  # it never knew this one
                pass
            region.release()
