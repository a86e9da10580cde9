"""DeviceSpace: streams and arrays on one device for lookups."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.array_inputs import device_number
from hps.cuda.cuda_graph import CudaGraph, record
from hps.cuda.device import CudaDevice
from hps.cuda.loader import cupy
from hps.errors import BadRequest
from hps.native import COMPILED
from hps.tiers.base import Part
from hps.types import EmbeddingTable, KeyArray

if COMPILED:
    from hps.native.launching import order_after

log = logging.getLogger(__name__)
_ALIGN = 256
_INT64, _FLAT = np.dtype(np.int64), (8,)
"""Dtype and strides of contiguous keys."""


class DeviceParts:
    """New parts with their answers on one device.

    ``block`` holds the versions of all parts, then their sources, so that one copy brings them to the host.
    """

    def __init__(self, parts: list[Part], block: Any, keys: int) -> None:
        self.parts = parts
        self._block = block
        self._keys = keys
        self._ends = np.cumsum([len(part.keys) for part in parts])[:-1]

    def reports(self, stream: Any) -> tuple[list[NDArray[np.uint64]], list[NDArray[np.uint8]]]:
        """Wait for ``stream``, and return each part's versions and sources on the host."""
        block: NDArray[np.uint8] = self._block.get(stream=stream)
        versions = block[: 8 * self._keys].view(np.uint64)
        sources = block[8 * self._keys :]
        return np.split(versions, self._ends), np.split(sources, self._ends)


