"""Cache writer: rows are read when they are inserted, the newest wins, no error ends the thread."""

import logging
import threading
from collections import Counter

import numpy as np
import pytest

from hps.errors import BadRequest, TierError
from hps.tiers.base import FetchContext, Part, TierInfo
from hps.tiers.cpu.cache import CpuCache
from hps.tiers.wrappers import GuardedTier
from hps.types import EmbeddingTable, Source, version_now
from hps.updates.cache_writer import SLICE_KEYS, CacheWriter, PromotionSources
from tests.support.memory_tier import MemoryTier
from tests.support.waiting import until

TABLE = EmbeddingTable.make("t", 2, default=-1.0)
NOW = version_now()
CACHE = TierInfo("cpu", Source.CPU, cache=True)


class Store(MemoryTier):
    def __init__(self):
        super().__init__(TierInfo("rocksdb", Source.ROCKSDB))
        self.error = None
        self.reads = []
        self.begun, self.leave = threading.Event(), threading.Event()
        self.leave.set()

    def fetch(self, parts, ctx):
        self.begun.set()
        assert self.leave.wait(60)
        self.reads.append(sum(len(part.keys) for part in parts))
        if self.error is not None:
            raise self.error
        super().fetch(parts, ctx)


def arrays(*keys):
    return np.array(keys, np.int64)


def put(tier, keys, value, version=NOW):
    keys = arrays(*keys)
    rows = np.full((len(keys), 2), value, np.float32)
    tier.insert(TABLE, keys, rows, np.full(len(keys), version, np.uint64))


def held(tier, *keys):
    """The first value of each key, or None."""
    part = Part.make(TABLE, arrays(*keys))
    tier.fetch([part], FetchContext())
    return [float(part.out[i, 0]) if part.source[i] else None for i in range(len(keys))]


@pytest.fixture
def make():
    made = []

    def build(
        stores, queue_keys=100_000, cache=None, on_missing_above=lambda table, keys: None, **own
    ):
        counts = Counter()
        cache = cache or MemoryTier(CACHE)
        writer = CacheWriter(
            cache,
            PromotionSources(stores, **own),
            queue_keys,
            lambda result, n: counts.update({result: n}),
            on_missing_above,
        )
        made.append((writer, stores))
        return writer, cache, counts

    yield build
    for writer, stores in made:
        for store in stores:
            getattr(store, "leave", threading.Event()).set()
        writer.close()


def test_promotion_inserts_stored_rows_and_no_defaults(make):
    store = Store()
    put(store, [1, 2], 5.0)
    store.delete(TABLE, arrays(3), np.array([NOW], np.uint64))
    writer, cache, counts = make([store])
    writer.promote(TABLE, arrays(1, 2, 3, 4))
    assert writer.flush(60)
    assert held(cache, 1, 2, 3, 4) == [5.0, 5.0, None, None]
    assert counts == {"inserted": 2, "gone": 2}
    assert writer.waiting_keys == 0


def test_promotion_takes_the_highest_version_of_all_stores(make):
    first, second = Store(), Store()
    put(first, [1, 2, 3], 1.0, NOW)
    put(second, [1], 2.0, NOW + 1)
    put(second, [2], 2.0, NOW - 1)
    second.delete(TABLE, arrays(3), np.array([NOW + 1], np.uint64))
    put(second, [4], 4.0, NOW)
    writer, cache, _ = make([first, second])
    writer.promote(TABLE, arrays(1, 2, 3, 4))
    assert writer.flush(60)
    assert held(cache, 1, 2, 3, 4) == [2.0, 1.0, None, 4.0]


def test_promotion_reads_the_row_when_it_runs_not_when_it_is_queued(make):
    store = Store()
    put(store, [1, 2], 1.0)
    store.leave.clear()
    writer, cache, _ = make([store])
    writer.promote(TABLE, arrays(99))
    assert store.begun.wait(60)
    writer.promote(TABLE, arrays(1, 2))
    put(store, [1], 2.0, NOW + 1)
    store.delete(TABLE, arrays(2), np.array([NOW + 1], np.uint64))
    store.leave.set()
    assert writer.flush(60)
    assert held(cache, 1, 2) == [2.0, None]


def test_promotion_keeps_a_newer_cached_row(make):
    store = Store()
    put(store, [1], 1.0, NOW)
    writer, cache, _ = make([store])
    put(cache, [1], 9.0, NOW + 5)
    writer.promote(TABLE, arrays(1))
    assert writer.flush(60)
    assert held(cache, 1) == [9.0]


