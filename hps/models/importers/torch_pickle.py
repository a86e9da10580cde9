"""Reads the pickle of a PyTorch checkpoint without executing it.

A pickle is a program; ``find_class`` decides what it may call. Here these are the few names with which
PyTorch describes tensors, each mapped to something inert of our own: they record offsets, sizes and
strides, nothing more. Any other name is refused, so a pickle that wants to run something ends in an
error before it does.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

_MAX_TENSOR_DIMS = 64
# Storage classes of PyTorch -> (dtype, NumPy type of the stored bytes); bfloat16 as its bits.
STORAGES = {
    "DoubleStorage": ("float64", "f8"),
    "FloatStorage": ("float32", "f4"),
    "HalfStorage": ("float16", "f2"),
    "BFloat16Storage": ("bfloat16", "u2"),
    "LongStorage": ("int64", "i8"),
    "IntStorage": ("int32", "i4"),
    "ShortStorage": ("int16", "i2"),
    "CharStorage": ("int8", "i1"),
    "ByteStorage": ("uint8", "u1"),
    "BoolStorage": ("bool", "u1"),
    "UntypedStorage": ("bytes", "u1"),
}
DTYPES = {
    "float64": "f8",
    "double": "f8",
    "float32": "f4",
    "float": "f4",
    "float16": "f2",
    "half": "f2",
    "bfloat16": "u2",
    "int64": "i8",
    "long": "i8",
    "int32": "i4",
    "int": "i4",
    "int16": "i2",
    "short": "i2",
    "int8": "i1",
    "uint8": "u1",
    "uint16": "u2",
    "uint32": "u4",
    "uint64": "u8",
    "bool": "u1",
}
_LONG_NAMES = {
    "double": "float64",
    "float": "float32",
    "half": "float16",
    "long": "int64",
    "int": "int32",
    "short": "int16",
}


class Refused(pickle.UnpicklingError):
    """The pickle names something that is not part of a tensor's description."""


# Tuples, because a pickle can change the attributes of most other objects after they were checked (BUILD
# calls __setstate__, which frozen dataclasses have).
class Storage(NamedTuple):
    """The bytes ``data/<key>`` of the archive, ``elements`` of ``dtype``."""

    key: str
    dtype: str
    stored: str
    elements: int


class Tensor(NamedTuple):
    """A view of a storage; offset and strides in elements of ``dtype``."""

    storage: Storage
    dtype: str
    stored: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class _StorageType(NamedTuple):
    dtype: str
    stored: str


class _DType(NamedTuple):
    name: str


class _Call:
    """What a name of the pickle stands for. It has no attributes that a pickle could set."""

    __slots__ = ("_function",)
    _function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "_function", function)

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setattr__(self, name: str, value: Any) -> None:
        raise Refused(f"the pickle wants to set '{name}'")


def _integers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, (tuple, list)) or len(values) > _MAX_TENSOR_DIMS:
        raise Refused("a tensor's sizes are not a tuple")
    if not all(type(v) is int and 0 <= v < 1 << 62 for v in values):
        raise Refused("a tensor has a size or stride that is not a natural number")
    return tuple(values)


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *_rest: Any) -> Tensor:
    if not isinstance(storage, Storage):
        raise Refused("a tensor without a storage")
    return _view(storage, offset, size, stride, storage.dtype, storage.stored)


def _tensor_v3(
    storage: Any, offset: Any, size: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any
) -> Tensor:
    if not isinstance(storage, Storage) or not isinstance(dtype, _DType):
        raise Refused("a tensor without a storage or dtype")
    return _view(storage, offset, size, stride, dtype.name, DTYPES[dtype.name])


def _view(storage: Storage, offset: Any, size: Any, stride: Any, dtype: str, stored: str) -> Tensor:
    sizes, strides = _integers(size), _integers(stride)
    (start,) = _integers((offset,))
    if len(sizes) != len(strides):
        raise Refused("a tensor whose sizes and strides differ in number")
    return Tensor(storage, _LONG_NAMES.get(dtype, dtype), stored, start, sizes, strides)


def _parameter(data: Any, *_rest: Any) -> Any:
    return data


_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch", "Size"): lambda sizes=(): _integers(sizes),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "collections" and name == "OrderedDict":
            return OrderedDict  # a builtin type: a pickle cannot alter it
        if (module, name) in _ALLOWED:
            return _Call(_ALLOWED[module, name])
        if module in ("torch", "torch.storage") and name in STORAGES:
            return _StorageType(*STORAGES[name])
        if module == "torch" and name in DTYPES:
            return _DType(name)
        raise Refused(f"the pickle names {module}.{name}")

    def persistent_load(self, pid: Any) -> Storage:
        match pid:
            case ("storage", _StorageType() as kind, str(key), str(), int(count)) if count >= 0:
                return Storage(key, kind.dtype, kind.stored, count)
        raise Refused(f"the pickle refers to {str(pid)[:80]}")


def read_pickle(data: bytes) -> Any:
    """The checkpoint's object with every tensor as a `Tensor`; raises pickle.UnpicklingError."""
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except Refused:
        raise
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise pickle.UnpicklingError(f"the pickle is damaged: {error!r}") from error
