"""The CPU cache beyond the contract: eviction, recency, tombstones as entries, accounting, large batches."""

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hps.errors import BadRequest, ConfigError
from hps.native import COMPILED
from hps.tiers.base import FetchContext, Part
from hps.tiers.cpu import cache as cache_module
from hps.tiers.cpu.cache import CpuCache
from hps.tiers.cpu.cache_reads import CacheStats
from hps.types import EmbeddingTable, make_version, version_now
from tests.support.rows import rising_rows

TABLE = EmbeddingTable.make("items", 4)
NOW = np.uint64(version_now())


def rows_of(keys, table=TABLE):
    return rising_rows(keys, table.dim, 1000, table.dtype)


def insert(cache, keys, version=NOW, table=TABLE):
    keys = np.asarray(keys, np.int64)
    cache.insert(table, keys, rows_of(keys, table), np.full(len(keys), version))


def fetch(cache, keys, table=TABLE):
    part = Part.make(table, np.asarray(keys, np.int64))
    cache.fetch([part], FetchContext())
    found = part.source > 0
    np.testing.assert_array_equal(part.out[found], rows_of(part.keys[found], table))
    return part


def held(cache, keys):
    return [key for key, source in zip(keys, fetch(cache, keys).source, strict=True) if source]


def delete(cache, keys, version=NOW):
    keys = np.asarray(keys, np.int64)
    cache.delete(TABLE, keys, np.full(len(keys), version))


# -- capacity --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 31, 100, 1000, 4096])
def test_cache_fills_to_capacity(rows):
    cache = CpuCache({TABLE: rows})
    assert cache.capacity(TABLE) == rows
    insert(cache, np.arange(20 * rows))
    assert rows * 0.999 - 1 < cache.size(TABLE) <= rows
    assert cache.stats(TABLE).evictions == 20 * rows - cache.size(TABLE)
    assert len(held(cache, range(20 * rows))) == cache.size(TABLE)


def test_table_without_capacity_is_not_cached():
    other = EmbeddingTable.make("others", 4)
    cache = CpuCache({TABLE: 0})
    for table in (TABLE, other):
        insert(cache, [1], table=table)
        cache.delete(table, np.array([2]), np.array([NOW]))
        assert len(fetch(cache, [1, 2], table).missing) == 2
        assert cache.stats(table) == CacheStats(0, 0, 0, 0, 0)
        assert cache.capacity(table) == cache.size(table) == 0
    with pytest.raises(BadRequest):
        cache.insert(other, np.arange(2), np.zeros((1, 4), np.float32), np.zeros(2, np.uint64))


def test_tables_are_added_and_dropped():
    cache = CpuCache({})
    cache.add_table(TABLE, 100)
    insert(cache, [1])
    assert held(cache, [1]) == [1]
    cache.drop_table(TABLE)
    assert held(cache, [1]) == []
    cache.drop_table(TABLE)
    with pytest.raises(ConfigError, match="-1 rows"):
        cache.add_table(TABLE, -1)


def test_too_little_memory_is_reported():
    with pytest.raises(ConfigError, match=r"MiB.* model/1/items.* lower"):
        CpuCache({TABLE: 1 << 55})


def test_stats_report_bytes():
    table = EmbeddingTable.make("halves", 8, dtype=np.float16)
    cache = CpuCache({TABLE: 1600, table: 1600})
    assert 1600 * (16 + 8 + 26) < cache.stats(TABLE).bytes < 1600 * (16 + 8 + 28)
    assert cache.stats(table).bytes == cache.stats(TABLE).bytes


def test_memory_overhead_is_small():
    for dim in (32, 128):
        table, rows = EmbeddingTable.make("wide", dim), 200_000
        cache, keys = CpuCache({table: rows}), np.random.default_rng(1).permutation(rows)
        vectors = np.zeros((rows, dim), np.float32)
        cache.insert(table, keys, vectors, np.full(rows, NOW))
        stats = cache.stats(table)
        assert stats.rows >= rows - 1
        assert stats.bytes <= 1.15 * stats.rows * (8 + 8 + 4 * dim)


