"""How rows lie in RocksDB: the two layouts, as pure array functions.

A *code* is the integer whose big-endian bytes are the stored key, so that sorting codes sorts the
stored keys:

* ``native``: code = key with its sign bit flipped, hence stored keys (8 bytes) stand in the numeric
  order of the signed key. Value: u64 little-endian version, u8 flags (bit 0: tombstone), then the
  row. A tombstone has no row: 9 bytes.
* ``hps``: HPS's own layout. The stored key is the key's 8 (with 32-bit keys 4) little-endian bytes, the
  value the bare row. There is no room for a version or a tombstone: the last write wins and versions
  read as 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hps.types import EmbeddingTable, IndexArray, KeyArray, VectorArray, VersionArray

Layout = Literal["native", "hps"]
CodeArray = NDArray[np.uint64]

_SIGN = np.uint64(1 << 63)
_HEADER = [("version", "<u8"), ("flags", "u1")]
_TOMBSTONE = np.dtype(_HEADER)
_TOMBSTONE_FLAG = 1
_NO_AT = np.empty(0, np.int64)
_NO_VERSIONS = np.empty(0, np.uint64)


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


def family_name(table: EmbeddingTable, layout: Layout) -> str:
    """The table's column family. HPS's names know no version."""
    return f"hps_et.{table.model}.{table.name}" if layout == "hps" else table.id


class RowCodec:
    """Translates one table's keys and rows to stored bytes and back. Immutable."""

    __slots__ = ("_key_bytes", "_record", "_table", "value_bytes", "versioned")

    def __init__(self, table: EmbeddingTable, layout: Layout) -> None:
        self._table = table
        self.versioned = layout == "native"
        self._key_bytes = 8 if self.versioned or table.key_bits == 64 else 4
        row = ("row", table.dtype.newbyteorder("<"), (table.dim,))
        self._record: np.dtype[Any] = np.dtype([*_HEADER, row] if self.versioned else [row])
        self.value_bytes = self._record.itemsize

    def codes(self, keys: KeyArray) -> CodeArray:
        """(n,) int64 -> (n,) uint64 whose ascending order is the order of the stored keys."""
        if self.versioned:
            native: CodeArray = self._table.narrow(keys).view(np.uint64) ^ _SIGN
            return native
        if self._key_bytes == 4:
            return keys.astype(np.uint32).byteswap().astype(np.uint64)
        return keys.view(np.uint64).byteswap()

    def stored_keys(self, code: CodeArray) -> list[Any]:
        """(n,) codes -> n keys as RocksDB keeps them."""
        width = self._key_bytes
        stored: list[Any] = code.astype(f">u{width}").view(f"V{width}").tolist()
        return stored

    def encode(self, vectors: VectorArray, versions: Any) -> list[bytes]:
        """(n, dim) vectors of any real dtype and (n,) versions (or one for all) -> n values."""
        out = np.empty(len(vectors), self._record)
        if self.versioned:
            out["version"] = versions
            out["flags"] = 0
        out["row"] = vectors
        values: list[bytes] = out.view(f"V{self.value_bytes}").tolist()
        return values

    @staticmethod
    def encode_tombstones(versions: VersionArray) -> list[bytes]:
        out = np.empty(len(versions), _TOMBSTONE)
        out["version"] = versions
        out["flags"] = _TOMBSTONE_FLAG
        values: list[bytes] = out.view(f"V{_TOMBSTONE.itemsize}").tolist()
        return values

    def decode(self, values: Sequence[bytes]) -> Stored:
        """``values``: one per key asked for, ``b""`` where there is none. Raises WrongLength."""
        lengths = np.fromiter(map(len, values), np.int64, len(values))
        is_row = lengths == self.value_bytes
        at = np.flatnonzero(is_row)
        if len(at) == len(values):
            return self._rows(at, b"".join(values), _NO_AT, _NO_VERSIONS)
        is_dead = (lengths == _TOMBSTONE.itemsize) & self.versioned
        wrong = ~(is_row | is_dead | (lengths == 0))
        if wrong.any():
            raise WrongLength(int(lengths[wrong][0]), self.value_bytes)
        if not is_dead.any():
            return self._rows(at, b"".join(values), _NO_AT, _NO_VERSIONS)
        dead = np.frombuffer(b"".join(compress(values, is_dead.tolist())), _TOMBSTONE)
        joined = b"".join(compress(values, is_row.tolist()))
        return self._rows(at, joined, np.flatnonzero(is_dead), dead["version"])

    def _rows(
        self, at: IndexArray, joined: bytes, dead_at: IndexArray, dead_versions: VersionArray
    ) -> Stored:
        records = np.frombuffer(joined, self._record)
        versions = records["version"] if self.versioned else np.zeros(len(at), np.uint64)
        return Stored(at, versions, records["row"], dead_at, dead_versions)
