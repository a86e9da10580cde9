"""Argument checks that all tiers share.

Arrays must be those of `hps.types`: keys (n,) int64, rows (n, row_width) of the table's row_dtype, versions
(n,) uint64, all C-contiguous. Nothing is converted: a silent copy of an input would hide a slow caller,
and a copy of an output would lose the answer. All functions raise BadRequest before anything is written,
and are thread-safe."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.errors import BadRequest
from hps.tiers.base import Bags, Part
from hps.types import EmbeddingTable, KeyArray, VectorArray, VersionArray

_INT64, _UINT64, _UINT8 = np.dtype(np.int64), np.dtype(np.uint64), np.dtype(np.uint8)


def _check(
    table: EmbeddingTable, name: str, array: Any, shape: tuple[int, ...], dtype: Any
) -> None:
    if (
        isinstance(array, np.ndarray)
        and array.shape == shape
        and array.dtype == dtype
        and array.flags.c_contiguous
    ):
        return
    expected = f"{shape} {dtype}, C-contiguous"
    if not isinstance(array, np.ndarray):
        actual = f"a {type(array).__name__}, not a NumPy array"
        remedy = "convert it with np.asarray"
    else:
        strided = "" if array.flags.c_contiguous else ", not C-contiguous"
        actual = f"{array.shape} {array.dtype}{strided}"
        remedy = f"pass np.ascontiguousarray({name}, {dtype})"
        if array.shape != shape:
            remedy = f"one entry per key is expected, and rows of {table.row_width} items"
    raise BadRequest(f"table {table.id}: {name} must be {expected}, got {actual}; {remedy}")


def check_keys(table: EmbeddingTable, keys: KeyArray, versions: VersionArray | None = None) -> None:
    """Check ``keys (n,) int64`` and, if passed, ``versions (n,) uint64``."""
    shape = (keys.size,) if isinstance(keys, np.ndarray) else (0,)
    _check(table, "keys", keys, shape, _INT64)
    if versions is not None:
        _check(table, "versions", versions, shape, _UINT64)


def check_rows(
    table: EmbeddingTable, keys: KeyArray, vectors: VectorArray, versions: VersionArray
) -> None:
    """Check the arguments of insert and update, with rows ``vectors (n, row_width)`` as they are stored."""
    check_keys(table, keys, versions)
    _check(table, "vectors", vectors, (len(keys), table.row_width), table.row_dtype)


def check_gather(table: EmbeddingTable, keys: KeyArray, out: VectorArray) -> None:
    """Check ``keys``, and that ``out`` is writable and takes rows as they are stored, or vectors."""
    check_keys(table, keys)
    stored = (len(keys), table.row_width)
    if not (isinstance(out, np.ndarray) and (out.shape, out.dtype) == (stored, table.row_dtype)):
        _check(table, "out", out, (len(keys), table.dim), table.dtype)
    _check_writable(table, "out", out)


def check_bags(bags: Bags) -> None:
    """Check every array of ``bags``, and that the offsets ascend from 0 to the number of keys."""
    table, n, count = bags.table, len(bags.keys), len(bags.out)
    check_keys(table, bags.keys)
    _check(table, "out", bags.out, (count, table.dim), table.dtype)
    _check_writable(table, "out", bags.out)
    if bags.weights is not None:
        _check(table, "weights", bags.weights, (n,), np.dtype(np.float32))
    if bags.divisors is not None:
        _check(table, "divisors", bags.divisors, (count,), np.dtype(np.float32))
    if bags.offsets is None:
        if n % count if count else n:
            raise BadRequest(
                f"table {table.id}: {n} keys cannot be divided into {count} bags; pass offsets"
            )
        return
    _check(table, "offsets", bags.offsets, (count + 1,), _INT64)
    ends = (int(bags.offsets[0]), int(bags.offsets[-1]))
    if ends != (0, n) or (bags.offsets[1:] < bags.offsets[:-1]).any():
        raise BadRequest(
            f"table {table.id}: offsets must ascend from 0 to the number of keys, {n}; the first is "
            f"{ends[0]}, the last {ends[1]}"
        )


def check_part(part: Part) -> None:
    """Check every array of ``part``, and that its outputs are writable."""
    table, n = part.table, len(part.keys)
    check_keys(table, part.keys)
    _check(table, "out", part.out, (n, table.row_width), table.row_dtype)
    _check(table, "versions", part.versions, (n,), _UINT64)
    _check(table, "source", part.source, (n,), _UINT8)
    _check(table, "missing", part.missing, (part.missing.size,), _INT64)
    for name in ("out", "versions", "source"):
        _check_writable(table, name, getattr(part, name))


def _check_writable(table: EmbeddingTable, name: str, array: NDArray[Any]) -> None:
    if not array.flags.writeable:
        raise BadRequest(f"table {table.id}: {name} is read-only; pass an array that can be filled")
