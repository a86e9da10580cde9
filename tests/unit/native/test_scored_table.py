"""The compiled scored table, and that on a device, against the NumPy twin.

Results, row numbers, scores and evictions are equal.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hps.native import _core as native
from hps.native import twin_scored as twin
from hps.native.twin_cache import mixed
from tests.support.tables import DeviceScoredTable

MOST = 2**64 - 1
KEY = st.integers(-(2**63), 2**63 - 1) | st.integers(-200, 200)
SCORE = st.sampled_from([0, 1, 2, 2**32 - 1, 2**32, MOST - 1, MOST]) | st.integers(0, 50)
ROW = st.sampled_from([(1, "f2"), (3, "f4"), (16, "f4"), (5, "f8"), (36, "i1"), (300, "f4")])
# Of few distinct keys, and of more than a bucket's slots.
N = st.sampled_from([0, 1, 3, 12, 12, 12, 150, 400])
NAMES = st.sampled_from(["write"] * 6 + ["erase", "find", "export", "reserve", "clear", "limit"])


CLASSES = [native.ScoredTable, pytest.param(DeviceScoredTable, marks=pytest.mark.gpu)]


def tables(compared=native.ScoredTable, row=(3, "f4"), buckets=1, most=4):
    like = np.empty((0, row[0]), row[1])
    return [made(buckets, most, like) for made in (compared, twin.ScoredTable)]


def in_order(result):
    """(found, evicted) with the evicted rows sorted: a device returns them in any order."""
    found, evicted = result
    if evicted is None:
        return result
    keys, rows, scores = evicted
    order = np.lexsort((*rows.T, scores, keys))
    return found, (keys[order], rows[order], scores[order])


def assert_equal(compiled, expected):
    """Compare results: arrays, tuples of results, None."""
    if isinstance(expected, tuple):
        assert len(compiled) == len(expected)
        for pair in zip(compiled, expected, strict=True):
            assert_equal(*pair)
    elif expected is None:
        assert compiled is None
    else:
        assert compiled.dtype == expected.dtype
        np.testing.assert_array_equal(compiled, expected)


def state(table):
    return table.size, table.buckets, table.max_buckets


def random_rows(rng, n, row):
    return rng.integers(-8, 8, (n, row[0])).astype(row[1])


@st.composite
def operations(draw):
    """A list of (name, arguments); the arrays come from a seed, so that examples stay small."""
    steps = []
    for _ in range(draw(st.integers(1, 12))):
        n, seed = draw(N), draw(st.integers(0, 2**32))
        keys = draw(st.lists(KEY, min_size=min(n, 12), max_size=min(n, 12)))
        details = draw(
            st.tuples(st.integers(0, 3), st.integers(0, 4), SCORE, st.booleans(), st.booleans())
        )
        steps.append((draw(NAMES), n, seed, keys, *details))
    return steps


@pytest.mark.parametrize("compared", CLASSES)
@settings(max_examples=150)
@given(operations(), ROW, st.sampled_from([1, 2, 3]))
def test_random_operations_equal_the_twin(compared, steps, row, buckets):
    both = tables(compared, row, buckets, 4 * buckets)
    for name, n, seed, some, operation, rule, base, flag, other in steps:
        rng = np.random.default_rng(seed)
        keys = np.concatenate([np.array(some, np.int64), rng.integers(-300, 300, n - len(some))])
        rows, scores = random_rows(rng, n, row), rng.integers(0, 60, n).astype(np.uint64)
        results = []
        for table in both:
            if name == "write":
                mine = rows.copy()
                given_rows = None if operation == twin.Write.ASSIGN and flag else mine
                flags = np.random.default_rng(seed).random(n) < 0.5
                result = table.write(
                    operation, keys, given_rows, flags, rule, base, scores if other else None, flag
                )
                if compared is DeviceScoredTable:
                    result = in_order(result)
                results.append((*result, mine))
            elif name == "erase":
                results.append(table.erase(keys, scores if flag else None))
            elif name == "find":
                out, got = rows.copy(), scores.copy()
                found = table.find(keys, out if flag else None, got if other else None)
                results.append((found, out, got, table.find_rows(keys)))
            elif name == "export":
                results.append(table.export(seed % 700, n, flag))
            elif name == "reserve":
                table.reserve(min(table.max_buckets, 2 * table.buckets))
                results.append(None)
            elif name == "clear" and flag and other:
                table.clear()
                results.append(None)
            elif name == "limit":
                table.set_max_buckets(table.max_buckets + n)
                results.append(None)
        if results:
            assert_equal(*results)
        assert state(both[0]) == state(both[1])
    assert_equal(*(table.export(0, 10**6, True) for table in both))
    numbers = both[1].find_rows(both[1].export(0, 10**6, False)[0])
    np.testing.assert_array_equal(both[0].rows[numbers], both[1].rows[numbers])
    assert both[0].rows.shape == both[1].rows.shape


@pytest.mark.parametrize("compared", CLASSES)
def test_keys_of_one_digest_and_half_are_told_apart(compared):
    """More keys with equal digests than a half has slots: they spill, are evicted and stay distinct."""
    keys = np.arange(300_000)
    x = mixed(keys)
    keys = keys[(x >> np.uint64(23)) & np.uint64(0x1FF) == x[0] >> np.uint64(23) & np.uint64(0x1FF)]
    assert len(keys) > 500
    both = tables(compared, (3, "f4"), 1, 8)
    for at in range(0, 500, 100):
        part = keys[at : at + 100]
        rows = np.repeat(part[:, None], 3, 1).astype(np.float32)
        scores = part.astype(np.uint64)
        assert_equal(*(in_order(t.write(0, part, rows, None, 4, 0, scores, True)) for t in both))
        for table in both:
            table.reserve(table.buckets if at < 200 else 4)
    assert_equal(*(table.export(0, 10**6, True) for table in both))
    assert_equal(*(table.find_rows(keys) for table in both))


@pytest.mark.parametrize("compared", CLASSES)
def test_scores_saturate(compared):
    for table in tables(compared):
        key, row = np.array([1]), np.zeros((1, 3), np.float32)
        for rule, base, scores, expected in [
            (2, 0, [5, MOST - 4], MOST),
            (3, 7 << 32, [2**32 - 2, 5], 7 << 32 | 2**32 - 1),
            (3, 7 << 32, [3 << 32 | 1, 9 << 32 | 2], 7 << 32 | 3),
        ]:
            table.clear()
            for score in scores:
                table.write(0, key, row, None, rule, base, np.array([score], np.uint64), False)
            assert table.export(0, 128, False)[1].tolist() == [expected]


@pytest.mark.parametrize("compared", CLASSES)
def test_a_batch_of_a_few_keys_in_many_positions_is_applied_in_order(compared):
    """More positions of one bucket than its list on a device has in shared memory."""
    rng = np.random.default_rng(3)
    both = tables(compared, (8, "f4"), 3, 3)
    for n in (33, 64, 100, 3000, 20_000):
        keys, flags = rng.integers(0, 500, n), rng.random(n) < 0.5
        keys[: n // 2] = rng.integers(0, 5, n // 2)
        rows, scores = random_rows(rng, n, (8, "f4")), rng.integers(0, 1000, n).astype(np.uint64)
        for operation in twin.Write:
            assert_equal(
                *(
                    in_order(t.write(operation, keys, rows.copy(), flags, 4, 0, scores, True))
                    for t in both
                )
            )
        assert_equal(*(t.export(0, 10**6, True) for t in both))
        assert_equal(*(t.erase(keys[: n // 3], None) for t in both))


@pytest.mark.parametrize("compared", CLASSES)
def test_evictions_after_scores_fell_take_the_lowest(compared):
    rng = np.random.default_rng(4)
    both = tables(compared, (2, "f4"), 1, 1)
    for step in range(30):
        new = np.arange(200) + 1000 * step
        for keys, rule in ((new, 4), (new[::3], 4), (new[::7], 2), (new[::5], 4)):
            scores = rng.integers(0, 100, len(keys)).astype(np.uint64)
            keys = np.ascontiguousarray(keys)
            rows = random_rows(rng, len(keys), (2, "f4"))
            assert_equal(
                *(in_order(t.write(0, keys, rows, None, rule, 0, scores, True)) for t in both)
            )
        assert_equal(*(t.erase(new[::11].copy(), None) for t in both))
    assert_equal(*(t.export(0, 128, True) for t in both))


@pytest.mark.parametrize("compared", CLASSES)
def test_sizes_out_of_range_are_refused(compared):
    like = np.empty((0, 3), np.float32)
    for made in (compared, twin.ScoredTable):
        for buckets, most in [(0, 1), (2, 1), (1, 2**32)]:
            with pytest.raises(ValueError, match="a table has 1 to"):
                made(buckets, most, like)
    for table in tables(compared):
        with pytest.raises(ValueError, match="more buckets than max_buckets"):
            table.reserve(5)
        table.reserve(3)
        with pytest.raises(ValueError, match="max_buckets must be at least"):
            table.set_max_buckets(3)
        assert state(table) == (0, 4, 4)


def test_arrays_that_do_not_fit_are_refused():
    table, _ = tables()
    keys, rows = np.arange(2), np.zeros((2, 3), np.float32)
    scores, flags = np.zeros(2, np.uint64), np.ones(2, bool)
    for wrong in (rows[:, :2].copy(), rows.astype("f8"), rows[:1], None):
        with pytest.raises(ValueError, match="rows"):
            table.write(0, keys, wrong, None, 1, 0, None, False)
    with pytest.raises(ValueError, match="C-contiguous"):
        table.write(0, keys, np.zeros((2, 6), np.float32)[:, ::2], None, 1, 0, None, False)
    frozen = rows.copy()
    frozen.flags.writeable = False
    table.write(0, keys, frozen, None, 1, 0, None, False)
    with pytest.raises(ValueError, match="rows must be"):
        table.write(1, keys, frozen, None, 1, 0, None, False)
    for wrong in (None, flags[:1]):
        with pytest.raises(ValueError, match="accumulate must have one entry per key"):
            table.write(3, keys, rows, wrong, 1, 0, None, False)
    with pytest.raises(ValueError, match="scores must have one entry"):
        table.write(0, keys, rows, None, 4, 0, scores[:1], False)
    with pytest.raises(ValueError, match="unknown operation"):
        table.write(4, keys, rows, None, 4, 0, scores, False)
    with pytest.raises(ValueError, match="rows must have"):
        table.find(keys, rows[:1].copy(), None)
    with pytest.raises(ValueError, match="scores must have"):
        table.find(keys, None, scores[:1].copy())
    with pytest.raises(ValueError, match="scores must have"):
        table.erase(keys, scores[:1])
    for call in (table.find_rows, lambda k: table.find(k, None, None)):
        with pytest.raises(TypeError):
            call(keys.astype(np.int32))
    assert table.size == 2


def test_address_space_that_the_system_refuses_is_a_memory_error():
    like = np.empty((0, 1 << 22), np.float32)
    with pytest.raises(MemoryError):
        native.ScoredTable(1, 2**32 - 1, like)
    table = native.ScoredTable(1, 1, like)
    with pytest.raises(MemoryError):
        table.set_max_buckets(2**32 - 1)
    assert state(table) == (0, 1, 1)
