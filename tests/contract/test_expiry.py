"""Rows older than their table's ``ttl_s``: stores do not serve them, a pass evicts them from caches."""

import time

import numpy as np
import pytest

from hps.types import make_version, oldest_row
from tests.conftest import named
from tests.contract.test_tier import (
    NOW_MS,
    assert_missing,
    assert_row,
    assert_tombstone,
    fetch,
    keys_of,
    put,
    remove,
)
from tests.support.rows import rows_from
from tests.support.tiers import TIERS, open_case

TTL_S = 3600
OLD = make_version(NOW_MS - TTL_S * 1000 - 60_000)
YOUNG = make_version(NOW_MS - TTL_S * 1000 + 1_800_000)
CACHES = ["cpu_cache", "cpu_cache_float16", "gpu_cache", "gpu_cache_float16", "gpu_split"]
# A cache comes first in them, and answers what it has.
CACHE_FIRST = [*CACHES, "chain_of_chains", "mapped_in_memory", "gpu_bridge", "gpu_chain"]
STORES = [name for name, case in TIERS.items() if case.versioned and name not in CACHE_FIRST]


@pytest.fixture
def opened(request, tmp_path):
    found = open_case(request.param, tmp_path, ttl_s=TTL_S)
    yield found
    found.tier.close()


def insert(tier, table, **versions):
    """Insert rows of the keys 1, 2 ..., which begin with 10, 20 ..., with these versions."""
    keys = np.arange(1, len(versions) + 1)
    rows = rows_from(table, *(10 * keys))
    tier.insert(table, keys, rows, np.array([*versions.values()], np.uint64))


@pytest.mark.parametrize("opened", STORES, indirect=True)
def test_stores_do_not_serve_expired_rows(opened):
    tier, table = opened.tier, opened.tables[0]
    insert(tier, table, one=OLD, two=YOUNG, three=OLD, four=OLD)
    part = fetch(tier, table, 1, 2, 3, 4, 5)
    for at in (0, 2, 3, 4):
        assert_missing(part, at)
    assert_row(opened, part, 1, 20)
    assert part.versions[1] == YOUNG
    put(tier, table, 1, 1, 50)  # renews it
    remove(tier, table, 3, 2)
    part = fetch(tier, table, 1, 3, 4)
    assert_row(opened, part, 0, 50, sequence=1)
    assert_tombstone(part, 1, 2)
    assert_missing(part, 2)


@pytest.mark.parametrize("opened", STORES, indirect=True)
def test_an_expired_write_does_not_replace_a_row(opened):
    tier, table = opened.tier, opened.tables[0]
    insert(tier, table, one=YOUNG)
    insert(tier, table, one=OLD)
    part = fetch(tier, table, 1)
    assert_row(opened, part, 0, 10)
    assert part.versions[0] == YOUNG


def passed(tier, table):
    """Evict what has expired now; return the number of rows."""
    oldest, begin, evicted = oldest_row(table, time.time()), 0, 0
    while True:
        found = tier.expire(table, oldest, begin) if begin else tier.expire(table, oldest)
        rows, begin = found if isinstance(found, tuple) else (found, 0)
        evicted += rows
        if not begin:
            return evicted


@pytest.mark.parametrize("opened", named(CACHES), indirect=True)
def test_a_pass_evicts_expired_rows_from_caches(opened):
    tier, table, other = opened.tier, *opened.tables[:2]
    insert(tier, table, one=OLD, two=YOUNG, three=OLD)
    insert(tier, other, one=OLD)
    tier.delete(table, keys_of(9), np.array([YOUNG], np.uint64))
    assert not len(fetch(tier, table, 1, 2, 3, 9).missing)
    assert passed(tier, table) == 2
    part = fetch(tier, table, 1, 2, 3, 9)
    assert part.missing.tolist() == [0, 2]
    assert_row(opened, part, 1, 20)
    assert part.versions[3] == YOUNG
    assert_row(opened, fetch(tier, other, 1), 0, 10)
    put(tier, table, 1, 1, 50)
    assert_row(opened, fetch(tier, table, 1), 0, 50, sequence=1)
    assert passed(tier, table) == 0
