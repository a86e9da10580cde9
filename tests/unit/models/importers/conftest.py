"""Checkpoints as ``torch.save`` writes them, made without PyTorch.

The pickles name PyTorch's own functions and classes; for the time of writing, modules of these names
with empty stand-ins are put where pickle looks them up. The layout of the archive (prefix folder, stored
entries, ``byteorder``) is that of PyTorch 2.
"""

import io
import pickle
import sys
import types
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

STORAGES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
}


@dataclass
class FakeStorage:
    """``data``: one-dimensional array of the stored elements."""

    data: np.ndarray
    dtype: str


@dataclass
class FakeTensor:
    storage: FakeStorage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    v3: bool = False
    parameter: bool = False


def tensor(array: np.ndarray, dtype: str | None = None, **settings: Any) -> FakeTensor:
    """A contiguous tensor. Pass the bits of a bfloat16 tensor as uint16."""
    array = np.ascontiguousarray(array)
    strides = tuple(s // array.itemsize for s in array.strides)
    storage = FakeStorage(array.reshape(-1), dtype or array.dtype.name)
    return FakeTensor(storage, 0, array.shape, strides, **settings)


def _stand_ins() -> dict[str, types.ModuleType]:
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    storage = types.ModuleType("torch.storage")
    for name in STORAGES.values():
        setattr(torch, name, type(name, (), {"__module__": "torch"}))
    storage.UntypedStorage = type("UntypedStorage", (), {"__module__": "torch.storage"})
    for name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"):
        function = eval("lambda *a: None")
        function.__module__, function.__qualname__, function.__name__ = "torch._utils", name, name
        setattr(utils, name, function)
    for name in ("float32", "bfloat16"):
        function = eval("lambda: None")
        function.__module__, function.__qualname__, function.__name__ = "torch", name, name
        setattr(torch, name, function)
    torch._utils, torch.storage = utils, storage
    return {"torch": torch, "torch._utils": utils, "torch.storage": storage}


def save_torch(
    path: Path,
    obj: Any,
    *,
    prefix: str = "archive",
    byteorder: str = "little",
    compression: int = zipfile.ZIP_STORED,
    pickled: bytes | None = None,
) -> Path:
    """Write a checkpoint as ``torch.save(obj, path)`` does, from tensors of `tensor`."""
    modules = _stand_ins()
    torch = modules["torch"]
    storages: list[FakeStorage] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, o: Any) -> Any:
            if not isinstance(o, FakeStorage):
                return None
            if not any(o is known for known in storages):
                storages.append(o)
            key = next(i for i, known in enumerate(storages) if known is o)
            if o.dtype == "untyped":
                kind, count = torch.storage.UntypedStorage, o.data.nbytes
            else:
                kind, count = getattr(torch, STORAGES[o.dtype]), o.data.size
            return ("storage", kind, str(key), "cpu", count)

        def reducer_override(self, o: Any) -> Any:
            if not isinstance(o, FakeTensor):
                return NotImplemented
            if o.parameter:
                inner = FakeTensor(o.storage, o.offset, o.size, o.stride)
                return torch._utils._rebuild_parameter, (inner, True, OrderedDict())
            view = (o.storage, o.offset, o.size, o.stride, False, OrderedDict())
            if o.v3:
                return torch._utils._rebuild_tensor_v3, (*view, torch.float32, None)
            return torch._utils._rebuild_tensor_v2, view

    kept = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        out = io.BytesIO()
        Pickler(out, 2).dump(obj)
    finally:
        for name, module in kept.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
    order = "<" if byteorder == "little" else ">"
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr(f"{prefix}/data.pkl", pickled or out.getvalue())
        archive.writestr(f"{prefix}/byteorder", byteorder)
        for key, storage in enumerate(storages):
            data = storage.data.astype(storage.data.dtype.newbyteorder(order))
            archive.writestr(f"{prefix}/data/{key}", data.tobytes())
        archive.writestr(f"{prefix}/version", "3\n")
    return path


@pytest.fixture(name="save_torch")
def save_torch_fixture() -> Any:
    return save_torch


@pytest.fixture(name="tensor")
def tensor_fixture() -> Any:
    return tensor


@pytest.fixture
def fake_torch() -> Any:
    """The raw parts, for tensors that are no plain arrays."""
    return types.SimpleNamespace(Storage=FakeStorage, Tensor=FakeTensor)
