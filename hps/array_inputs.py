"""Convert callers' arrays to NumPy: any array-like on the host, without a copy where possible."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.errors import BadRequest
from hps.types import JaggedKeys, KeyArray, VectorArray, as_keys

_INT64 = np.dtype(np.int64)
_CUDA = 2
"""DLPack's number of the memory of CUDA devices."""

Features = Mapping[str, Any]
"""Keys by feature: ``JaggedKeys``, integers ``(batch,)`` or ``(batch, hotness)`` as an array, a list or
anything on the host with ``__dlpack__``, or a list of keys per sample."""


DeviceKeys = Callable[[str, Any], Any]
"""Converts a feature's keys that are on a device to an int64 array there; returns None for others."""


def jagged_keys(features: Features, device_keys: DeviceKeys | None = None) -> dict[str, JaggedKeys]:
    """Convert keys by feature; ``device_keys`` those on a device. Raises ``BadRequest`` for values that are
    not keys."""
    converted = {}
    for name, keys in features.items():
        if (
            type(keys) is np.ndarray
            and keys.dtype == _INT64
            and keys.ndim
            and keys.flags.c_contiguous
        ):
            keys = JaggedKeys(keys.reshape(-1), len(keys))  # the common case
        elif device_keys is not None and (there := _on_device(name, keys, device_keys)) is not None:
            keys = there
        elif not isinstance(keys, JaggedKeys):
            try:
                nested = isinstance(keys, list | tuple)
                keys = JaggedKeys.of(keys if nested else tensor(name, keys))
            except (TypeError, ValueError) as error:
                raise BadRequest(f"feature {name!r}: {error}") from None
        converted[name] = keys
    return converted


def device_number(keys: Any) -> int | None:
    """Return the number of the CUDA device that ``keys`` are on; None for keys on the host."""
    if not hasattr(keys, "__dlpack_device__"):
        return None
    kind, number = keys.__dlpack_device__()
    return int(number) if kind == _CUDA else None


def _on_device(name: str, keys: Any, device_keys: DeviceKeys) -> JaggedKeys | None:
    """Return keys on a device, with or without offsets; None for keys on the host."""
    if isinstance(keys, JaggedKeys):
        array = device_keys(name, keys.keys)
        return None if array is None else replace(keys, keys=array.reshape(-1))
    array = device_keys(name, keys)
    if array is None:
        return None
    return JaggedKeys(array if array.ndim == 1 else array.reshape(-1), len(array))


def tensor(name: str, array: Any) -> NDArray[Any]:
    """Convert any array-like on the host to NumPy, without a copy of an array. Raises ``BadRequest``."""
    if isinstance(array, np.ndarray):
        return array
    try:
        if hasattr(array, "__dlpack__"):
            return np.from_dlpack(array)
        return np.asarray(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise BadRequest(f"{name!r} is not an array on the host: {error}") from None


def flat_keys(name: str, keys: Any) -> KeyArray:
    """Convert keys ``(n,)`` of a table. Raises ``BadRequest``."""
    try:
        array = as_keys(tensor(name, keys))
    except TypeError as error:
        raise BadRequest(f"{name}: {error}") from None
    if array.ndim != 1:
        raise BadRequest(f"{name} must be (n,), not {array.shape}")
    return array


def output_arrays(out: Any) -> dict[str, VectorArray] | None:
    """Convert the caller's output arrays, by name; None if there are none. Raises ``BadRequest``."""
    if not isinstance(out, Mapping):
        kind = type(out).__name__
        raise BadRequest(f"out must be a mapping from names to arrays, got {kind}")
    return {name: _target(name, array) for name, array in out.items()} or None


def _target(name: str, array: Any) -> VectorArray:
    """Convert an output array to NumPy: the same memory, never a copy."""
    if isinstance(array, np.ndarray):
        return array
    if not hasattr(array, "__dlpack__"):
        raise BadRequest(f"out[{name!r}] must be an array or a tensor, got {type(array).__name__}")
    view = tensor(name, array)
    if not view.flags.writeable:
        raise BadRequest(
            f"out[{name!r}] cannot be written through DLPack (it is read-only, or its exporter is "
            "older than DLPack 1.0); pass its NumPy view, as tensor.numpy()"
        )
    return view
