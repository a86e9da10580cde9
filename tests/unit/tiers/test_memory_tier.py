"""MemoryTier beyond the contract: clock, identity of tables, info; argument checks."""

import numpy as np
import pytest

from hps.errors import BadRequest
from hps.tiers.base import FetchContext, Part, TierInfo
from hps.tiers.checks import check_keys, check_part, check_rows
from hps.types import EmbeddingTable, Source, make_version, oldest_tombstone
from tests.support.memory_tier import MemoryTier

TABLE = EmbeddingTable.make("items", 2, tombstone_ttl_s=60.0)
KEYS = np.array([1, 2])
ROWS = np.ones((2, 2), np.float32)


def missing(tier):
    part = Part.make(TABLE, KEYS)
    tier.fetch([part], FetchContext())
    return part.missing.tolist()


def test_tombstones_expire_by_clock():
    now = [5_000.0]
    tier = MemoryTier(clock=lambda: now[0])
    versions = np.full(2, make_version(5_000_000), np.uint64)
    tier.insert(TABLE, KEYS, ROWS, versions)
    tier.delete(TABLE, KEYS[:1], versions[:1])
    assert missing(tier) == []
    now[0] += 60
    assert missing(tier) == []
    now[0] += 1
    assert missing(tier) == [0]
    assert tier.size(TABLE) == 1


@pytest.mark.parametrize(
    ("ttl_s", "unix_s", "oldest"),
    [
        (60.0, 5_000.0, make_version(4_940_000)),
        (0.0, 5_000.0, make_version(5_000_000)),
        (1e9, 5_000.0, 0),
        (float("inf"), 5_000.0, 0),
    ],
)
def test_oldest_tombstone_follows_ttl(ttl_s, unix_s, oldest):
    table = EmbeddingTable.make("items", 2, tombstone_ttl_s=ttl_s)
    assert oldest_tombstone(table, unix_s) == oldest


def test_tables_are_distinguished_by_identity():
    tier, twin = MemoryTier(), EmbeddingTable.make("items", 2)
    tier.insert(TABLE, KEYS, ROWS, np.zeros(2, np.uint64))
    assert (tier.size(TABLE), tier.size(twin)) == (2, 0)
    tier.drop(twin)
    tier.drop(TABLE)
    assert tier.size(TABLE) == 0
    assert missing(tier) == [0, 1]


def test_memory_tier_takes_any_tier_info():
    info = TierInfo("redis", Source.REDIS, blocking=True, shared=True)
    tier = MemoryTier(info)
    assert tier.info is info
    tier.insert(TABLE, KEYS, ROWS, np.zeros(2, np.uint64))
    part = Part.make(TABLE, KEYS)
    tier.fetch([part], FetchContext())
    assert part.source.tolist() == [Source.REDIS, Source.REDIS]


# -- checks ----------------------------------------------------------------------------------------


def test_valid_arrays_are_accepted():
    versions = np.zeros(2, np.uint64)
    check_keys(TABLE, KEYS)
    check_keys(TABLE, KEYS, versions)
    check_rows(TABLE, KEYS, ROWS, versions)
    check_part(Part.make(TABLE, KEYS))


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        (
            np.ones((2, 3), np.float32),
            r"table model/1/items: vectors must be \(2, 2\) float32, C-contiguous, "
            r"got \(2, 3\) float32; one entry per key is expected, and rows of 2 items",
        ),
        (ROWS.astype(np.float64), r"got \(2, 2\) float64; pass np.ascontiguousarray"),
        (np.asfortranarray(ROWS), r"got \(2, 2\) float32, not C-contiguous; pass"),
        (ROWS.tolist(), "got a list, not a NumPy array; convert it with np.asarray"),
    ],
)
def test_message_names_cause_and_remedy(vectors, message):
    with pytest.raises(BadRequest, match=message):
        check_rows(TABLE, KEYS, vectors, np.zeros(2, np.uint64))
