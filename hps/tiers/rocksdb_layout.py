"""How rows lie in RocksDB: the two layouts, as pure array functions.

Both keep 8-byte keys. A *code* is the uint64 whose big-endian bytes are the stored key, so that
sorting codes sorts the stored keys:

* ``native``: code = key with its sign bit flipped, hence stored keys stand in the numeric order of
  the signed key. Value: u64 little-endian version, u8 flags (bit 0: tombstone), then the row. A
  tombstone has no row: 9 bytes.
* ``hps``: HPS's own layout. The stored key is the key's 8 little-endian bytes, the value the bare
  row. There is no room for a version or a tombstone: the last write wins and versions read as 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hps.types import EmbeddingTable, IndexArray, KeyArray, VectorArray, VersionArray

Layout = Literal["native", "hps"]
CodeArray = NDArray[np.uint64]

_SIGN = np.uint64(1 << 63)
HEADER = 9
TOMBSTONE = 1


class WrongLength(ValueError):
    """A stored value has a length that the table's dim and dtype rule out."""

    def __init__(self, found: int, expected: int) -> None:
        super().__init__(found, expected)
        self.found = found
        self.expected = expected


@dataclass(frozen=True, slots=True)
class Stored:
    """What a batched read found: positions (f,) of the rows with their versions (f,) and vectors
    (f, dim); positions (t,) and versions (t,) of the tombstones."""

    at: IndexArray
    versions: VersionArray
    vectors: VectorArray
    dead_at: IndexArray
    dead_versions: VersionArray


_NO_AT = np.empty(0, np.int64)
_NO_VERSIONS = np.empty(0, np.uint64)


def column_family(table: EmbeddingTable, layout: Layout) -> str:
    if layout == "hps":
        return f"hps_et.{table.model}.{table.name}"
    return table.id


def codes(keys: KeyArray, layout: Layout) -> CodeArray:
    """(n,) int64 -> (n,) uint64 whose ascending order is the order of the stored keys."""
    unsigned: CodeArray = keys.view(np.uint64)
    return unsigned.byteswap() if layout == "hps" else unsigned ^ _SIGN


def keys_of(code: CodeArray, layout: Layout) -> KeyArray:
    """The inverse of ``codes``."""
    plain: CodeArray = code.byteswap() if layout == "hps" else code ^ _SIGN
    return plain.view(np.int64)


def stored_keys(code: CodeArray) -> list[Any]:
    """(n,) codes -> n keys of 8 bytes, as RocksDB keeps them."""
    stored: list[Any] = code.astype(">u8").view("V8").tolist()
    return stored


@lru_cache(maxsize=4096)
def record(dim: int, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The native value as a packed structure."""
    return np.dtype([("version", "<u8"), ("flags", "u1"), ("row", dtype.newbyteorder("<"), (dim,))])


def value_bytes(table: EmbeddingTable, layout: Layout) -> int:
    return table.row_bytes + (0 if layout == "hps" else HEADER)


def encode(
    table: EmbeddingTable, vectors: VectorArray, versions: Any, layout: Layout
) -> list[bytes]:
    """(n, dim) vectors and (n,) versions (or one for all) -> n stored values."""
    if layout == "hps":
        raw = np.ascontiguousarray(vectors, table.dtype)
        rows: list[bytes] = raw.view(f"V{table.row_bytes}").reshape(-1).tolist()
        return rows
    out = np.empty(len(vectors), record(table.dim, table.dtype))
    out["version"] = versions
    out["flags"] = 0
    out["row"] = vectors
    values: list[bytes] = out.view(f"V{out.itemsize}").tolist()
    return values


_TOMBSTONE_RECORD = np.dtype([("version", "<u8"), ("flags", "u1")])


def encode_tombstones(versions: VersionArray) -> list[bytes]:
    out = np.empty(len(versions), _TOMBSTONE_RECORD)
    out["version"] = versions
    out["flags"] = TOMBSTONE
    values: list[bytes] = out.view(f"V{HEADER}").tolist()
    return values


def decode(table: EmbeddingTable, values: Sequence[bytes], layout: Layout) -> Stored:
    """``values``: one per key asked for, ``b""`` where there is none. Raises WrongLength."""
    n = len(values)
    full = value_bytes(table, layout)
    lengths = np.fromiter(map(len, values), np.int64, n)
    is_row = lengths == full
    at = np.flatnonzero(is_row)
    dead_at = _NO_AT
    if len(at) != n:
        is_dead = (lengths == HEADER) if layout == "native" else np.zeros(n, bool)
        wrong = ~(is_row | is_dead | (lengths == 0))
        if wrong.any():
            raise WrongLength(int(lengths[wrong][0]), full)
        dead_at = np.flatnonzero(is_dead)
    if len(dead_at):
        joined = b"".join(compress(values, is_row.tolist()))
        dead = np.frombuffer(b"".join(compress(values, is_dead.tolist())), _TOMBSTONE_RECORD)
        dead_versions = dead["version"]
    else:
        joined = b"".join(values)
        dead_versions = _NO_VERSIONS
    if layout == "hps":
        rows = np.frombuffer(joined, table.dtype).reshape(len(at), table.dim)
        return Stored(at, np.zeros(len(at), np.uint64), rows, dead_at, dead_versions)
    records = np.frombuffer(joined, record(table.dim, table.dtype))
    return Stored(at, records["version"], records["row"], dead_at, dead_versions)
