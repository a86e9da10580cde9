"""safetensors: a JSON header, then the arrays' bytes; bfloat16 works without a framework."""

from __future__ import annotations

import json
import math
import os
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

_MAX_HEADER = 100 << 20
_DTYPES = {
    "F64": ("float64", "<f8"),
    "F32": ("float32", "<f4"),
    "F16": ("float16", "<f2"),
    "BF16": ("bfloat16", "<u2"),
    "I64": ("int64", "<i8"),
    "I32": ("int32", "<i4"),
    "I16": ("int16", "<i2"),
    "I8": ("int8", "<i1"),
    "U64": ("uint64", "<u8"),
    "U32": ("uint32", "<u4"),
    "U16": ("uint16", "<u2"),
    "U8": ("uint8", "<u1"),
    "BOOL": ("bool", "<u1"),
}


def open_safetensors(path: Path) -> ArrayFile:
    """Open a safetensors file. Raises ModelError for a header that does not match the file."""
    try:
        with readable(path), path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                raise ModelError(
                    f"{path}: the header says it has {length} bytes, the file {size}: truncated, or "
                    "not a safetensors file"
                )
            header = json.loads(file.read(length))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: its header is not JSON: not a safetensors file") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path}: its header is not a JSON object: not a safetensors file")
    header.pop("__metadata__", None)
    base = 8 + length
    return ArrayFile(
        path, {name: _array(path, size, base, name, entry) for name, entry in header.items()}
    )


def _array(path: Path, size: int, base: int, name: str, entry: Any) -> StoredArray:
    try:
        kind, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
        begin, end = (int(n) for n in entry["data_offsets"])
    except (TypeError, KeyError, ValueError) as error:
        raise ModelError(
            f"{path}: the header's entry of '{name}' is damaged: {str(entry)[:200]}"
        ) from error
    dtype, raw = _DTYPES.get(kind, (kind, "<u1"))
    item = np.dtype(raw)
    count = math.prod(shape)
    if min(shape, default=0) < 0 or not 0 <= begin <= end or base + end > size:
        raise ModelError(
            f"{path}: '{name}' lies at bytes {begin} to {end}, but only {size - base} follow the "
            "header: the file is truncated"
        )
    if kind in _DTYPES and end - begin != count * item.itemsize:
        raise ModelError(
            f"{path}: '{name}' {list(shape)} {kind} needs {count * item.itemsize} bytes, the header "
            f"gives it {end - begin}"
        )
    if kind not in _DTYPES or not count or not shape:
        return StoredArray(name, shape, dtype, empty_blocks)
    return StoredArray(name, shape, dtype, read_blocks(path, item, base + begin, shape))
