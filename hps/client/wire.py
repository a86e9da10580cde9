"""Convert features to tensors, and decode answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hps.errors import BadRequest
from hps.types import JaggedKeys, as_keys

Keys = JaggedKeys | ArrayLike | Sequence[Sequence[int]]
"""Keys of one feature: integers ``(batch,)`` or ``(batch, hotness)``, or a list of keys per sample."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A model's answer: named arrays, in the server's order, and the response's parameters."""

    outputs: dict[str, NDArray[Any]]
    parameters: dict[str, Any] = field(default_factory=dict)
    model_version: str = ""

    @property
    def defaulted(self) -> int:
        """Number of unknown keys, which were answered with the table's default."""
        return int(self.parameters.get("hps_defaulted", 0))

    @property
    def degraded(self) -> tuple[str, ...]:
        """Tiers that were skipped as failed or late."""
        named = str(self.parameters.get("hps_degraded") or "").split(",")
        return tuple(tier.strip() for tier in named if tier.strip())

    @property
    def stale_s(self) -> int:
        """Possible age of rows in seconds if it exceeds the server's limit; else 0."""
        return int(self.parameters.get("hps_stale_s", 0))

    @property
    def account(self) -> dict[str, Any]:
        """``defaulted``, ``degraded`` and ``stale_s`` as a dict."""
        return {name: getattr(self, name) for name in ("defaulted", "degraded", "stale_s")}


def numpy_type(datatype: str) -> np.dtype[Any]:
    """NumPy's type for a datatype of the protocol."""
    from tritonclient.utils import triton_to_np_dtype

    dtype: np.dtype[Any] = np.dtype(triton_to_np_dtype(datatype))
    return dtype


def encode_array(array: NDArray[Any]) -> tuple[str, NDArray[Any]]:
    """Datatype of an array, and its elements in the wire's type, C-contiguous."""
    from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor

    datatype = np_to_triton_dtype(array.dtype)
    if datatype == "BYTES":
        array = np.frombuffer(serialize_byte_tensor(array).tobytes(), np.uint8)
    return datatype, np.ascontiguousarray(array)


def decode_array(datatype: str, raw: bytes) -> NDArray[Any]:
    """The elements of an array, flat."""
    from tritonclient.utils import deserialize_bytes_tensor

    if datatype == "BYTES":
        elements: NDArray[Any] = deserialize_bytes_tensor(raw)
        return elements
    return np.frombuffer(raw, numpy_type(datatype)).copy()


def tensors_of(features: Mapping[str, Keys]) -> dict[str, NDArray[Any]]:
    """Convert features to tensors: ``f [batch, hotness]``, or ``f [n]``, ``f.offsets``, ``f.weights``."""
    tensors: dict[str, NDArray[Any]] = {}
    for name, keys in features.items():
        try:
            keys = JaggedKeys.of(keys)
        except (TypeError, ValueError) as error:
            raise BadRequest(f"feature {name!r}: {error}") from None
        tensors[name] = as_keys(keys.keys)
        if keys.offsets is None:
            tensors[name] = tensors[name].reshape(keys.batch, -1 if keys.batch else 0)
        else:
            tensors[f"{name}.offsets"] = np.asarray(keys.offsets, np.int64)
        if keys.weights is not None:
            tensors[f"{name}.weights"] = np.asarray(keys.weights, np.float32)
    return tensors