class DeviceSpace:
    """Allocates and copies on one device. Thread-safe."""

    kind = "cuda"
    """ONNX Runtime's name of the memory that the arrays are in."""

    def __init__(self, device: int) -> None:
        self._cupy = cupy()
        self.device = CudaDevice(device)
        self.number = device
        self._streams: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def take_stream(self) -> Any:
        """Return a stream of this device; the caller gives it back when its work has finished."""
        try:
            return self._streams.get_nowait()
        except queue.Empty:
            with self.device:
                return self._cupy.cuda.Stream(non_blocking=True)

    def current_stream(self) -> Any:
        """Return the thread's current stream of the current device."""
        return self._cupy.cuda.get_current_stream()

    def give_back(self, stream: Any) -> None:
        self._streams.put(stream)

    def event(self) -> Any:
        """Make an event for `after_current`."""
        with self.device:
            return self._cupy.cuda.Event(disable_timing=True)

    def after_current(self, stream: Any, event: Any) -> None:
        """Let ``stream`` wait for the work on the thread's current stream of the current device, if it is
        another one.

        ``event`` must not be in use by another thread."""
        current = self._cupy.cuda.get_current_stream()
        if current.ptr == stream.ptr:
            return
        if COMPILED:
            order_after(stream.ptr, current.ptr, event.ptr)
        else:
            event.record(current)
            stream.wait_event(event)

    def allocate(self, size: int) -> Any:
        """Allocate ``size`` bytes on the current device, for `array` and `address`.

        They must be used on the thread's current stream, or on one ordered after it: the memory may be
        that of an array which was released while work on that stream still uses it."""
        return self._cupy.cuda.alloc(size)

    def holds(self, array: Any) -> bool:
        """Return whether ``array`` is a CuPy array on this device."""
        return type(array) is self._cupy.ndarray and array.data.device_id == self.number

    def device_keys(self, name: str, keys: Any) -> Any:
        """Return ``keys``, integers on a device, as a C-contiguous CuPy array of int64; None for others.

        Takes CuPy and Torch arrays, and any with ``__cuda_array_interface__`` or ``__dlpack__``, without a
        copy if they are int64 or uint64, which is reinterpreted. Raises BadRequest for keys that are not
        integers, or on another device."""
        cp = self._cupy
        if self.holds(keys) and keys.dtype == _INT64 and keys.strides == _FLAT:
            return keys  # the common case
        if not isinstance(keys, cp.ndarray):
            if hasattr(keys, "__cuda_array_interface__"):
                keys = cp.asarray(keys)
            elif device_number(keys) is not None:
                keys = cp.from_dlpack(keys)
            else:
                return None
        if keys.dtype.kind not in "iu" or not keys.ndim:
            raise BadRequest(
                f"feature {name!r}: keys on a device must be integers (batch,) or (batch, hotness), got "
                f"{keys.shape} {keys.dtype}"
            )
        if keys.data.device_id != self.number:
            raise BadRequest(
                f"feature {name!r}: the keys are on GPU {keys.data.device_id}, the rows on GPU "
                f"{self.number}; copy the keys there"
            )
        if keys.dtype == np.int64 and keys.flags.c_contiguous:
            return keys
        if keys.dtype.itemsize == 8:
            return cp.ascontiguousarray(keys).view(np.int64)
        return cp.ascontiguousarray(keys, np.int64)

    def bytes(self, size: int) -> Any:
        """Allocate ``(size,) uint8`` of device memory, for use on any stream."""
        with self.device:
            return self._cupy.empty(size, np.uint8)

    def pinned(self, size: int) -> NDArray[np.uint8]:
        """Allocate ``(size,) uint8`` of pinned host memory, for asynchronous copies."""
        with self.device:
            memory = self._cupy.cuda.alloc_pinned_memory(size)
        return np.frombuffer(memory, np.uint8, size)

    def array(self, block: Any, offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return the array at ``offset`` bytes of ``block``, memory of `allocate`, which it keeps."""
        return self._cupy.ndarray(shape, dtype, block + offset if offset else block)

    def address(self, block: Any) -> int:
        """Return the address of memory of `allocate` for kernels."""
        address: int = block.ptr
        return address

    def array_address(self, array: Any) -> int:
        """Return the address of ``array`` on the device for kernels."""
        address: int = array.data.ptr
        return address

    def clear(self, array: Any, stream: Any) -> None:
        """Fill ``array`` with zeros on ``stream``."""
        array.data.memset_async(0, array.nbytes, stream)

    def to_host(self, array: Any, stream: Any) -> NDArray[Any]:
        """Copy ``array`` to the host, after the work on ``stream``."""
        copy: NDArray[Any] = array.get(stream=stream)
        return copy

    def fill_rows(self, out: Any, positions: KeyArray, row: NDArray[Any], stream: Any) -> None:
        """Write ``row (dim,)`` to the ``positions`` of ``out (n, dim)``, on ``stream``."""
        with self.device, stream:
            out[self._cupy.asarray(positions)] = self._cupy.asarray(row)

    def copy(self, to: int, source: int, nbytes: int, stream: Any) -> None:
        """Copy between two addresses, on host or device, asynchronously."""
        self._cupy.cuda.runtime.memcpyAsync(to, source, nbytes, 4, stream.ptr)

    def copy_to_host(self, to: NDArray[Any], array: Any, stream: Any) -> None:
        """Copy ``array`` asynchronously into ``to``, pinned memory of the same size."""
        self.copy(to.ctypes.data, array.data.ptr, to.nbytes, stream)

    def record(self, stream: Any, work: Callable[[], None]) -> CudaGraph | None:
        """Record ``work`` as a CUDA graph; see hps/cuda/cuda_graph.py."""
        with self.device:
            return record(stream, work)

    # -- steps of the batch scheduler --------------------------------------------------------------

    @property
    def context(self) -> int:
        """The CUDA context of the current device; enter ``device`` first."""
        self._cupy.cuda.runtime.deviceSynchronize()  # creates it
        return int(self._cupy.cuda.driver.ctxGetCurrent())

    def copy_step(self, device: int, host: int, nbytes: int, *, inwards: bool) -> Any:
        """Make the step that copies between an address on the device and pinned memory."""
        from hps.native.scheduler import Step

        if inwards:
            return Step.copy_in(device, host, nbytes)
        return Step.copy_out(host, device, nbytes)

    def clear_step(self, array: Any) -> Any:
        """Make the step that fills ``array`` with zeros."""
        from hps.native.scheduler import Step

        return Step.clear(array.data.ptr, array.nbytes)

    def graph_step(self, graph: CudaGraph) -> Any:
        """Make the step that launches a recorded graph."""
        from hps.native.scheduler import Step

        return Step.graph(graph.address)

    def call_step(self, work: Callable[[], None], stream: Any) -> Any:
        """Make the step that calls ``work``, which starts work on ``stream``, on this device."""
        from hps.native.scheduler import Step

        def call() -> bool:
            try:
                with self.device:
                    work()
            except Exception:
                log.exception("a batch failed on GPU %d", self.device.id)
                return False
            return True

        return Step.call(call)

    def assign(self, to: Any, source: Any, stream: Any) -> None:
        """Assign ``to[...] = source`` on ``stream``, which converts dtypes and broadcasts."""
        with self.device, stream:
            to[...] = source

    def upload(self, array: NDArray[Any]) -> Any:
        """Copy ``array`` to the device and wait for it."""
        with self.device:
            return self._cupy.asarray(array)

    def empty(self, shape: tuple[int, ...], dtype: Any, stream: Any) -> Any:
        with self.device, stream:
            return self._cupy.empty(shape, dtype)

    def parts(
        self, requests: Sequence[tuple[EmbeddingTable, KeyArray]], stream: Any
    ) -> DeviceParts:
        """Make parts for ``keys (n,)`` of each table, for use on ``stream``."""
        cp = self._cupy
        total = sum(len(keys) for _, keys in requests)
        rows_at, size = [], 0
        for table, keys in requests:
            rows_at.append(size)
            size += -(-len(keys) * table.row_bytes // _ALIGN) * _ALIGN
        with self.device, stream:
            block, rows = cp.zeros(9 * total, np.uint8), cp.empty(size, np.uint8)
        parts, first = [], 0
        for (table, keys), at in zip(requests, rows_at, strict=True):
            n = len(keys)
            parts.append(
                Part(
                    table,
                    keys,
                    cp.ndarray((n, table.row_width), table.row_dtype, rows.data + at),
                    cp.ndarray((n,), np.uint64, block.data + 8 * first),
                    cp.ndarray((n,), np.uint8, block.data + 8 * total + first),
                    np.arange(n),
                )
            )
            first += n
        return DeviceParts(parts, block, total)
