"""The protocol's datatypes by NumPy type, the rules of inputs, and tensors in JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.dense.base import DATATYPES

# By type number: an int is faster to look up than a dtype, and every answer needs it.
DATATYPE_OF: dict[int, str] = {dtype.num: name for name, dtype in DATATYPES.items()}
DATATYPE_OF.setdefault(np.dtype(np.longlong).num, "INT64")
DATATYPE_OF.setdefault(np.dtype(np.ulonglong).num, "UINT64")

# Keys of any integer type are widened; 64-bit hashes are kept bit for bit. The first one is the model's.
INTEGERS: dict[str, np.dtype[Any]] = {"INT64": DATATYPES["INT64"]} | {
    name: dtype for name, dtype in DATATYPES.items() if dtype.kind in "iu"
}

# Binary only: the protocol has no JSON numbers of this type.
BINARY_ONLY = frozenset({"FP16"})

_ELEMENTS: dict[str, set[type]] = {"i": {int}, "u": {int}, "f": {int, float}, "b": {bool}}


@dataclass(frozen=True, slots=True)
class InputRule:
    """Rule of one input of a model.

    ``dtypes``: accepted types by datatype. ``is_keys``: its elements count as keys."""

    dtypes: Mapping[str, np.dtype[Any]]
    is_keys: bool = False


def numbers(data: Any, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    """Convert a tensor's JSON ``data``, flat or nested, to ``(count,)`` of ``dtype``.

    Raises TypeError or ValueError where NumPy would silently round, truncate or reinterpret."""
    data = flat(data)
    if type(data) is not list:
        raise TypeError("data must be an array")
    kinds = set(map(type, data))
    if not kinds <= _ELEMENTS[dtype.kind]:
        raise TypeError("elements")
    if len(data) != count:
        raise ValueError("count")
    if dtype.kind == "f":
        if dtype.itemsize == 2:
            raise TypeError("FP16 has no JSON form")
        with np.errstate(over="ignore"):
            values = np.array(data, dtype)
        if not np.isfinite(values).all():  # JSON has no infinity: a number was too large
            raise OverflowError("out of range")
        return values
    if data and dtype.kind != "b":
        info = np.iinfo(dtype)
        if min(data) < info.min or max(data) > info.max:  # NumPy 1 would wrap around
            raise OverflowError("out of range")
    return np.array(data, dtype)


def flat(data: Any) -> Any:
    """Flatten uniformly nested lists; return other data unchanged."""
    if type(data) is not list:
        return data
    while data and type(data[0]) is list and set(map(type, data)) == {list}:
        data = list(chain.from_iterable(data))
    return data
