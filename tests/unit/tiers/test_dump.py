"""HPS's ``.bin`` dumps: golden bytes, both key widths, and every way a file can be broken."""

import os
import struct

import numpy as np
import pytest

from hps.errors import ModelError
from hps.tiers.dump import open_dump, write_dump
from hps.tiers.rocksdb import RocksDbTier
from hps.types import EmbeddingTable

GOLDEN_64 = (
    b"bin\0" + bytes.fromhex("01000000 08000000 08000000")
    + bytes.fromhex("2a00000000000000 0000803f 000000c0")
    + bytes.fromhex("ffffffffffffffff 00000000 00002041")
)  # fmt: skip
GOLDEN_32 = (
    b"bin\0" + bytes.fromhex("01000000 04000000 08000000")
    + bytes.fromhex("2a000000 0000803f 000000c0")
    + bytes.fromhex("ffffffff 00000000 00002041")
)  # fmt: skip
ROWS = np.array([[1, -2], [0, 10]], np.float32)


def table(bits: int = 64, **given) -> EmbeddingTable:
    return EmbeddingTable.make("t", 2, key_bits=bits, **given)


def read(path, table):
    keys, vectors = zip(*open_dump(path).read(table), strict=True)
    return np.concatenate(keys), np.concatenate(vectors)


@pytest.mark.parametrize(
    ("bits", "golden", "keys"),
    [(64, GOLDEN_64, [42, -1]), (32, GOLDEN_32, [42, 0xFFFF_FFFF])],
)
class TestGolden:
    def test_dump_of_hps_is_read(self, tmp_path, bits, golden, keys):
        (tmp_path / "t.bin").write_bytes(golden)
        dump = open_dump(tmp_path / "t.bin")
        assert (dump.key_bytes, dump.value_bytes, dump.rows) == (bits // 8, 8, 2)
        found, vectors = read(tmp_path / "t.bin", table(bits))
        assert found.tolist() == keys
        assert vectors.tolist() == ROWS.tolist()
        assert (found.dtype, vectors.dtype) == (np.int64, np.float32)

    def test_dump_equals_that_of_hps(self, tmp_path, bits, golden, keys):
        rows = [(np.array(keys[:1]), ROWS[:1]), (np.array(keys[1:]), ROWS[1:])]
        progress = []
        assert write_dump(tmp_path / "t.bin", table(bits), rows, progress.append) == 2
        assert (tmp_path / "t.bin").read_bytes() == golden
        assert progress == [1, 1]

    def test_every_truncation_is_rejected_with_its_numbers(self, tmp_path, bits, golden, keys):
        path = tmp_path / "t.bin"
        row = bits // 8 + 8
        for length in range(len(golden)):
            path.write_bytes(golden[:length])
            if length in (12, 16, 16 + row):  # an empty table in both forms, and one whole row
                assert open_dump(path).rows == (length > 16)
                continue
            with pytest.raises(ModelError) as caught:
                open_dump(path)
            if length > 16:
                whole_rows, left = divmod(length - 16, row)
                said = f"truncated: {whole_rows} whole rows of {row} bytes, then {left} bytes of another"
                assert said in str(caught.value)


@pytest.mark.parametrize("bits", [32, 64])
def test_empty_table_dump_has_no_value_size(tmp_path, bits):
    path = tmp_path / "t.bin"
    assert write_dump(path, table(bits), [(np.empty(0, np.int64), np.empty((0, 2)))]) == 0
    assert path.read_bytes() == b"bin\0" + struct.pack("<II", 1, bits // 8)
    assert list(open_dump(path).read(table(bits))) == []


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"sst\0" + GOLDEN_64[4:], "not a .bin dump"),
        (b"", "not a .bin dump"),
        (b"bin\0" + struct.pack("<III", 2, 8, 8), "version 2; only version 1 is supported"),
        (b"bin\0" + struct.pack("<III", 1, 16, 8), "keys of 16 bytes; expected 4 or 8"),
        (b"bin\0" + struct.pack("<III", 1, 8, 0) + bytes(8), "values of 0 bytes, but 8 bytes"),
    ],
)
def test_other_files_are_rejected(tmp_path, data, said):
    (tmp_path / "t.bin").write_bytes(data)
    with pytest.raises(ModelError, match=said):
        open_dump(tmp_path / "t.bin")


def test_missing_file_and_table_of_another_shape_are_reported(tmp_path):
    with pytest.raises(ModelError, match="cannot read"):
        open_dump(tmp_path / "none.bin")
    (tmp_path / "t.bin").write_bytes(GOLDEN_64)
    with pytest.raises(ModelError, match=r"values of 8 bytes; table .* has rows of 16 \(dim 4"):
        read(tmp_path / "t.bin", EmbeddingTable.make("t", 4))
    with pytest.raises(ModelError, match=r"keys of 8 bytes; table .* has 32-bit keys"):
        read(tmp_path / "t.bin", table(32))
    with pytest.raises(ModelError, match="cannot write"):
        write_dump(tmp_path / "no" / "t.bin", table(), [])


def test_failed_dump_keeps_old_file(tmp_path):
    (tmp_path / "t.bin").write_bytes(GOLDEN_64)

    def broken():
        yield np.array([1]), ROWS[:1]
        raise RuntimeError("the store went away")

    with pytest.raises(RuntimeError):
        write_dump(tmp_path / "t.bin", table(), broken())
    assert os.listdir(tmp_path) == ["t.bin"]
    assert (tmp_path / "t.bin").read_bytes() == GOLDEN_64


def test_large_dumps_are_streamed(tmp_path):
    dumped = EmbeddingTable.make("t", 64)
    keys = np.random.default_rng(1).permutation(50_000)
    rows = np.repeat(keys[:, None], 64, 1).astype(np.float32)
    write_dump(tmp_path / "t.bin", dumped, [(keys, rows)])
    sizes, progress = [], []
    for found, vectors in open_dump(tmp_path / "t.bin").read(dumped, progress.append):
        assert (vectors == found[:, None]).all()
        sizes.append(len(found))
    assert sum(sizes) == sum(progress) == 50_000
    assert max(sizes) * dumped.dim * 4 < 5 << 20


@pytest.mark.parametrize("layout", ["native", "hps"])
@pytest.mark.parametrize("bits", [32, 64])
def test_dump_of_store_round_trips(tmp_path, layout, bits):
    dumped = table(bits)
    keys = np.array([3, 2**31, 258, 0, 1])
    rows = np.arange(10, dtype=np.float32).reshape(-1, 2)
    store = RocksDbTier(tmp_path / "db", layout=layout)
    store.insert(dumped, keys, rows, np.full(5, 9, np.uint64))
    write_dump(tmp_path / "t.bin", dumped, ((k, v) for k, v, _ in store.scan(dumped)))
    store.close()
    found, vectors = read(tmp_path / "t.bin", dumped)
    order, stored_order = np.argsort(keys), np.argsort(found)
    assert found[stored_order].tolist() == keys[order].tolist()
    assert vectors[stored_order].tolist() == rows[order].tolist()
