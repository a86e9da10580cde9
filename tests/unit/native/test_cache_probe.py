"""The CPU cache's compiled probe against its NumPy twin."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hps.native import _core as native
from hps.native import twin_cache as twin
from hps.native.twin_cache import EMPTY, ROW, TOMBSTONE

KEY = st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3)


class Slots:
    """The arrays of a cache, filled at random by ``seed`` from ``held`` keys."""

    def __init__(self, held, buckets, ways, dim, dtype, seed):
        rng = np.random.default_rng(seed)
        self.keys = rng.integers(-3, 4, (buckets, ways))  # left over in emptied slots
        self.states = np.zeros((buckets, ways), np.uint8)
        for key in dict.fromkeys(held):
            first, second = twin.cache_buckets(np.array([key]), buckets)[0]
            for bucket in (first, second):
                free = np.flatnonzero(self.states[bucket] == EMPTY)
                if len(free):
                    way = rng.choice(free)
                    self.keys[bucket, way] = key
                    self.states[bucket, way] = rng.choice([ROW, TOMBSTONE])
                    break
        slots = buckets * ways
        self.versions = rng.integers(0, 10, slots).astype(np.uint64)
        self.rows = rng.random((slots, dim)).astype(dtype)
        self.stamps = rng.integers(1, 5, slots).astype(np.uint32)
        self.stamps[self.states.reshape(-1) == EMPTY] = 0

    def probe(self, module, stamps):
        return module.CacheProbe(self.keys, self.states, stamps, self.versions, self.rows, 2)


def fetched(module, slots, keys, missing):
    """All a fetch writes and returns."""
    n, dim = len(keys), slots.rows.shape[1]
    out = np.full((n, dim), 7, slots.rows.dtype)
    versions, source = np.full(n, 77, np.uint64), np.full(n, 9, np.uint8)
    stamps = slots.stamps.copy()
    left = slots.probe(module, stamps).fetch(keys, missing, 6, 5, out, versions, source)
    return out, versions, source, stamps, np.empty(0, np.int64) if left is None else left


@settings(deadline=None)
@given(
    st.lists(KEY, max_size=60),
    st.lists(KEY, max_size=30, unique=True),
    st.sampled_from([(1, 1), (1, 3), (3, 16), (40, 17)]),
    st.sampled_from([(1, np.float16), (3, np.float32), (16, np.float32)]),
    st.integers(0, 2**32),
)
def test_fetch_and_find_equal_their_twins(held, asked, shape, row, seed):
    slots = Slots(held, *shape, *row, seed)
    keys = np.array(held[:20] + asked, np.int64)
    np.testing.assert_array_equal(
        native.cache_buckets(keys, shape[0]), twin.cache_buckets(keys, shape[0])
    )
    found = slots.probe(native, slots.stamps).find(keys)
    np.testing.assert_array_equal(found, slots.probe(twin, slots.stamps).find(keys))
    at = found[found >= 0]
    np.testing.assert_array_equal(slots.keys.reshape(-1)[at], keys[found >= 0])
    assert (slots.states.reshape(-1)[at] != EMPTY).all()
    missing = np.flatnonzero(np.random.default_rng(seed).random(len(keys)) < 0.7)
    for mine, other in zip(
        fetched(native, slots, keys, missing), fetched(twin, slots, keys, missing), strict=True
    ):
        np.testing.assert_array_equal(mine, other)


def gathered(module, slots, keys):
    """Whether every key had a row, and all a gather writes then."""
    out, stamps = (
        np.full((len(keys), slots.rows.shape[1]), 7, slots.rows.dtype),
        slots.stamps.copy(),
    )
    found = slots.probe(module, stamps).gather(keys, 6, out)
    return (found, out, stamps) if found else (found,)


@settings(deadline=None)
@given(
    st.lists(KEY, max_size=60),
    st.lists(KEY, max_size=3),
    st.booleans(),
    st.sampled_from([(1, 1), (1, 3), (3, 16), (40, 17)]),
    st.sampled_from([(1, np.float16), (3, np.float32), (16, np.float32), (100, np.float32)]),
    st.integers(0, 2**32),
)
def test_gather_equals_its_twin_and_fetch(held, asked, only_rows, shape, row, seed):
    slots = Slots(held, *shape, *row, seed)
    keys = np.array(held + held[::2], np.int64)  # keys may repeat
    if only_rows:
        at = slots.probe(twin, slots.stamps).find(keys)
        keys = keys[(at >= 0) & (slots.states.reshape(-1)[at] == ROW)]
    else:
        keys = np.concatenate([keys, np.array(asked, np.int64)])
    mine, other = gathered(native, slots, keys), gathered(twin, slots, keys)
    assert mine[0] is other[0]
    assert mine[0] or not only_rows
    for left, right in zip(mine[1:], other[1:], strict=True):
        np.testing.assert_array_equal(left, right)
    out, _, source, stamps, _ = fetched(native, slots, keys, np.arange(len(keys)))
    assert mine[0] == (source == 2).all()
    if mine[0]:
        np.testing.assert_array_equal(mine[1], out)
        np.testing.assert_array_equal(mine[2], stamps)


@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 128, 129, 5000])
def test_gather_of_every_length(n):
    slots = Slots(range(3000), 300, 16, 3, np.float32, 1)
    slots.states[slots.states == TOMBSTONE] = ROW
    there = np.array([k for k in range(3000) if k in slots.keys[slots.states == ROW]])
    keys = np.resize(there, n)
    found, *rest = gathered(native, slots, keys)
    assert found
    for mine, other in zip(rest, gathered(twin, slots, keys)[1:], strict=True):
        np.testing.assert_array_equal(mine, other)
    for at in {0, n // 2, n - 1} if n else ():
        lacking = keys.copy()
        lacking[at] = -7777
        assert not gathered(native, slots, lacking)[0]


@pytest.mark.parametrize(
    ("keys", "out"),
    [
        (np.zeros(2, np.int32), np.zeros((2, 3), np.float32)),
        (np.zeros(4, np.int64)[::2], np.zeros((2, 3), np.float32)),
        (np.zeros(2, np.int64), np.zeros((2, 3), np.float64)),
        (np.zeros(2, np.int64), np.zeros((3, 3), np.float32)),
        (np.zeros(2, np.int64), np.zeros((2, 4), np.float32)),
        (np.zeros(2, np.int64), np.zeros((2, 6), np.float32)[:, ::2]),
    ],
)
def test_gather_refuses_what_does_not_fit(keys, out):
    slots = Slots([1], 1, 3, 3, np.float32, 1)
    with pytest.raises((TypeError, ValueError)):
        slots.probe(native, slots.stamps).gather(keys, 6, out)


def test_above_the_gil_release_threshold():
    held = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 10_000)
    slots = Slots(held[:3_000].tolist(), 300, 16, 4, np.float32, 1)
    missing = np.arange(len(held))
    for mine, other in zip(
        fetched(native, slots, held, missing), fetched(twin, slots, held, missing), strict=True
    ):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("buckets", [1, 7, 4096, 2**32 - 2])
def test_every_bucket_is_used_and_none_beyond(buckets):
    keys = np.arange(-20_000, 20_000)
    both = native.cache_buckets(keys, buckets)
    assert both.min() >= 0
    assert both.max() < buckets
    if buckets <= 4096:
        load = np.bincount(both.reshape(-1), minlength=buckets)
        mean = 80_000 / buckets
        assert abs(load - mean).max() <= 6 * mean**0.5 + 1


def test_keys_of_one_partition_use_every_bucket():
    keys = np.arange(200_000)
    hashes = native.partition_hash(keys)
    for mine in (hashes % np.uint64(16) == 3, hashes >> np.uint64(60) == 3):
        both = native.cache_buckets(keys[mine], 64)
        for column in both.T:
            assert np.bincount(column, minlength=64).min() > 100


ADMITTED = st.lists(KEY, max_size=40, unique=True)
SHAPES = st.sampled_from([(1, 1), (1, 3), (3, 16), (40, 17)])


def newcomers(slots, keys):
    """Those of ``keys`` that are not resident, with versions and rows of their own."""
    keys = np.array(keys, np.int64)
    keys = keys[slots.probe(twin, slots.stamps).find(keys) < 0]
    rows = (np.arange(len(keys))[:, None] + 100 + np.zeros((1, 3))).astype(slots.rows.dtype)
    return keys, np.arange(len(keys)).astype(np.uint64) + np.uint64(50), rows


def admit(module, slots, keys, versions, rows, stamp=9):
    return slots.probe(module, slots.stamps).admit(keys, versions, rows, stamp)


def arrays(slots):
    return slots.keys, slots.states, slots.stamps, slots.versions, slots.rows


@settings(deadline=None)
@given(st.lists(KEY, max_size=60), ADMITTED, SHAPES, st.booleans(), st.integers(0, 2**32))
def test_admission_one_by_one_equals_the_twin(held, asked, shape, deletions, seed):
    """And a batch at once is the same, in the compiled one."""
    by_twin, by_native, at_once = (Slots(held, *shape, 3, np.float32, seed) for _ in range(3))
    keys, versions, rows = newcomers(by_twin, asked)
    total = np.zeros(2, int)
    for i in range(len(keys)):
        one = keys[i : i + 1], versions[i : i + 1], None if deletions else rows[i : i + 1]
        displaced = admit(native, by_native, *one)
        assert displaced == admit(twin, by_twin, *one)
        total += displaced
    assert tuple(total) == admit(native, at_once, keys, versions, None if deletions else rows)
    for mine, other, third in zip(arrays(by_native), arrays(by_twin), arrays(at_once), strict=True):
        np.testing.assert_array_equal(mine, other)
        np.testing.assert_array_equal(mine, third)


@pytest.mark.parametrize("module", [native, twin])
@settings(deadline=None)
@given(held=st.lists(KEY, max_size=60), asked=ADMITTED, shape=SHAPES, seed=st.integers(0, 2**32))
def test_admission_of_a_batch(module, held, asked, shape, seed):
    slots, before = (Slots(held, *shape, 3, np.float32, seed) for _ in range(2))
    keys, versions, rows = newcomers(slots, asked)
    gone = sum(admit(module, slots, keys, versions, rows))
    occupied = np.count_nonzero(before.states)
    assert np.count_nonzero(slots.states) == occupied + len(keys) - gone
    found = slots.probe(module, slots.stamps).find(keys)
    at = found[found >= 0]
    np.testing.assert_array_equal(slots.versions[at], versions[found >= 0])
    np.testing.assert_array_equal(slots.rows[at], rows[found >= 0])
    assert (slots.stamps[at] == 9).all()
    assert (slots.states.reshape(-1)[at] == ROW).all()
    others = np.setdiff1d(np.arange(len(slots.stamps)), at)
    for mine, old in zip(arrays(slots), arrays(before), strict=True):
        flat = mine.reshape(len(slots.stamps), -1), old.reshape(len(slots.stamps), -1)
        np.testing.assert_array_equal(flat[0][others], flat[1][others])


@pytest.mark.parametrize("module", [native, twin])
def test_no_row_goes_while_a_bucket_has_room(module):
    slots = Slots([], 64, 16, 3, np.float32, 1)
    keys = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 850)
    for start in range(0, len(keys), 50):
        some = keys[start : start + 50]
        rows = np.zeros((50, 3), np.float32)
        assert admit(module, slots, some, np.zeros(50, np.uint64), rows) == (0, 0)


BAD = {
    "out of another dim": lambda a: a.update(out=np.zeros((3, 5), np.float32)),
    "out of another dtype": lambda a: a.update(out=np.zeros((3, 4), np.float64)),
    "out too short": lambda a: a.update(out=np.zeros((2, 4), np.float32)),
    "strided out": lambda a: a.update(out=np.zeros((3, 8), np.float32)[:, ::2]),
    "read-only out": lambda a: a["out"].setflags(write=False),
    "versions too short": lambda a: a.update(versions=np.zeros(2, np.uint64)),
    "source of another dtype": lambda a: a.update(source=np.zeros(3, np.int8)),
    "position beyond the keys": lambda a: a.update(missing=np.array([0, 3])),
    "negative position": lambda a: a.update(missing=np.array([-1])),
    "32-bit keys": lambda a: a.update(keys=np.zeros(3, np.int32)),
}


BAD_ADMISSIONS = {
    "rows of another dim": {"rows": np.zeros((3, 5), np.float32)},
    "rows of another dtype": {"rows": np.zeros((3, 4), np.float16)},
    "too few rows": {"rows": np.zeros((2, 4), np.float32)},
    "too few versions": {"versions": np.zeros(2, np.uint64)},
    "signed versions": {"versions": np.zeros(3, np.int64)},
    "32-bit keys": {"keys": np.zeros(3, np.int32)},
}


@pytest.mark.parametrize("wrong", BAD_ADMISSIONS.values(), ids=BAD_ADMISSIONS)
def test_wrong_rows_are_not_admitted(wrong):
    slots = Slots([], 2, 3, 4, np.float32, 1)
    good = {
        "keys": np.arange(3), "versions": np.zeros(3, np.uint64),
        "rows": np.zeros((3, 4), np.float32), "stamp": 1,
    }  # fmt: skip
    with pytest.raises((TypeError, ValueError)):
        slots.probe(native, slots.stamps).admit(**good | wrong)
    assert not slots.states.any()


@pytest.mark.parametrize("spoil", BAD.values(), ids=BAD)
def test_wrong_arrays_are_refused_before_anything_is_written(spoil):
    slots = Slots([0, 1, 2], 2, 3, 4, np.float32, 1)
    arrays = {
        "keys": np.arange(3), "missing": np.arange(3), "clock": 1, "oldest_tombstone": 0,
        "out": np.zeros((3, 4), np.float32), "versions": np.zeros(3, np.uint64),
        "source": np.zeros(3, np.uint8),
    }  # fmt: skip
    spoil(arrays)
    with pytest.raises((TypeError, ValueError)):
        slots.probe(native, slots.stamps).fetch(**arrays)
    assert not arrays["out"].any()
    assert not arrays["source"].any()


WRONG_SLOTS = {
    "fewer stamps than slots": {"stamps": np.zeros(5, np.uint32)},
    "fewer rows than slots": {"rows": np.zeros((5, 4), np.float32)},
    "states of another shape": {"states": np.zeros((3, 2), np.uint8)},
    "no bucket": {"keys": np.zeros((0, 3), np.int64), "states": np.zeros((0, 3), np.uint8)},
    "strided keys": {"keys": np.zeros((2, 6), np.int64)[:, ::2]},
}


@pytest.mark.parametrize("wrong", WRONG_SLOTS.values(), ids=WRONG_SLOTS)
def test_slots_that_do_not_fit_are_refused(wrong):
    arrays = {
        "keys": np.zeros((2, 3), np.int64), "states": np.zeros((2, 3), np.uint8),
        "stamps": np.zeros(6, np.uint32), "versions": np.zeros(6, np.uint64),
        "rows": np.zeros((6, 4), np.float32), "code": 2,
    }  # fmt: skip
    native.CacheProbe(**arrays)
    with pytest.raises((TypeError, ValueError)):
        native.CacheProbe(**arrays | wrong)
