"""CUDA graphs: work on a stream, recorded once and launched again as one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from hps.cuda.loader import cupy

_COPY = 1
_REPEATABLE = frozenset((0, 2, 5, 10, 11))
"""Kinds of graph nodes that can be launched again: kernels, fills, empty nodes, allocations and frees.

Copies within device memory are also allowed. Host memory may have another use by then, and a host function
may free its argument."""
_ON_DEVICE = 2
_COPY_FIELDS = 25  # of CUDA_MEMCPY3D, 8 bytes each
_FROM, _TO = 4, 15
"""The fields with the memory types of source and destination."""


class CudaGraph:
    """A recorded graph. May be launched on any stream of its device, by one thread at a time."""

    def __init__(self, graph: int) -> None:
        self._runtime = cupy().cuda.runtime
        self._executable = self._runtime.graphInstantiate(graph)

    @property
    def address(self) -> int:
        """The handle of the executable graph (``cudaGraphExec_t``), valid as long as this object."""
        return int(self._executable)

    def launch(self, stream: Any) -> None:
        """Launch the graph on ``stream``; does not wait."""
        self._runtime.graphLaunch(self._executable, stream.ptr)

    def __del__(self) -> None:
        if executable := getattr(self, "_executable", 0):
            self._runtime.graphExecDestroy(executable)


def record(stream: Any, work: Callable[[], None]) -> CudaGraph | None:
    """Record what ``work`` launches on ``stream``, without running it.

    None if it cannot be recorded or must not be repeated. Other threads may use the device meanwhile.
    ``work`` must not use device memory that is freed later.
    """
    runtime = cupy().cuda.runtime
    # Relaxed mode: calls of other threads neither fail because of the recording nor make it fail.
    runtime.streamBeginCapture(stream.ptr, runtime.streamCaptureModeRelaxed)
    failed = False
    try:
        work()
    except Exception:
        failed = True
    try:
        graph = runtime.streamEndCapture(stream.ptr)
    except runtime.CUDARuntimeError:
        return None
    try:
        return None if failed or not _is_repeatable(graph) else CudaGraph(graph)
    except runtime.CUDARuntimeError:
        return None
    finally:
        runtime.graphDestroy(graph)


def _is_repeatable(graph: int) -> bool:
    """True if all nodes of ``graph`` are of kinds that do the same again, whatever the host did meanwhile."""
    driver = ctypes.CDLL("libcuda.so.1")
    count, kind = ctypes.c_size_t(), ctypes.c_int()
    at = ctypes.c_void_p(graph)
    if driver.cuGraphGetNodes(at, None, ctypes.byref(count)) or not count.value:
        return False
    nodes = (ctypes.c_void_p * count.value)()
    if driver.cuGraphGetNodes(at, nodes, ctypes.byref(count)):
        return False
    for pointer in nodes:
        node = ctypes.c_void_p(pointer)
        if driver.cuGraphNodeGetType(node, ctypes.byref(kind)):
            return False
        if kind.value == _COPY:
            copy = (ctypes.c_uint64 * _COPY_FIELDS)()
            if driver.cuGraphMemcpyNodeGetParams(node, copy):
                return False
            if any(copy[side] & 0xFFFF_FFFF != _ON_DEVICE for side in (_FROM, _TO)):
                return False
        elif kind.value not in _REPEATABLE:
            return False
    return True