def test_promotion_is_skipped_while_a_store_is_unavailable(make):
    sound, broken = Store(), Store()
    put(sound, [1], 1.0)
    broken.error = TierError("redis", "gone")
    guarded = GuardedTier(broken, 1.0, 1, 60.0)
    writer, cache, counts = make([sound, guarded])
    writer.promote(TABLE, arrays(1))
    assert writer.flush(60)
    assert held(cache, 1) == [None]
    assert counts == {"degraded": 1}
    guarded.close()


@pytest.mark.parametrize("down", ["shared", "own"])
def test_promotion_continues_while_a_shared_store_is_down(make, down):
    """Every update also goes to the own store, so it is no older than the rows that lookups get meanwhile."""
    own, shared = Store(), Store()
    shared._info = TierInfo("redis", Source.REDIS, shared=True)
    for store in (own, shared):
        put(store, [1], 1.0)
    broken = {"shared": shared, "own": own}[down]
    broken.error = TierError("gone", "gone")
    stores = [GuardedTier(shared, 1.0, 1, 60.0), GuardedTier(own, 1.0, 1, 60.0)]
    writer, cache, counts = make(stores, own=stores[1])
    writer.promote(TABLE, arrays(1, 2))
    assert writer.flush(60)
    if down == "shared":
        assert held(cache, 1, 2) == [1.0, None]
        assert counts == {"inserted": 1, "degraded": 1}  # the shared store may have had key 2
    else:
        assert held(cache, 1, 2) == [None, None]
        assert counts == {"degraded": 2}


def test_keys_that_a_degraded_store_did_answer_are_promoted(make):
    """Such as a store with a damaged file, which loses only its own rows."""

    class Damaged(Store):
        def fetch(self, parts, ctx):
            super().fetch(parts, ctx)
            ctx.degraded.append("rocksdb")

    store = Damaged()
    put(store, [1], 1.0)
    writer, cache, counts = make([store])
    writer.promote(TABLE, arrays(1, 2))
    assert writer.flush(60)
    assert held(cache, 1, 2) == [1.0, None]
    assert counts == {"inserted": 1, "degraded": 1}


def test_promotion_requires_an_answer_of_a_sole_shared_store(make):
    shared = Store()
    shared._info = TierInfo("redis", Source.REDIS, shared=True)
    shared.error = TierError("redis", "gone")
    writer, cache, counts = make([GuardedTier(shared, 1.0, 1, 60.0)])
    writer.promote(TABLE, arrays(1))
    assert writer.flush(60)
    assert held(cache, 1) == [None]
    assert counts == {"degraded": 1}


def test_promotion_requires_other_stores_when_the_own_one_gets_no_updates(make):
    """A read-only database misses updates that the shared store has."""
    shared, database = Store(), Store()
    shared._info = TierInfo("redis", Source.REDIS, shared=True)
    shared.error = TierError("redis", "gone")
    put(database, [1], 1.0)
    writer, cache, counts = make([GuardedTier(shared, 1.0, 1, 60.0), database])
    writer.promote(TABLE, arrays(1))
    assert writer.flush(60)
    assert held(cache, 1) == [None]
    assert counts == {"degraded": 1}


@pytest.mark.parametrize("own_first", [True, False])
def test_promotion_prefers_the_own_store_when_versions_are_equal(make, own_first):
    """The shared store may miss an update that the caches have already received."""
    shared, own = Store(), Store()
    put(shared, [1, 2], 1.0, version=0)
    put(own, [1], 2.0, version=0)
    writer, cache, _counts = make([shared, own], own=own, own_first=own_first)
    writer.promote(TABLE, arrays(1, 2))
    assert writer.flush(60)
    assert held(cache, 1, 2) == [2.0 if own_first else 1.0, 1.0]


def test_rest_of_a_queue_is_skipped_after_a_cache_rejects_a_slice(make):
    """Each failing insertion may take as long as a network timeout."""
    store, refused = Store(), []
    put(store, range(5000), 1.0)

    class Redis(MemoryTier):
        def insert(self, table, keys, vectors, versions):
            refused.append(len(keys))
            raise TierError("redis", "no answer")

    writer, _cache, counts = make([store], cache=Redis(CACHE))
    writer.promote(TABLE, arrays(*range(5000)))
    assert writer.flush(60)
    assert refused == [SLICE_KEYS]
    assert counts == {"failed": 5000}
    assert writer.waiting_keys == 0
    writer.promote(TABLE, arrays(1))
    assert writer.flush(60)
    assert refused == [SLICE_KEYS, 1]


