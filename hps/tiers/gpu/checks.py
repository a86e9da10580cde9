"""Argument checks of the GPU cache; hps/tiers/checks.py has those for host arrays.

Arrays may be on the host or on the cache's device, but outputs of a fetch must be on the device.
Nothing is converted. All functions raise BadRequest before any launch, and are thread-safe."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from hps.cuda.loader import cupy
from hps.cuda.table import GpuTable
from hps.errors import BadRequest
from hps.tiers.base import Part
from hps.types import EmbeddingTable, JaggedKeys

_ON_HOST, _ON_DEVICE = (1, 3), 2
"""DLPack's memory types: of the CPU, plain or pinned by CUDA; and of CUDA devices."""
_INT64, _UINT64 = np.dtype(np.int64), np.dtype(np.uint64)
_UINT32, _UINT8 = np.dtype(np.uint32), np.dtype(np.uint8)
_FLAT = (8,)
"""Strides of a contiguous array of keys."""
_DTYPES: dict[str, np.dtype[Any]] = {
    "versions": _UINT64,
    "source": _UINT8,
    "scores": _UINT64,
    "members": _UINT8,
    "weights": np.dtype(np.float32),
}


@dataclass(frozen=True, slots=True)
class DevicePooling:
    """One table's part of a pooling on the device.

    Bags of ``keys`` (arrays as for a fetch; offsets int64, weights float32), their ``combiner``, and
    ``out (batch, dim)`` on the device."""

    table: EmbeddingTable
    keys: JaggedKeys
    combiner: Literal["sum", "mean", "sqrtn"]
    out: Any


def check_pooling(ask: DevicePooling, device: int) -> DevicePooling:
    """Check every array of ``ask``, except the values of offsets on the device.

    Returns ``ask`` with CuPy views in place of other libraries' arrays."""
    table, bags = ask.table, ask.keys
    n = array_length(bags.keys)
    keys, weights, offsets = bags.keys, bags.weights, bags.offsets
    keys = check_array(table, "keys", keys, n, device)
    if weights is not None:
        weights = check_array(table, "weights", weights, n, device)
    if offsets is not None:
        offsets = check_array(table, "offsets", offsets, bags.batch + 1, device)
        if isinstance(offsets, np.ndarray) and not _are_offsets(offsets, n):
            raise BadRequest(
                f"table {table.id}: offsets must ascend from 0 to the number of keys, {n:,}"
            )
    elif bags.batch and n % bags.batch:
        raise BadRequest(
            f"table {table.id}: {n:,} keys can't be shared out over {bags.batch:,} bags"
        )
    out = check_array(table, "pooled", ask.out, bags.batch, device)
    if isinstance(out, np.ndarray):
        raise BadRequest(f"table {table.id}: out must be on device {device}, got a NumPy array")
    if keys is bags.keys and weights is bags.weights and offsets is bags.offsets and out is ask.out:
        return ask
    return DevicePooling(table, JaggedKeys(keys, bags.batch, offsets, weights), ask.combiner, out)


def _are_offsets(offsets: NDArray[np.int64], n: int) -> bool:
    return bool(offsets[0] == 0 and offsets[-1] == n and (np.diff(offsets) >= 0).all())


def check_part(part: Part, device: int, peers: Collection[int] = ()) -> None:
    """Check every array of ``part``; outputs must be on ``device``, or all arrays on one of its ``peers``.

    CuPy views replace other libraries' arrays in ``part``."""
    if peers and isinstance(part.out, cupy().ndarray):
        there = cast(Any, part.out.data).device_id
        device = there if there in peers else device
    if _is_valid(part, device):
        return
    table, n = part.table, len(part.keys)
    part.keys = check_array(table, "keys", part.keys, n, device)
    part.missing = check_array(table, "missing", part.missing, len(part.missing), device)
    for name in ("out", "versions", "source"):
        array = getattr(part, name)
        if array is None and name != "out":
            continue
        if not isinstance(array, np.ndarray):
            array = check_array(table, name, array, n, device)
        if isinstance(array, np.ndarray):
            shape, dtype = _expected(table, name, n)
            raise BadRequest(
                f"table {table.id}: {name} must be on device {device}, got a NumPy array; pass "
                f"cupy.empty({shape}, '{dtype}')"
            )
        setattr(part, name, array)


def check_on_device(table: EmbeddingTable, vectors: Any, n: int, device: int) -> None:
    """Check ``vectors (n, dim)``, which the call overwrites: they must be on ``device``."""
    if isinstance(check_array(table, "vectors", vectors, n, device), np.ndarray):
        raise BadRequest(f"table {table.id}: vectors must be on device {device}, got a host array")


