"""PromotingTier: rows are promoted; defaults, deletions and rows that the part already has are not."""

import numpy as np
import pytest

from hps.tiers.base import FetchContext, Part, TierInfo
from hps.tiers.wrappers import PromotingTier
from hps.types import EmbeddingTable, Source, version_now
from tests.support.memory_tier import MemoryTier

TABLE = EmbeddingTable.make("items", 2)
NOW = version_now()


@pytest.fixture
def promoted():
    return []


@pytest.fixture
def tier(promoted):
    store = MemoryTier(TierInfo("rocksdb", Source.ROCKSDB))
    keys = np.arange(10)
    store.insert(TABLE, keys, np.ones((10, 2), np.float32), np.full(10, NOW, np.uint64))
    store.delete(TABLE, np.array([3]), np.array([NOW + 1], np.uint64))
    return PromotingTier(
        store, lambda table, keys: promoted.append((table, keys.tolist())), "redis"
    )


def test_returned_rows_are_promoted(tier, promoted):
    part = Part.make(TABLE, np.array([9, 3, 77, 1]))
    tier.fetch([part], FetchContext())
    assert part.missing.tolist() == [2]
    assert promoted == [(TABLE, [9, 1])]


def test_rows_found_in_earlier_tiers_are_not_promoted(tier, promoted):
    part = Part.make(TABLE, np.array([9, 5, 1]))
    part.source[:] = [3, 0, 3]
    part.missing = np.array([1])
    tier.fetch([part], FetchContext())
    assert promoted == [(TABLE, [5])]


def test_no_promotion_to_skipped_tier(tier, promoted):
    tier.fetch([Part.make(TABLE, np.array([9]))], FetchContext(degraded=["redis"]))
    assert promoted == []
    tier.fetch([Part.make(TABLE, np.array([9]))], FetchContext(degraded=["another"]))
    assert promoted == [(TABLE, [9])]


def test_no_promotion_without_hits(tier, promoted):
    tier.fetch([Part.make(TABLE, np.array([99]))], FetchContext())
    assert promoted == []


def test_writes_pass_through(tier):
    tier.insert(TABLE, np.array([50]), np.ones((1, 2), np.float32), np.full(1, NOW, np.uint64))
    part = Part.make(TABLE, np.array([50]))
    tier.fetch([part], FetchContext())
    assert part.source.tolist() == [Source.ROCKSDB]
