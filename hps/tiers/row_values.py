"""Encoding of rows as stored bytes, by pure array functions.

* versioned: u64 little-endian version, u8 flags (bit 0: tombstone), then the row's values,
  little-endian. A tombstone has no row: 9 bytes.
* not versioned: the bare row, as HPS stores it. It has no version and no tombstone: the last write
  wins, and versions read as 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hps.errors import ConfigError
from hps.types import EmbeddingTable, IndexArray, VectorArray, VersionArray

Layout = Literal["native", "hps"]

_HEADER = [("version", "<u8"), ("flags", "u1")]
TOMBSTONE = np.dtype(_HEADER)
"""A deleted key's value; the first fields of every versioned value."""
TOMBSTONE_FLAG = 1
_NO_POSITIONS = np.empty(0, np.int64)
_NO_VERSIONS = np.empty(0, np.uint64)


class WrongLength(ValueError):
    """A stored value has a length that does not match the table's dim and dtype."""

    def __init__(self, actual: int, expected: int) -> None:
        super().__init__(actual, expected)
        self.actual = actual
        self.expected = expected


@dataclass(frozen=True, slots=True)
class StoredRows:
    """The result of a batched read.

    ``at (f,)``: positions of the keys with a row, which has ``versions (f,)`` and, as it is stored,
    ``vectors (f, row_width)``; ``tombstone_at (t,)``: positions of the tombstones, with
    ``tombstone_versions (t,)``."""

    at: IndexArray
    versions: VersionArray
    vectors: VectorArray
    tombstone_at: IndexArray
    tombstone_versions: VersionArray


class RowValueCodec:
    """Converts one table's rows to stored values and back. Immutable."""

    __slots__ = ("record", "value_bytes", "versioned")

    def __init__(self, table: EmbeddingTable, layout: Layout) -> None:
        """Raises ConfigError for a row format that the layout can't hold."""
        self.versioned = layout == "native"
        if not (self.versioned or table.row_format.is_plain):
            raise ConfigError(
                f"table {table.id} has rows of {table.row_format.name}, which the layout 'hps' can't hold, "
                "because HPS would read them as float32; use the layout 'native', or rows: float32 (in a "
                "ps.json fp8_quant: false)"
            )
        row = ("row", table.row_dtype.newbyteorder("<"), (table.row_width,))
        self.record: np.dtype[Any] = np.dtype([*_HEADER, row] if self.versioned else [row])
        """The dtype of one value: ``version`` and ``flags`` if versioned, and ``row`` (dim,)."""
        self.value_bytes = self.record.itemsize

    def records(self, vectors: VectorArray, versions: Any) -> NDArray[np.void]:
        """Encode rows (n, row_width) and (n,) versions, or one, as (n,) ``record``."""
        out = np.empty(len(vectors), self.record)
        if self.versioned:
            out["version"] = versions
            out["flags"] = 0
        out["row"] = vectors
        return out

    def encode(self, vectors: VectorArray, versions: Any) -> list[bytes]:
        """Encode vectors and versions, as for `records`, as n bytes objects."""
        values: list[bytes] = self.records(vectors, versions).view(f"V{self.value_bytes}").tolist()
        return values

    @staticmethod
    def tombstones(versions: VersionArray) -> NDArray[np.void]:
        """Encode tombstones with (n,) versions as (n,) ``TOMBSTONE``."""
        out = np.empty(len(versions), TOMBSTONE)
        out["version"] = versions
        out["flags"] = TOMBSTONE_FLAG
        return out

    @classmethod
    def encode_tombstones(cls, versions: VersionArray) -> list[bytes]:
        values: list[bytes] = cls.tombstones(versions).view(f"V{TOMBSTONE.itemsize}").tolist()
        return values

    def decode(self, values: Sequence[bytes]) -> StoredRows:
        """Decode ``values``, one per key; ``b""`` means that the key is absent. Raises WrongLength."""
        lengths = np.fromiter(map(len, values), np.int64, len(values))
        is_row = lengths == self.value_bytes
        at = np.flatnonzero(is_row)
        if len(at) == len(values):
            return self._rows(at, b"".join(values), _NO_POSITIONS, _NO_VERSIONS)
        is_tombstone = (lengths == TOMBSTONE.itemsize) & self.versioned
        wrong = ~(is_row | is_tombstone | (lengths == 0))
        if wrong.any():
            raise WrongLength(int(lengths[wrong][0]), self.value_bytes)
        if not is_tombstone.any():
            return self._rows(at, b"".join(values), _NO_POSITIONS, _NO_VERSIONS)
        tombstones = np.frombuffer(b"".join(compress(values, is_tombstone.tolist())), TOMBSTONE)
        joined = b"".join(compress(values, is_row.tolist()))
        return self._rows(at, joined, np.flatnonzero(is_tombstone), tombstones["version"])

    def _rows(
        self,
        at: IndexArray,
        joined: bytes,
        tombstone_at: IndexArray,
        tombstone_versions: VersionArray,
    ) -> StoredRows:
        records = np.frombuffer(joined, self.record)
        versions = records["version"] if self.versioned else np.zeros(len(at), np.uint64)
        return StoredRows(at, versions, records["row"], tombstone_at, tombstone_versions)
