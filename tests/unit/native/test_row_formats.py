"""Rows of every format: their bytes, their errors, and that the compiled core and its twin agree."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hps import native
from hps.config.model_schema import RowFormatName
from hps.native import twin_rows
from hps.row_format import ROW_FORMAT_NAMES, row_format, row_format_of

KERNELS = list(native._core.cache_kernels()) if native.COMPILED else []


def encode(name, vectors, encode_rows=native.encode_rows, **options):
    stored = row_format(name)
    vectors = np.atleast_2d(np.asarray(vectors, np.float32))
    rows = np.zeros((len(vectors), stored.width(vectors.shape[1])), stored.dtype)
    storable = np.zeros(len(vectors), np.uint8)
    encode_rows(vectors, stored.code, rows, storable, **options)
    return rows, storable.astype(bool)


def decode(name, rows, dim, decode_rows=native.decode_rows, dtype=np.float32, **options):
    out = np.empty((len(rows), dim), dtype)
    decode_rows(rows, None, out, row_format(name).code, **options)
    return out


def random_vectors(dim, seed, n=40):
    random = np.random.default_rng(seed)
    vectors = random.standard_normal((n, dim)) * np.exp(random.uniform(-12, 8, (n, 1)))
    vectors = (vectors + random.choice([0, 0, 5, -300.0], (n, 1))).astype(np.float32)
    special = [0.0, -0.0, np.nan, np.inf, -np.inf, 1e38, -7e4, 1e-30, 0.5, 65_504]
    vectors[: len(special), 0] = special
    vectors[3] = np.nan
    vectors[8] = 0.5
    return vectors


def test_names_are_those_of_the_configuration():
    from typing import get_args

    assert get_args(RowFormatName) == ROW_FORMAT_NAMES
    assert [row_format(name).code for name in ROW_FORMAT_NAMES] == list(range(6))


def test_a_numpy_type_is_stored_as_it_is():
    for dtype in (np.int8, np.float64, np.int32):
        stored = row_format_of(dtype)
        assert (stored.code, stored.width(5), stored.dtype) == (None, 5, np.dtype(dtype))
    assert row_format_of(np.float16) is row_format("float16")
    assert row_format("float64") == row_format_of(np.float64)
    with pytest.raises(TypeError):
        row_format("int9")


@pytest.mark.parametrize(
    ("name", "dim", "row_bytes"),
    [
        ("float32", 64, 256), ("float16", 64, 128), ("bfloat16", 64, 128), ("float8_e4m3", 64, 68),
        ("int8", 64, 68), ("int4", 64, 36), ("int4", 5, 7), ("int8", 1, 5), ("int4", 1, 5),
    ],
)  # fmt: skip
def test_row_bytes(name, dim, row_bytes):
    assert row_format(name).row_bytes(dim) == row_bytes
    assert encode(name, np.zeros((1, dim)))[0].nbytes == row_bytes


def test_int8_has_the_bytes_of_fbgemm():
    # Half scale and bias behind the values: scale 2, bias -4.
    rows, _ = encode("int8", [[-4.0, 506.0, 0.0, 101.0]])
    assert rows[0, :4].tolist() == [0, 255, 2, 52]
    assert rows[0, 4:].view("<f2").tolist() == [2.0, -4.0]
    assert decode("int8", rows, 4).tolist() == [[-4.0, 506.0, 0.0, 100.0]]


def test_int4_has_the_bytes_of_fbgemm():
    # The first value of a byte in its low half: scale .5, bias 1.
    rows, _ = encode("int4", [[1.0, 8.5, 1.5, 3.0, 4.2]])
    assert rows[0, :3].tolist() == [0xF0, 0x41, 0x06]
    assert rows[0, 3:].view("<f2").tolist() == [0.5, 1.0]
    assert decode("int4", rows, 5).tolist() == [[1.0, 8.5, 1.5, 3.0, 4.0]]


def test_float8_has_the_bytes_of_the_specification():
    # The scale is 1 with 448 as the largest magnitude.
    values = [448.0, -448.0, 0.0, 1.0, -1.0, 2.0**-6, 2.0**-9, 2.0**-10, 3 * 2.0**-10, 17.0, 0.4375]
    rows, _ = encode("float8_e4m3", [values])
    assert rows[0, -4:].view("<f4")[0] == 1.0
    codes = [0x7E, 0xFE, 0x00, 0x38, 0xB8, 0x08, 0x01, 0x00, 0x02, 0x58, 0x2E]
    assert rows[0, :-4].tolist() == codes
    everything = np.concatenate([np.arange(256, dtype=np.uint8), np.float32([1]).view(np.uint8)])
    found = decode("float8_e4m3", everything[None], 256)[0]
    np.testing.assert_array_equal(found, twin_rows.FLOAT8_VALUES)
    assert np.isnan(found[[127, 255]]).all()
    assert np.isfinite(np.delete(found, [127, 255])).all()


def test_the_scale_of_small_float8_rows_is_that_of_hps():
    rows, _ = encode("float8_e4m3", [[0.0, 0.0], [1e-9, 0.0]])
    assert (rows[:, -4:].view("<f4") == np.float32(1) / (np.float32(448) * np.float32(512))).all()


def test_bfloat16_rounds_to_even():
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0xBF808000], np.uint32)
    rows, _ = encode("bfloat16", bits.view(np.float32)[None])
    assert rows[0].tolist() == [0x3F80, 0x3F82, 0x3F81, 0xBF80]


@pytest.mark.parametrize("name", ROW_FORMAT_NAMES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_not_storable(name, value):
    vectors = np.ones((3, 20), np.float32)
    vectors[1, 19] = value
    assert encode(name, vectors)[1].tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("name", "vector"),
    [
        ("float16", [65_520.0]),
        ("bfloat16", [3.4e38]),
        ("int8", [-65_520.0, 0.0]),
        ("int8", [0.0, 255 * 65_520.0]),
        ("int4", [0.0, 15 * 65_520.0]),
    ],
)
def test_a_vector_that_is_too_large_is_not_storable(name, vector):
    assert not encode(name, [vector])[1].any()
    assert encode(name, [np.float32(vector) * np.float32(0.9)])[1].all()


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("float16", 2**-11),
        ("bfloat16", 2**-8),
        ("float8_e4m3", 2**-4),
        ("int8", 1 / 255),
        ("int4", 1 / 15),
    ],
)
def test_errors_are_within_half_a_step(name, most):
    vectors = np.random.default_rng(2).uniform(-1, 1, (500, 64)).astype(np.float32)
    found = decode(name, encode(name, vectors)[0], 64)
    reach = np.ptp(vectors, axis=1) if name in ("int8", "int4") else 2
    # The scale is rounded to float16, too, and a bias up to twice the reach.
    assert (np.abs(found - vectors).max(axis=1) <= most * reach / 2 * 1.15).all()


@pytest.mark.parametrize("name", ROW_FORMAT_NAMES)
def test_usual_rows_survive_another_conversion(name):
    """So that rows that were decoded into files are the same rows again."""
    vectors = np.random.default_rng(3).standard_normal((300, 64)).astype(np.float32) * 0.1
    rows = encode(name, vectors)[0]
    again = encode(name, decode(name, rows, 64))[0]
    if name == "float8_e4m3":  # the last bit of the scale may differ
        np.testing.assert_array_equal(again[:, :-4], rows[:, :-4])
        np.testing.assert_allclose(again[:, -4:].view("<f4"), rows[:, -4:].view("<f4"), rtol=2e-7)
    else:
        np.testing.assert_array_equal(again, rows)


@pytest.mark.skipif(not native.COMPILED, reason="compares the compiled core with its twin")
@settings(deadline=None, max_examples=60)
@given(st.sampled_from(ROW_FORMAT_NAMES), st.integers(1, 140), st.integers(0, 2**32))
def test_all_kernels_convert_like_the_twin(name, dim, seed):
    vectors = random_vectors(dim, seed)
    rows, storable = encode(name, vectors, twin_rows.encode_rows)
    numbers = np.random.default_rng(seed).integers(0, len(rows), 50)
    for kernels in KERNELS:
        found, can = encode(name, vectors, kernels=kernels)
        np.testing.assert_array_equal(can, storable)
        assert found[can].tobytes() == rows[can].tobytes()
        for dtype in (np.float32, np.float16):
            some = rows[storable]
            expected = decode(name, some, dim, twin_rows.decode_rows, dtype)
            assert (
                decode(name, some, dim, dtype=dtype, kernels=kernels).tobytes()
                == expected.tobytes()
            )
            out = np.empty((len(numbers), dim), dtype)
            native.decode_rows(rows, numbers, out, row_format(name).code, kernels)
            picked = decode(name, rows[numbers], dim, twin_rows.decode_rows, dtype)
            assert out[storable[numbers]].tobytes() == picked[storable[numbers]].tobytes()


@pytest.mark.skipif(not native.COMPILED, reason="the twin trusts its arrays")
@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": np.zeros((3, 9), np.uint8)},
        {"rows": np.zeros((3, 8), np.uint8)[:, ::2]},
        {"numbers": np.array([3])},
        {"numbers": np.array([-1])},
        {"out": np.zeros((2, 4), np.float32)},
        {"out": np.zeros((3, 5), np.float32)},
        {"out": np.zeros((3, 4), np.float64)},
        {"format": 6},
    ],
)
def test_decoding_rejects_arrays_that_do_not_fit(wrong):
    right = {
        "rows": np.zeros((3, 8), np.uint8),
        "numbers": None,
        "out": np.zeros((3, 4), np.float32),
        "format": row_format("int8").code,
    }
    native.decode_rows(**right)
    with pytest.raises((TypeError, ValueError)):
        native.decode_rows(**right | wrong)


@pytest.mark.skipif(not native.COMPILED, reason="the twin trusts its arrays")
@pytest.mark.parametrize(
    "wrong",
    [
        {"vectors": np.zeros((3, 4))},
        {"vectors": np.zeros((3, 5), np.float32)},
        {"rows": np.zeros((2, 8), np.uint8)},
        {"storable": np.zeros(2, np.uint8)},
        {"format": 9},
    ],
)
def test_encoding_rejects_arrays_that_do_not_fit(wrong):
    right = {
        "vectors": np.zeros((3, 4), np.float32),
        "format": row_format("int8").code,
        "rows": np.zeros((3, 8), np.uint8),
        "storable": np.zeros(3, np.uint8),
    }
    native.encode_rows(**right)
    with pytest.raises((TypeError, ValueError)):
        native.encode_rows(**right | wrong)
