"""References to tensors in shared memory: parameters of tensors in Triton's shared memory extension."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from hps.errors import BadRequest

_REGION, _SIZE, _OFFSET = "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"
PARAMETERS = (_REGION, _SIZE, _OFFSET)


class SharedMemoryRef(NamedTuple):
    """Location of a tensor's bytes."""

    region: str
    size: int
    offset: int = 0

    @property
    def parameters(self) -> dict[str, str | int]:
        """The reference as a tensor's parameters."""
        offset = {_OFFSET: self.offset} if self.offset else {}
        return {_REGION: self.region, _SIZE: self.size, **offset}


@dataclass(frozen=True, slots=True)
class Region:
    """A registered region. ``file`` identifies the file, even if another takes its name later.

    ``busy`` is held during writes to the region, so that none continues after its removal."""

    name: str
    key: str
    offset: int
    size: int
    file: tuple[int, int]
    busy: threading.Lock = field(default_factory=threading.Lock, compare=False)

    def as_json(self) -> dict[str, Any]:
        """The region in the protocol's form."""
        return {
            "name": self.name,
            "key": self.key,
            "offset": self.offset,
            "byte_size": self.size,
        }


class Target(NamedTuple):
    """Target of an output: a location, and the region that had its name when the request arrived."""

    reference: SharedMemoryRef
    region: Region


@dataclass(slots=True)
class SharedMemoryRefs:
    """The tensors of a request in shared memory, by name: inputs with their types, and targets of outputs."""

    inputs: dict[str, tuple[SharedMemoryRef, np.dtype[Any]]] = field(default_factory=dict)
    outputs: dict[str, SharedMemoryRef] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of the inputs."""
        return sum(reference.size for reference, _ in self.inputs.values())


def parse_reference(tensor: str, parameters: Mapping[str, Any]) -> SharedMemoryRef:
    """Parse the location of ``tensor`` from its ``parameters``. Raises ``BadRequest``."""
    region, size, offset = (
        parameters.get(_REGION),
        parameters.get(_SIZE),
        parameters.get(_OFFSET, 0),
    )
    if type(region) is not str or type(size) is not int or type(offset) is not int:
        raise BadRequest(
            f"'{tensor}': '{_REGION}' must be a string, '{_SIZE}' and '{_OFFSET}' whole numbers of bytes; "
            "the first two go together, the last may be left out"
        )
    if size < 0 or offset < 0:
        raise BadRequest(
            f"'{tensor}': '{_SIZE}' and '{_OFFSET}' must not be negative, got {size}, {offset}"
        )
    return SharedMemoryRef(region, size, offset)


def require_size(tensor: str, reference: SharedMemoryRef, expected: int, model: str) -> None:
    """Check that an input's bytes match its shape."""
    if reference.size != expected:
        raise BadRequest(
            f"input byte size mismatch for input '{tensor}' for model '{model}'. Expected {expected}, got "
            f"{reference.size}"
        )
