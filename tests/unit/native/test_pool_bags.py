"""Pooling of cached rows in one pass, which must equal gathering and then pooling bit by bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hps import native
from hps.lookup.pooling import divisors, pool
from hps.native import twin_cache
from hps.types import JaggedKeys

ROWS = 50
TABLE_CLASSES = (
    [native.CacheTable, twin_cache.CacheTable] if native.COMPILED else [native.CacheTable]
)


def filled_table(table_class, dim, dtype):
    rows = np.random.default_rng(dim).normal(0, 1, (ROWS, dim)).astype(dtype)
    table = table_class(ROWS, rows[:0], "lru", 2)
    table.write(np.arange(ROWS), rows, np.ones(ROWS, np.uint64), 0, False)
    return table, rows


@pytest.mark.parametrize("table_class", TABLE_CLASSES)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_bags_of_any_size_equal_gather_then_pool_bit_by_bit(table_class, dtype, data):
    dim = data.draw(st.sampled_from([2, 3, 16, 32, 128]))
    table, rows = filled_table(table_class, dim, dtype)
    sizes = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=6))
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    n = int(offsets[-1])
    keys = np.array(data.draw(st.lists(st.integers(0, ROWS - 1), min_size=n, max_size=n)), np.int64)
    weights = None
    if data.draw(st.booleans()):
        weights = np.random.default_rng(n).normal(0, 1, n).astype(np.float32)
    out = np.empty((len(sizes), dim), dtype)
    assert table.pool_bags(keys, offsets, weights, None, out) is None
    expected = pool(rows[keys], JaggedKeys(keys, len(sizes), offsets, weights), "sum")
    assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("table_class", TABLE_CLASSES)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dim", [2, 3, 16, 32, 33, 128])
@pytest.mark.parametrize("hotness", [1, 2, 7, 20])
def test_bags_of_one_size_equal_gather_then_pool_bit_by_bit(
    table_class, dtype, weighted, dim, hotness
):
    table, rows = filled_table(table_class, dim, dtype)
    random = np.random.default_rng(hotness)
    keys = random.integers(0, ROWS, 9 * hotness)
    weights = random.normal(0, 1, len(keys)).astype(np.float32) if weighted else None
    out = np.empty((9, dim), dtype)
    jagged = JaggedKeys(keys, 9, None, weights)
    assert table.pool_bags(keys, None, weights, None, out) is None
    assert out.tobytes() == pool(rows[keys], jagged, "sum").tobytes()
    for pooling in ("mean", "sqrtn"):
        assert table.pool_bags(keys, None, weights, divisors(jagged, pooling), out) is None
        assert out.tobytes() == pool(rows[keys], jagged, pooling).tobytes()


@pytest.mark.parametrize("table_class", TABLE_CLASSES)
def test_missing_rows_are_reported_and_can_be_supplied(table_class):
    table, rows = filled_table(table_class, 4, np.float32)
    keys = np.array([1, 900, 2, 3, 901, 902, 4, 5], np.int64)
    out = np.empty((4, 4), np.float32)
    missing = table.pool_bags(keys, None, None, None, out)
    assert missing.tolist() == [1, 4, 5]
    assert (
        out[1].tobytes() == (rows[2] + rows[3]).tobytes()
    )  # bags without misses are pooled already
    extra = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert table.pool_bags(keys, None, None, None, out, (missing, extra)) is None
    assert out.tolist() == [
        (rows[1] + extra[0]).tolist(),
        (rows[2] + rows[3]).tolist(),
        (extra[1] + extra[2]).tolist(),
        (rows[4] + rows[5]).tolist(),
    ]


@pytest.mark.parametrize("table_class", TABLE_CLASSES)
@pytest.mark.parametrize("offsets", [None, np.array([0, 2, 4, 6, 8]), np.array([0, 0, 3, 7, 8])])
def test_bags_without_supplied_rows_are_left_unchanged(table_class, offsets):
    table, rows = filled_table(table_class, 4, np.float32)
    keys = np.array([1, 2, 3, 4, 900, 5, 6, 7])
    bounds = np.arange(0, 9, 2) if offsets is None else offsets
    bag = int(np.searchsorted(bounds, 4, side="right")) - 1
    extra = np.full((1, 4), 0.5, np.float32)
    divisors = np.full(4, 2, np.float32)
    out = np.full((4, 4), 77, np.float32)
    assert table.pool_bags(keys, offsets, None, divisors, out, (np.array([4]), extra)) is None
    inside = range(bounds[bag], bounds[bag + 1])
    total = np.zeros(4, np.float32)
    for i in inside:
        total = total + (extra[0] if i == 4 else rows[keys[i]])
    assert out[bag].tobytes() == (total / np.float32(2)).tobytes()
    assert (np.delete(out, bag, axis=0) == 77).all()
    # A row of this bag evicted meanwhile is reported; those of other bags are not.
    table.evict(np.array([5, 1, 7]))
    missing = table.pool_bags(keys, offsets, None, divisors, out, (np.array([4]), extra))
    assert missing.tolist() == [5]


@pytest.mark.parametrize("table_class", TABLE_CLASSES)
def test_empty_bag_and_bag_with_divisor_zero_are_zeros(table_class):
    table, _ = filled_table(table_class, 4, np.float32)
    out = np.full((2, 4), 7, np.float32)
    divisors = np.zeros(2, np.float32)
    table.pool_bags(np.array([1, 2]), np.array([0, 2, 2]), None, divisors, out)
    assert not out.any()


@pytest.mark.skipif(not native.COMPILED, reason="the twin has one thread")
def test_several_threads_give_the_same_result_as_one():
    table, _ = filled_table(native.CacheTable, 16, np.float32)
    keys = np.random.default_rng(1).integers(0, ROWS + 1, 200_000)
    results = []
    for threads in (1, 3):
        table.threads = threads
        out = np.empty((20_000, 16), np.float32)
        missing = table.pool_bags(keys, None, None, None, out)
        whole = (keys < ROWS).reshape(20_000, 10).all(axis=1)
        left = table.fetch(
            keys,
            np.arange(len(keys)),
            0,
            np.empty((len(keys), 16), np.float32),
            np.zeros(len(keys), np.uint64),
            np.zeros(len(keys), np.uint8),
        )
        results.append((missing.tobytes(), out[whole].tobytes(), left.tobytes()))
    assert results[0] == results[1]
    assert np.frombuffer(results[0][0], np.int64).tolist() == np.flatnonzero(keys == ROWS).tolist()


@pytest.mark.skipif(not native.COMPILED, reason="the twin trusts its arrays")
@pytest.mark.parametrize(
    "wrong",
    [
        {"offsets": np.array([0, 3])},
        {"offsets": np.array([0, 3, 1, 2])},
        {"offsets": np.array([1, 2, 2])},
        {"offsets": np.array([0, -1, 2])},
        {"weights": np.ones(1, np.float32)},
        {"divisors": np.ones(3, np.float32)},
        {"out": np.empty((2, 5), np.float32)},
        {"out": np.empty((2, 4))},
        {"out": np.empty((3, 4), np.float32)},
        {"supplied": (np.array([0]),)},
        {"supplied": (np.array([0]), np.ones((2, 4), np.float32))},
        {"supplied": (np.array([2]), np.ones((1, 4), np.float32))},
        {"supplied": (np.array([-1]), np.ones((1, 4), np.float32))},
        {"supplied": (np.array([1, 0]), np.ones((2, 4), np.float32))},
        {"supplied": (np.array([1, 1]), np.ones((2, 4), np.float32))},
        {"keys": np.ones(2, np.int32)},
    ],
)
def test_pool_bags_rejects_arrays_that_do_not_fit(wrong):
    table, _ = filled_table(native.CacheTable, 4, np.float32)
    right = {
        "keys": np.array([1, 2]),
        "offsets": None,
        "weights": None,
        "divisors": None,
        "out": np.empty((2, 4), np.float32),
    }
    with pytest.raises((TypeError, ValueError)):
        table.pool_bags(**right | wrong)