def test_failed_promotions_are_counted_and_logged_and_the_thread_continues(make, caplog):
    store = Store()
    put(store, [1], 1.0)
    writer, cache, counts = make([store])
    store.error = ZeroDivisionError("a bug")
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            writer.promote(TABLE, arrays(1, 2))
            assert writer.flush(60)
    assert counts == {"failed": 6}
    assert len(caplog.records) == 1  # not one line per batch
    assert "a bug" in caplog.text
    store.error = None
    writer.promote(TABLE, arrays(1))
    assert writer.flush(60)
    assert held(cache, 1) == [1.0]


def test_promote_drops_keys_when_the_queue_is_full(make):
    store = Store()
    put(store, range(20), 1.0)
    store.leave.clear()
    writer, cache, counts = make([store], queue_keys=10)
    writer.promote(TABLE, arrays(0))
    assert store.begun.wait(60)
    writer.promote(TABLE, arrays(*range(1, 7)))
    writer.promote(TABLE, arrays(*range(7, 14)))
    writer.promote(TABLE, arrays(15))
    assert writer.waiting_keys == 10
    assert counts == {"dropped": 5}  # the running key counts as queued until it is done
    store.leave.set()
    assert writer.flush(60)
    assert held(cache, *range(16)) == [1.0] * 10 + [None] * 6
    assert writer.waiting_keys == 0


def test_running_keys_count_as_queued(make):
    store = Store()
    put(store, range(SLICE_KEYS + 10), 1.0)
    store.leave.clear()
    writer, _cache, _counts = make([store])
    writer.promote(TABLE, arrays(*range(SLICE_KEYS + 10), 5, 5))
    assert store.begun.wait(60)
    assert writer.waiting_keys == SLICE_KEYS + 12
    store.leave.set()
    assert writer.flush(60)
    assert writer.waiting_keys == 0


def test_keys_queued_twice_are_read_once_and_in_slices(make):
    store = Store()
    put(store, range(3000), 1.0)
    store.leave.clear()
    writer, _cache, counts = make([store])
    writer.promote(TABLE, arrays(0))
    assert store.begun.wait(60)
    for _ in range(3):
        writer.promote(TABLE, arrays(*range(3000)))
    store.leave.set()
    assert writer.flush(60)
    assert counts == {"inserted": 3001}
    assert max(store.reads) <= SLICE_KEYS


def test_only_the_writer_thread_changes_the_caches(make):
    changed = set()

    class Cache(MemoryTier):
        def __init__(self):
            super().__init__(CACHE)
            for verb in ("insert", "update", "delete"):
                setattr(self, verb, self.noting(getattr(self, verb)))

        def noting(self, change):
            def noted(*what):
                changed.add((change.__name__, threading.get_ident()))
                change(*what)

            return noted

    store = Store()
    put(store, [1, 2], 5.0)
    writer, _, _ = make([store], cache=Cache())
    row, version = np.zeros((1, 2), np.float32), np.array([NOW], np.uint64)

    def call():
        writer.promote(TABLE, arrays(1, 2))
        writer.insert(TABLE, arrays(3), row, version)
        writer.update(TABLE, arrays(1), row, version)
        writer.delete(TABLE, arrays(2), version)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert writer.flush(60)
    assert changed == {(verb, writer._thread.ident) for verb in ("insert", "update", "delete")}


def test_change_overtakes_queued_promotions(make):
    done = []

    class Cache(MemoryTier):
        def insert(self, table, keys, vectors, versions):
            super().insert(table, keys, vectors, versions)
            done.append("promoted")

        def delete(self, table, keys, versions):
            super().delete(table, keys, versions)
            done.append("deleted")

    store = Store()
    put(store, range(10 * SLICE_KEYS), 1.0)
    store.leave.clear()
    writer, cache, _ = make([store], cache=Cache(CACHE))
    writer.promote(TABLE, arrays(*range(10 * SLICE_KEYS)))
    assert store.begun.wait(60)
    store.delete(TABLE, arrays(0, 9999), np.full(2, NOW, np.uint64))
    change = writer.delete(TABLE, arrays(0, 9999), np.full(2, NOW, np.uint64))
    store.leave.set()
    change.result(60)
    assert done.index("deleted") <= 1
    assert writer.flush(60)
    assert held(cache, 0, 9998, 9999) == [None, 1.0, None]
    assert done.count("promoted") == 10


def test_changes_run_in_order_and_return_their_errors(make):
    writer, cache, _ = make([Store()])
    versions = np.array([NOW], np.uint64)
    rows = np.ones((1, 2), np.float32)
    writer.insert(TABLE, arrays(1), rows, versions).result(60)
    assert held(cache, 1) == [1.0]
    writer.update(TABLE, arrays(1), rows * 2, versions + np.uint64(1)).result(60)
    writer.update(TABLE, arrays(2), rows * 2, versions).result(60)  # not resident
    assert held(cache, 1, 2) == [2.0, None]
    writer.delete(TABLE, arrays(1), versions + np.uint64(2)).result(60)
    assert held(cache, 1) == [None]
    with pytest.raises(BadRequest, match=r"vectors"):
        writer.insert(TABLE, arrays(1), rows[:, :1], versions).result(60)
    assert writer.flush(60)


