"""npz and safetensors files, and the choice of tables in them."""

import json
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from hps.errors import ModelError
from hps.models.importers import TableChoice
from hps.models.importers.arrays import ArrayFile, StoredArray
from hps.models.importers.npz import open_npz
from hps.models.importers.plan import table_name, tables_from_arrays
from hps.models.importers.safetensors import open_safetensors

ROWS = np.random.default_rng(0).random((10, 4), np.float32)


def all_of(array, rows=3):
    return np.concatenate(list(array.blocks(rows)))


class TestNpz:
    @pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
    @pytest.mark.parametrize("dtype", ["f4", "f8", "f2", ">f4", "<i8", "u8", ">i4"])
    def test_arrays_written_by_numpy_are_read(self, tmp_path, save, dtype):
        values = (ROWS * 100).astype(dtype)
        save(tmp_path / "a.npz", w=values, empty=values[:0])
        file = open_npz(tmp_path / "a.npz")
        assert all_of(file.arrays["w"]).tolist() == values.tolist()
        assert file.arrays["w"].shape == (10, 4)
        assert list(file.arrays["empty"].blocks(5)) == []

    def test_fortran_order_is_read_unless_compressed(self, tmp_path):
        np.savez(tmp_path / "a.npz", w=np.asfortranarray(ROWS))
        assert all_of(open_npz(tmp_path / "a.npz").arrays["w"]).tolist() == ROWS.tolist()
        np.savez_compressed(tmp_path / "b.npz", w=np.asfortranarray(ROWS))
        with pytest.raises(ModelError, match=r"Fortran order .*np\.savez"):
            open_npz(tmp_path / "b.npz")

    def test_pickled_objects_are_rejected(self, tmp_path):
        np.savez(tmp_path / "a.npz", w=np.array([{"a": 1}], object))
        with pytest.raises(ModelError, match="pickled Python objects, which are never executed"):
            open_npz(tmp_path / "a.npz")

    def test_missing_and_damaged_npz_are_rejected(self, tmp_path):
        path = tmp_path / "a.npz"
        with pytest.raises(ModelError, match="is missing"):
            open_npz(path)
        np.savez(path, w=ROWS)
        whole = path.read_bytes()
        path.write_bytes(whole[:-10])
        with pytest.raises(ModelError, match=r"truncated, or of another format"):
            open_npz(path)
        path.write_bytes(whole.replace(b"(10, 4)", b"(90, 4)"))
        with pytest.raises(ModelError, match="'w'"):
            open_npz(path)

    def test_damaged_compressed_data_is_rejected(self, tmp_path):
        path = tmp_path / "a.npz"
        np.savez_compressed(path, w=np.random.default_rng(0).random((5000, 4)))
        data = bytearray(path.read_bytes())
        data[20_000] ^= 0xFF
        path.write_bytes(data)
        with pytest.raises(ModelError, match="damaged"):
            all_of(open_npz(path).arrays["w"])


