"""Tensors in memory that this process and a Triton on the same machine share.

For large batches: what it saves is measured by `benchmarks/dense_transports.py`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hps.dense.base import NetworkTensor
from hps.dense.triton.host_memory import HostRegion
from hps.dense.triton.transport import (
    CudaSharedMemory,
    SharedMemoryTensors,
    TritonNotConnected,
    TritonRejected,
    TritonTransport,
)
from hps.errors import DeadlineExceeded, DenseModelError, Unavailable

log = logging.getLogger(__name__)
SMALLEST = 1 << 16
_ALIGN = 64
# What regions that nobody here uses and Triton may still know may hold together.
_STALE_BYTES = 1 << 30
# Of them Triton is told to forget so many at a time, and within this time where nobody's run depends on it.
_AT_A_TIME = 64
_FORGET_S = 1.0


class TritonRegion(Protocol):
    """Memory of one thread, of ``size`` bytes. No other ever had its name, in Triton or on this machine."""

    name: str
    size: int
    registered: bool
    """Triton knows it, or may."""
    key: str | CudaSharedMemory
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
        """Triton does not know it any more, or never did."""
        ...


class ThreadRegions:
    """A region for each thread that runs something; a larger one takes its place when it must hold more.

    Triton must allow them (``--allow-client-shm=true`` in newer ones). Outputs whose size cannot be told
    beforehand come in the answer. ``make`` makes a region of a size.

    One that a failed run leaves to Triton is kept until Triton says that it has let go of it. At most a GiB
    waits for that; beyond it runs raise Unavailable.
    """

    def __init__(
        self, make: Callable[[int], TritonRegion] = HostRegion, *, on_device: bool = False
    ) -> None:
        """``on_device``: its regions are a GPU's memory, and take arrays that are."""
        self._make = make
        self.on_device = on_device
        self._own = threading.local()
        self._all: list[TritonRegion] = []
        self._stale: deque[TritonRegion] = deque()
        self._stale_bytes = 0
        self._lock = threading.Lock()

    def infer(
        self,
        transport: TritonTransport,
        inputs: Sequence[tuple[str, str, NDArray[Any]]],
        outputs: Sequence[NetworkTensor],
        left_s: Callable[[], float],
    ) -> dict[str, NDArray[Any]]:
        """As ``transport.infer``. After an error the thread takes another region, for Triton may still write
        to the one it had, unless it never heard of the run; at once for a Triton that was started anew and
        knows of none. Raises Unavailable, too, where there is no memory for a region."""
        for first in (True, False):
            try:
                return self._infer(transport, inputs, outputs, left_s)
            except TritonNotConnected:
                raise
            except BaseException as error:
                self._drop()
                told = isinstance(error, DenseModelError) and "shared memory region" in str(error)
                if not (first and told):
                    raise
        raise AssertionError("the second attempt answers or raises")

    def close(self, transport: TritonTransport) -> None:
        """Nobody may run anything any more. A Triton that answers forgets the regions; memory that another
        one may still use is kept as long as this process lives."""
        with self._lock:
            regions, self._all = self._all, []
        for region in regions:
            self._leave(region)
        self._forget(transport, _within(_FORGET_S))
        if self._stale:
            log.warning(
                "Triton has not said that it uses %d shared regions of %d MiB no more: they are left to it",
                len(self._stale),
                self._stale_bytes >> 20,
            )
            _left.add(self)
        else:
            _left.discard(self)

    def _infer(
        self,
        transport: TritonTransport,
        inputs: Sequence[tuple[str, str, NDArray[Any]]],
        outputs: Sequence[NetworkTensor],
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
        region = self._region(end, transport, left_s)
        if not region.registered:
            _register(region, transport, left_s())
            self._forget(transport, left_s)
        region.put((places[name][0], array) for name, _, array in inputs)
        shared = SharedMemoryTensors(region.name, places)
        answer = transport.infer(inputs, [tensor.name for tensor in outputs], left_s(), shared)
        for name, (tensor, shape) in sized.items():
            answer[name] = region.get(places[name][0], shape, tensor.dtype)
        return {tensor.name: answer[tensor.name] for tensor in outputs}

    def _region(
        self, size: int, transport: TritonTransport, left_s: Callable[[], float]
    ) -> TritonRegion:
        region: TritonRegion | None = getattr(self._own, "region", None)
        if region is not None and region.size >= size:
            return region
        self._drop()
        size = max(SMALLEST, 2 * size if region else size)
        if self._is_full(size):
            self._forget(transport, _within(min(_FORGET_S, left_s())))
        if self._is_full(size):
            raise Unavailable(
                f"Triton has not said that it uses {self._stale_bytes >> 20} MiB of shared memory no more, "
                "which runs that failed have left to it; see whether it hangs"
            )
        larger = self._make(size)
        self._own.region = larger
        with self._lock:
            self._all.append(larger)
        return larger

    def _is_full(self, size: int) -> bool:
        return bool(self._stale) and self._stale_bytes + size > _STALE_BYTES

    def _drop(self) -> None:
        """This thread has no region any more. What Triton mapped stays its own until it is told."""
        region: TritonRegion | None = getattr(self._own, "region", None)
        if region is None:
            return
        self._own.region = None
        with self._lock:
            self._all.remove(region)
        self._leave(region)

    def _leave(self, region: TritonRegion) -> None:
        region.drop()
        if not region.registered:
            region.release()
            return
        with self._lock:
            self._stale.append(region)
            self._stale_bytes += region.size

    def _forget(self, transport: TritonTransport, left_s: Callable[[], float]) -> None:
        """Triton unregisters regions that are no more; what it does not hear now is told another time."""
        for _ in range(min(_AT_A_TIME, len(self._stale))):
            with self._lock:
                if not self._stale:  # other threads were quicker
                    return
                region = self._stale.popleft()
            try:
                gone = _unregister(region, transport, left_s())
            except BaseException as error:
                self._stale.append(region)
                if not isinstance(error, (DenseModelError, DeadlineExceeded)):
                    raise
                return
            if not gone:
                self._stale.append(region)
                continue
            with self._lock:
                self._stale_bytes -= region.size
            region.release()


_left: set[ThreadRegions] = set()
"""Closed, with regions that their Triton may still use."""


def _register(region: TritonRegion, transport: TritonTransport, left_s: float) -> None:
    region.registered = True
    try:
        transport.register(region.name, region.key, region.size, left_s)
    except (TritonNotConnected, TritonRejected):
        region.registered = False
        raise


def _unregister(region: TritonRegion, transport: TritonTransport, left_s: float) -> bool:
    """Whether Triton has let go of it. It refuses to while a run uses it."""
    try:
        transport.unregister(region.name, region.key, left_s)
    except TritonRejected as error:
        if "in use" in str(error):
            return False
        log.warning("Triton does not know the shared region %s: %s", region.name, error)
    return True


def _within(seconds: float) -> Callable[[], float]:
    until = time.monotonic() + seconds
    return lambda: max(0.0, until - time.monotonic())
