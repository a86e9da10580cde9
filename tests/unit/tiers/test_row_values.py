"""The bytes of stored rows, as golden values: RocksDB and Redis hold them."""

import struct

import numpy as np
import pytest

from hps.tiers.row_values import RowValueCodec, WrongLength
from hps.types import EmbeddingTable

ROWS = np.array([[1, -2.5], [3, 0]], np.float32)
VERSIONS = np.array([2**63 + 1, 7], np.uint64)


def test_native_value_is_version_flags_row():
    values = RowValueCodec(EmbeddingTable.make("t", 2), "native")
    encoded = values.encode(ROWS, VERSIONS)
    assert encoded == [
        struct.pack("<QB2f", 2**63 + 1, 0, 1, -2.5),
        struct.pack("<QB2f", 7, 0, 3, 0),
    ]
    assert values.value_bytes == 17
    assert values.encode_tombstones(VERSIONS[1:]) == [struct.pack("<QB", 7, 1)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_hps_value_is_bare_row(dtype):
    values = RowValueCodec(EmbeddingTable.make("t", 2, dtype=dtype), "hps")
    rows = ROWS.astype(dtype)
    assert values.encode(rows, VERSIONS) == [row.tobytes() for row in rows]
    stored = values.decode([b"", rows[1].tobytes()])
    assert stored.at.tolist() == [1]
    assert stored.vectors.tolist() == rows[1:].tolist()
    assert stored.versions.tolist() == [0]
    assert not len(stored.tombstone_at)


def test_rows_tombstones_and_absent_keys_are_distinguished():
    values = RowValueCodec(EmbeddingTable.make("t", 2), "native")
    row, other = values.encode(ROWS, VERSIONS)
    (dead,) = values.encode_tombstones(np.array([9], np.uint64))
    stored = values.decode([dead, row, b"", other])
    assert stored.at.tolist() == [1, 3]
    assert stored.vectors.tolist() == ROWS.tolist()
    assert stored.versions.tolist() == VERSIONS.tolist()
    assert (stored.tombstone_at.tolist(), stored.tombstone_versions.tolist()) == ([0], [9])


@pytest.mark.parametrize("layout", ["native", "hps"])
@pytest.mark.parametrize("by", [-1, 1])
def test_value_of_another_length_is_rejected(layout, by):
    values = RowValueCodec(EmbeddingTable.make("t", 2), layout)
    with pytest.raises(WrongLength) as caught:
        values.decode([b"", bytes(values.value_bytes + by)])
    assert (caught.value.actual, caught.value.expected) == (
        values.value_bytes + by,
        values.value_bytes,
    )
