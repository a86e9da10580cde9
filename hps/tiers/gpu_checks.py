"""What the GPU cache demands of the arrays it is given; the device's sibling of checks.py.

Arrays may lie on the host or on the cache's device, but what a fetch fills must lie on the device. Nothing is
converted. All functions raise BadRequest before anything is launched, and may be called from any thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hps.cuda.loader import cupy
from hps.errors import BadRequest
from hps.tiers.base import Part
from hps.types import EmbeddingTable

_INT64, _UINT64, _UINT8 = np.dtype(np.int64), np.dtype(np.uint64), np.dtype(np.uint8)


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
    if not isinstance(array, np.ndarray) and array.device.id != device:
        raise BadRequest(
            f"table {table.id}: {name} is on device {array.device.id}, the cache on {device}; "
            "copy it there"
        )
    return array


def _wanted(table: EmbeddingTable, name: str, n: int) -> tuple[tuple[int, ...], np.dtype[Any]]:
    if name in ("out", "vectors"):
        return (n, table.dim), table.dtype
    return (n,), _UINT64 if name == "versions" else _UINT8 if name == "source" else _INT64


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
        and out.device.id == versions.device.id == source.device.id == device
    )
