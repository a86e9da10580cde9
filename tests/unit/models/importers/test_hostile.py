"""Damaged and malicious files: a quick error that names the file, in little memory."""

import io
import json
import os
import pickle
import random
import resource
import subprocess
import sys
import warnings
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save as safetensors_bytes

from hps.errors import ModelError
from hps.models.importers import TableChoice, plan_import
from hps.models.importers.import_model import _CheckedChunks
from hps.models.importers.torch import open_torch
from hps.models.importers.torch_pickle import read_pickle
from hps.types import NoProgress


def read_all(path):
    """Read everything that an import of ``path`` reads."""
    plan = plan_import(path)
    for table in plan.tables:
        for keys, vectors in _CheckedChunks(path, table, NoProgress(), allow_nan=True):
            assert vectors.shape == (len(keys), table.dim)


class TestPickles:
    """Python's own unpickler hangs on some of these and takes gigabytes for others."""

    def test_large_memo_number_allocates_nothing(self):
        """Python's unpickler makes its memo twice as long as the largest number: 16 GB here."""
        assert read_pickle(b"\x80\x02Nr\xff\xff\xff\x3f.") is None

    @pytest.mark.parametrize(
        "size", [b"\x8e", b"\x96", b"\x8d"], ids=["bytes", "bytearray", "text"]
    )
    def test_large_length_allocates_nothing(self, size):
        with pytest.raises(pickle.UnpicklingError, match=r"damaged|operation"):
            read_pickle(b"\x80\x05" + size + (1 << 40).to_bytes(8, "little") + b"abc.")

    def test_key_that_is_slow_to_hash_is_rejected(self):
        doubled = b"K\x01" + b"q\x00h\x00\x86" * 100
        with pytest.raises(pickle.UnpicklingError, match="dict with a tuple for a key"):
            read_pickle(b"\x80\x02}" + doubled + b"Ns.")
        assert read_pickle(b"\x80\x02}K\x01K\x02\x86Ns.") == {(1, 2): None}

    def test_reference_that_is_slow_to_format_is_rejected(self):
        doubled = b"K\x01" + b"q\x00h\x00\x86" * 100
        with pytest.raises(
            pickle.UnpicklingError, match="refers to an object that is not a storage"
        ):
            read_pickle(b"\x80\x02" + doubled + b"Q.")

    @pytest.mark.parametrize("key", [b"\x8b\xd0\x07\x00\x00" + b"\x7f" * 2000, b"]", b"}"])
    def test_large_and_unhashable_keys_are_rejected(self, key):
        with pytest.raises(pickle.UnpicklingError, match=r"dict with a (int|list|dict) for a key"):
            read_pickle(b"\x80\x02}" + key + b"Ns.")

    def test_ordered_dict_with_arguments_is_rejected(self):
        pickled = b"\x80\x02ccollections\nOrderedDict\n]\x85R."
        with pytest.raises(pickle.UnpicklingError, match="makes an OrderedDict with arguments"):
            read_pickle(pickled)

    def test_attributes_do_not_shadow_methods(self):
        pickled = b"\x80\x02ccollections\nOrderedDict\n)R}X\x05\x00\x00\x00itemsNsb."
        assert read_pickle(pickled) == {}

    def test_number_of_operations_is_bounded(self, monkeypatch):
        monkeypatch.setattr("hps.models.importers.torch_pickle._MAX_OPERATIONS", 1000)
        with pytest.raises(pickle.UnpicklingError, match="more than 1000 operations"):
            read_pickle(b"\x80\x02" + b"]" * 2000 + b".")

    @pytest.mark.parametrize(
        "pickled", [b"\x80\x04\x8f.", b"\x80\x02K\x010K\x02.", b"\x80\x05\x97.", b"I1\n."]
    )
    def test_operations_that_no_tensor_needs_are_rejected(self, pickled):
        with pytest.raises(pickle.UnpicklingError, match="which no tensor needs"):
            read_pickle(pickled)

    def test_reader_agrees_with_the_pickler(self):
        value = {
            "a": [1, -5, 1 << 40, -(1 << 62), 1.5, None, True, False, "text" * 100, b"bytes"],
            ("k", 3): ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), [], {}),
            7: {"deep": [{"er": "x" * 300}]},
        }
        value["again"] = value["a"]
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            read = read_pickle(pickle.dumps(value, protocol))
            assert read == value
            assert read["again"] is read["a"]