# -- recency ---------------------------------------------------------------------------------------


def test_least_recently_used_row_is_evicted_first():
    cache, order = CpuCache({TABLE: 8}), [3, 0, 5, 1, 2, 6, 4]
    insert(cache, sorted(order))
    for key in order:
        insert(cache, [100])  # the eighth row: the clock ticks
        fetch(cache, [key])
        cache.evict(TABLE, np.array([100]))
    insert(cache, [200])
    for n in range(1, len(order)):
        insert(cache, [200 + n])
        assert held_keys(cache) == sorted(order[n:]) + list(range(200, 201 + n))


def held_keys(cache):
    """Return the resident keys without changing their recency."""
    return sorted(cache.top_k(TABLE, 10_000)[0].tolist())


def test_hits_protect_rows_from_eviction_and_refreshes_do_not():
    cache = CpuCache({TABLE: 16})
    insert(cache, range(16))
    for n in range(100, 160):
        fetch(cache, [1, 2])
        keys = np.array([3, 4])
        cache.update(TABLE, keys, rows_of(keys), np.full(2, NOW))
        insert(cache, [n])
    assert held(cache, range(16)) == [1, 2]
    assert held(cache, range(146, 160)) == list(range(146, 160))


def test_insertion_larger_than_cache_fills_it():
    cache = CpuCache({TABLE: 64})
    insert(cache, range(10_000))
    assert cache.size(TABLE) == 64
    insert(cache, [5, 6, 7])
    assert held(cache, [5, 6, 7]) == [5, 6, 7]


def test_lru_clock_wraps_around():
    """A stamp has a byte; with 16 rows the clock ticks once per insertion."""
    cache = CpuCache({TABLE: 16})
    insert(cache, range(16))
    for n in range(100, 1000):
        fetch(cache, [3])
        insert(cache, [n])
        assert held_keys(cache) == [3, *range(max(100, n - 14), n + 1)] or n < 115
    fetch(cache, [990])
    for n in range(2000, 2600):  # far beyond a round: only the newest and 990 are used
        insert(cache, [n])
        fetch(cache, [990, n])
    assert held(cache, [3, 990]) == [990]


# -- other policies --------------------------------------------------------------------------------


def test_lfu_keeps_rows_used_often_but_not_recently():
    cache = CpuCache({TABLE: 64}, eviction="lfu")
    insert(cache, range(8))
    for _ in range(200):
        fetch(cache, range(8))
    insert(cache, range(100, 160))
    assert held(cache, range(8)) == list(range(8))
    lru = CpuCache({TABLE: 64})
    insert(lru, range(8))
    fetch(lru, range(8))
    insert(lru, range(100, 200))
    assert held(lru, range(8)) == []


def test_lfu_use_counts_decay():
    cache = CpuCache({TABLE: 64}, eviction="lfu")
    insert(cache, [1])
    for _ in range(100):
        fetch(cache, [1])
    for n in range(100, 100 + 64 * 40):
        insert(cache, [n])
    assert held(cache, [1]) == []


def test_fifo_ignores_uses():
    cache = CpuCache({TABLE: 16}, eviction="fifo")
    insert(cache, range(16))
    for n in range(100, 116):
        insert(cache, held(cache, range(16)))
        insert(cache, [n])
        assert held_keys(cache) == [*range(n - 99, 16), *range(100, n + 1)]


def test_random_evicts_old_and_new_rows_alike():
    """After twice the capacity was inserted, old and new rows remain with the expected shares."""
    cache = CpuCache({TABLE: 20_000}, eviction="random")
    insert(cache, range(40_000))
    assert cache.size(TABLE) == 20_000
    first = len(held(cache, range(20_000)))
    assert 20_000 / np.e * 0.9 < first < 20_000 / np.e * 1.1


