"""The CPU cache on the key trace of a real recommender: every vector right, and as many hits as exact
LRU but for half a point."""

import lzma
import time
from collections import OrderedDict

import numpy as np
import pytest

from hps.native import dedup
from hps.tiers.base import FetchContext, Part
from hps.tiers.chain import TierChain
from hps.tiers.cpu.cache import CpuCache
from hps.types import EmbeddingTable, NoProgress, Source, version_now
from hps.updates.cache_warmup import CacheWarmup
from hps.updates.cache_writer import CacheWriter, PromotionSources
from hps.updates.hot_key_snapshot import read_hot_keys, write_hot_keys
from tests.support.memory_tier import MemoryTier

TABLE = EmbeddingTable.make("items", 8)
BATCH = 256
# Share of the distinct keys that the cache holds -> hit rate of exact LRU.
EXACT_LRU = {0.01: 0.347, 0.10: 0.606, 0.20: 0.695}


def rows_of(keys):
    """(n, 8): a row is its key's bytes, so that no two keys have the same."""
    return keys.view(np.uint8).reshape(-1, 8).astype(np.float32)


@pytest.fixture(scope="module")
def trace(shared_data):
    """(1245184,) keys in the order of their access."""
    raw = lzma.decompress((shared_data / "scarab" / "scarab-recs.trace.xz").read_bytes())
    keys = np.frombuffer(raw, ">i8").astype(np.int64)
    assert (len(keys), np.count_nonzero(keys < 0) / len(keys) > 0.4) == (1_245_184, True)
    return keys


@pytest.fixture(scope="module")
def store(trace):
    """Every row."""
    keys = np.unique(trace)
    store = MemoryTier()
    store.insert(TABLE, keys, rows_of(keys), np.full(len(keys), version_now(), np.uint64))
    return store


def exact_lru_hit_rate(trace, capacity):
    held, hits = OrderedDict(), 0
    for key in trace.tolist():
        if key in held:
            held.move_to_end(key)
            hits += 1
        else:
            held[key] = None
            if len(held) > capacity:
                held.popitem(last=False)
    return hits / len(trace)


def replay(trace, chain, cache):
    """Look the trace up in batches as the engine does, each key once, and promote the cache's misses.

    Returns the share of accesses that needed no row of the store. A batch's second access to a key
    counts as a hit, as it would if the accesses came one by one."""
    fetched_below = 0
    for start in range(0, len(trace), BATCH):
        batch = trace[start : start + BATCH]
        keys, inverse = dedup(batch)
        part = Part.make(TABLE, keys)
        chain.fetch([part], FetchContext())
        assert (part.out[inverse] == rows_of(batch)).all()
        assert len(part.missing) == 0
        below = np.flatnonzero(part.source != Source.CPU)
        fetched_below += len(below)
        cache.insert(TABLE, keys[below], part.out[below], part.versions[below])
    return 1 - fetched_below / len(trace)


@pytest.mark.data
@pytest.mark.parametrize("share", EXACT_LRU)
def test_replay_of_the_scarab_trace(trace, store, share):
    capacity = round(share * store.size(TABLE))
    cache = CpuCache({TABLE: capacity})
    hit_rate = replay(trace, TierChain([TierChain([cache]), store]), cache)
    exact = exact_lru_hit_rate(trace, capacity)
    print(f"\ncache of {share:.0%}: hit rate {hit_rate:.4f}, exact LRU {exact:.4f}")
    assert exact == pytest.approx(EXACT_LRU[share], abs=0.002)
    assert hit_rate > exact - 0.005
    assert hit_rate < exact + 0.005
    stats = cache.stats(TABLE)
    assert stats.rows == stats.capacity <= capacity


@pytest.mark.data
def test_cache_is_as_warm_after_a_restart(trace, store, tmp_path):
    """The same accesses, by a cache that went on and by one that was restarted from the hot keys."""
    capacity, half = round(0.1 * store.size(TABLE)), len(trace) // 2
    cache = CpuCache({TABLE: capacity})
    replay(trace[:half], TierChain([TierChain([cache]), store]), cache)
    write_hot_keys(tmp_path / "hot", {TABLE.id: cache.top_k(TABLE, capacity)})

    began = time.monotonic()
    restarted = CpuCache({TABLE: capacity})
    writer = CacheWriter(restarted, PromotionSources([store]), 1 << 20)
    keys, _ = read_hot_keys(tmp_path / "hot")[TABLE.id]
    CacheWarmup(writer, NoProgress()).hottest(TABLE, keys, restarted)
    took = time.monotonic() - began
    writer.close()

    then = trace[half : half + 50_000]
    rates = {}
    for name, each in {
        "before": cache,
        "after": restarted,
        "cold": CpuCache({TABLE: capacity}),
    }.items():
        rates[name] = replay(then, TierChain([TierChain([each]), store]), each)
    print(f"\n{len(keys)} keys in {took:.1f} s: {rates}")
    assert rates["cold"] < rates["before"] - 0.05  # otherwise the test would show nothing
    assert abs(rates["after"] - rates["before"]) < 0.02
    assert took < 60