class TestArchives:
    def test_large_byteorder_entry_is_not_read(self, tmp_path, save_torch, tensor):
        """A gigabyte of zeros, a megabyte in the file."""
        path = save_torch(tmp_path / "n.pt", {"w": tensor(np.ones((2, 2), np.float32))})
        with zipfile.ZipFile(path) as full, zipfile.ZipFile(tmp_path / "b.pt", "w", 8) as bomb:
            for name in ("archive/data.pkl", "archive/data/0"):
                bomb.writestr(zipfile.ZipInfo(name), full.read(name))
            with bomb.open("archive/byteorder", "w") as file:
                for _ in range(1024):
                    file.write(bytes(1 << 20))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert open_torch(tmp_path / "b.pt").arrays["w"].shape == (2, 2)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10

    def test_empty_tensor_with_a_huge_dim_is_read(self, tmp_path, save_torch, fake_torch):
        storage = fake_torch.Storage(np.zeros(1, np.float32), "float32")
        huge = fake_torch.Tensor(storage, 0, (1 << 61, 0), (1, 1))
        path = save_torch(tmp_path / "n.pt", {"w": huge})
        assert list(open_torch(path).arrays["w"].blocks(1 << 20)) == []

    @pytest.mark.parametrize("flag", [1, 1 << 6])
    def test_encrypted_entry_is_rejected(self, tmp_path, flag):
        """Flags are read from the directory at the archive's end."""
        path = tmp_path / "e.npz"
        np.savez(path, w=np.ones((2, 2)))
        data = bytearray(path.read_bytes())
        at = data.index(b"PK\x01\x02") + 8
        data[at] |= flag
        path.write_bytes(data)
        with pytest.raises(ModelError, match=r"e\.npz cannot be read: .*it is damaged, or not"):
            read_all(path)

    @pytest.mark.parametrize("shape", ["(-1, 4)", f"({1 << 62}, 4)", f"({1 << 70}, 4)", "(4, -1)"])
    @pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
    def test_npy_headers_with_wrong_sizes_are_rejected(self, tmp_path, shape, compression):
        """2^62 rows of 16 bytes are 2^66 bytes, which is 0 in 64 bits."""
        text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
        head = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()
        with zipfile.ZipFile(tmp_path / "w.npz", "w", compression) as archive:
            archive.writestr("w.npy", head)
        with pytest.raises(ModelError, match=r"w\.npz.*(negative|truncated|cannot be read)"):
            read_all(tmp_path / "w.npz")


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ([1 << 32, 1 << 32], "needs 73786976294838206464 bytes, the header gives it 0"),
        ([1 << 70, 0], "say which arrays"),
        ([1 << 70, 4], "needs"),
        ([-2, -2], "lies at bytes"),
    ],
)
def test_safetensors_shapes_with_wrong_sizes_are_rejected(tmp_path, shape, message):
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    path = tmp_path / "w.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match=message):
        read_all(path)


def test_deeply_nested_safetensors_header_is_rejected(tmp_path):
    path = tmp_path / "w.safetensors"
    path.write_bytes((200_000).to_bytes(8, "little") + b"[" * 200_000)
    with pytest.raises(ModelError, match="not a safetensors file"):
        read_all(path)


PEAK = """
import sys
from pathlib import Path
import pyarrow as pa
from hps.models.importers import plan_import
(table,) = plan_import(Path(sys.argv[1])).tables
print(sum(len(keys) for keys, _ in table.chunks()), pa.default_memory_pool().max_memory())
"""


