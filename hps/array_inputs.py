"""What callers hand in, as arrays of ours: anything array-like on the host, not copied where that goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.errors import BadRequest
from hps.types import JaggedKeys, KeyArray, VectorArray, as_keys

_INT64 = np.dtype(np.int64)

Features = Mapping[str, Any]
"""Keys by feature: ``JaggedKeys``, integers ``(batch,)`` or ``(batch, hotness)`` as an array, a list or
anything on the host with ``__dlpack__``, or a list of keys per sample."""


def jagged_keys(features: Features) -> dict[str, JaggedKeys]:
    """Keys by feature. Raises ``BadRequest`` for what are no keys."""
    found = {}
    for name, keys in features.items():
        if (
            type(keys) is np.ndarray
            and keys.dtype == _INT64
            and keys.ndim
            and keys.flags.c_contiguous
        ):
            keys = JaggedKeys(keys.reshape(-1), len(keys))  # as most are
        elif not isinstance(keys, JaggedKeys):
            try:
                nested = isinstance(keys, list | tuple)
                keys = JaggedKeys.of(keys if nested else tensor(name, keys))
            except (TypeError, ValueError) as error:
                raise BadRequest(f"feature {name!r}: {error}") from None
        found[name] = keys
    return found


def tensor(name: str, array: Any) -> NDArray[Any]:
    """Any array-like on the host as NumPy, without a copy where there is an array already."""
    if isinstance(array, np.ndarray):
        return array
    try:
        if hasattr(array, "__dlpack__"):
            return np.from_dlpack(array)
        return np.asarray(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise BadRequest(f"{name!r} is not an array on the host: {error}") from None


def flat_keys(name: str, keys: Any) -> KeyArray:
    """Keys ``(n,)`` of a table. Raises ``BadRequest``."""
    try:
        found = as_keys(tensor(name, keys))
    except TypeError as error:
        raise BadRequest(f"{name}: {error}") from None
    if found.ndim != 1:
        raise BadRequest(f"{name} must be (n,), not {found.shape}")
    return found


def output_arrays(out: Any) -> dict[str, VectorArray] | None:
    """Arrays to write vectors into, by name; None for none. Raises ``BadRequest``."""
    if not isinstance(out, Mapping):
        kind = type(out).__name__
        raise BadRequest(f"out must be a mapping from names to arrays, got {kind}")
    return {name: _target(name, array) for name, array in out.items()} or None


def _target(name: str, array: Any) -> VectorArray:
    """A caller's array to write into: the memory itself, never a copy."""
    if isinstance(array, np.ndarray):
        return array
    if not hasattr(array, "__dlpack__"):
        raise BadRequest(f"out[{name!r}] must be an array or a tensor, got {type(array).__name__}")
    there = tensor(name, array)
    if not there.flags.writeable:
        raise BadRequest(
            f"out[{name!r}] cannot be written through DLPack (it is read-only, or its exporter is "
            "older than DLPack 1.0); pass its NumPy view, as tensor.numpy()"
        )
    return there
