"""Encoding of keys and rows in RocksDB, in both layouts, as pure array functions.

A *code* is the integer whose big-endian bytes are the stored key, so that sorting codes sorts the
stored keys:

* ``native``: the code is the key with its sign bit flipped, so that stored keys (8 bytes) are in the
  numeric order of the signed keys. Values are versioned (`hps.tiers.row_values`).
* ``hps``: HPS's own layout. The stored key has the key's 8 (with 32-bit keys 4) little-endian bytes, the
  value is the bare row."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.tiers.row_values import Layout, RowValueCodec
from hps.types import EmbeddingTable, KeyArray

CodeArray = NDArray[np.uint64]

_SIGN = np.uint64(1 << 63)


def family_name(table: EmbeddingTable, layout: Layout) -> str:
    """Return the name of the table's column family."""
    return f"hps_et.{table.hps_name}" if layout == "hps" else table.id


class RowCodec(RowValueCodec):
    """Converts one table's keys and rows to stored bytes and back. Immutable."""

    __slots__ = ("_table", "key_bytes")

    def __init__(self, table: EmbeddingTable, layout: Layout) -> None:
        super().__init__(table, layout)
        self._table = table
        self.key_bytes = 8 if self.versioned or table.key_bits == 64 else 4
        """Bytes of a stored key."""

    def codes(self, keys: KeyArray) -> CodeArray:
        """Convert (n,) int64 keys to (n,) uint64 codes, whose order is that of the stored keys."""
        if self.versioned:
            native: CodeArray = self._table.narrow(keys).view(np.uint64) ^ _SIGN
            return native
        if self.key_bytes == 4:
            return keys.astype(np.uint32).byteswap().astype(np.uint64)
        return keys.view(np.uint64).byteswap()

    def keys(self, stored: bytes) -> KeyArray:
        """Convert n stored keys, joined, to (n,) int64.

        32-bit keys of the ``hps`` layout are unsigned, as in HPS."""
        if self.versioned:
            return (np.frombuffer(stored, ">u8").astype(np.uint64) ^ _SIGN).view(np.int64)
        return np.frombuffer(stored, "<u4" if self.key_bytes == 4 else "<i8").astype(np.int64)

    def stored_keys(self, code: CodeArray) -> list[Any]:
        """Convert (n,) codes to n keys as stored in RocksDB."""
        width = self.key_bytes
        stored: list[Any] = code.astype(f">u{width}").view(f"V{width}").tolist()
        return stored