def test_single_parquet_row_group_is_read_in_batches(tmp_path):
    """Writers choose the size of a group; some put a whole table into one: 128 MB here."""
    path = tmp_path / "w.parquet"
    values = np.random.default_rng(0).random(32 << 20, np.float32)
    rows = pa.FixedSizeListArray.from_arrays(pa.array(values), 64)
    pq.write_table(
        pa.table({"key": np.arange(len(rows)), "v": rows}), path, row_group_size=len(rows)
    )
    done = subprocess.run(
        [sys.executable, "-c", PEAK, path], capture_output=True, text=True, timeout=120, check=True
    )
    rows_read, peak = map(int, done.stdout.split())
    assert rows_read == len(rows)
    assert peak < 48 << 20


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["w.npz", "w.pt", "w.parquet", "ps.json"])
def test_pipe_is_rejected(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelError, match="is neither a file nor a folder; copy"):
        plan_import(tmp_path / name)


@pytest.mark.parametrize("kind", ["hugectr", "parquet"])
def test_source_is_searched_in_the_folder_first(tmp_path, monkeypatch, kind):
    """The working folder may hold a source of the same name."""
    for place, rows in ((tmp_path / "given", 3), (tmp_path / "here", 7)):
        keys, vectors = np.arange(rows), np.ones((rows, 2), np.float32)
        folder = place / "users"
        folder.mkdir(parents=True)
        if kind == "hugectr":
            keys.tofile(folder / "key")
            vectors.tofile(folder / "emb_vector")
        else:
            pq.write_table(pa.table({"key": keys, "v": list(vectors)}), folder / "part.parquet")
    monkeypatch.chdir(tmp_path / "here")
    choice = TableChoice.parse("users=users")
    assert plan_import(tmp_path / "given", [choice], format=kind).tables[0].rows == 3
    other = TableChoice.parse(f"users={tmp_path / 'here' / 'users'}")
    assert plan_import(tmp_path / "given", [other], format=kind).tables[0].rows == 7


def _files(save_torch, tensor, folder):
    keys, vectors = np.arange(50), np.random.default_rng(0).random((50, 8), np.float32)
    arrays = {"t.keys": keys, "t.vectors": vectors}
    plain, small = io.BytesIO(), io.BytesIO()
    np.savez(plain, **arrays)
    np.savez_compressed(small, **arrays)
    table = io.BytesIO()
    lists = pa.array(list(vectors), pa.list_(pa.float32()))
    pq.write_table(pa.table({"key": keys, "vector": lists}), table)
    torch = save_torch(folder / "seed.pt", {k: tensor(v) for k, v in arrays.items()}).read_bytes()
    return [
        ("npz", plain.getvalue()),
        ("npz", small.getvalue()),
        ("parquet", table.getvalue()),
        ("safetensors", safetensors_bytes(arrays)),
        ("pt", torch),
    ]


_PIECES = [b"\xff" * 4, b"\x00" * 4, b"\xff\xff\xff\x7f", b"-1", b"9" * 20, b"[", b"\x80"]


def _damaged(data, chance):
    """One to sixteen changes, half of them near the end, where most formats have their directory."""
    data = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 4, 16])):
        near_end = max(0, len(data) - chance.randrange(1, 400))
        at = chance.choice([chance.randrange(len(data)), near_end])
        piece = chance.choice(_PIECES)
        match chance.randrange(4):
            case 0:
                data[at] ^= 1 << chance.randrange(8)
            case 1:
                data[at : at + len(piece)] = piece
            case 2 if len(data) > 100:
                del data[at : at + chance.randrange(1, 20)]
            case _:
                data[at:at] = piece
    return bytes(data)


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    from tests.unit.models.importers.conftest import save_torch, tensor

    return _files(save_torch, tensor, tmp_path_factory.mktemp("seeds"))


@settings(
    max_examples=300,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(which=st.integers(0, 4), seed=st.integers(0, 1 << 32))
def test_damaged_file_is_read_or_rejected(seeds, tmp_path, which, seed):
    suffix, data = seeds[which]
    path = tmp_path / f"x.{suffix}"
    path.write_bytes(_damaged(data, random.Random(seed)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile and NumPy remark on some of it
        message = str(path)
        try:
            read_all(path)
        except ModelError as error:
            message = str(error)
    assert str(path) in message
