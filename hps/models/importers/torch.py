"""PyTorch checkpoints (``torch.save``, since version 1.6), read without PyTorch.

A checkpoint is a zip archive: ``<prefix>/data.pkl`` describes the tensors, ``<prefix>/data/<key>`` are
their bytes, stored uncompressed."""

from __future__ import annotations

import math
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hps.errors import ModelError
from hps.models.importers.arrays import (
    ArrayFile,
    StoredArray,
    empty_blocks,
    read_blocks,
    readable,
)
from hps.models.importers.npz import data_offset, open_zip
from hps.models.importers.torch_pickle import STORED_AS, TorchTensor, read_pickle

_MAX_PICKLE = 64 << 20
_MAX_DEPTH = 64
_REMEDY = "save the state_dict alone: torch.save(model.state_dict(), path)"


def open_torch(path: Path) -> ArrayFile:
    """Open a checkpoint; names of tensors in nested dicts are joined by dots. Raises ModelError."""
    with _open(path) as archive:
        prefix = _prefix(path, archive)
        order = _byte_order(archive, prefix)
        tree = _read(path, archive, f"{prefix}data.pkl")
        entries = {e.filename: e for e in archive.infolist()}
    tensors = {name or path.stem: tensor for name, tensor in _tensors(path, tree)}
    if not tensors:
        raise ModelError(f"{path} holds no tensors; {_REMEDY}")
    arrays = {n: _array(path, n, tensor, entries, prefix, order) for n, tensor in tensors.items()}
    return ArrayFile(path, arrays)


def _open(path: Path) -> zipfile.ZipFile:
    with readable(path), path.open("rb") as file:
        is_pickle = file.read(1) == pickle.PROTO
    if is_pickle:
        raise ModelError(
            f"{path} is in PyTorch's legacy format (a bare pickle, before 1.6), which cannot be read "
            "without executing it; load it in PyTorch and save it again with torch.save"
        )
    return open_zip(path, "a PyTorch checkpoint")


def _prefix(path: Path, archive: zipfile.ZipFile) -> str:
    found = [n for n in archive.namelist() if n == "data.pkl" or n.endswith("/data.pkl")]
    if len(found) != 1:
        raise ModelError(f"{path} is a zip archive without a data.pkl: not a PyTorch checkpoint")
    prefix = found[0].removesuffix("data.pkl")
    if f"{prefix}constants.pkl" in archive.namelist():
        raise ModelError(f"{path} is a TorchScript archive, which holds code; {_REMEDY}")
    return prefix


def _byte_order(archive: zipfile.ZipFile, prefix: str) -> str:
    name = f"{prefix}byteorder"
    if name not in archive.namelist():
        return "<"
    with archive.open(name) as file:
        return ">" if file.read(16).strip() == b"big" else "<"


def _read(path: Path, archive: zipfile.ZipFile, name: str) -> Any:
    entry = archive.getinfo(name)
    if entry.file_size > _MAX_PICKLE:
        raise ModelError(f"{path}: its data.pkl has {entry.file_size} bytes: not a state_dict")
    try:
        return read_pickle(archive.read(name))
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{path}: {error}. Only tensors, dicts, lists and numbers are read, nothing is executed; "
            f"{_REMEDY}"
        ) from error


def _tensors(path: Path, tree: Any) -> Iterator[tuple[str, TorchTensor]]:
    """Yield the tensors and their names, depth first.

    Not recursive: a hostile file may nest deeper than Python's stack."""
    stack = [(tree, "", 0)]
    seen: set[int] = set()
    while stack:
        node, name, depth = stack.pop()
        if isinstance(node, TorchTensor):
            yield name, node
        elif isinstance(node, (Mapping, list, tuple)) and id(node) not in seen:
            if depth == _MAX_DEPTH:
                raise ModelError(
                    f"{path} nests deeper than {_MAX_DEPTH} dicts and lists; {_REMEDY}"
                )
            seen.add(id(node))
            items = node.items() if isinstance(node, Mapping) else enumerate(node)
            children = [(v, f"{name}.{key}" if name else str(key), depth + 1) for key, v in items]
            stack.extend(reversed(children))


def _array(
    path: Path,
    name: str,
    tensor: TorchTensor,
    entries: Mapping[str, zipfile.ZipInfo],
    prefix: str,
    order: str,
) -> StoredArray:
    item = np.dtype(order + STORED_AS[tensor.dtype])
    if 0 in tensor.size or len(tensor.size) not in (1, 2):
        return StoredArray(name, tensor.size, tensor.dtype, empty_blocks)
    entry = entries.get(f"{prefix}data/{tensor.storage.key}")
    if entry is None:
        raise ModelError(f"{path}: the bytes of '{name}' (data/{tensor.storage.key}) are missing")
    if entry.compress_type != zipfile.ZIP_STORED:
        raise ModelError(f"{path}: '{name}' is compressed, which torch.save never does; {_REMEDY}")
    last = tensor.offset + sum(
        (n - 1) * step for n, step in zip(tensor.size, tensor.stride, strict=True)
    )
    held = entry.file_size // item.itemsize
    if last >= held or math.prod(tensor.size) > held:
        raise ModelError(
            f"{path}: '{name}' {list(tensor.size)} needs {math.prod(tensor.size)} elements up to number "
            f"{last}, its storage has {held}: the file is damaged"
        )

    offset = data_offset(path, entry) + tensor.offset * item.itemsize
    strides = None if tensor.stride == (*tensor.size[1:], 1) else tuple(tensor.stride)
    return StoredArray(
        name, tensor.size, tensor.dtype, read_blocks(path, item, offset, tensor.size, strides)
    )
