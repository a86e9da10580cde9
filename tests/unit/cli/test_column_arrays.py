"""File columns: every key keeps its 64 bits, errors name the column and the row."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hps.cli.column_arrays import dense_of, keys_of
from hps.errors import BadRequest

KEY = st.integers(-(2**63), 2**64 - 1)


def as_int64(keys: list[int]) -> list[int]:
    return np.array([k & (2**64 - 1) for k in keys], np.uint64).view(np.int64).tolist()


@given(st.lists(KEY, max_size=20))
def test_text_keys_keep_their_bits(keys: list[int]) -> None:
    got = keys_of("f", pa.array([str(k) for k in keys], pa.string()))
    assert got.keys.tolist() == as_int64(keys)
    assert got.batch == len(keys)
    assert got.offsets is None


@given(st.lists(st.lists(KEY, max_size=4), max_size=12), st.sampled_from([" ", ",", "|"]))
def test_text_lists_keep_order_and_lengths(bags: list[list[int]], comma: str) -> None:
    got = keys_of("f", pa.array([comma.join(map(str, bag)) for bag in bags], pa.string()))
    assert got.keys.tolist() == as_int64([k for bag in bags for k in bag])
    assert samples(got) == [as_int64(bag) for bag in bags]


def samples(keys) -> list[list[int]]:
    if keys.offsets is None:
        return keys.keys.reshape(keys.batch, -1).tolist() if keys.batch else []
    ends = keys.offsets.tolist()
    return [keys.keys[a:b].tolist() for a, b in pairwise(ends)]


@pytest.mark.parametrize(
    "kind", [pa.int8(), pa.int32(), pa.int64(), pa.uint32(), pa.uint64()], ids=str
)
def test_integer_columns_become_keys(kind: pa.DataType) -> None:
    got = keys_of("f", pa.array([1, 2, 100], kind))
    assert got.keys.dtype == np.int64
    assert got.keys.tolist() == [1, 2, 100]


def test_unsigned_column_is_reinterpreted() -> None:
    got = keys_of("f", pa.array([2**64 - 1, 2**63], pa.uint64()))
    assert got.keys.tolist() == [-1, -(2**63)]


@pytest.mark.parametrize("wrap", [pa.list_, pa.large_list])
def test_list_columns_are_jagged(wrap) -> None:
    column = pa.array([[1, 2], [], None, [3]], wrap(pa.int64()))
    assert samples(keys_of("f", column)) == [[1, 2], [], [], [3]]


def test_a_slice_of_a_list_column_keeps_its_own_rows() -> None:
    column = pa.array([[1, 2], [3], [4, 5, 6]], pa.list_(pa.int64())).slice(1)
    assert samples(keys_of("f", column)) == [[3], [4, 5, 6]]


def test_fixed_size_lists_and_dictionaries_become_keys() -> None:
    fixed = pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2))
    got = keys_of("f", fixed)
    assert got.offsets is None
    assert got.hotness == 2
    assert keys_of("f", pa.array(["7", "8", "7"]).dictionary_encode()).keys.tolist() == [7, 8, 7]


def test_empty_cells_are_samples_without_keys() -> None:
    assert samples(keys_of("f", pa.array(["5", "", None]))) == [[5], [], []]
    assert samples(keys_of("f", pa.array([5, None]))) == [[5], []]


def test_float_keys_are_rejected() -> None:
    with pytest.raises(
        BadRequest, match=r"column 'url' holds double values.*int64, uint64 or text"
    ):
        keys_of("url", pa.array([1.42e19]))


@pytest.mark.parametrize("text", ["1.42e+19", str(2**64), "-9223372036854775809", "seven"])
def test_text_that_is_not_a_key_names_its_row(text: str) -> None:
    with pytest.raises(BadRequest, match=r"column 'url', row 103: .* is not a whole number"):
        keys_of("url", pa.array(["1", "-2", text]), first_row=100)
    with pytest.raises(BadRequest, match=r"column 'url', row 102: .* is not a whole number"):
        keys_of("url", pa.array(["1 2 3", f"-2 {text}"]), first_row=100)


def test_dense_scalars_and_lists_become_tensors() -> None:
    f4 = np.dtype(np.float32)
    assert dense_of("d", pa.array([1, 2]), f4, [-1]).shape == (2,)
    assert dense_of("d", pa.array(["0.1", "2"]), f4, [-1, 1]).tolist() == [[np.float32(0.1)], [2]]
    got = dense_of("d", pa.array(["1 2 3", "[4,5,6]"]), f4, [-1, 3])
    assert got.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert got.dtype == np.float32


def test_dense_errors_name_column_and_row() -> None:
    f4 = np.dtype(np.float32)
    with pytest.raises(BadRequest, match="column 'd', row 12: 'x' is not a float32 number"):
        dense_of("d", pa.array(["1", "x"]), f4, [-1], first_row=10)
    with pytest.raises(BadRequest, match="column 'd', row 2: 0 values"):
        dense_of("d", pa.array([1.0, None]), f4, [-1])
    for cells, row in ((["1 2"], 1), (["1 2 3", "1 2", "1 2 3"], 2), (["", "1 2 3"], 1)):
        with pytest.raises(BadRequest, match=f"column 'd', row {row}: .*the model's input takes 3"):
            dense_of("d", pa.array(cells), f4, [-1, 3])
    with pytest.raises(BadRequest, match="column 'd', row 2: 1 values, the rows before it have 2"):
        dense_of("d", pa.array(["1 2", "1"]), f4, [-1, -1])


@pytest.mark.parametrize(
    ("cell", "key"),
    [("68fd1e64", 0x68FD1E64), ("0x68FD1E64", 0x68FD1E64), ("10", 16), ("f" * 16, -1), ("0XA", 10)],
)
def test_hex_keys_need_no_prefix_with_is_hex(cell: str, key: int) -> None:
    assert keys_of("f", pa.array([cell]), is_hex=True).keys.tolist() == [key]


def test_hex_keys_without_a_prefix_are_rejected_without_is_hex() -> None:
    assert keys_of("f", pa.array(["0x68fd1e64", "12"])).keys.tolist() == [0x68FD1E64, 12]
    with pytest.raises(BadRequest, match=r"row 1: '68fd1e64' is not a whole.*--hex-keys"):
        keys_of("f", pa.array(["68fd1e64"]))
    for cell in ("xyz", "-1", "1" * 17):
        with pytest.raises(BadRequest, match=r"row 2: .*not a hexadecimal number"):
            keys_of("f", pa.array(["1", cell]), is_hex=True)


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array(["1", "", "2 3", None]), [[1], [77, 78], [2, 3], [77, 78]]),
        (pa.array([None, 5], pa.int64()), [[77, 78], [5]]),
        (pa.array([[1], [], None], pa.list_(pa.int64())), [[1], [], [77, 78]]),
        (pa.array([1, 2]), [[1], [2]]),
        (pa.array([], pa.int64()), []),
    ],
)
def test_missing_cells_take_the_given_keys(column: pa.Array, expected: list[list[int]]) -> None:
    keys = keys_of("f", column, missing=lambda _name: np.array([77, 78]))
    assert samples(keys) == expected


@pytest.mark.parametrize("missing", [None, lambda _: np.array([7, 7])])
def test_wrong_number_of_keys_names_row_and_remedy(missing) -> None:
    with pytest.raises(BadRequest) as error:
        keys_of("k", pa.array(["1", ""]), 10, hotness=1, missing=missing)
    assert "column 'k', row 12: " in str(error.value)
    assert ("; --missing default" in str(error.value)) is (missing is None)


def test_null_in_a_list_names_column_and_row() -> None:
    with pytest.raises(BadRequest, match=r"column 'k', row 13: the list has a null element"):
        keys_of("k", pa.array([[1, 2], None, [3, None], []]), 10)
