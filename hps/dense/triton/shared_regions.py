"""Shared memory regions for tensors of this process and a Triton server on the same machine.

For large batches: `benchmarks/dense_transports.py` measures what it saves.
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
# The limit in bytes of dropped regions that Triton may still have registered.
_STALE_BYTES = 1 << 30
# How many of them are unregistered at a time, and how long that may take if no run depends on it.
_AT_A_TIME = 64
_UNREGISTER_S = 1.0


class TritonRegion(Protocol):
    """Memory of one thread, of ``size`` bytes. Its name is never reused, in Triton or on this machine."""

    name: str
    size: int
    registered: bool
    """True if Triton has, or may have, registered the region."""
    key: str | CudaSharedMemory
    """Name or CUDA handle by which Triton maps the region."""

    def put(self, tensors: Iterable[tuple[int, NDArray[Any]]]) -> None:
        """Write arrays at their offsets; complete on return."""
        ...

    def get(self, offset: int, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Copy an array out of the region."""
        ...

    def drop(self) -> None:
        """Stop using the region in this process; Triton may still use it."""
        ...

    def release(self) -> None:
        """Free the region: Triton has unregistered it, or never knew it."""
        ...


class ThreadRegions:
    """A region per thread that runs networks; a larger one replaces it when needed.

    Triton must allow them (``--allow-client-shm=true`` in newer versions). Outputs of a size that is
    unknown beforehand come in the response. ``make`` makes a region of a size.

    A region of a failed run is kept until Triton has unregistered it. At most a GiB waits for that; beyond
    it runs raise Unavailable.
    """

    def __init__(
        self, make: Callable[[int], TritonRegion] = HostRegion, *, on_device: bool = False
    ) -> None:
        """``on_device``: the regions are GPU memory, and take device arrays."""
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
        """Run ``transport.infer`` with tensors in this thread's region.

        After an error the thread takes another region, since Triton may still write to the old one; not
        if Triton never received the run. If a restarted Triton does not know the region, the run is
        repeated immediately. Also raises Unavailable if there is no memory for a region."""
        for first in (True, False):
            try:
                return self._infer(transport, inputs, outputs, left_s)
            except TritonNotConnected:
                raise
            except BaseException as error:
                self._drop()
                is_unknown_region = isinstance(
                    error, DenseModelError
                ) and "shared memory region" in str(error)
                if not (first and is_unknown_region):
                    raise
        raise AssertionError("the second attempt answers or raises")

    def close(self, transport: TritonTransport) -> None:
        """Unregister all regions; no run may be in flight.

        If Triton does not respond, memory that it may still use is kept until the process ends."""
        with self._lock:
            regions, self._all = self._all, []
        for region in regions:
            self._retire(region)
        self._unregister_stale(transport, _within(_UNREGISTER_S))
        if self._stale:
            log.warning(
                "Triton did not unregister %d shared regions (%d MiB); keeping them until this process ends",
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
            # An input and an output may have the same name.
            if min(shape) < 0 or tensor.name in places:
                continue
            sized[tensor.name] = tensor, shape
            places[tensor.name] = (end, int(np.prod(shape)) * tensor.dtype.itemsize)
            end += -(-places[tensor.name][1] // _ALIGN) * _ALIGN
        region = self._region(end, transport, left_s)
        if not region.registered:
            _register(region, transport, left_s())
            self._unregister_stale(transport, left_s)
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
            self._unregister_stale(transport, _within(min(_UNREGISTER_S, left_s())))
        if self._is_full(size):
            raise Unavailable(
                f"Triton has not unregistered {self._stale_bytes >> 20} MiB of shared memory of failed runs; "
                "check whether it hangs"
            )
        larger = self._make(size)
        self._own.region = larger
        with self._lock:
            self._all.append(larger)
        return larger

    def _is_full(self, size: int) -> bool:
        return bool(self._stale) and self._stale_bytes + size > _STALE_BYTES

    def _drop(self) -> None:
        """Drop this thread's region. Triton's mapping stays until it is unregistered."""
        region: TritonRegion | None = getattr(self._own, "region", None)
        if region is None:
            return
        self._own.region = None
        with self._lock:
            self._all.remove(region)
        self._retire(region)

    def _retire(self, region: TritonRegion) -> None:
        region.drop()
        if not region.registered:
            region.release()
            return
        with self._lock:
            self._stale.append(region)
            self._stale_bytes += region.size

    def _unregister_stale(self, transport: TritonTransport, left_s: Callable[[], float]) -> None:
        """Unregister dropped regions at Triton; failed ones are retried later."""
        for _ in range(min(_AT_A_TIME, len(self._stale))):
            with self._lock:
                if not self._stale:  # another thread did it
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
"""Closed instances whose regions Triton may still use; referenced here so that these are not freed."""


def _register(region: TritonRegion, transport: TritonTransport, left_s: float) -> None:
    region.registered = True
    try:
        transport.register(region.name, region.key, region.size, left_s)
    except (TritonNotConnected, TritonRejected):
        region.registered = False
        raise


def _unregister(region: TritonRegion, transport: TritonTransport, left_s: float) -> bool:
    """Return whether Triton has unregistered the region. It refuses while a run uses it."""
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
