"""Shared memory of the host for tensors of this process and a Triton server on the same machine.

A region is a file in ``/dev/shm``, locked by its process. The kernel releases the lock when the process
ends: so the next process finds and removes the regions of a killed one, in whatever pid namespace it ran.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.dense.triton.transport import CudaSharedMemory
from hps.errors import Unavailable
from hps.tiers.file_lock import FileLock

log = logging.getLogger(__name__)
_FOLDER = Path("/dev/shm")
_PREFIX = "hps-dense-"


class HostRegion:
    """A `TritonRegion` in host memory. Raises Unavailable if ``/dev/shm`` has no ``size`` bytes free."""

    def __init__(self, size: int) -> None:
        self.name = unused_name()
        self.key: str | CudaSharedMemory = f"/{self.name}"
        self.registered = False
        path = _FOLDER / self.name
        hidden = path.with_name(f".{self.name}")
        self._lock = FileLock(hidden)
        hidden.rename(path)  # locked before `remove_stale_regions` finds it
        try:
            _reserve(path, size)
        except OSError as error:
            path.unlink()
            self._lock.release()
            raise Unavailable(
                f"{_FOLDER} has no {size:,} bytes to share with Triton ({error.strerror}); enlarge it (mount "
                "-o remount,size=..., docker run --shm-size), or set dense.triton.shared_memory to none"
            ) from None
        self._memory = SharedMemory(self.name)
        self.size = self._memory.size

    def put(self, tensors: Iterable[tuple[int, NDArray[Any]]]) -> None:
        for offset, array in tensors:
            self._array(offset, array.shape, array.dtype)[...] = array

    def get(self, offset: int, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        return self._array(offset, shape, dtype).copy()

    def drop(self) -> None:
        self._memory.close()
        self._memory.unlink()
        self._lock.release()

    def release(self) -> None:
        """Do nothing: Triton had its own mapping."""

    def _array(self, offset: int, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        return np.ndarray(shape, dtype, buffer=self._memory.buf, offset=offset)


def unused_name() -> str:
    return f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"


def remove_stale_regions() -> None:
    """Remove the regions of processes that ended without removing them."""
    removed = size = 0
    for path in _FOLDER.glob(f"{_PREFIX}*"):
        # Locked: in use. Not permitted: another user's. Not found: another process has removed it.
        with suppress(BlockingIOError, PermissionError, FileNotFoundError):
            size_now = path.stat().st_size
            lock = FileLock(path)
            path.unlink()
            lock.release()
            removed, size = removed + 1, size + size_now
    if removed:
        log.info(
            "removed %d stale Triton shared-memory regions of %d bytes from %s: their process was killed",
            removed, size, _FOLDER,
        )  # fmt: skip


def _reserve(path: Path, size: int) -> None:
    """Reserve ``size`` bytes of the file.

    On a full file system, a write to bytes that are not reserved raises SIGBUS."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.posix_fallocate(file, 0, size)
    finally:
        os.close(file)
