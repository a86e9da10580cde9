"""Files of rows: exported, written by other programs, and damaged."""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from hps.errors import BadRequest
from hps.rows.base import TableRows
from hps.rows.export import export
from hps.tiers.positions import TableChanges
from hps.types import EmbeddingTable
from hps.updates.files.row_files import open_rows

KEYS = np.array([5, -7, 2**62, 0])
ROWS = np.arange(8, dtype=np.float32).reshape(4, 2)
VERSIONS = np.array([10, 2**64 - 1, 12, 13], np.uint64)


def changes_of(path, block: int = 3) -> tuple[dict, dict]:
    """(key -> (version, vector), key -> version)."""
    rows, gone = {}, {}
    for each in open_rows(path).changes(block, 100):
        assert isinstance(each, TableChanges)
        assert len(each.keys) + len(each.deleted) <= block
        vectors = each.vectors.tolist()
        rows |= {
            k: (v, row)
            for k, v, row in zip(each.keys.tolist(), each.versions.tolist(), vectors, strict=True)
        }
        gone |= dict(zip(each.deleted.tolist(), each.deleted_versions.tolist(), strict=True))
    return rows, gone


@pytest.mark.parametrize("ending", ["npz", "parquet"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_exports_are_read_as_written(tmp_path, ending, dtype):
    table = EmbeddingTable.make("t", 2, model="m", dtype=dtype)
    path = tmp_path / f"rows.{ending}"
    dead = TableRows(KEYS[3:], np.zeros((1, 2), dtype), VERSIONS[3:])
    export(path, table, [TableRows(KEYS, ROWS.astype(dtype), VERSIONS).at(slice(3))], [dead])
    assert changes_of(path) == (
        {k: (v, r) for k, v, r in zip(KEYS[:3].tolist(), VERSIONS.tolist(), ROWS.tolist(), strict=False)},
        {0: 13},
    )  # fmt: skip
    found = open_rows(path)
    assert (found.rows, found.table) == (4, "m/t" if ending == "parquet" else None)
    (changes,) = found.changes(10, 0)
    assert changes.vectors.dtype == dtype


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_rows_without_versions_get_consecutive_ones(tmp_path, save):
    save(tmp_path / "a.npz", key=KEYS, vector=ROWS, remark=np.array("?"))
    rows, gone = changes_of(tmp_path / "a.npz")
    assert [version for version, _ in rows.values()] == [100, 101, 102, 103]
    assert not gone


def test_variable_length_lists_are_accepted_if_equally_long(tmp_path):
    vectors = pa.array([[1.0, 2.0], None, [5.0, 6.0]], pa.list_(pa.float32()))
    table = pa.table(
        {
            "key": pa.array([1, 2, 3], pa.uint64()),
            "vector": vectors,
            "deleted": [False, True, False],
        }
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    assert changes_of(tmp_path / "a.parquet") == (
        {1: (100, [1.0, 2.0]), 3: (102, [5.0, 6.0])},
        {2: 101},
    )


def test_file_without_rows_has_no_changes(tmp_path):
    np.savez(tmp_path / "a.npz", key=KEYS[:0], vector=ROWS[:0])
    assert changes_of(tmp_path / "a.npz") == ({}, {})
    assert open_rows(tmp_path / "a.npz").rows == 0


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"vector": ROWS}, "no column key: .* this one has vector"),
        ({"key": KEYS}, "no column vector"),
        ({"key": KEYS, "vector": ROWS.astype("f8")}, r"float16, not \(.*\) float64"),
        ({"key": KEYS, "vector": ROWS.reshape(-1)[:4]}, r"must be \(n, dim\)"),
        ({"key": KEYS, "vector": np.asfortranarray(ROWS)}, "by rows"),
        ({"key": KEYS[:3], "vector": ROWS}, "vector has 4 rows, key has 3"),
        ({"key": KEYS.astype("f8"), "vector": ROWS}, "keys must be integers"),
        ({"key": KEYS, "vector": ROWS, "version": VERSIONS.astype("f8")}, "version must be whole"),
        ({"key": KEYS, "vector": ROWS, "version": -KEYS - 1}, "negative"),
        ({"key": KEYS, "vector": ROWS, "deleted": np.zeros(4)}, "deleted must be bool"),
        ({"key": KEYS[:, None], "vector": ROWS}, r"key must be \(3,\)"),
        ({"key": np.array(3), "vector": ROWS}, "array of numbers"),
    ],
)
def test_arrays_of_wrong_shape_are_rejected(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(BadRequest, match=message) as error:
        changes_of(tmp_path / "a.npz")
    assert str(tmp_path / "a.npz") in str(error.value)


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("key", pa.array([1, None, 3]), "key is null"),
        ("key", pa.array(["a", "b", "c"]), "keys must be integers"),
        ("vector", pa.array([1.0, 2.0, 3.0]), "must be a column of lists"),
        ("vector", pa.array([[1.0], [1.0, 2.0], [3.0]], pa.list_(pa.float32())), "2 different lengths"),
        ("vector", pa.array([[1.0], [None], [3.0]], pa.list_(pa.float32())), "values that are null"),
    ],
)  # fmt: skip
def test_columns_of_wrong_type_are_rejected(tmp_path, column, values, message):
    good = {"key": pa.array([1, 2, 3]), "vector": pa.array([[1.0]] * 3, pa.list_(pa.float32(), 1))}
    parquet.write_table(pa.table(good | {column: values}), tmp_path / "a.parquet")
    with pytest.raises(BadRequest, match=message):
        changes_of(tmp_path / "a.parquet")


@pytest.mark.parametrize("name", ["a.npz", "a.parquet", "a.csv"])
def test_file_of_another_format_is_rejected(tmp_path, name):
    (tmp_path / name).write_bytes(b"something else" * 10)
    message = (
        "not an npz"
        if "npz" in name
        else "not a Parquet"
        if "parquet" in name
        else "use a file named"
    )
    with pytest.raises(BadRequest, match=message):
        open_rows(tmp_path / name)


def test_flipped_bit_in_npz_is_detected_before_any_row_is_read(tmp_path):
    path = tmp_path / "a.npz"
    many = np.arange(100_000, dtype=np.float32).reshape(-1, 2)  # more than is read with the header
    np.savez(path, key=np.arange(50_000), vector=many)
    data = bytearray(path.read_bytes())
    data[data.index(many.tobytes()) + 300_000] ^= 1
    path.write_bytes(data)
    with pytest.raises(BadRequest, match=r"damaged: .*vector"):
        open_rows(path)


@pytest.mark.parametrize("cut", [10, 200, 400])
@pytest.mark.parametrize("ending", ["npz", "parquet"])
def test_truncated_file_is_rejected(tmp_path, ending, cut):
    path = tmp_path / f"a.{ending}"
    if ending == "npz":
        np.savez(path, key=KEYS, vector=ROWS)
    else:
        parquet.write_table(pa.table({"key": KEYS, "vector": list(ROWS)}), path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(BadRequest, match=re.escape(str(path))):
        changes_of(path)
