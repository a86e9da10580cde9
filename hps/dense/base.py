"""The DenseModel protocol and the check of a network against ``model.yaml``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hps.errors import ModelError

# Element types by their Open Inference Protocol names.
DATATYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
}


@dataclass(frozen=True, slots=True)
class NetworkTensor:
    """A named tensor; -1 in ``shape`` is a variable dimension, the first one is the batch.

    ``convertible``: datatypes of a network's input that it is converted to."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    convertible: frozenset[str] = frozenset()

    @property
    def dtype(self) -> np.dtype[Any]:
        return DATATYPES[self.datatype]

    def __str__(self) -> str:
        return f"{self.datatype} {list(self.shape)}"


class DenseModel(Protocol):
    """Interface of a network. Thread-safe."""

    @property
    def inputs(self) -> tuple[NetworkTensor, ...]: ...

    @property
    def outputs(self) -> tuple[NetworkTensor, ...]: ...

    @property
    def takes_device_arrays(self) -> bool:
        """True if ``predict`` also takes complete arrays in a GPU's memory."""
        ...

    def predict(
        self,
        inputs: Mapping[str, NDArray[Any]],
        outputs: tuple[str, ...] | None = None,
        deadline: float | None = None,
    ) -> dict[str, NDArray[Any]]:
        """Run the network on C-contiguous arrays ``(batch, ...)``; return ``outputs`` in their order.

        The default is all outputs. NaN is passed through. A remote network is not waited for after
        ``deadline``, an instant of ``time.monotonic()``. Raises ``DenseModelError``; a remote network
        also raises ``Unavailable`` and ``DeadlineExceeded``."""
        ...

    def runs_inline(self, batch: int) -> bool:
        """True if a run of ``batch`` samples is short enough for an event loop's thread."""
        ...

    def close(self) -> None: ...


def check_network(
    model: str, network: DenseModel, fed: Iterable[NetworkTensor], served: Iterable[NetworkTensor]
) -> None:
    """Check that the network's inputs equal ``fed`` and that it has all outputs ``served``.

    Raises ``ModelError`` with what ``model.yaml`` says and what the network has. A float32 input also takes
    float16 vectors (they are widened), and an input of a type in ``NetworkTensor.convertible`` what is fed.
    """
    takes = {tensor.name: tensor for tensor in network.inputs}
    gives = {tensor.name: tensor for tensor in network.outputs}
    seen = set()
    for tensor in fed:
        if tensor.name in seen:
            raise ModelError(f"{model}: network input {tensor.name!r} is fed twice in model.yaml")
        seen.add(tensor.name)
        _compare(model, "input", tensor, takes)
    if unfed := [name for name in takes if name not in seen]:
        raise ModelError(
            f"{model}: model.yaml feeds nothing to network input {unfed[0]!r} ({takes[unfed[0]]}); "
            "list it in dense.inputs, or name it in dense.embeddings, dense.masks or dense.lengths"
        )
    for tensor in served:
        _compare(model, "output", tensor, gives)


def _compare(
    model: str, kind: str, expected: NetworkTensor, network: Mapping[str, NetworkTensor]
) -> None:
    actual = network.get(expected.name)
    if actual is None:
        raise ModelError(
            f"{model}: model.yaml names {kind} {expected.name!r}, the network has "
            f"{', '.join(network) or 'none'}"
        )
    widened = kind == "input" and (expected.datatype, actual.datatype) == ("FP16", "FP32")
    converted = widened or actual.datatype in expected.convertible
    if expected.datatype != actual.datatype and not converted:
        others = "".join(
            f" or {each}" for each in sorted(expected.convertible - {expected.datatype})
        )
        raise ModelError(
            f"{model}: {kind} {expected.name!r} is {expected.datatype}{others} in model.yaml, "
            f"{actual.datatype} in the network"
        )
    fits = len(expected.shape) == len(actual.shape) and all(
        a == b or -1 in (a, b) for a, b in zip(expected.shape[1:], actual.shape[1:], strict=True)
    )
    if not fits:
        raise ModelError(
            f"{model}: {kind} {expected.name!r} has shape {list(expected.shape)} in model.yaml, "
            f"{list(actual.shape)} in the network"
        )
    if actual.shape[:1] != (-1,):
        raise ModelError(
            f"{model}: {kind} {expected.name!r} has a fixed batch in the network, {list(actual.shape)}; "
            "export it with a variable first dimension"
        )