def test_eviction_policy_is_set_per_table():
    other = EmbeddingTable.make("others", 4)
    cache = CpuCache({TABLE: 16, other: 16}, eviction="fifo", evictions={other: "lru"})
    for table in (TABLE, other):
        insert(cache, range(16), table=table)
        for n in range(100, 130):
            fetch(cache, [3], table)
            insert(cache, [n], table=table)
    assert len(fetch(cache, [3]).missing) == 1
    assert len(fetch(cache, [3], other).missing) == 0
    with pytest.raises(ConfigError, match="eviction must be lru, lfu, random or fifo, not 'mru'"):
        CpuCache({TABLE: 16}, eviction="mru")


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_hottest_keys_are_listed(eviction):
    cache = CpuCache({TABLE: 4096}, eviction=eviction)
    insert(cache, range(4000))
    delete(cache, [4000])
    for _ in range(40):
        fetch(cache, [7, -1, 2000])
        if eviction == "lru":
            insert(cache, range(10_000, 10_070))
            cache.evict(TABLE, np.arange(10_000, 10_070))
    fetch(cache, [7, 2000])
    keys, scores = cache.top_k(TABLE, 3)
    assert {7, 2000} <= set(keys.tolist())
    assert (np.diff(scores.astype(int)) <= 0).all()
    everything, _ = cache.top_k(TABLE, 10_000)
    assert sorted(everything) == list(range(4000))
    assert len(cache.top_k(TABLE, 0)[0]) == 0
    assert len(cache.top_k(EmbeddingTable.make("unheard_of", 1), 5)[0]) == 0
    with pytest.raises(BadRequest):
        cache.top_k(TABLE, -1)


# -- tombstones ------------------------------------------------------------------------------------


def test_tombstones_are_evicted_in_turn():
    cache = CpuCache({TABLE: 16})
    delete(cache, range(100, 116))
    assert cache.stats(TABLE).tombstones == 16
    assert len(fetch(cache, range(100, 116)).missing) == 0
    insert(cache, range(16))
    stats = cache.stats(TABLE)
    assert (stats.rows, stats.tombstones, stats.evictions) == (16, 0, 0)


def test_flood_of_deletions_evicts_few_rows():
    cache = CpuCache({TABLE: 1600})
    insert(cache, range(1600))
    before = cache.size(TABLE)
    delete(cache, range(10_000, 30_000))
    assert cache.size(TABLE) >= before - 320  # one in sixteen buckets or so
    assert cache.stats(TABLE).tombstones == 1600 - cache.size(TABLE)


def test_fetched_tombstone_is_kept():
    cache = CpuCache({TABLE: 16})
    insert(cache, range(15))
    delete(cache, [50])
    for n in range(100, 160):
        assert len(fetch(cache, [50]).missing) == 0
        insert(cache, [n])
    assert cache.stats(TABLE).tombstones == 1


def test_tombstones_expire_by_clock():
    now = [1_000_000.0]
    cache = CpuCache({TABLE: 16}, clock=lambda: now[0])
    version = np.uint64(make_version(int(now[0] * 1000)))
    insert(cache, [1], version)
    delete(cache, [1, 2], version)
    now[0] += TABLE.tombstone_ttl_s
    assert len(fetch(cache, [1, 2]).missing) == 0
    now[0] += 1.0
    assert len(fetch(cache, [1, 2]).missing) == 2
    insert(cache, [1], version - np.uint64(1))
    assert held(cache, [1, 2]) == [1]


# -- readers beside the writer ---------------------------------------------------------------------