class TestSafetensors:
    def test_arrays_written_by_safetensors_are_read(self, tmp_path):
        arrays = {
            "w": ROWS,
            "h": ROWS.astype("f2"),
            "ids": np.arange(10),
            "s": np.array(3, np.float32),
        }
        save_file(arrays, tmp_path / "a.safetensors", metadata={"format": "np"})
        file = open_safetensors(tmp_path / "a.safetensors")
        assert file.arrays.keys() == arrays.keys()
        for name in ("w", "h", "ids"):
            assert all_of(file.arrays[name]).tolist() == arrays[name].tolist()
            assert file.arrays[name].dtype == arrays[name].dtype.name

    def test_bfloat16_is_widened_and_unknown_types_are_rejected(self, tmp_path):
        bits = np.array([[0x3F80, 0x4000]], "<u2")
        path = write(
            tmp_path,
            {
                "b": {"dtype": "BF16", "shape": [1, 2], "data_offsets": [0, 4]},
                "f8": {"dtype": "F8_E4M3", "shape": [1, 2], "data_offsets": [0, 2]},
            },
            bits.tobytes(),
        )
        file = open_safetensors(path)
        (table,) = tables_from_arrays(file, [TableChoice("t", ("b",))])
        ((keys, vectors),) = table.chunks()
        assert (keys.tolist(), vectors.tolist()) == ([0], [[1.0, 2.0]])
        with pytest.raises(ModelError, match=r"expected a matrix .*found \[1, 2\] F8_E4M3"):
            tables_from_arrays(file, [TableChoice("t", ("f8",))])

    @pytest.mark.parametrize(
        ("entry", "message"),
        [
            ({"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 12]}, "needs 16 bytes"),
            ({"dtype": "F32", "shape": [9, 9], "data_offsets": [0, 324]}, "only 16 follow"),
            ({"dtype": "F32", "shape": [-1, 2], "data_offsets": [0, 8]}, "only 16 follow"),
            ({"dtype": "F32", "shape": [2, 2], "data_offsets": [8, 0]}, "only 16 follow"),
            ({"dtype": "F32", "shape": [2, 2]}, "entry of 'w' is damaged"),
            ({"dtype": "F32", "shape": 4, "data_offsets": [0, 16]}, "entry of 'w' is damaged"),
            ([], "entry of 'w' is damaged"),
        ],
    )
    def test_inconsistent_headers_are_rejected(self, tmp_path, entry, message):
        with pytest.raises(ModelError, match=message):
            open_safetensors(write(tmp_path, {"w": entry}, bytes(16)))

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"\x01",
            struct.pack("<Q", 2**63),
            struct.pack("<Q", 4) + b"abcd",
            struct.pack("<Q", 2) + b"[]",
        ],
    )
    def test_other_bytes_are_rejected_as_not_safetensors(self, tmp_path, data):
        (tmp_path / "x.safetensors").write_bytes(data)
        with pytest.raises(ModelError, match="not a safetensors file"):
            open_safetensors(tmp_path / "x.safetensors")


def write(folder, header, data):
    text = json.dumps(header).encode()
    path = folder / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def memory_file(path, **arrays):
    def blocks_of(array):
        return lambda rows: (array[i : i + rows] for i in range(0, len(array), rows))

    path.touch()
    return ArrayFile(
        path, {n: StoredArray(n, a.shape, a.dtype.name, blocks_of(a)) for n, a in arrays.items()}
    )


def read(table):
    chunks = list(table.chunks())
    return np.concatenate([k for k, _ in chunks]).tolist(), np.concatenate([v for _, v in chunks])


