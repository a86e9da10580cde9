"""Arrays in files, read block by block: the common form of npz, safetensors and PyTorch files."""

from __future__ import annotations

import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
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
    RuntimeError,  # an encrypted zip; JSON that nests too deep
    ValueError,
    lzma.LZMAError,
    zipfile.BadZipFile,
    zlib.error,
)


@dataclass(frozen=True, slots=True)
class StoredArray:
    """One array of a file. ``blocks(rows)`` yields it in order, ``rows`` of the first dimension at a
    time; bfloat16 comes as uint16, its bits."""

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
        """Raises ModelError listing what there is."""
        found = self.arrays.get(name)
        if found is None:
            raise ModelError(
                f"{self.path}: no array '{name}' for {purpose}; it holds {self.contents()}"
            )
        return found

    def contents(self, *, matrices: bool = False) -> str:
        chosen = [str(a) for a in self.arrays.values() if a.is_matrix or not matrices]
        shown = ", ".join(chosen[:12]) + (f" and {len(chosen) - 12} more" if chosen[12:] else "")
        return shown or "nothing that could be a table"


def mapped(array: NDArray[Any]) -> Callable[[int], Iterator[NDArray[Any]]]:
    """Blocks of an array that is mapped from a file."""

    def blocks(rows: int) -> Iterator[NDArray[Any]]:
        for start in range(0, array.shape[0], rows):
            yield array[start : start + rows]

    return blocks


def empty(_rows: int) -> Iterator[NDArray[Any]]:
    """Blocks of an array without elements, whatever its shape claims."""
    return iter(())


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """What the readers of zip, Parquet and JSON raise for a damaged or hostile file, as ModelError."""
    try:
        yield
    except _DAMAGE as error:
        reason = " ".join(f"{error}".split())[:300] or type(error).__name__
        raise ModelError(
            f"{path} cannot be read: {reason}; it is damaged, or not what its name says: write it again"
        ) from error


def block_rows(dim: int) -> int:
    """Rows of ``dim`` float32 values in a block."""
    return max(1, BLOCK_BYTES // (dim * 4))


def to_float32(array: StoredArray, block: NDArray[Any]) -> NDArray[np.float32]:
    """A block as C-contiguous float32 (n, dim)."""
    if array.dtype == "bfloat16":
        bits: NDArray[np.uint32] = np.ascontiguousarray(block).astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32)
    with np.errstate(over="ignore"):  # what does not fit becomes infinite, and that is refused
        return np.ascontiguousarray(block, np.float32)


def to_keys(block: NDArray[Any]) -> KeyArray:
    return as_keys(np.ascontiguousarray(block, block.dtype.newbyteorder("=")))
