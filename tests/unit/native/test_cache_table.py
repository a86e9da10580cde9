"""The CPU cache's compiled table against its NumPy twin: equal results, placement and evictions."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hps.native import _core as native
from hps.native import twin_cache as twin
from hps.native import twin_pool

KEY = st.integers(-(2**63), 2**63 - 1) | st.integers(-40, 40)
KEYS = st.lists(KEY, max_size=30)
CAPACITY = st.sampled_from([1, 2, 5, 24, 40, 60, 100])
# Without LFU: it counts uses with random numbers, which differ between the twins.
DETERMINISTIC = st.sampled_from(["lru", "random", "fifo"])
# The int8 rows: 32 values and 4 bytes for their scale.
ROW = st.sampled_from(
    [(1, np.float16), (3, np.float32), (16, np.float32), (32, np.float32), (36, np.int8)]
)
OPERATION = st.sampled_from(
    ["insert", "insert", "insert", "update", "delete", "evict", "expire", "fetch", "gather"]
)


def native_and_twin(capacity, row=(3, np.float32), eviction="lru", **kernels):
    like = np.empty((0, row[0]), row[1])
    return [
        native.CacheTable(capacity, like, eviction, 2, **kernels),
        twin.CacheTable(capacity, like, eviction, 2),
    ]


def rows_of(keys, versions, row=(3, np.float32)):
    return ((keys % 97 + versions.astype(np.int64))[:, None] + np.arange(row[0])).astype(row[1])


def fetch(table, keys, row=(3, np.float32), missing=None, oldest=0):
    """Fetch into new arrays; return them and the positions still missing."""
    n = len(keys)
    out, versions = np.full((n, row[0]), 7, row[1]), np.full(n, 77, np.uint64)
    source = np.full(n, 9, np.uint8)
    missing = np.arange(n) if missing is None else missing
    left = table.fetch(keys, missing, oldest, out, versions, source)
    return out, versions, source, np.empty(0, np.int64) if left is None else left


def state(table):
    keys, scores = table.top_k(10_000)
    return keys.tolist(), scores.tolist(), table.rows, table.tombstones, table.evictions


def apply(table, operation, keys, versions, row):
    if operation == "insert":
        table.write(keys, rows_of(keys, versions, row), versions, 3, False)
    elif operation == "update":
        table.write(keys, rows_of(keys, versions, row), versions, 3, True)
    elif operation == "delete":
        table.write(keys, None, versions, 3, False)
    elif operation == "evict":
        table.evict(keys)
    elif operation == "expire":
        # Rows of the version before, in all buckets and in some.
        oldest = int(versions[0]) if len(versions) else 1
        return [[table.expire(oldest, 2, 3), table.expire(oldest, 0, 1), table.expire(1, 0, 99)]]
    elif operation == "gather":
        out = np.full((len(keys), row[0]), 7, row[1])
        found = table.gather(keys, out)
        return [found, out if found else None]
    else:
        return fetch(table, keys, row, oldest=3)
    return []


@settings(deadline=None, max_examples=150)
@given(
    CAPACITY,
    ROW,
    DETERMINISTIC,
    st.lists(st.tuples(OPERATION, KEYS, st.integers(0, 9)), max_size=25),
)
def test_random_operation_sequences_leave_both_twins_equal(capacity, row, eviction, steps):
    tables = native_and_twin(capacity, row, eviction)
    for operation, keys, version in steps:
        keys = np.array(keys, np.int64)
        versions = np.full(len(keys), version, np.uint64)
        results = [apply(table, operation, keys, versions, row) for table in tables]
        for left, right in zip(*results, strict=True):
            np.testing.assert_array_equal(left, right)
        assert state(tables[0]) == state(tables[1])
        assert tables[0].rows + tables[0].tombstones <= capacity


@pytest.mark.parametrize("number", [0, 1])
def test_expired_rows_make_room_and_tombstones_stay(number):
    table, keys = native_and_twin(100)[number], np.arange(100)
    versions = np.arange(100).astype(np.uint64)
    table.write(keys, rows_of(keys, versions), versions, 0, False)
    table.write(keys[:10], None, versions[:10], 0, False)
    assert table.expire(0, 0, table.buckets) == 0
    assert table.expire(50, table.buckets, 5) == 0
    parts = [table.expire(50, first, 7) for first in range(0, table.buckets, 7)]
    assert sum(parts) == 40
    assert max(parts) <= 28
    assert (table.rows, table.tombstones, table.evictions) == (50, 10, 0)
    out, _, _, left = fetch(table, keys)
    assert left.tolist() == [*range(10, 50)]
    np.testing.assert_array_equal(out[50:], rows_of(keys[50:], keys[50:].astype(np.uint64)))
    new = np.arange(1000, 1040)
    table.write(new, rows_of(new, versions[:40]), versions[:40], 0, False)
    assert (table.rows, table.evictions) == (90, 0)


def test_lfu_without_uses_evicts_the_same_rows_as_the_twin():
    tables = native_and_twin(40, eviction="lfu")
    for n in range(60):
        keys = np.arange(n * 7, n * 7 + 7)
        for table in tables:
            apply(table, "insert", keys, np.ones(7, np.uint64), (3, np.float32))
        assert state(tables[0]) == state(tables[1])


def test_lfu_scores_equal_the_twins_on_average():
    tables = native_and_twin(2000, eviction="lfu")
    keys = np.arange(1000)
    scores = []
    for table in tables:
        apply(table, "insert", keys, np.ones(1000, np.uint64), (3, np.float32))
        for _ in range(100):
            fetch(table, keys)
        scores.append(table.top_k(1000)[1].mean())
    assert abs(scores[0] - scores[1]) < 1.0
    assert 32 + 10 < scores[0] < 32 + 60


ROW_BYTES = [2, 32, 64, 128, 256, 512, 400, 2800]


@pytest.mark.parametrize("kernels", native.cache_kernels())
@pytest.mark.parametrize("row", [(size // 2, np.float16) for size in ROW_BYTES])
def test_reads_equal_the_twins_for_every_row_and_batch_length(row, kernels):
    """Batch lengths around the prefetch distances and the threshold above which the GIL is released."""
    tables = native_and_twin(6000, row, kernels=kernels)
    keys = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 6000)
    versions = np.arange(6000).astype(np.uint64)
    for table in tables:
        table.write(keys, rows_of(keys, versions, row), versions, 0, False)
    for n in (0, 1, 11, 12, 13, 24, 25, 47, 48, 49, 64, 65, 100, 4095, 6000):
        out = np.empty((n, row[0]), row[1])
        assert tables[0].gather(keys[:n], out)
        np.testing.assert_array_equal(out, rows_of(keys[:n], versions[:n], row))
        for at in {0, n // 2, n - 1} if n else ():
            keys_with_a_miss = keys[:n].copy()
            keys_with_a_miss[at] = 12345
            assert not tables[0].gather(keys_with_a_miss, out)
        keys_and_absent = np.concatenate([keys[:n], keys[:n] + 1])
        missing = np.flatnonzero(np.random.default_rng(n).random(2 * n) < 0.7)
        for compiled, expected in zip(
            fetch(tables[0], keys_and_absent, row, missing),
            fetch(tables[1], keys_and_absent, row, missing),
            strict=True,
        ):
            np.testing.assert_array_equal(compiled, expected)


@pytest.mark.parametrize("buckets", [1, 7, 4096, 2**32 - 1])
def test_home_buckets_are_in_range_and_evenly_used(buckets):
    home = twin.homes(np.arange(-20_000, 20_000), buckets)
    assert home.min() >= 0
    assert home.max() < buckets
    if buckets <= 4096:
        mean = 40_000 / buckets
        assert abs(np.bincount(home, minlength=buckets) - mean).max() <= 6 * mean**0.5 + 1


@pytest.mark.parametrize(
    "keys",
    [
        np.arange(200_000) << 40,
        np.arange(200_000) << 20 | 5,
        np.arange(200_000) * -(2**13),
        np.arange(3_200_000)[native.partition_hash(np.arange(3_200_000)) % np.uint64(16) == 3],
        np.arange(3_200_000)[native.partition_hash(np.arange(3_200_000)) >> np.uint64(60) == 3],
    ],
)
def test_patterned_keys_fill_the_table_without_eviction_or_crowded_buckets(keys):
    """Strided keys, keys that differ only in their high bits, and the keys of one hash partition."""
    table, _ = native_and_twin(len(keys))
    table.write(keys, None, np.ones(len(keys), np.uint64), 0, False)
    assert (table.tombstones, table.evictions) == (len(keys), 0)
    load = np.bincount(twin.homes(keys, 4096), minlength=4096)
    assert load.max() < 2 * len(keys) / 4096


def test_cache_bytes_equal_the_twins_for_every_capacity_and_row():
    for capacity in (1, 2, 3, 100, 12_345, 10**9):
        for row_bytes in (2, 12, 64, 500):
            assert native.cache_bytes(capacity, row_bytes) == twin.cache_bytes(capacity, row_bytes)
    assert native.cache_kernels()[-1] == "baseline"
    with pytest.raises(ValueError, match="can't run the kernels neon9"):
        native_and_twin(1, kernels="neon9")


WRONG_FETCHES = {
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


@pytest.mark.parametrize("spoil", WRONG_FETCHES.values(), ids=WRONG_FETCHES)
def test_fetch_rejects_wrong_arrays_and_writes_nothing(spoil):
    table = native.CacheTable(10, np.empty((0, 4), np.float32), "lru", 2)
    table.write(np.arange(3), np.ones((3, 4), np.float32), np.ones(3, np.uint64), 0, False)
    arrays = {
        "keys": np.arange(3), "missing": np.arange(3), "oldest_tombstone": 0,
        "out": np.zeros((3, 4), np.float32), "versions": np.zeros(3, np.uint64),
        "source": np.zeros(3, np.uint8),
    }  # fmt: skip
    spoil(arrays)
    with pytest.raises((TypeError, ValueError)):
        table.fetch(**arrays)
    assert not arrays["out"].any()
    assert not arrays["source"].any()
    if arrays["out"].shape != (3, 4) or arrays["keys"].dtype != np.int64:
        with pytest.raises((TypeError, ValueError)):
            table.gather(arrays["keys"], arrays["out"])


WRONG_WRITES = {
    "rows of another dim": {"rows": np.zeros((3, 5), np.float32)},
    "rows of another dtype": {"rows": np.zeros((3, 4), np.float16)},
    "too few rows": {"rows": np.zeros((2, 4), np.float32)},
    "too few versions": {"versions": np.zeros(2, np.uint64)},
    "signed versions": {"versions": np.zeros(3, np.int64)},
    "32-bit keys": {"keys": np.zeros(3, np.int32)},
}


@pytest.mark.parametrize("wrong", WRONG_WRITES.values(), ids=WRONG_WRITES)
def test_write_rejects_wrong_arrays_and_stores_nothing(wrong):
    table = native.CacheTable(10, np.empty((0, 4), np.float32), "lru", 2)
    good = {
        "keys": np.arange(3), "versions": np.zeros(3, np.uint64),
        "rows": np.zeros((3, 4), np.float32), "oldest_tombstone": 0, "resident_only": False,
    }  # fmt: skip
    with pytest.raises((TypeError, ValueError)):
        table.write(**good | wrong)
    assert table.rows == 0


@pytest.mark.parametrize("module", [native, twin])
@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"capacity": 0}, ValueError),
        ({"capacity": 2**32 - 1}, ValueError),
        ({"eviction": "mru"}, ValueError),
    ],
)
def test_table_with_invalid_capacity_or_eviction_is_rejected(module, wrong, error):
    good = {"capacity": 10, "like": np.empty((0, 4), np.float32), "eviction": "lru", "code": 2}
    module.CacheTable(**good)
    with pytest.raises(error):
        module.CacheTable(**good | wrong)


@pytest.mark.parametrize("dim", [1, 16, 32, 128, 50])
def test_copy_rows_copies_rows_by_number_and_rejects_others(dim):
    rows = np.arange(100 * dim, dtype=np.float32).reshape(100, dim)
    numbers = np.random.default_rng(1).integers(0, 100, 333)
    out = np.empty((333, dim), np.float32)
    native.copy_rows(rows, numbers, out)
    np.testing.assert_array_equal(out, rows[numbers])
    for wrong in (np.array([100]), np.array([-1])):
        with pytest.raises(ValueError, match="numbers"):
            native.copy_rows(rows, wrong, out[:1])
    with pytest.raises(ValueError, match="out"):
        native.copy_rows(rows, numbers, out[:5])


@pytest.mark.parametrize("gather_all", [native.gather_all, twin_pool.gather_all])
def test_gather_all_keeps_a_table_alive_that_is_removed_during_the_call(gather_all):
    which = 0 if gather_all is native.gather_all else 1
    table, other = native_and_twin(10)[which], native_and_twin(10)[which]
    table.write(np.arange(3), np.ones((3, 3), np.float32), np.ones(3, np.uint64), 0, False)
    tables = {"first": table}
    references = []

    class RemovesTheFirstTable:
        """A name whose lookup removes another table, as `CpuCache.close` may do on another thread."""

        def __hash__(self):
            if len(tables) == 2:
                del tables["first"]
                references.append(sys.getrefcount(table))
            return 1

    last = RemovesTheFirstTable()
    tables[last] = other
    references.append(sys.getrefcount(table))
    requests = [
        (name, np.arange(n), np.empty((n, 3), np.float32)) for name, n in (("first", 3), (last, 0))
    ]
    assert gather_all(tables, requests)
    assert references[0] == references[1]  # first the dictionary holds the table, then the call
    np.testing.assert_array_equal(requests[0][2], np.ones((3, 3)))
