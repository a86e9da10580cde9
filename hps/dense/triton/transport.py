"""How Triton is asked, and what its clients' tensors and errors are here.

Errors are Triton's: `TritonUnavailable` for what may be better a moment later or elsewhere
(`translate_triton_error` says what that is), anything else as it is.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

from hps.dense.base import DATATYPES, NetworkTensor
from hps.errors import DeadlineExceeded, DenseModelError, ModelError, NotFound
from hps.tracing import current_context

_TOO_LATE = "StatusCode.DEADLINE_EXCEEDED"
# Triton's words for a request whose `timeout` passed in its queue; its status is UNAVAILABLE.
_EXPIRED = "Request timeout expired"
_UNREACHABLE = {"StatusCode.UNAVAILABLE", "503"}
_NOT_FOUND = {"StatusCode.NOT_FOUND", "404"}
# gRPC's own codes for what goes wrong on the way are not among them.
_ANSWERED = {
    f"StatusCode.{code}"
    for code in ("INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "UNIMPLEMENTED")
}
# gRPC's words for a call that found no connection. In others, it counts as one that may have arrived.
_NO_CONNECTION = ("failed to connect to all addresses", "DNS resolution failed")


class TritonUnavailable(DenseModelError):
    """Nobody answers there, the connection was lost, or Triton says that it cannot at the moment or does not
    know the model (yet). A run has no side effects: whoever has asked may ask again."""


class TritonNotConnected(TritonUnavailable):
    """There was no connection: Triton has not heard of the call."""


class TritonRejected(DenseModelError):
    """Triton has answered that it did not do it."""


@dataclass(frozen=True, slots=True)
class TritonModelInfo:
    """A model as Triton describes it. ``max_batch`` 0: Triton knows no batches there."""

    inputs: tuple[NetworkTensor, ...]
    outputs: tuple[NetworkTensor, ...]
    max_batch: int


@dataclass(frozen=True, slots=True)
class SharedMemoryTensors:
    """Tensors in shared memory that Triton knows as ``region``: offset and bytes of each, by name."""

    region: str
    places: dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class CudaSharedMemory:
    """Memory of GPU number ``device``, by the handle that CUDA gives for other processes."""

    handle: bytes
    device: int


class TritonTransport(Protocol):
    """One model of one Triton. Any number of threads may call it; no call lasts beyond its ``timeout_s``.

    ``register`` and ``unregister`` raise what ``infer`` does."""

    def describe(self, timeout_s: float) -> TritonModelInfo:
        """Raises `TritonUnavailable`, `DeadlineExceeded`, `NotFound` when there is no such model,
        `ModelError` when its tensors are of types that no network may use."""
        ...

    def infer(
        self,
        inputs: Sequence[tuple[str, str, NDArray[Any]]],
        outputs: Sequence[str],
        timeout_s: float,
        shared: SharedMemoryTensors | None = None,
    ) -> dict[str, NDArray[Any]]:
        """The ``outputs`` for ``inputs`` (name, datatype, array). What is ``shared`` is read and written
        there, and not among the arrays returned. Triton is told ``timeout_s``, too, and need not run what
        waited longer in its queue. Raises `TritonUnavailable`, `DeadlineExceeded`, `DenseModelError`."""
        ...

    def register(
        self, region: str, key: str | CudaSharedMemory, size: int, timeout_s: float
    ) -> None:
        """Let Triton map ``size`` bytes of shared memory, in the host's by name."""
        ...

    def unregister(self, region: str, key: str | CudaSharedMemory, timeout_s: float) -> None: ...

    def close(self) -> None: ...


def request_headers() -> tuple[str, dict[str, str]]:
    """The id of the request that is worked for, and what Triton is told of its trace."""
    origin = current_context()
    return ("", {}) if origin is None else (origin.request_id, origin.headers())


def microseconds(timeout_s: float) -> int:
    """``timeout_s`` as a request's parameter ``timeout``, of which 0 says that there is none."""
    return max(1, int(timeout_s * 1e6))


def tensors_in(
    kind: Any, inputs: Sequence[tuple[str, str, NDArray[Any]]], shared: SharedMemoryTensors | None
) -> list[Any]:
    """Inputs as Triton's client takes them (its module is ``kind``); some lie in ``shared`` memory."""
    made = []
    for name, datatype, array in inputs:
        tensor = kind.InferInput(name, list(array.shape), datatype)
        if shared is not None and name in shared.places:
            offset, size = shared.places[name]
            tensor.set_shared_memory(shared.region, size, offset)
        else:
            tensor.set_data_from_numpy(array)
        made.append(tensor)
    return made


def tensors_out(kind: Any, names: Sequence[str], shared: SharedMemoryTensors | None) -> list[Any]:
    """Outputs as Triton's client asks for them."""
    made = []
    for name in names:
        tensor = kind.InferRequestedOutput(name)
        if shared is not None and name in shared.places:
            offset, size = shared.places[name]
            tensor.set_shared_memory(shared.region, size, offset)
        made.append(tensor)
    return made


def output_arrays_of(
    result: Any, names: Sequence[str], shared: SharedMemoryTensors | None
) -> dict[str, NDArray[Any]]:
    """The outputs of an answer but those in ``shared``. Raises DenseModelError when one is missing."""
    found = {}
    for name in names:
        if shared is not None and name in shared.places:
            continue
        array = result.as_numpy(name)
        if array is None:
            raise DenseModelError(f"Triton's answer lacks the output {name!r}")
        found[name] = np.ascontiguousarray(array)
    return found


def info_of(name: str, datatype: str, shape: Sequence[int]) -> NetworkTensor:
    """A tensor as Triton describes it. Raises ModelError for a type that no network may use."""
    if datatype not in DATATYPES:
        raise ModelError(
            f"Triton says that {name!r} is {datatype}; a network may use {', '.join(DATATYPES)}"
        )
    return NetworkTensor(name, datatype, tuple(map(int, shape)))


def translate_triton_error(error: Exception, describing: str | None = None) -> Exception:
    """Triton's clients' errors as ours. What may be better a moment later is `TritonUnavailable`: a
    Triton that says it is not available or that does not know the model, no connection, and one lost in
    mid-call. A request whose time was up in Triton's queue is late, whatever status that has."""
    if isinstance(error, InferenceServerException):
        status, message = error.status(), error.message()
        if status == _TOO_LATE:
            return DeadlineExceeded("Triton did not answer within the request's time")
        if _EXPIRED in message:
            return DeadlineExceeded("the request's time was up while it waited in Triton's queue")
        if describing is not None and (
            status in _NOT_FOUND or (status == "400" and "unknown model" in message)
        ):
            return NotFound(message)
        # A Triton that was started anew serves before it has loaded every model.
        if status in _UNREACHABLE or "unknown model" in message:
            away = any(words in message for words in _NO_CONNECTION)
            return TritonNotConnected(message) if away else TritonUnavailable(message)
        answered = status in _ANSWERED or str(status).isdigit()
        return (TritonRejected if answered else DenseModelError)(f"Triton answered: {message}")
    if isinstance(error, TimeoutError):
        return DeadlineExceeded("Triton did not answer within the request's time")
    if isinstance(error, (ConnectionRefusedError, socket.gaierror)):
        return TritonNotConnected(str(error))
    if isinstance(error, (OSError, EOFError)):
        return TritonUnavailable(str(error) or type(error).__name__)
    return DenseModelError(f"Triton could not be asked: {type(error).__name__}: {error}")
