"""Check and convert callers' arrays, into the table's memory.

Everything raises ``BadRequest`` that names what was given and what the table takes, before anything changes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.array_inputs import device_number, flat_keys
from hps.errors import BadRequest
from hps.table.memory import Memory
from hps.types import KeyArray, VectorArray


def _text(array: Any) -> str:
    return f"{array.dtype} {array.shape}"


def table_keys(keys: Any, memory: Memory) -> KeyArray:
    """Convert integer keys ``(n,)``; unsigned ones keep their bits."""
    if device_number(keys) is None:
        return _contiguous(memory.take("keys", flat_keys("keys", keys)), np.int64, memory)
    array = memory.take("keys", keys)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise BadRequest(f"keys are {_text(array)}, but must be integers (n,)")
    return _contiguous(array, np.int64, memory)


def _contiguous(array: Any, dtype: Any, memory: Memory) -> NDArray[Any]:
    found: NDArray[Any] = memory.xp.ascontiguousarray(array.astype(dtype, copy=False))
    return found


def table_rows(
    rows: Any, n: int, like: NDArray[Any], memory: Memory, name: str = "rows"
) -> VectorArray:
    """Check rows ``(n, dim)`` of the dtype of ``like (0, dim)``; a list is converted to it."""
    array = memory.take(name, rows)
    if isinstance(rows, list | tuple) and array.dtype.kind in "iuf":
        array = array.astype(like.dtype)
    if array.dtype != like.dtype or array.shape != (n, like.shape[1]):
        raise BadRequest(
            f"{name} are {_text(array)}, but {n} keys of this table have {like.dtype} ({n}, {like.shape[1]})"
        )
    return _contiguous(array, like.dtype, memory)


def output_rows(out: Any, n: int, like: NDArray[Any], memory: Memory) -> VectorArray | None:
    """Check the caller's output array ``(n, dim)``; None if there is none."""
    if out is None:
        return None
    array: VectorArray = memory.output("out rows", out)
    if array.dtype != like.dtype or array.shape != (n, like.shape[1]):
        raise BadRequest(
            f"out is {_text(array)}, but the rows of {n} keys are {like.dtype} ({n}, {like.shape[1]})"
        )
    if not array.flags.c_contiguous or not getattr(array.flags, "writeable", True):
        raise BadRequest("out must be C-contiguous and writeable")
    return array


def table_scores(scores: Any, n: int, memory: Memory) -> NDArray[np.uint64] | None:
    """Convert scores ``(n,)``, integers from 0 to 2^64 - 1; None if there are none."""
    if scores is None:
        return None
    array = memory.take("scores", scores)
    if array.shape != (n,):
        raise BadRequest(f"scores are {_text(array)}, but there are {n} keys")
    if array.dtype.kind not in "iu" and n:
        raise BadRequest(f"scores are {array.dtype}, but a table takes uint64")
    if array.dtype.kind == "i" and n and array.min() < 0:
        raise BadRequest(f"a score is {array.min()}, but scores are at least 0")
    return _contiguous(array, np.uint64, memory)


def table_flags(flags: Any, n: int, memory: Memory) -> NDArray[np.bool_]:
    """Check flags ``(n,)`` of dtype bool."""
    array = memory.take("accumulate", flags)
    if array.shape != (n,) or (array.dtype != bool and n):
        raise BadRequest(f"accumulate is {_text(array)}, but {n} keys take bool ({n},)")
    return _contiguous(array, bool, memory)


def selected(
    predicate: Any, keys: KeyArray, scores: NDArray[np.uint64], memory: Memory
) -> NDArray[np.bool_]:
    """Return the caller's choice among rows, checked."""
    chosen: NDArray[np.bool_] = memory.xp.asarray(predicate(keys, scores))
    if chosen.shape != keys.shape or chosen.dtype != bool:
        raise BadRequest(
            f"the predicate returned {_text(chosen)}, but {len(keys)} keys take bool ({len(keys)},)"
        )
    return chosen