def test_close_drops_queued_work(make):
    store = Store()
    store.leave.clear()
    writer, _cache, counts = make([store])
    writer.promote(TABLE, arrays(1))
    assert store.begun.wait(60)
    writer.promote(TABLE, arrays(2))
    change = writer.delete(TABLE, arrays(1), np.array([NOW], np.uint64))
    closing = threading.Thread(target=writer.close)
    closing.start()
    until(change.cancelled)
    store.leave.set()
    closing.join()
    writer.close()
    assert not writer.flush(1)
    writer.promote(TABLE, arrays(3))
    assert counts["dropped"] == 1
    assert not [t for t in threading.enumerate() if t is writer._thread]


def test_flush_returns_false_after_its_timeout(make):
    store = Store()
    store.leave.clear()
    writer, _cache, _ = make([store])
    writer.promote(TABLE, arrays(1))
    assert not writer.flush(0.05)


def test_keys_of_32_bit_tables_are_narrowed(make):
    """A producer may send signed keys of a table with 32-bit keys."""
    table = EmbeddingTable.make("narrow", 1, key_bits=32)
    store = MemoryTier(TierInfo("rocksdb", Source.ROCKSDB))
    wide, narrow = arrays(-1, 2**32 + 7), arrays(2**32 - 1, 7)

    def rows(value):
        return np.full((2, 1), value, np.float32)

    def first(tier):
        part = Part.make(table, narrow)
        tier.fetch([part], FetchContext())
        return [float(v) if s else None for v, s in zip(part.out[:, 0], part.source, strict=True)]

    def versions(n):
        return np.full(2, NOW + n, np.uint64)

    writer, cache, _ = make([store])
    writer.insert(table, wide, rows(1.0), versions(0)).result(60)
    assert first(cache) == [1.0, 1.0]
    writer.update(table, wide, rows(2.0), versions(1)).result(60)
    assert first(cache) == [2.0, 2.0]
    writer.delete(table, wide, versions(2)).result(60)
    assert first(cache) == [None, None]
    store.insert(table, narrow, rows(3.0), versions(3))
    writer.promote(table, wide)
    assert writer.flush(60)
    assert first(cache) == [3.0, 3.0]


def test_keys_missing_in_the_upper_store_are_reported(make):
    upper, lower, reported = Store(), Store(), []

    def missing_above(table, keys):
        reported.append((table, keys.tolist()))

    put(upper, [1], 1.0)
    upper.delete(TABLE, arrays(4), np.array([NOW], np.uint64))
    put(lower, [1, 2, 3, 4], 1.0)
    writer, cache, _ = make([upper, lower], on_missing_above=missing_above)
    writer.promote(TABLE, arrays(1, 2, 3, 4, 5))
    assert writer.flush(60)
    assert reported == [(TABLE, [2, 3])]
    assert held(cache, 1, 2, 3, 5) == [1.0, 1.0, 1.0, None]
    writer, _, _ = make([lower], on_missing_above=missing_above)
    writer.promote(TABLE, arrays(1))
    assert writer.flush(60)
    assert len(reported) == 1


def test_writer_thread_survives_any_error():
    """Otherwise callers that wait for it would hang."""
    counted = []

    def count(result, keys):
        counted.append(result)
        if len(counted) <= 2:
            raise RuntimeError("a counter that fails")

    cache, store = CpuCache({TABLE: 100}), MemoryTier()
    keys = np.arange(5)
    store.insert(TABLE, keys, np.ones((5, TABLE.dim), np.float32), np.ones(5, np.uint64))
    writer = CacheWriter(cache, PromotionSources([store]), 100, count)
    try:
        writer.promote(TABLE, keys)
        assert writer.flush(60)
        assert writer.waiting_keys == 0
        writer.promote(TABLE, keys)
        assert writer.flush(60)
        assert counted == ["inserted", "failed", "inserted"]
    finally:
        writer.close()


def test_writer_without_its_thread_cancels_changes():
    """As after a fork, which does not copy threads."""
    writer = CacheWriter(CpuCache({}), PromotionSources([]), 100)
    alive = writer._thread
    writer._thread = threading.Thread(target=lambda: None)
    assert not writer.flush()
    writer._thread = alive
    writer.close()