def check_writable(held: GpuTable, *, scored: bool = False) -> None:
    """Reject changes of a static table, and scores for a table that does not evict by score."""
    if held.state.sealed:
        raise BadRequest(f"table {held.table.id} is static in the GPU cache: it can't be changed")
    if scored and not held.shape.scored:
        raise BadRequest(
            f"table {held.table.id}: it evicts by {held.policy.name}, so scores are rejected; "
            "leave them out, or add the table with EvictionPolicy.SCORE"
        )


def write_arrays(keys: Any, vectors: Any, versions: Any, scores: Any) -> dict[str, Any]:
    """Return a write's arrays by name; without ``scores`` if None."""
    arrays = {"keys": keys, "vectors": vectors, "versions": versions}
    return arrays if scores is None else arrays | {"scores": scores}


def array_length(array: Any) -> int:
    """Return the number of values in ``array``; 0 if it is not an array."""
    return math.prod(getattr(array, "shape", (0,)))


def check_array(table: EmbeddingTable, name: str, array: Any, n: int, device: int) -> Any:
    """Check that ``array`` has ``n`` entries or rows.

    Returns it as a CuPy array if it is on ``device``."""
    cp = cupy()
    shape, dtype = _expected(table, name, n)
    if not isinstance(array, (np.ndarray, cp.ndarray)):
        if hasattr(array, "__cuda_array_interface__"):
            array = cp.asarray(array)
        elif (kind := _dlpack_kind(array)) in _ON_HOST:
            array = np.from_dlpack(array)
        elif kind == _ON_DEVICE:
            array = cp.from_dlpack(array)
        else:
            raise BadRequest(
                f"table {table.id}: {name} must be {shape} {dtype}, got a {type(array).__name__}, "
                "not an array; convert it with numpy.asarray or cupy.asarray"
            )
    contiguous = array.flags.c_contiguous
    if array.shape != shape or array.dtype != dtype or not contiguous:
        strided = "" if contiguous else ", not C-contiguous"
        width = shape[1] if len(shape) == 2 else table.row_width
        raise BadRequest(
            f"table {table.id}: {name} must be {shape} {dtype}, C-contiguous, got {array.shape} "
            f"{array.dtype}{strided}; one entry per key is expected, and rows of {width} values"
        )
    if not isinstance(array, np.ndarray) and array.data.device_id != device:
        raise BadRequest(
            f"table {table.id}: {name} is on device {array.data.device_id}, the cache on {device}; "
            "copy it there"
        )
    return array


def _dlpack_kind(array: Any) -> int | None:
    return int(array.__dlpack_device__()[0]) if hasattr(array, "__dlpack__") else None


def _expected(table: EmbeddingTable, name: str, n: int) -> tuple[tuple[int, ...], np.dtype[Any]]:
    if name in ("out", "vectors"):
        return (n, table.row_width), table.row_dtype
    if name == "pooled":
        return (n, table.dim), table.dtype
    return (n,), _DTYPES.get(name, _INT64)


def _is_valid(part: Part, device: int) -> bool:
    """Return whether ``part`` has NumPy and CuPy arrays alone and is valid: the fast path of `check_part`.

    Strides are compared because they are read faster than flags; unusual ones of valid arrays with a row or
    a column alone only cost the slow path."""
    device_array, out, keys, missing = cupy().ndarray, cast(Any, part.out), part.keys, part.missing
    if type(out) is not device_array or type(missing) is not np.ndarray:
        return False
    if type(keys) is device_array:
        if cast(Any, keys.data).device_id != device:
            return False
    elif type(keys) is not np.ndarray:
        return False
    dtype, dim, shape = part.table.row_dtype, part.table.row_width, keys.shape
    size = dtype.itemsize
    return (
        keys.dtype == _INT64
        and keys.strides == _FLAT
        and out.dtype == dtype
        and out.shape == (*shape, dim)
        and out.strides == (size * dim, size)
        and out.data.device_id == device
        and missing.dtype == _INT64
        and missing.strides == _FLAT
        and (part.versions is None or _matches(part.versions, shape, _UINT64, device))
        and (part.source is None or _matches(part.source, shape, _UINT8, device))
    )


def _matches(array: Any, shape: tuple[int, ...], dtype: np.dtype[Any], device: int) -> bool:
    return bool(
        type(array) is cupy().ndarray
        and array.dtype == dtype
        and array.shape == shape
        and array.strides == (dtype.itemsize,)
        and array.data.device_id == device
    )
