"""Gathers from the CPU cache: the same rows as fetch, or none."""

import numpy as np
import pytest

from hps.errors import BadRequest
from hps.tiers.base import Bags, FetchContext, Part
from hps.tiers.chain import TierChain
from hps.tiers.cpu.cache import CpuCache
from hps.tiers.fused_lookup import fused_lookup_of
from hps.types import EmbeddingTable
from tests.support.memory_tier import MemoryTier

ROWS = 20_000


@pytest.fixture
def table():
    return EmbeddingTable.make("t", 3)


@pytest.fixture
def cache(table):
    cache = CpuCache({table: ROWS * 2})
    keys = np.arange(ROWS)
    rows = np.repeat(keys.astype(np.float32)[:, None], 3, axis=1)
    cache.insert(table, keys, rows, np.ones(ROWS, np.uint64))
    yield cache
    cache.close()


def gather(cache, table, keys):
    keys = np.asarray(keys, np.int64)
    out = np.full((len(keys), 3), -1, np.float32)
    return cache.gather([(table, keys, out)]), out


@pytest.mark.parametrize("n", [0, 1, 26, 8192, 8193, ROWS])
def test_gather_writes_each_row_to_its_position(cache, table, n):
    keys = np.random.default_rng(n).integers(0, ROWS, n)
    found, out = gather(cache, table, keys)
    assert found
    np.testing.assert_array_equal(out[:, 0], keys)


@pytest.mark.parametrize("key", [-1, ROWS, 2**63 - 1])
@pytest.mark.parametrize("at", [0, 9000, 9999])
def test_one_missing_key_fails_gather(cache, table, key, at):
    keys = np.arange(10_000)
    keys[at] = key
    assert not gather(cache, table, keys)[0]


def test_deleted_and_evicted_keys_are_missing(cache, table):
    cache.delete(table, np.array([5]), np.array([2], np.uint64))
    cache.evict(table, np.array([6]))
    assert not gather(cache, table, [4, 5])[0]
    assert not gather(cache, table, [4, 6])[0]
    assert gather(cache, table, [4, 7])[0]


def test_gather_of_unknown_table_fails(cache):
    assert not gather(cache, EmbeddingTable.make("other", 3), [1])[0]


def test_one_gather_reads_all_tables_of_request(cache, table):
    other = EmbeddingTable.make("other", 1)
    cache.add_table(other, 100)
    cache.insert(other, np.array([7]), np.array([[70]], np.float32), np.ones(1, np.uint64))
    outs = np.empty((2, 3), np.float32), np.empty((1, 1), np.float32)
    pair = (table, np.array([1, 2]), outs[0])
    assert cache.gather([pair, (other, np.array([7]), outs[1])])
    assert outs[0][:, 0].tolist() == [1, 2]
    assert outs[1].tolist() == [[70]]
    assert not cache.gather([pair, (other, np.array([8]), outs[1])])


def test_gather_counts_as_use_of_keys():
    """Like a fetch: keys that are read repeatedly survive a flood of insertions."""
    table = EmbeddingTable.make("t", 1)
    cache = CpuCache({table: 1600})
    hot = np.arange(200)
    cache.insert(table, hot, np.ones((200, 1), np.float32), np.ones(200, np.uint64))
    for flood in range(1000, 20_000, 100):
        assert cache.gather([(table, hot, np.empty((200, 1), np.float32))])
        keys = np.arange(flood, flood + 100)
        cache.insert(table, keys, np.zeros((100, 1), np.float32), np.ones(100, np.uint64))
    part = Part.make(table, hot)
    cache.fetch([part], FetchContext())
    assert len(part.missing) == 0


@pytest.mark.parametrize(
    ("keys", "out"),
    [
        (np.zeros(2, np.int32), np.zeros((2, 3), np.float32)),
        (np.zeros(2, np.int64), np.zeros((2, 3))),
        (np.zeros(2, np.int64), np.zeros((1, 3), np.float32)),
    ],
)
def test_wrong_arrays_are_reported(cache, table, keys, out):
    with pytest.raises(BadRequest, match="table model/1/t"):
        cache.gather([(table, keys, out)])


def test_fused_lookup_of_chain_is_that_of_first_tier(cache, table):
    store = MemoryTier()
    assert fused_lookup_of(cache) is cache
    assert fused_lookup_of(TierChain([cache, store])) is cache
    assert fused_lookup_of(TierChain([TierChain([cache]), store])) is cache
    assert fused_lookup_of(TierChain([store, cache])) is None
    assert fused_lookup_of(TierChain([])) is None


def pooled(cache, table, keys, **options):
    keys = np.asarray(keys, np.int64)
    out = np.full((options.pop("bags", 2), 3), -1, np.float32)
    bags = Bags(table, keys, out, **options)
    return cache.gather([], [bags]), bags


def test_one_gather_reads_rows_and_pools_bags(cache, table):
    out = np.empty((1, 3), np.float32)
    bags = Bags(table, np.array([1, 2, 3, 4]), np.empty((2, 3), np.float32))
    assert cache.gather([(table, np.array([7]), out)], [bags])
    assert out[:, 0].tolist() == [7]
    assert bags.out[:, 0].tolist() == [3, 7]
    assert bags.missing is None


def test_missing_keys_of_bags_are_listed_and_completed(cache, table):
    found, bags = pooled(cache, table, [1, -9, 3, 4], divisors=np.array([2, 2], np.float32))
    assert found
    assert bags.missing.tolist() == [1]
    assert bags.out[1].tolist() == [3.5] * 3
    assert cache.complete(bags, np.full((1, 3), 5, np.float32))
    assert bags.out[:, 0].tolist() == [3, 3.5]
    cache.evict(table, np.array([1]))
    assert not cache.complete(bags, np.full((1, 3), 5, np.float32))


def test_bags_of_uncached_table_are_not_pooled(cache):
    found, bags = pooled(cache, EmbeddingTable.make("other", 3), [1, 2])
    assert not found
    assert not cache.complete(bags, bags.out)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"keys": [1, 2, 3]}, "3 keys cannot be divided into 2 bags"),
        ({"keys": [1], "bags": 0}, "1 keys cannot be divided into 0 bags"),
        ({"offsets": np.array([0, 2])}, r"offsets must be \(3,\) int64"),
        ({"offsets": np.array([0, 1, 1])}, "ascend from 0 to the number of keys, 2"),
        ({"offsets": np.array([0, 3, 2])}, "ascend from 0"),
        ({"weights": np.ones(1, np.float32)}, r"weights must be \(2,\) float32"),
        ({"weights": np.ones(2)}, "weights must be"),
        ({"divisors": np.ones(3, np.float32)}, r"divisors must be \(2,\) float32"),
    ],
)
def test_wrong_bags_are_reported(cache, table, wrong, words):
    with pytest.raises(BadRequest, match=words):
        pooled(cache, table, **{"keys": [1, 2]} | wrong)
