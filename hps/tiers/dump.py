"""Read and write HPS's ``.bin`` dumps of a table in bounded memory.

Format: the header ``bin\\0``, u32 version 1, u32 bytes per key, u32 bytes per value; then each key with
its value, to the end of the file. All integers are little-endian, keys have 4 or 8 bytes, values are bare
rows. For an empty table HPS's writers omit the bytes per value: the file has 12 bytes instead of 16."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hps.errors import ModelError
from hps.types import EmbeddingTable, KeyArray, VectorArray

_MAGIC, _VERSION = b"bin\0", 1
_SHORT = struct.Struct("<4sII")
_LONG = struct.Struct("<4sIII")
_BLOCK_BYTES = 4 << 20

Rows = tuple[KeyArray, VectorArray]
"""Keys (n,) int64 and vectors (n, dim)."""


def _ignore(_rows: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class BinDump:
    """An opened dump file with checked header and length. ``key_bytes``: 4 or 8."""

    path: Path
    key_bytes: int
    value_bytes: int
    rows: int

    def read(
        self, table: EmbeddingTable, progress: Callable[[int], None] = _ignore
    ) -> Iterator[Rows]:
        """Yield the rows in the file's order, a few megabytes at a time.

        4-byte keys are unsigned, as in HPS. Raises ModelError if the values are not rows of ``table``
        or the keys exceed its width."""
        expected = table.dim * table.dtype.itemsize
        if self.rows and self.value_bytes != expected:
            raise ModelError(
                f"{self.path}: values of {self.value_bytes} bytes; table {table.id} has rows of "
                f"{expected} (dim {table.dim} of {table.dtype}): name the table it was dumped from"
            )
        if self.rows and self.key_bytes * 8 > table.key_bits:
            raise ModelError(
                f"{self.path}: keys of {self.key_bytes} bytes; table {table.id} has {table.key_bits}-bit "
                "keys"
            )
        record = _record(self.key_bytes, table)
        with self.path.open("rb") as file:
            file.seek(_LONG.size)
            left, block_rows = self.rows, max(1, _BLOCK_BYTES // record.itemsize)
            while left:
                block = np.fromfile(file, record, min(left, block_rows))
                if not len(block):
                    raise ModelError(
                        f"{self.path}: {left} rows disappeared; another process is writing to it"
                    )
                left -= len(block)
                yield block["key"].astype(np.int64), block["row"].astype(table.dtype)
                progress(len(block))


def open_dump(path: Path) -> BinDump:
    """Read and check the header. Raises ModelError for another format or a truncated last row."""
    try:
        with path.open("rb") as file:
            head = file.read(_LONG.size)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    if len(head) < _SHORT.size or head[:4] != _MAGIC:
        raise ModelError(
            f"{path}: not a .bin dump: it begins with {head[:4]!r}, expected {_MAGIC!r}"
        )
    _, version, key_bytes = _SHORT.unpack_from(head)
    if version != _VERSION:
        raise ModelError(
            f"{path}: a .bin dump of version {version}; only version {_VERSION} is supported"
        )
    if key_bytes not in (4, 8):
        raise ModelError(f"{path}: keys of {key_bytes} bytes; expected 4 or 8")
    if size == _SHORT.size:
        return BinDump(path, key_bytes, 0, 0)
    if len(head) < _LONG.size:
        raise ModelError(f"{path}: truncated within its header: {size} of {_LONG.size} bytes")
    value_bytes = _LONG.unpack(head)[3]
    body = size - _LONG.size
    if not value_bytes and body:
        raise ModelError(f"{path}: values of 0 bytes, but {body} bytes follow the header")
    rows, left = divmod(body, key_bytes + value_bytes)
    if left:
        raise ModelError(
            f"{path}: truncated: {rows:,} whole rows of {key_bytes + value_bytes} bytes, then {left} "
            "bytes of another; copy or dump it again"
        )
    return BinDump(path, key_bytes, value_bytes, rows)


def write_dump(
    path: Path,
    table: EmbeddingTable,
    rows: Iterable[Rows],
    progress: Callable[[int], None] = _ignore,
) -> int:
    """Write ``rows`` in HPS's format and return their number.

    Keys have the table's width. The file gets its name when it is complete. Raises ModelError if
    writing fails."""
    key_bytes = table.key_bits // 8
    record = _record(key_bytes, table)
    part = path.with_name(f".{path.name}.part")
    written = 0
    try:
        with part.open("wb") as file:
            file.write(_SHORT.pack(_MAGIC, _VERSION, key_bytes))
            for keys, vectors in rows:
                if not written and len(keys):
                    file.write(struct.pack("<I", record["row"].itemsize))
                block = np.empty(len(keys), record)
                block["key"] = keys.astype(record["key"])
                block["row"] = vectors
                file.write(block.data)
                written += len(keys)
                progress(len(keys))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise ModelError(f"cannot write {path}: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)
    return written


def _record(key_bytes: int, table: EmbeddingTable) -> np.dtype[Any]:
    key = "<u4" if key_bytes == 4 else "<i8"
    return np.dtype([("key", key), ("row", table.dtype.newbyteorder("<"), (table.dim,))])
