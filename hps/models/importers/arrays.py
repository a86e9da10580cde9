"""Arrays in files, read in blocks: the common form of npz, safetensors and PyTorch files."""

from __future__ import annotations

import lzma
import math
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from hps.errors import ModelError
from hps.types import KeyArray, as_keys

BLOCK_BYTES = 4 << 20
FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")

_DAMAGE = (
    OverflowError,
    EOFError,
    MemoryError,
    OSError,
    RuntimeError,  # an encrypted zip; JSON with too deep nesting
    ValueError,
    lzma.LZMAError,
    zipfile.BadZipFile,
    zlib.error,
)


@dataclass(frozen=True, slots=True)
class StoredArray:
    """One array of a file.

    ``blocks(rows)`` yields it in order, ``rows`` of the first dimension at a time; bfloat16 as the
    uint16 of its bits."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    blocks: Callable[[int], Iterator[NDArray[Any]]]

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)} {self.dtype}"

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) == 2 and self.dtype in FLOATS and self.shape[1] > 0

    @property
    def is_keys(self) -> bool:
        return len(self.shape) == 1 and self.dtype in INTEGERS


@dataclass(frozen=True, slots=True)
class ArrayFile:
    """A file of named arrays."""

    path: Path
    arrays: Mapping[str, StoredArray]

    def get(self, name: str, purpose: str) -> StoredArray:
        """Return the array ``name``. Raises ModelError with a list of all arrays if it is missing."""
        found = self.arrays.get(name)
        if found is None:
            raise ModelError(
                f"{self.path}: no array '{name}' for {purpose}; it holds {self.contents()}"
            )
        return found

    def contents(self, *, matrices: bool = False) -> str:
        chosen = [str(a) for a in self.arrays.values() if a.is_matrix or not matrices]
        shown = ", ".join(chosen[:12]) + (f" and {len(chosen) - 12} more" if chosen[12:] else "")
        return shown or "no array that could be a table"


def read_blocks(
    path: Path,
    dtype: np.dtype[Any],
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None = None,
) -> Callable[[int], Iterator[NDArray[Any]]]:
    """Return a function that yields blocks of an array stored in ``path`` at byte ``offset``.

    Its elements are contiguous or, for a vector or matrix, ``strides`` elements apart. They are read,
    not mapped: if the file is shortened, a read raises ModelError, a mapping ends the process (SIGBUS)."""
    rows_apart, columns_apart = (*(strides or (0, 0)), 0)[:2]

    def blocks(rows: int) -> Iterator[NDArray[Any]]:
        with path.open("rb", buffering=0) as file:

            def read(at: int, count: int) -> NDArray[Any]:
                return _read(path, file, dtype, offset + at * dtype.itemsize, count)

            for start in range(0, shape[0], rows):
                part = (min(rows, shape[0] - start), *shape[1:])
                if strides is None:
                    width = math.prod(shape[1:])
                    yield read(start * width, part[0] * width).reshape(part)
                else:
                    yield _strided(read, start, part, rows_apart, columns_apart, dtype)

    return blocks


def _read(path: Path, file: IO[bytes], dtype: np.dtype[Any], at: int, count: int) -> NDArray[Any]:
    file.seek(at)
    found = np.empty(count, dtype)
    left = memoryview(found.view(np.uint8).data)
    while len(left):
        n = file.readinto(left)  # type: ignore[attr-defined] # an unbuffered file has it
        if not n:
            raise ModelError(
                f"{path} was shortened while it was read; replace it by the complete file"
            )
        left = left[n:]
    return found


def _strided(
    read: Callable[[int, int], NDArray[Any]],
    start: int,
    shape: tuple[int, ...],
    rows_apart: int,
    columns_apart: int,
    dtype: np.dtype[Any],
) -> NDArray[Any]:
    """Read rows from ``start`` on, with the elements between them, at most a block at a time."""
    out = np.empty((shape[0], math.prod(shape[1:])), dtype)
    if rows_apart >= columns_apart:
        step = max(1, BLOCK_BYTES // dtype.itemsize // max(1, rows_apart))
        parts = [(slice(i, i + step), slice(0, None)) for i in range(0, shape[0], step)]
    else:
        parts = [(slice(0, None), slice(j, j + 1)) for j in range(out.shape[1])]
    apart = rows_apart * dtype.itemsize, columns_apart * dtype.itemsize
    for rows, columns in parts:
        into = out[rows, columns]
        first = (start + rows.start) * rows_apart + columns.start * columns_apart
        span = (into.shape[0] - 1) * rows_apart + (into.shape[1] - 1) * columns_apart + 1
        into[...] = as_strided(read(first, span), into.shape, apart, writeable=False)
    return out.reshape(shape)


def empty_blocks(_rows: int) -> Iterator[NDArray[Any]]:
    """Yield no blocks, for an array without elements, whatever its shape claims."""
    return iter(())


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Context that turns errors of opening and reading ``path`` into ModelError."""
    try:
        yield
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from error


@contextmanager
def import_errors(path: Path) -> Iterator[None]:
    """Context that turns errors of zip, Parquet and JSON readers into ModelError.

    Readers raise many kinds of errors for a damaged or hostile file."""
    try:
        yield
    except _DAMAGE as error:
        reason = " ".join(f"{error}".split())[:300] or type(error).__name__
        raise ModelError(
            f"{path} cannot be read: {reason}; it is damaged, or not what its name says: write it again"
        ) from error


def block_rows(dim: int) -> int:
    """Return the number of rows of ``dim`` float32 values in a block."""
    return max(1, BLOCK_BYTES // (dim * 4))


def to_float32(array: StoredArray, block: NDArray[Any]) -> NDArray[np.float32]:
    """Convert a block of ``array`` to C-contiguous float32 (n, dim)."""
    if array.dtype == "bfloat16":
        bits: NDArray[np.uint32] = np.ascontiguousarray(block).astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32)
    with np.errstate(over="ignore"):  # too large values become infinite; a later check rejects them
        return np.ascontiguousarray(block, np.float32)


def to_keys(block: NDArray[Any]) -> KeyArray:
    return as_keys(np.ascontiguousarray(block, block.dtype.newbyteorder("=")))