class TestChoice:
    def test_row_numbers_are_the_keys_by_default(self, tmp_path):
        (table,) = tables_from_arrays(
            memory_file(tmp_path, w=ROWS, b=ROWS[0]), [TableChoice("t", ("w",))]
        )
        keys, vectors = read(table)
        assert keys == list(range(10))
        assert vectors.tolist() == ROWS.tolist()
        assert (table.rows, table.dim, table.parts) == (10, 4, ())

    @pytest.mark.parametrize("dtype", ["i8", "u8", "i4", ">i8", "u2"])
    def test_keys_are_taken_from_the_chosen_array(self, tmp_path, dtype):
        ids = (np.arange(10)[::-1] * 7).astype(dtype)
        file = memory_file(tmp_path, w=ROWS, ids=ids)
        (table,) = tables_from_arrays(file, [TableChoice("t", ("w",), "ids")])
        assert read(table)[0] == ids.tolist()

    def test_unsigned_keys_are_reinterpreted(self, tmp_path):
        file = memory_file(tmp_path, w=ROWS[:1], ids=np.array([2**64 - 1], np.uint64))
        (table,) = tables_from_arrays(file, [TableChoice("t", ("w",), "ids")])
        assert read(table)[0] == [-1]

    def test_keys_of_a_long_table_match_their_rows(self, tmp_path):
        n = 300_000
        rows = np.arange(n, dtype=np.float64)[:, None] * [1, 1, 1, 1, 1, 1, 1, 1]
        file = memory_file(tmp_path, w=rows, ids=np.arange(n)[::-1])
        (table,) = tables_from_arrays(file, [TableChoice("t", ("w",), "ids")])
        seen = 0
        for keys, vectors in table.chunks():
            assert vectors.nbytes <= 4 << 20
            assert (vectors[:, 0] == n - 1 - keys).all()
            seen += len(keys)
        assert seen == n

    def test_stacked_parts_continue_the_row_numbers(self, tmp_path):
        file = memory_file(tmp_path, **{"e.0.weight": ROWS, "e.1.weight": ROWS[:3], "top": ROWS.T})
        (table,) = tables_from_arrays(file, [TableChoice("all", ("e.*.weight",))])
        keys, vectors = read(table)
        assert keys == list(range(13))
        assert vectors[10:].tolist() == ROWS[:3].tolist()
        assert table.parts == (("e.0.weight", 0), ("e.1.weight", 10))

    def test_pattern_without_a_name_makes_one_table_per_match(self, tmp_path):
        file = memory_file(
            tmp_path, **{"e.0.weight": ROWS, "e.1.weight": ROWS[:3], "e.bias": ROWS[0]}
        )
        tables = tables_from_arrays(file, [TableChoice("", ("e.*",))])
        assert [(t.name, t.rows) for t in tables] == [("e_0", 10), ("e_1", 3)]

    @pytest.mark.parametrize(
        ("vectors", "keys"), [("u.vectors", "u.keys"), ("u_vectors", "u_keys")]
    )
    def test_pairs_of_keys_and_vectors_are_recognized_by_name(self, tmp_path, vectors, keys):
        file = memory_file(tmp_path, **{vectors: ROWS, keys: np.arange(10) + 5, "other": ROWS})
        (table,) = tables_from_arrays(file, [])
        assert (table.name, read(table)[0][0]) == ("u", 5)

    def test_only_matrix_of_a_file_is_its_table(self, tmp_path):
        (table,) = tables_from_arrays(memory_file(tmp_path, **{"emb.weight": ROWS}), [])
        assert table.name == "emb"

    @pytest.mark.parametrize(
        ("choice", "message"),
        [
            (
                TableChoice("t", ("x",)),
                r"no array 'x' for table 't'; it holds w \[10, 4\] float32, ids",
            ),
            (TableChoice("t", ("ids",)), r"'ids' cannot be table 't': expected a matrix"),
            (
                TableChoice("t", ("iw",)),
                r"expected a matrix \(rows, dim\) of floats, found .*int64",
            ),
            (TableChoice("t", ("w", "wide")), "whose dims differ"),
            (TableChoice("t", ("z*",)), r"no matrix matches 'z\*'"),
            (TableChoice("t", ("w",), "nokeys"), "no array 'nokeys' for the keys of 't'"),
            (TableChoice("t", ("w",), "w"), r"'w' cannot be keys: expected integers"),
            (TableChoice("t", ("w",), "few"), r"'few' has 3 keys, but there are 10 rows"),
        ],
    )
    def test_invalid_choices_are_rejected(self, tmp_path, choice, message):
        file = memory_file(
            tmp_path, w=ROWS, ids=np.arange(10), few=np.arange(3), wide=ROWS.T.copy(),
            iw=ROWS.astype(np.int64),
        )  # fmt: skip
        with pytest.raises(ModelError, match=message):
            tables_from_arrays(file, [choice])

    def test_ambiguous_arrays_are_rejected(self, tmp_path):
        file = memory_file(tmp_path, a=ROWS, b=ROWS, ids=np.arange(3))
        with pytest.raises(ModelError, match=r"--table NAME=ARRAY; it holds a .*, b "):
            tables_from_arrays(file, [])
        with pytest.raises(ModelError, match="two tables are called 't'"):
            tables_from_arrays(file, [TableChoice("t", ("a",)), TableChoice("t", ("b",))])

    @pytest.mark.parametrize(
        ("text", "choice"),
        [
            ("u=a.weight", TableChoice("u", ("a.weight",))),
            ("u = a, b", TableChoice("u", ("a", "b"))),
            ("a.weight", TableChoice("", ("a.weight",))),
        ],
    )
    def test_parse_accepts_command_line_syntax(self, text, choice):
        assert TableChoice.parse(text) == choice

    @pytest.mark.parametrize("text", ["", "=", "u=", "=a", ","])
    def test_parse_rejects_invalid_syntax(self, text):
        with pytest.raises(ModelError, match="expected NAME=SOURCE"):
            TableChoice.parse(text)

    @pytest.mark.parametrize(
        ("source", "name"),
        [("layers.user.weight", "layers_user"), ("a/b:c", "a_b_c"), ("weight", "weight"), ("...", "table"),
         ("é", "table"), ("x" * 200, "x" * 120)],
    )  # fmt: skip
    def test_table_name_is_made_from_the_source(self, source, name):
        assert table_name(source) == name
