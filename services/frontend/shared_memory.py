"""Tensors in shared memory of a client on this machine: Triton's system shared memory extension.

A region is a part of a file in ``/dev/shm``, created by a client and registered under a name. It is read
and written by system calls instead of being mapped: 3.4 MB take 0.5 ms instead of 0.3. But a file that
its client truncates is then an error, whereas a mapping would end the server (SIGBUS). A file is opened
for each use, so a region keeps none open, and memory that its client removes is freed immediately."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.config.checks import is_loopback
from hps.errors import BadRequest, Forbidden, NotFound, Unsupported
from services.frontend import request_errors as faults
from services.frontend.endpoints import Output
from services.frontend.errors import RequestTooLarge, short_value
from services.frontend.shared_memory_refs import Region, SharedMemoryRef, SharedMemoryRefs, Target

FOLDER = Path("/dev/shm")
# Limits on the number of regions, and on the bytes of a name.
_MAX_REGIONS, _MAX_NAME = 4096, 255
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_NOTHING = np.empty(0, np.uint8)


class SharedMemoryRegistry:
    """The registered regions. Thread-safe.

    ``caller`` is the client's address, which must be this machine's."""

    def __init__(self, *, on: bool, most_bytes: int, folder: Path = FOLDER) -> None:
        """``on``: enabled; ``most_bytes``: limit on one request's inputs."""
        self.on = on
        self._most_bytes = most_bytes
        self._folder = folder
        self._regions: dict[str, Region] = {}
        self._lock = threading.Lock()

    def require(self, caller: str) -> None:
        """Raise ``Unsupported`` if it is off, ``Forbidden`` for callers on other machines."""
        if not self.on:
            raise Unsupported(
                "system shared memory is not offered; set server.shared_memory on a server whose clients run "
                "on its machine"
            )
        if not is_loopback(caller):
            raise Forbidden(
                "system shared memory is only for clients that connect by 127.0.0.1, not for "
                f"{caller or 'others'}"
            )

    def register(self, name: str, key: str, offset: int, size: int, caller: str) -> None:
        """Register ``size`` bytes from ``offset`` of ``/dev/shm/<key>`` as ``name``.

        Raises ``BadRequest``, or as ``require``."""
        self.require(caller)
        if not 0 < len(name.encode()) <= _MAX_NAME:
            raise BadRequest(f"the name of a shared memory region must have 1 to {_MAX_NAME} bytes")
        region = Region(name, key, offset, size, self._checked_file(key, offset, size))
        with self._lock:
            if name in self._regions:
                raise BadRequest(f"shared memory region '{name}' already in manager")
            if len(self._regions) >= _MAX_REGIONS:
                raise BadRequest(
                    f"{_MAX_REGIONS} shared memory regions are registered; unregister some"
                )
            self._regions[name] = region

    def unregister(self, name: str, caller: str) -> None:
        """Remove a region, or all for the name "". After the return, no answer is written into it."""
        self.require(caller)
        with self._lock:
            names = [name] if name else list(self._regions)
            gone = [region for each in names if (region := self._regions.pop(each, None))]
        for region in gone:
            with region.busy:
                pass

    def status(self, name: str, caller: str) -> list[dict[str, Any]]:
        """Describe a region, or all for the name "". Raises ``NotFound`` for an unknown one."""
        self.require(caller)
        if name and name not in self._regions:
            raise NotFound(f"Unable to find system shared memory region: '{name}'")
        return [r.as_json() for r in list(self._regions.values()) if name in ("", r.name)]

    def take(
        self, tensors: SharedMemoryRefs, caller: str
    ) -> tuple[dict[str, NDArray[Any]], dict[str, Target]]:
        """Read the inputs into new arrays ``(n,)``; find the targets of the outputs.

        Raises ``BadRequest``, ``RequestTooLarge``, ``NotFound`` or as ``require``."""
        if not self.on:
            raise faults.shared_memory(next(iter((*tensors.inputs, *tensors.outputs))))
        self.require(caller)
        if tensors.size > self._most_bytes:
            raise RequestTooLarge(
                f"the inputs in shared memory take {tensors.size} bytes, at most {self._most_bytes} are "
                "taken; send smaller batches or raise server.max_body_bytes"
            )
        targets = {n: Target(ref, self._region(n, ref)) for n, ref in tensors.outputs.items()}
        inputs = {n: self._read(n, ref, dtype) for n, (ref, dtype) in tensors.inputs.items()}
        return inputs, targets

    def put(self, outputs: Sequence[Output], targets: Mapping[str, Target]) -> list[Output]:
        """Write the outputs that have a target; return all outputs, the written ones without elements.

        Raises ``BadRequest``, or ``NotFound`` if a region was unregistered since `take`, even if its
        name is registered again."""
        left = []
        for name, array in outputs:
            if (target := targets.get(name)) is not None:
                self._write(name, target, array)
                array = _NOTHING
            left.append((name, array))
        return left

    def _region(self, tensor: str, ref: SharedMemoryRef) -> Region:
        region = self._regions.get(ref.region)
        if region is None:
            raise NotFound(
                f"'{tensor}': Unable to find shared memory region: {short_value(ref.region)}; "
                "register it first"
            )
        if ref.offset + ref.size > region.size:
            raise BadRequest(
                f"'{tensor}': Invalid offset + byte size for shared memory region: '{ref.region}' has "
                f"{region.size} bytes, not {ref.size} from {ref.offset}"
            )
        return region

    def _read(self, tensor: str, ref: SharedMemoryRef, dtype: np.dtype[Any]) -> NDArray[Any]:
        region = self._region(tensor, ref)
        array = np.empty(ref.size // dtype.itemsize, dtype)
        left, at = array.view(np.uint8).data, region.offset + ref.offset
        with self._opened_region(region, os.O_RDONLY) as file:
            while left:
                read = os.preadv(file, [left], at)
                if not read:
                    raise _short(region.key)
                left, at = left[read:], at + read
        return array

    def _write(self, tensor: str, target: Target, array: NDArray[Any]) -> None:
        ref, region = target
        if array.nbytes > ref.size:
            raise BadRequest(
                f"shared memory size specified with the request for output '{tensor}' ({ref.size} bytes) "
                f"should be at least {array.nbytes} bytes to hold the results"
            )
        left = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        at = region.offset + ref.offset
        with region.busy:
            if self._regions.get(region.name) is not region:
                raise NotFound(f"shared memory region '{region.name}' was unregistered meanwhile")
            with self._opened_region(region, os.O_WRONLY) as file:
                # A write must not extend a file that was truncated.
                if os.fstat(file).st_size < at + array.nbytes:
                    raise _short(region.key)
                while left:
                    written = os.pwrite(file, left, at)
                    left, at = left[written:], at + written

    def _checked_file(self, key: str, offset: int, size: int) -> tuple[int, int]:
        """Check that the file of ``key`` has the bytes; return its identity. Raises ``BadRequest``."""
        plain = key.removeprefix("/")
        # A plain name that is not a link cannot lead to a file outside the folder.
        if plain in ("", ".", "..") or len(plain.encode()) > _MAX_NAME or {"/", "\0"} & {*plain}:
            raise BadRequest(
                f"the key of a shared memory region must be a plain name of up to {_MAX_NAME} bytes, as "
                f"shm_open takes it, got {short_value(key)}"
            )
        if size <= 0 or offset < 0:
            raise BadRequest(
                f"'byte_size' must be positive, 'offset' not negative; got {size}, {offset}"
            )
        with _as_bad_request(key), self._opened(key, os.O_RDWR) as file:
            found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise BadRequest(f"shared memory key {short_value(key)} is not a shared memory file")
        if offset + size > found.st_size:
            raise BadRequest(
                f"shared memory key {short_value(key)} has {found.st_size} bytes, not {size} from {offset}"
            )
        return found.st_dev, found.st_ino

    @contextmanager
    def _opened(self, key: str, mode: int) -> Iterator[int]:
        file = os.open(self._folder / key.removeprefix("/"), mode | _FLAGS)
        try:
            yield file
        finally:
            os.close(file)

    @contextmanager
    def _opened_region(self, region: Region, mode: int) -> Iterator[int]:
        with _as_bad_request(region.key), self._opened(region.key, mode) as file:
            found = os.fstat(file)
            if (found.st_dev, found.st_ino) != region.file:
                raise BadRequest(
                    f"shared memory key {short_value(region.key)} now names another file than when it was "
                    f"registered as '{region.name}'; unregister and register it again"
                )
            yield file


@contextmanager
def _as_bad_request(key: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BadRequest(
            f"Unable to open shared memory region: {short_value(key)} in {FOLDER}: {error.strerror}; "
            "it must exist, and the server must be allowed to read and write it"
        ) from None


def _short(key: str) -> BadRequest:
    return BadRequest(
        f"shared memory key {short_value(key)} is shorter than when it was registered"
    )
