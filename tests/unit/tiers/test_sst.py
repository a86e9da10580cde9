"""HPS's ``.sst`` dumps, as RocksDB's own writer makes them."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from rocksdict import Options, SstFileWriter

from hps.errors import ModelError
from hps.tiers.rocksdb import open_sst
from hps.types import EmbeddingTable


def table(dim: int = 4, bits: int = 64) -> EmbeddingTable:
    return EmbeddingTable.make("t", dim, key_bits=bits)


def row(key: int) -> bytes:
    return np.arange(key, key + 4, dtype="<f4").tobytes()


def write(path: Path, keys: range, form: str = "<q") -> Path:
    """Write raw keys and values in the order of their bytes, like HPS."""
    writer = SstFileWriter(Options(raw_mode=True))
    writer.open(str(path))
    for stored, key in sorted((struct.pack(form, key), key) for key in keys):
        writer[stored] = row(key)
    writer.finish()
    return path


@pytest.mark.parametrize(
    ("keys", "form", "bits"), [(range(-3000, 9000), "<q", 64), (range(5, 300), "<I", 32)]
)
def test_every_row_is_read_and_file_is_unchanged(
    tmp_path: Path, keys: range, form: str, bits: int
) -> None:
    path = write(tmp_path / "t.sst", keys, form)
    before, steps = path.read_bytes(), list[int]()
    with open_sst(path) as dump:
        assert dump.rows == len(keys)
        parts = list(dump.read(table(bits=bits), steps.append))
    found, vectors = (np.concatenate(each) for each in zip(*parts, strict=True))
    assert sorted(found.tolist()) == list(keys)
    np.testing.assert_array_equal(vectors, found[:, None] + np.arange(4, dtype=np.float32))
    assert (found.dtype, vectors.dtype, sum(steps)) == (np.int64, np.float32, len(keys))
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["t.sst"]


def test_file_in_read_only_folder_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "t.sst", range(10))
    monkeypatch.setattr("os.access", lambda *_: False)
    with open_sst(path) as dump:
        assert sum(len(keys) for keys, _ in dump.read(table())) == 10


@pytest.mark.parametrize(
    ("of", "message"),
    [
        (table(dim=8), "values of 16 bytes, expected 32"),
        (table(bits=32), "keys of 8 bytes, expected 4"),
    ],
)
def test_rows_of_another_table_are_rejected(
    tmp_path: Path, of: EmbeddingTable, message: str
) -> None:
    with (
        open_sst(write(tmp_path / "t.sst", range(10))) as dump,
        pytest.raises(ModelError, match=message),
    ):
        list(dump.read(of))


@pytest.mark.parametrize("damage", ["empty", "half", "flipped", "other", "missing"])
def test_damaged_file_is_rejected(tmp_path: Path, damage: str) -> None:
    path = write(tmp_path / "t.sst", range(9000))
    data = path.read_bytes()
    broken = bytearray(data)
    broken[len(data) // 2] ^= 255
    contents = {"empty": b"", "half": data[: len(data) // 2], "flipped": bytes(broken)}
    path.write_bytes(contents.get(damage, b"bin\0" * 4))
    if damage == "missing":
        path.unlink()
    with pytest.raises(ModelError, match=r"t\.sst"), open_sst(path) as dump:
        list(dump.read(table()))
