"""The interface to Triton, with the conversion of its clients' tensors and errors.

Errors are `TritonUnavailable` if a later attempt, or another server, may succeed; see
`translate_triton_error`."""

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
# Triton's message for a request whose `timeout` passed in its queue; the status is UNAVAILABLE.
_EXPIRED = "Request timeout expired"
_UNREACHABLE = {"StatusCode.UNAVAILABLE", "503"}
_NOT_FOUND = {"StatusCode.NOT_FOUND", "404"}
# Statuses with which Triton itself answered. gRPC's codes for transport errors are not among them.
_ANSWERED = {
    f"StatusCode.{code}"
    for code in ("INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "UNIMPLEMENTED")
}
# gRPC's message for a call without a connection. With any other message the call may have arrived.
_NO_CONNECTION = ("failed to connect to all addresses", "DNS resolution failed")


class TritonUnavailable(DenseModelError):
    """Triton is unreachable or unavailable, the connection was lost, or the model is unknown (yet).

    A run has no side effects: the caller may retry.
    """


class TritonNotConnected(TritonUnavailable):
    """There was no connection: the call did not reach Triton."""


class TritonRejected(DenseModelError):
    """Triton answered that it did not run the call."""


@dataclass(frozen=True, slots=True)
class TritonModelInfo:
    """A model as Triton describes it. ``max_batch`` 0: it has no batch dimension in Triton."""

    inputs: tuple[NetworkTensor, ...]
    outputs: tuple[NetworkTensor, ...]
    max_batch: int


@dataclass(frozen=True, slots=True)
class SharedMemoryTensors:
    """Tensors in the shared memory that Triton knows as ``region``: offset and bytes of each, by name."""

    region: str
    places: dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class CudaSharedMemory:
    """Memory of GPU number ``device``, with CUDA's handle for other processes."""

    handle: bytes
    device: int


class TritonTransport(Protocol):
    """Interface to one model on one Triton. Thread-safe; no call outlasts its ``timeout_s``.

    ``register`` and ``unregister`` raise what ``infer`` raises."""

    def describe(self, timeout_s: float) -> TritonModelInfo:
        """Return Triton's description of the model.

        Raises `TritonUnavailable`, `DeadlineExceeded`, `NotFound` if there is no such model,
        `ModelError` if a network cannot use its tensors' types."""
        ...

    def infer(
        self,
        inputs: Sequence[tuple[str, str, NDArray[Any]]],
        outputs: Sequence[str],
        timeout_s: float,
        shared: SharedMemoryTensors | None = None,
    ) -> dict[str, NDArray[Any]]:
        """Return the ``outputs`` for ``inputs`` (name, datatype, array).

        Tensors in ``shared`` are read and written there, and are not among the returned arrays. Triton
        gets ``timeout_s`` too, and need not run a request that waited longer in its queue. Raises
        `TritonUnavailable`, `DeadlineExceeded`, `DenseModelError`."""
        ...

    def register(
        self, region: str, key: str | CudaSharedMemory, size: int, timeout_s: float
    ) -> None:
        """Let Triton map ``size`` bytes of shared memory; host memory by its name."""
        ...

    def unregister(self, region: str, key: str | CudaSharedMemory, timeout_s: float) -> None: ...

    def close(self) -> None: ...


def request_headers() -> tuple[str, dict[str, str]]:
    """Return the current request's ID and trace headers."""
    context = current_context()
    return ("", {}) if context is None else (context.request_id, context.headers())


def microseconds(timeout_s: float) -> int:
    """Convert ``timeout_s`` to Triton's request parameter ``timeout``, of which 0 means none."""
    return max(1, int(timeout_s * 1e6))


def tensors_in(
    kind: Any, inputs: Sequence[tuple[str, str, NDArray[Any]]], shared: SharedMemoryTensors | None
) -> list[Any]:
    """Make the inputs of Triton's client (its module is ``kind``); some lie in ``shared`` memory."""
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
    """Make the requested outputs of Triton's client."""
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
    """Return the response's outputs except those in ``shared``. Raises DenseModelError for a missing one."""
    found = {}
    for name in names:
        if shared is not None and name in shared.places:
            continue
        array = result.as_numpy(name)
        if array is None:
            raise DenseModelError(f"Triton's response misses the output {name!r}")
        found[name] = np.ascontiguousarray(array)
    return found


def info_of(name: str, datatype: str, shape: Sequence[int]) -> NetworkTensor:
    """Convert Triton's description of a tensor. Raises ModelError for a type that no network may use."""
    if datatype not in DATATYPES:
        raise ModelError(
            f"Triton reports type {datatype} for tensor {name!r}; a network may use {', '.join(DATATYPES)}"
        )
    return NetworkTensor(name, datatype, tuple(map(int, shape)))


def translate_triton_error(error: Exception, describing: str | None = None) -> Exception:
    """Convert an error of Triton's clients to one of ours.

    `TritonUnavailable` if a retry may succeed: Triton is unavailable or does not know the model, there is
    no connection, or it was lost during the call. A request whose deadline passed in Triton's queue is
    `DeadlineExceeded`, whatever its status.
    """
    if isinstance(error, InferenceServerException):
        status, message = error.status(), error.message()
        if status == _TOO_LATE:
            return DeadlineExceeded("deadline exceeded before Triton answered")
        if _EXPIRED in message:
            return DeadlineExceeded("deadline exceeded in Triton's queue")
        if describing is not None and (
            status in _NOT_FOUND or (status == "400" and "unknown model" in message)
        ):
            return NotFound(message)
        # A restarted Triton serves before it has loaded every model.
        if status in _UNREACHABLE or "unknown model" in message:
            away = any(words in message for words in _NO_CONNECTION)
            return TritonNotConnected(message) if away else TritonUnavailable(message)
        answered = status in _ANSWERED or str(status).isdigit()
        return (TritonRejected if answered else DenseModelError)(f"Triton answered: {message}")
    if isinstance(error, TimeoutError):
        return DeadlineExceeded("deadline exceeded before Triton answered")
    if isinstance(error, (ConnectionRefusedError, socket.gaierror)):
        return TritonNotConnected(str(error))
    if isinstance(error, (OSError, EOFError)):
        return TritonUnavailable(str(error) or type(error).__name__)
    return DenseModelError(f"the call to Triton failed: {type(error).__name__}: {error}")
