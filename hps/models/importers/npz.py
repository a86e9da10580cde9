"""NumPy's ``.npz``, stored or compressed, read in blocks; pickled objects are rejected."""

from __future__ import annotations

import math
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from hps.errors import ModelError
from hps.models.importers.arrays import (
    ArrayFile,
    StoredArray,
    empty_blocks,
    read_blocks,
    readable,
)

_LOCAL_HEADER = struct.Struct("<4s22xHH")


def open_npz(path: Path) -> ArrayFile:
    """Open an npz file. Raises ModelError if it is damaged or holds anything but plain arrays."""
    archive = open_zip(path, "an .npz file")
    arrays = {}
    with archive:
        for entry in archive.infolist():
            name = entry.filename.removesuffix(".npy")
            try:
                with archive.open(entry) as stream:
                    shape, fortran, dtype = _header(stream)
                    header_bytes = stream.tell()
            except (ValueError, EOFError, OSError, zipfile.BadZipFile) as error:
                raise ModelError(f"{path}: array '{name}' is not readable: {error}") from error
            if min(shape, default=0) < 0:
                raise ModelError(f"{path}: array '{name}' has a negative shape: {list(shape)}")
            if dtype.hasobject:
                raise ModelError(
                    f"{path}: array '{name}' holds pickled Python objects, which are never executed; "
                    "save it with a numeric dtype"
                )
            if entry.compress_type == zipfile.ZIP_STORED:
                offset = data_offset(path, entry) + header_bytes
                expected = math.prod(shape) * dtype.itemsize
                if entry.file_size - header_bytes != expected:
                    raise ModelError(
                        f"{path}: array '{name}' has {entry.file_size - header_bytes} bytes, its "
                        f"header needs {expected}; the file is truncated"
                    )
                blocks = _stored(path, offset, shape, dtype, fortran=fortran)
            elif fortran and len(shape) > 1:
                raise ModelError(
                    f"{path}: array '{name}' is compressed in Fortran order and cannot be "
                    "streamed; save it with np.savez, or np.ascontiguousarray first"
                )
            else:
                blocks = _inflated(path, entry.filename, shape, dtype)
            arrays[name] = StoredArray(name, shape, dtype.name, blocks)
    return ArrayFile(path, arrays)


def open_zip(path: Path, what: str) -> zipfile.ZipFile:
    try:
        with readable(path):
            return zipfile.ZipFile(path)
    except zipfile.BadZipFile:
        raise ModelError(
            f"{path} is not {what} (no zip directory at its end): truncated, or of another format"
        ) from None


def data_offset(path: Path, entry: zipfile.ZipInfo) -> int:
    """Return the offset of a stored entry's bytes in the archive."""
    with path.open("rb") as file:
        file.seek(entry.header_offset)
        head = file.read(_LOCAL_HEADER.size)
    if len(head) < _LOCAL_HEADER.size:
        raise ModelError(f"{path}: entry '{entry.filename}' is truncated")
    signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(head)
    if signature != b"PK\x03\x04":
        raise ModelError(f"{path}: entry '{entry.filename}' has no header where the directory says")
    return int(entry.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes)


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = npy.read_magic(stream)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = read(stream)
    return shape, fortran, dtype


def _stored(
    path: Path, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any], *, fortran: bool
) -> Callable[[int], Iterator[NDArray[Any]]]:
    if 0 in shape or not shape or not dtype.itemsize:
        return empty_blocks
    if fortran and len(shape) > 2:
        return empty_blocks  # neither keys nor vectors have such a shape
    strides = (1, shape[0])[: len(shape)] if fortran else None
    return read_blocks(path, dtype, offset, shape, strides)


def _inflated(
    path: Path, entry: str, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> Callable[[int], Iterator[NDArray[Any]]]:
    row_shape = shape[1:]
    row_bytes = math.prod(row_shape) * dtype.itemsize

    def blocks(rows: int) -> Iterator[NDArray[Any]]:
        with zipfile.ZipFile(path) as archive, archive.open(entry) as stream:
            _header(stream)
            left = shape[0] if shape else 0
            while left:
                count = min(rows, left)
                try:
                    data = stream.read(count * row_bytes)
                except (OSError, EOFError, zipfile.BadZipFile) as error:
                    raise ModelError(f"{path}: array '{entry}' is damaged: {error}") from error
                if len(data) != count * row_bytes:
                    raise ModelError(f"{path}: array '{entry}' ends early: the file is truncated")
                yield np.frombuffer(data, dtype).reshape(count, *row_shape)
                left -= count

    return blocks