def test_large_batches_read_whole_rows_during_writes():
    """From 4,096 keys on the table lets other threads run: here only sequence numbers keep rows whole."""
    table, keys = EmbeddingTable.make("wide", 128), np.arange(6_000)
    cache = CpuCache({table: 4_000})
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)

    def write():
        for version in range(1, 40):
            some = np.random.default_rng(version).permutation(keys)[:2_000]
            rows = np.repeat((some * 64 + version).astype(np.float32)[:, None], table.dim, axis=1)
            cache.insert(table, some, rows, np.full(len(some), version, np.uint64))

    def read():
        found = 0
        while not writer.done() or not found:
            part = Part.make(table, keys)
            cache.fetch([part], FetchContext())
            at = np.flatnonzero(part.source)
            expected = (keys[at] * 64 + part.versions[at].astype(np.int64)).astype(np.float32)
            assert (part.out[at] == expected[:, None]).all()
            found += len(at)
        return found

    try:
        with ThreadPoolExecutor(3) as pool:
            writer = pool.submit(write)
            readers = [pool.submit(read) for _ in range(2)]
            writer.result()
            assert all(reader.result() for reader in readers)
    finally:
        sys.setswitchinterval(usual)


def test_resident_key_is_never_missed():
    """The key is refreshed, and others are inserted and evicted meanwhile."""
    table, keys = EmbeddingTable.make("wide", 256), np.arange(50)
    cache = CpuCache({table: 200})
    insert(cache, keys, table=table)
    stop = []

    def write():
        n = 0
        while not stop:
            n += 1
            insert(cache, keys[n % 50 : n % 50 + 1], table=table, version=NOW + np.uint64(n))
            insert(cache, np.arange(1000 + n % 100, 1010 + n % 100), table=table)
            cache.evict(table, np.arange(1000 + n % 100, 1010 + n % 100))
        return n

    requested = np.resize(keys, 5_000)
    out = np.empty((5_000, 256), np.float32)
    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(write)
        missed = sum(not cache.gather([(table, requested, out)]) for _ in range(100))
        stop.append(True)
        assert writer.result() > 100
    # A writer that is put to sleep in the middle of a row may cost a miss, on a busy machine now and then;
    # if its writing cost one, few would be spared.
    assert missed < 50


def test_highest_version_of_a_call_wins_after_eviction():
    """The cache is smaller than the batch."""
    cache = CpuCache({TABLE: 1})
    keys, versions = np.array([1, 2, 1]), NOW + np.array([5, 5, 3], np.uint64)
    cache.insert(TABLE, keys, rows_of(keys), versions)
    part = fetch(cache, [1, 2])
    assert part.versions[part.source > 0].tolist() == [NOW + np.uint64(5)]


@pytest.mark.skipif(not COMPILED, reason="the twin is slower by nature")
def test_fetch_makes_few_calls_for_any_number_of_keys():
    """Counts Python calls, which shows work per key without a clock."""
    table = EmbeddingTable.make("ads", 16)
    cache, ctx = CpuCache({table: 1000}), FetchContext()
    insert(cache, np.arange(1000), table=table)
    assert 0 < calls(cache.fetch, [Part.make(table, np.arange(26))], ctx) <= 20
    assert calls(cache.fetch, [Part.make(table, np.arange(1000))], ctx) <= 20


def calls(function, *arguments):
    events = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return sum("call" in event for event in events)


# -- expiry ----------------------------------------------------------------------------------------


def test_expired_rows_are_evicted_part_by_part(monkeypatch):
    monkeypatch.setattr(cache_module, "_EXPIRED_AT_ONCE", 10)
    cache, keys = CpuCache({TABLE: 1000}), np.arange(1000)
    insert(cache, keys[::2].copy(), NOW - 1)
    insert(cache, keys[1::2].copy(), NOW)
    parts, begin = [], 0
    while True:
        rows, begin = cache.expire(TABLE, int(NOW), begin)
        parts.append(rows)
        if not begin:
            break
    assert sum(parts) == 500
    assert max(parts) <= 40
    assert held(cache, keys.tolist()) == keys[1::2].tolist()
    assert cache.expire(EmbeddingTable.make("absent", 4), int(NOW)) == (0, 0)
