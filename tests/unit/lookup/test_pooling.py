"""Pooling against the definition, sample by sample."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hps.lookup.pooling import pool
from hps.types import JaggedKeys

POOLINGS = ["sum", "mean", "sqrtn"]


def reference(vectors, bags, weights, pooling):
    pooled = np.zeros((len(bags), vectors.shape[1]), np.float64)
    for sample, bag in enumerate(bags):
        w = np.ones(len(bag)) if weights is None else weights[bag].astype(np.float64)
        total = (vectors[bag].astype(np.float64) * w[:, None]).sum(axis=0)
        by = {"sum": 1.0, "mean": w.sum(), "sqrtn": np.sqrt((w**2).sum())}[pooling]
        pooled[sample] = total / by if by else 0
    return pooled


@st.composite
def batches(draw):
    lengths = draw(st.lists(st.integers(0, 4), max_size=6))
    jagged = draw(st.booleans())
    if not jagged:
        lengths = [draw(st.integers(0, 4))] * len(lengths)
    n, dim = sum(lengths), draw(st.integers(1, 4))
    # Small integers, exact in every order of summing.
    numbers = st.integers(-8, 8)
    dtype = draw(st.sampled_from([np.float32, np.float16]))
    vectors = np.array(draw(st.lists(numbers, min_size=n * dim, max_size=n * dim)), dtype)
    weights = None
    if draw(st.booleans()):
        weights = np.array(draw(st.lists(numbers, min_size=n, max_size=n)), np.float32)
    return lengths, jagged, vectors.reshape(n, dim), weights, draw(st.sampled_from(POOLINGS))


@given(batches())
def test_pool_equals_the_definition(batch):
    lengths, jagged, vectors, weights, pooling = batch
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
    keys = JaggedKeys(
        np.zeros(len(vectors), np.int64), len(lengths), offsets if jagged else None, weights
    )
    bags = [np.arange(a, b) for a, b in itertools.pairwise(offsets)]
    pooled = pool(vectors, keys, pooling)
    assert pooled.dtype == vectors.dtype
    assert pooled.shape == (len(lengths), vectors.shape[1])
    expected = reference(vectors, bags, weights, pooling)
    np.testing.assert_allclose(pooled, expected, rtol=1e-3 if vectors.dtype == np.float16 else 1e-6)


def test_float16_is_summed_in_float32():
    vectors = np.full((4096, 1), 1.0, np.float16)
    keys = JaggedKeys(np.zeros(4096, np.int64), 1)
    assert pool(vectors, keys, "mean")[0, 0] == 1.0
    assert pool(vectors, keys, "sum")[0, 0] == 4096.0  # float16 alone would stop at 2048


@pytest.mark.parametrize("pooling", POOLINGS)
def test_nan_stays_in_its_sample(pooling):
    vectors = np.ones((4, 2), np.float32)
    weights = np.array([1, np.nan, 1, 1], np.float32)
    pooled = pool(vectors, JaggedKeys(np.zeros(4, np.int64), 2, weights=weights), pooling)
    assert np.isnan(pooled[0]).all()
    assert np.isfinite(pooled[1]).all()


def test_overflow_is_infinite_without_a_warning():
    vectors = np.full((2, 1), 3e38, np.float32)
    assert np.isinf(pool(vectors, JaggedKeys(np.zeros(2, np.int64), 1), "sum")).all()


def test_sqrtn_is_that_of_tensorflow():
    """Results of `tf.nn.embedding_lookup_sparse(combiner="sqrtn")`; the last bag has no keys."""
    vectors = np.array([[1, 2], [3, 4], [5, 6], [7, 8]], np.float32)
    offsets = np.array([0, 2, 3, 4, 4])
    keys = np.arange(4)
    weighted = JaggedKeys(keys, 4, offsets, np.array([3, 4, -2, 0], np.float32))
    expected = [[3, 4.4], [-5, -6], [0, 0], [0, 0]]
    np.testing.assert_allclose(pool(vectors, weighted, "sqrtn"), expected, rtol=1e-6)
    plain = JaggedKeys(keys, 4, offsets)
    expected = [[4 / 2**0.5, 6 / 2**0.5], [5, 6], [7, 8], [0, 0]]
    np.testing.assert_allclose(pool(vectors, plain, "sqrtn"), expected, rtol=1e-6)


def test_squares_of_weights_overflow_and_underflow_without_a_warning():
    vectors, keys = np.ones((2, 1), np.float32), np.zeros(2, np.int64)
    weights = np.array([1e30, 1e-30], np.float32)
    pooled = pool(vectors, JaggedKeys(keys, 2, weights=weights), "sqrtn")
    assert pooled.tolist() == [[0], [0]]  # divided by infinity; divisor 0


def test_none_returns_the_rows_themselves():
    vectors = np.ones((3, 2), np.float32)
    assert pool(vectors, JaggedKeys(np.zeros(3, np.int64), 3), "none") is vectors
