"""The compiled kernels against their NumPy twins and the golden values of HPS's partition hash."""

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hps import native
from hps.native import twin

GOLDEN = {
    0: 0x0000000000000000,
    1: 0x0DADBFEEB7D64133,
    2: 0x90AEEA2043435D3E,
    3: 0x27C640C5330912D0,
    42: 0x7E5408D0AA979155,
    1000: 0x3B1E3778BD1CF415,
    123456789: 0xCC0F5D71DF7F53AC,
    4294967295: 0xCCF726CD1741B44B,
    4294967296: 0x0515CA9FB695AF41,
    2**63 - 1: 0x2122D66FBAFE88AE,
    -1: 0xE398180ADC04D6FC,
}
KEYS = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3), max_size=200)


def test_compiled_core_is_used_unless_native_mode_is_off():
    assert (os.environ.get("HPS_NATIVE", "auto") != "off") == native.COMPILED


@pytest.mark.parametrize("module", [native, twin])
def test_partition_hash_returns_golden_values(module):
    keys = np.array(list(GOLDEN), np.int64)
    assert module.partition_hash(keys).tolist() == list(GOLDEN.values())


@given(KEYS)
def test_partition_hash_equals_twin(keys):
    arr = np.array(keys, np.int64)
    np.testing.assert_array_equal(native.partition_hash(arr), twin.partition_hash(arr))


@given(KEYS)
def test_dedup_equals_twin_and_its_inverse_restores_the_keys(keys):
    arr = np.array(keys, np.int64)
    unique, inverse = native.dedup(arr)
    np.testing.assert_array_equal(unique[inverse], arr)
    assert unique.tolist() == list(dict.fromkeys(keys))
    for compiled, expected in zip((unique, inverse), twin.dedup(arr), strict=True):
        np.testing.assert_array_equal(compiled, expected)


def test_dedup_inverse_restores_keys_of_a_batch_that_releases_the_gil():
    arr = np.random.default_rng(1).integers(-(2**40), 2**40, 50_000) // 2**35
    unique, inverse = native.dedup(arr)
    np.testing.assert_array_equal(unique[inverse], arr)


@pytest.mark.parametrize(
    "bad", [np.zeros(3, np.int32), np.zeros((2, 2), np.int64), np.zeros(6, np.int64)[::2]]
)
def test_dedup_rejects_other_dtypes_dimensions_and_strides(bad):
    with pytest.raises(TypeError):
        native.dedup(bad)
