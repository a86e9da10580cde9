"""Cache warm-up: the first rows stay, and the time limit holds."""

import time
from concurrent.futures import Future
from functools import partial

import numpy as np
import pytest

from hps.tiers.base import FetchContext, Part, TierInfo
from hps.tiers.cpu.cache import CpuCache
from hps.types import EmbeddingTable, NoProgress, Source
from hps.updates import cache_warmup as warm
from hps.updates.cache_writer import CacheWriter, PromotionSources
from tests.support.memory_tier import MemoryTier

TABLE = EmbeddingTable.make("t", 2, dtype=np.float16)


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setattr(warm, "_CHUNK_ROWS", 64)
    store = MemoryTier(TierInfo("rocksdb", Source.ROCKSDB))
    cache = CpuCache({TABLE: 256})
    writer = CacheWriter(cache, PromotionSources([store]), 32)
    yield store, cache, writer
    writer.close()


def held(cache, keys):
    part = Part.make(TABLE, keys)
    cache.fetch([part], FetchContext())
    return part.source != 0, part


def test_insert_rows_keeps_the_first_rows_when_the_cache_is_full(world):
    _store, cache, writer = world
    keys = np.arange(1000)
    rows = np.repeat(np.float32(keys)[:, None], 2, axis=1)
    steps = []
    warm.insert_rows(
        partial(writer.insert, TABLE),
        warm.FileRows(TABLE, keys, lambda a, b: rows[a:b], 7),
        steps.append,
    )
    assert sum(steps) == 1000
    there, part = held(cache, keys)
    assert there[:64].sum() > 55
    assert there[500:].sum() < 10
    np.testing.assert_array_equal(part.out[there], rows[there].astype(np.float16))
    assert (part.versions[there] == 7).all()


def test_next_rows_are_read_while_the_last_ones_are_inserted():
    """At most two chunks are in memory; a failed insert ends the fill with its error."""
    inserts, reads = [], []

    def insert(keys, vectors, versions):
        inserts.append(Future())
        return inserts[-1]

    def read(start, stop):
        if len(inserts) == 1:
            assert not inserts[0].done()
            inserts[0].set_result(None)
        elif len(inserts) == 2:
            assert not inserts[1].done()
            inserts[1].set_exception(ValueError("no memory"))
        reads.append((start, stop))
        return np.ones((stop - start, 2), np.float32)

    steps = []
    with pytest.raises(ValueError, match="no memory"):
        warm.insert_rows(insert, warm.FileRows(TABLE, np.arange(50), read, 1), steps.append, 10)
    assert reads == [(40, 50), (30, 40), (20, 30)]
    assert steps == [10]


def test_promote_keys_inserts_the_rows_of_the_store(world):
    store, cache, writer = world
    keys = np.arange(100)
    rows = np.ones((100, 2), np.float16)
    store.insert(TABLE, keys[::2].copy(), rows[::2].copy(), np.full(50, 3, np.uint64))
    steps = []
    warm.promote_keys(writer, TABLE, keys, steps.append, time.monotonic() + 60)
    assert (sum(steps), max(steps)) == (100, 32)  # never more than the queue's bound
    there, _ = held(cache, keys)
    assert there[1::2].sum() == 0
    assert there[::2].sum() == 50


def test_promote_keys_stops_at_its_time_limit(world):
    _store, _cache, writer = world
    steps = []
    warm.promote_keys(writer, TABLE, np.arange(100), steps.append, time.monotonic() - 1)
    assert steps == []


def test_all_rows_are_promoted_in_the_order_of_their_keys(world):
    """Each once, also if the queue of promotions is shorter."""
    store, cache, writer = world
    keys = np.random.default_rng(1).permutation(200)
    rows = np.repeat(np.float16(keys)[:, None], 2, axis=1)
    store.insert(TABLE, keys[keys != 7], rows[keys != 7], np.full(199, 3, np.uint64))
    read, fetch = [], store.fetch

    def record(parts, ctx):
        read.append(parts[0].keys.tolist())
        fetch(parts, ctx)

    store.fetch = record
    warm.CacheWarmup(writer, NoProgress()).promote_all(TABLE, np.append(keys, keys[:50]))
    assert [len(some) for some in read] == [64, 64, 64, 8]
    assert np.concatenate(read).tolist() == list(range(200))
    there, part = held(cache, np.arange(200))
    assert not there[7]
    assert there.sum() == 199
    np.testing.assert_array_equal(part.out[there][:, 0], np.float16(np.flatnonzero(there)))
