"""Bags on the fast path: pooled in one pass, and only their missing rows are fetched."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from hps.lookup.base import Feature, LookupModel
from hps.lookup.engine import INLINE_KEYS, LookupEngine
from hps.threads import BoundedThreadPool
from hps.tiers.base import TierInfo
from hps.tiers.chain import TierChain
from hps.tiers.cpu.cache import CpuCache
from hps.types import EmbeddingTable, JaggedKeys, LookupRequest, MissPolicy, Source
from tests.support.memory_tier import MemoryTier
from tests.support.two_ways import ITEM, MODEL, ROWS, USER, Side, dense, outcome


@pytest.fixture(scope="module")
def workers():
    workers = BoundedThreadPool(1, 4, name="test", setting="x")
    yield workers
    workers.close()


@pytest.fixture
def sides(workers):
    pair = Side(workers, fast=True), Side(workers, fast=False)
    yield pair
    for side in pair:
        side.cache.close()


def bags_of(seed, batch, hotness, *, jagged=True, weighted=False, keys=ROWS):
    """Bags of any sizes, or all of ``hotness``."""
    random = np.random.default_rng(seed)
    sizes = random.integers(0, hotness + 1, batch) if jagged else np.full(batch, hotness)
    n = int(sizes.sum())
    offsets = np.concatenate([[0], np.cumsum(sizes)]) if jagged else None
    weights = random.normal(0, 1, n).astype(np.float32) if weighted else None
    return JaggedKeys(random.integers(0, keys, n), batch, offsets, weights)


def random_rows(side, table):
    """Rows whose sums depend on the order of adding, in the cache."""
    rows = np.random.default_rng(1).normal(0, 1, (ROWS, table.dim)).astype(table.dtype)
    side.cache.insert(table, np.arange(ROWS), rows, np.full(ROWS, 2, np.uint64))
    return rows


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("name", "jagged"), [("shown", False), ("shown", True), ("bought", False)])
def test_bags_pooled_while_read_equal_those_pooled_after_a_fetch(sides, name, jagged, weighted):
    fast, slow = sides
    hotness = 2 if name == "bought" else 7
    bags = bags_of(3, 20, hotness, jagged=jagged, weighted=weighted)
    if name == "shown":
        bags = JaggedKeys(bags.keys + 5, bags.batch, bags.offsets, bags.weights)
    for side in sides:
        random_rows(side, ITEM)
    expected = slow.engine.lookup(LookupRequest({name: bags})).vectors[name]
    result = fast.engine.lookup(LookupRequest({name: bags})).vectors[name]
    assert fast.observed == [[(ITEM, len(bags.keys), len(bags.keys))]]
    assert result.tobytes() == expected.tobytes()
    assert fast.finished == slow.finished


def gaps(side, *keys):
    """Take the rows of ``keys`` out of the cache and put them into the store."""
    keys = np.array(keys)
    out = {}
    for table in (USER, ITEM):
        rows = np.empty((len(keys), table.dim), table.dtype)
        assert side.cache.gather([(table, keys, rows)])
        side.cache.evict(table, keys)
        side.store.insert(table, keys, rows, np.ones(len(keys), np.uint64))
        out[table] = rows
    side.fetched = []
    fetch = side.store.fetch
    side.store.fetch = lambda parts, ctx: (
        side.fetched.extend((part.table, part.keys[part.missing].tolist()) for part in parts),
        fetch(parts, ctx),
    )
    return out


@pytest.mark.parametrize("weighted", [False, True])
def test_only_missing_rows_of_bags_are_fetched(sides, weighted):
    fast, slow = sides
    bags = bags_of(5, 30, 9, weighted=weighted)
    request = LookupRequest(
        {
            "item": JaggedKeys(np.zeros(30, np.int64), 30),  # of the same table, before the bags
            "shown": JaggedKeys(bags.keys + 5, 30, bags.offsets, bags.weights),
            "user": JaggedKeys(np.full(30, 3), 30),  # whose row is in memory
        }
    )
    for side in sides:
        random_rows(side, ITEM)
    whole = fast.engine.lookup(request)
    for side in sides:
        gaps(side, 7, 8, 9)
    result = fast.engine.lookup(request)
    missing = list(dict.fromkeys(key for key in bags.keys.tolist() if key in (7, 8, 9)))
    assert fast.fetched == [(ITEM, missing)]
    # The same to the last bit as when all were in memory, and what is told of it as the other way.
    assert result.vectors["shown"].tobytes() == whole.vectors["shown"].tobytes()
    slow.engine.lookup(request)
    assert sorted(fast.finished[-1][0][0][1]) == sorted(slow.finished[-1][0][0][1])
    assert fast.finished[-1] == slow.finished[-1]
    assert fast.promoted == slow.promoted != []
    n, m = len(bags.keys), sum(key in (7, 8, 9) for key in bags.keys.tolist())
    assert fast.observed[1:] == [
        [(ITEM, 30, 30), (USER, 30, 30), (ITEM, n - m, n - m)],
        [(ITEM, len(missing), 0)],
    ]


def test_row_evicted_meanwhile_restarts_the_request(sides):
    fast, slow = sides
    request = dense(bought=[[1, 7], [2, 3]])
    expected = slow.engine.lookup(request).vectors["bought"]
    gaps(fast, 7)
    fetch = fast.store.fetch
    lost = []

    def fetch_and_lose(parts, ctx):
        fetch(parts, ctx)
        if not lost:
            lost.append(1)
            rows = np.empty((1, 2), np.float16)
            assert fast.cache.gather([(ITEM, np.array([1]), rows)])
            fast.cache.evict(ITEM, np.array([1]))
            fast.store.insert(ITEM, np.array([1]), rows, np.ones(1, np.uint64))

    fast.store.fetch = fetch_and_lose
    for blocks in (False, True):
        lost.clear()
        fast.engine._stores_block = blocks
        assert fast.engine.lookup(request).vectors["bought"].tobytes() == expected.tobytes()
        assert fast.fetched[-2:] == [(ITEM, [7]), (ITEM, [1, 7])]
        rows = np.array([[1, 1.25]], np.float16)
        fast.cache.insert(ITEM, np.array([1]), rows, np.ones(1, np.uint64))


def test_cached_tombstone_in_a_bag_is_not_fetched_from_the_store(sides):
    fast, slow = sides
    for side in sides:
        gaps(side, 7)
        side.cache.delete(ITEM, np.array([7]), np.array([9 << 60], np.uint64))
    request = dense(bought=[[1, 7], [2, 3]])
    assert outcome(fast, request) == outcome(slow, request)
    assert fast.fetched == []
    assert fast.finished == slow.finished


@pytest.mark.parametrize(("rate", "waits"), [(0.0, False), (0.7, False), (0.8, True)])
def test_miss_policy_counts_all_keys_of_the_table(workers, rate, waits):
    table = EmbeddingTable.make("t", 2, miss=MissPolicy("default_then_promote", rate), default=1)
    features = {
        "bag": Feature("bag", table, pooling="mean"),
        "row": Feature("row", table, pooling="none", key_offset=1),
    }
    cache, store = CpuCache({table: 10}), MemoryTier(TierInfo("store", Source.ROCKSDB))
    keys = np.arange(4)
    cache.insert(table, keys[:3], np.full((3, 2), 4, np.float32), np.ones(3, np.uint64))
    store.insert(table, keys, np.full((4, 2), 4, np.float32), np.ones(4, np.uint64))
    promoted = []
    engine = LookupEngine(
        LookupModel("m", 1, {"t": table}, features),
        TierChain([cache]),
        store,
        workers,
        lambda t, k: promoted.append(k.tolist()),
    )
    # Of four keys, 0, 1, 2 and 3, one is missing, and it stands in the bag only.
    request = dense(bag=[[0, 0, 3, 3]], row=[[1]])
    request.features["row"] = JaggedKeys(np.array([0, 1]), 1)
    result = engine.lookup(request)
    assert result.vectors["bag"].tolist() == [[4, 4] if waits else [2.5, 2.5]]
    assert result.defaulted == (0 if waits else 2)
    assert promoted == [[3]]
    cache.close()


def test_large_request_of_bags_is_pooled_on_a_pool_thread(workers):
    model = replace(MODEL, max_batch_size=INLINE_KEYS, max_keys=2 * INLINE_KEYS)
    fast, slow = Side(workers, True, model), Side(workers, False, model)
    request = dense(bought=np.random.default_rng(1).integers(0, ROWS, (INLINE_KEYS, 2)))
    threads = []
    gather = fast.cache.gather
    fast.cache.gather = lambda *args: (
        threads.append(threading.current_thread().name) or gather(*args)
    )
    assert outcome(fast, request) == outcome(slow, request)
    assert fast.observed == [[(ITEM, 2 * INLINE_KEYS, 2 * INLINE_KEYS)]]
    for side in (fast, slow):
        gaps(side, 7, 8)
    assert outcome(fast, request) == outcome(slow, request)
    assert set(threads[:1]) == {"hps-test-0"}
