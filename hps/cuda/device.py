"""A device as a context manager that also binds its CUDA context to the thread."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext

from hps.cuda.loader import cupy

_NOTHING = nullcontext()


class _Thread(threading.local):
    """Of one thread: the devices that were current before its blocks, and whether it has the context."""

    def __init__(self) -> None:
        self.former: list[int] = []
        self.is_bound = False


class CudaDevice:
    """Makes device ``id`` the thread's current one within a block. Thread-safe, and may be nested.

    The CUDA driver, which the compiled core calls, refuses threads without a context. Only calls of the CUDA
    runtime bind one, and those that reuse memory and streams need not make any."""

    def __init__(self, number: int) -> None:
        self.id = number
        self._runtime = cupy().cuda.runtime
        self._thread = _Thread()

    def __enter__(self) -> CudaDevice:
        thread, runtime = self._thread, self._runtime
        former = runtime.getDevice()
        thread.former.append(former)
        if former != self.id:
            runtime.setDevice(self.id)
        if not thread.is_bound:
            runtime.free(0)  # binds the context, and frees nothing
            thread.is_bound = True
        return self

    def __exit__(self, *_error: object) -> None:
        former = self._thread.former.pop()
        if self._runtime.getDevice() != former:  # also if a library has changed it
            self._runtime.setDevice(former)

    def entered(self) -> AbstractContextManager[object]:
        """Return a context manager for a block that leaves the current device as it is: this device, or, at
        a third of the time, one that does nothing because the device is current."""
        is_current = self._thread.is_bound and self._runtime.getDevice() == self.id
        return _NOTHING if is_current else self

    def synchronize(self) -> None:
        """Wait for all work on the device."""
        with self:
            self._runtime.deviceSynchronize()
