"""A device as a context manager that also binds its CUDA context to the thread."""

from __future__ import annotations

import threading

from hps.cuda.loader import cupy


class CudaDevice:
    """Makes device ``id`` the thread's current one within a block. Thread-safe, and may be nested.

    The CUDA driver, which the compiled core calls, refuses threads without a context. Only calls of the CUDA
    runtime bind one, and those that reuse memory and streams need not make any."""

    def __init__(self, number: int) -> None:
        self.id = number
        self._device = cupy().cuda.Device(number)
        self._thread = threading.local()

    def __enter__(self) -> CudaDevice:
        self._device.__enter__()
        if not hasattr(self._thread, "is_bound"):
            cupy().cuda.runtime.free(0)  # binds the context, and frees nothing
            self._thread.is_bound = True
        return self

    def __exit__(self, *error: object) -> None:
        self._device.__exit__(*error)

    def synchronize(self) -> None:
        """Wait for all work on the device."""
        self._device.synchronize()
