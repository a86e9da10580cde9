"""What the GPU cache demands of the arrays it is given; the device's sibling of checks.py.

Arrays may lie on the host or on the cache's device, but what a fetch fills must lie on the device. Nothing is
converted. All functions raise BadRequest before anything is launched, and may be called from any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hps.cuda.loader import cupy
from hps.errors import BadRequest
from hps.tiers.base import Part
from hps.types import EmbeddingTable, JaggedKeys

_INT64, _UINT64 = np.dtype(np.int64), np.dtype(np.uint64)
_UINT32, _UINT8 = np.dtype(np.uint32), np.dtype(np.uint8)
_DTYPES: dict[str, np.dtype[Any]] = {
    "versions": _UINT64,
    "source": _UINT8,
    "scores": _UINT32,
    "weights": np.dtype(np.float32),
}


@dataclass(frozen=True, slots=True)
class Pooling:
    """One table's share of a pooling on the device: bags of ``keys`` (NumPy or CuPy arrays; offsets int64,
    weights float32), their ``combiner``, and ``out (batch, dim)`` on the device."""

    table: EmbeddingTable
    keys: JaggedKeys
    combiner: Literal["sum", "mean"]
    out: Any


def check_pooling(ask: Pooling, device: int) -> None:
    """Check every array of ``ask``; what offsets on the device say is not looked at."""
    table, keys = ask.table, ask.keys
    n = keys.keys.size
    checked(table, "keys", keys.keys, n, device)
    if keys.weights is not None:
        checked(table, "weights", keys.weights, n, device)
    if keys.offsets is not None:
        checked(table, "offsets", keys.offsets, keys.batch + 1, device)
        if isinstance(keys.offsets, np.ndarray) and not _are_offsets(keys.offsets, n):
            raise BadRequest(
                f"table {table.id}: offsets must ascend from 0 to the number of keys, {n:,}"
            )
    elif keys.batch and n % keys.batch:
        raise BadRequest(
            f"table {table.id}: {n:,} keys can't be shared out over {keys.batch:,} bags"
        )
    if isinstance(ask.out, np.ndarray):
        raise BadRequest(f"table {table.id}: out must be on device {device}, got a NumPy array")
    checked(table, "out", ask.out, keys.batch, device)


def _are_offsets(offsets: NDArray[np.int64], n: int) -> bool:
    return bool(offsets[0] == 0 and offsets[-1] == n and (np.diff(offsets) >= 0).all())


def check_part(part: Part, device: int) -> None:
    """Check every array of ``part``; those to be filled must lie on ``device``."""
    if _is_usual(part, device):
        return
    table, n = part.table, len(part.keys)
    checked(table, "keys", part.keys, n, device)
    checked(table, "missing", part.missing, part.missing.size, device)
    for name in ("out", "versions", "source"):
        array = getattr(part, name)
        if isinstance(array, np.ndarray):
            shape, dtype = _wanted(table, name, n)
            raise BadRequest(
                f"table {table.id}: {name} must be on device {device}, got a NumPy array; pass "
                f"cupy.empty({shape}, '{dtype}')"
            )
        checked(table, name, array, n, device)


def checked(table: EmbeddingTable, name: str, array: Any, n: int, device: int) -> Any:
    """``array``, a CuPy array if it lies on ``device``. ``n`` entries, or rows, are expected."""
    cp = cupy()
    shape, dtype = _wanted(table, name, n)
    if not isinstance(array, (np.ndarray, cp.ndarray)):
        if not hasattr(array, "__cuda_array_interface__"):
            raise BadRequest(
                f"table {table.id}: {name} must be {shape} {dtype}, got a {type(array).__name__}, "
                "not an array; convert it with numpy.asarray or cupy.asarray"
            )
        array = cp.asarray(array)
    contiguous = array.flags.c_contiguous
    if array.shape != shape or array.dtype != dtype or not contiguous:
        strided = "" if contiguous else ", not C-contiguous"
        raise BadRequest(
            f"table {table.id}: {name} must be {shape} {dtype}, C-contiguous, got {array.shape} "
            f"{array.dtype}{strided}; one entry per key is expected, and rows of {table.dim} values"
        )
    if not isinstance(array, np.ndarray) and array.data.device_id != device:
        raise BadRequest(
            f"table {table.id}: {name} is on device {array.data.device_id}, the cache on {device}; "
            "copy it there"
        )
    return array


def _wanted(table: EmbeddingTable, name: str, n: int) -> tuple[tuple[int, ...], np.dtype[Any]]:
    if name in ("out", "vectors"):
        return (n, table.dim), table.dtype
    return (n,), _DTYPES.get(name, _INT64)


def _is_usual(part: Part, device: int) -> bool:
    """Whether ``part`` is as most are, keys on the host, and in order: the quick way through."""
    keys: Any = part.keys
    missing: Any = part.missing
    out: Any = part.out
    versions: Any = part.versions
    source: Any = part.source
    there, shape = cupy().ndarray, keys.shape
    return (
        type(out) is type(versions) is type(source) is there
        and type(keys) is type(missing) is np.ndarray
        and keys.dtype == missing.dtype == _INT64
        and versions.dtype == _UINT64
        and source.dtype == _UINT8
        and out.dtype == part.table.dtype
        and versions.shape == source.shape == shape
        and out.shape == (*shape, part.table.dim)
        and missing.ndim == 1
        and keys.flags.c_contiguous
        and missing.flags.c_contiguous
        and out.flags.c_contiguous
        and versions.flags.c_contiguous
        and source.flags.c_contiguous
        and out.data.device_id == versions.data.device_id == source.data.device_id == device
    )
