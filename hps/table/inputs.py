"""Check and convert callers' arrays: NumPy's, and others on the host by DLPack.

Everything raises ``BadRequest`` that names what was given and what the table takes, before anything changes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.array_inputs import device_number, flat_keys, output_arrays, tensor
from hps.errors import BadRequest
from hps.types import KeyArray, VectorArray


def _on_host(name: str, array: Any) -> Any:
    device = device_number(array)
    if device is not None:
        raise BadRequest(
            f"{name} are on CUDA device {device}, but this table is in host memory: copy them to the "
            "host first (cupy.asnumpy, or tensor.cpu())"
        )
    return array


def _text(array: NDArray[Any]) -> str:
    return f"{array.dtype} {array.shape}"


def table_keys(keys: Any) -> KeyArray:
    """Convert integer keys ``(n,)``; unsigned ones keep their bits."""
    return flat_keys("keys", _on_host("keys", keys))


def table_rows(rows: Any, n: int, like: NDArray[Any], name: str = "rows") -> VectorArray:
    """Check rows ``(n, dim)`` of the dtype of ``like (0, dim)``; a list is converted to it."""
    array = tensor(name, _on_host(name, rows))
    if isinstance(rows, list | tuple) and array.dtype.kind in "iuf":
        array = array.astype(like.dtype)
    if array.dtype != like.dtype or array.shape != (n, like.shape[1]):
        raise BadRequest(
            f"{name} are {_text(array)}, but {n} keys of this table have {like.dtype} ({n}, {like.shape[1]})"
        )
    return np.ascontiguousarray(array)


def output_rows(out: Any, n: int, like: NDArray[Any]) -> VectorArray | None:
    """Check the caller's output array ``(n, dim)``; None if there is none."""
    if out is None:
        return None
    array = (output_arrays({"rows": _on_host("out rows", out)}) or {})["rows"]
    if array.dtype != like.dtype or array.shape != (n, like.shape[1]):
        raise BadRequest(
            f"out is {_text(array)}, but the rows of {n} keys are {like.dtype} ({n}, {like.shape[1]})"
        )
    if not array.flags.c_contiguous or not array.flags.writeable:
        raise BadRequest("out must be C-contiguous and writeable")
    return array


def table_scores(scores: Any, n: int) -> NDArray[np.uint64] | None:
    """Convert scores ``(n,)``, integers from 0 to 2^64 - 1; None if there are none."""
    if scores is None:
        return None
    array = tensor("scores", _on_host("scores", scores))
    if array.shape != (n,):
        raise BadRequest(f"scores are {_text(array)}, but there are {n} keys")
    if array.dtype.kind not in "iu" and n:
        raise BadRequest(f"scores are {array.dtype}, but a table takes uint64")
    if array.dtype.kind == "i" and n and array.min() < 0:
        raise BadRequest(f"a score is {array.min()}, but scores are at least 0")
    return np.ascontiguousarray(array, np.uint64)


def table_flags(flags: Any, n: int) -> NDArray[np.bool_]:
    """Check flags ``(n,)`` of dtype bool."""
    array = tensor("accumulate", _on_host("accumulate", flags))
    if array.shape != (n,) or (array.dtype != bool and n):
        raise BadRequest(f"accumulate is {_text(array)}, but {n} keys take bool ({n},)")
    return np.ascontiguousarray(array, bool)


def selected(predicate: Any, keys: KeyArray, scores: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return the caller's choice among rows, checked."""
    chosen = np.asarray(predicate(keys, scores))
    if chosen.shape != keys.shape or chosen.dtype != bool:
        raise BadRequest(
            f"the predicate returned {_text(chosen)}, but {len(keys)} keys take bool ({len(keys)},)"
        )
    return chosen
