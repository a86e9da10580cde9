"""Rows of the CPU cache for a device's misses, and the keys that are promoted."""

import numpy as np
import pytest

from hps.cuda.launch import UNANSWERED
from hps.cuda.miss_fill import MissBatch
from hps.lookup.gpu.miss_fill import HostCaches
from hps.native import WorkerPool
from hps.tiers.cpu.cache import CpuCache
from hps.tiers.fused_lookup import fused_lookup_of
from hps.tiers.wrappers import MeteredTier
from hps.types import EmbeddingTable, Source
from tests.support.rows import distinct_rows

TABLES = [EmbeddingTable.make("a", 4), EmbeddingTable.make("b", 8)]
HELD = 40_000


@pytest.fixture(scope="module")
def cpu():
    cache, keys = CpuCache(dict.fromkeys(TABLES, 2 * HELD)), np.arange(HELD)
    for table in TABLES:
        cache.insert(table, keys, distinct_rows(table, keys), np.full(HELD, 5, np.uint64))
    return cache


def batch_of(missing, listed, total=None):
    """Every second key of a batch with as many keys of each table is missing; one in ten is unknown.

    It is a slice of ``total`` misses, by default of its own."""
    keys = np.tile(np.arange(missing), 2)
    keys[::20] += HELD
    positions = np.random.default_rng(1).permutation(2 * missing)[:missing].astype(np.uint32)
    rows, sources = np.zeros((missing, 32), np.uint8), np.zeros(missing, np.uint8)
    bases, counts = np.array([0, missing], np.uint32), np.zeros((2, 2), np.uint32)
    own = keys[positions] if listed else keys
    total = total or missing
    batch = MissBatch(TABLES, bases, own, positions, listed, rows, sources, counts, total)
    return batch, keys[positions], positions >= missing


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("missing", [1, 2000, 30_000])
def test_rows_are_gathered_and_their_keys_promoted(cpu, missing, listed):
    promoted, observed = {table: [] for table in TABLES}, []
    tier = MeteredTier(cpu, lambda counts, _seconds: observed.extend(counts))
    host = HostCaches(
        fused_lookup_of(tier),
        promote=lambda table, keys: promoted[table].append(keys),
        pool=WorkerPool(2),
    )
    batch, keys, second = batch_of(missing, listed)
    found = keys < HELD
    assert host.gather(batch) == np.count_nonzero(~found)
    np.testing.assert_array_equal(batch.sources, np.where(found, Source.CPU, UNANSWERED))
    for table, mine in zip(TABLES, (found & ~second, found & second), strict=True):
        rows = batch.rows[mine, : table.row_bytes].copy().view(np.float32)
        np.testing.assert_array_equal(rows, distinct_rows(table, keys[mine]))
        sent = np.concatenate([np.empty(0, np.int64), *promoted[table]])
        assert set(sent) <= set(keys[mine])
        assert len(sent) == np.count_nonzero(mine) if missing <= 2000 else 150 < len(sent) < 600
    expected = {(t, n) for t, n in zip(TABLES, batch.counts[:, 1].tolist(), strict=True) if n}
    assert {(table, n) for table, n, hits in observed if n == hits} == expected
    assert batch.counts[:, 0].tolist() == [np.count_nonzero(~second), np.count_nonzero(second)]


def test_sample_of_promoted_keys_is_one_of_all_slices(cpu):
    promoted = []
    host = HostCaches(
        fused_lookup_of(MeteredTier(cpu, lambda *_: None)),
        promote=lambda _table, keys: promoted.extend(keys),
    )
    for _ in range(4):
        host.gather(batch_of(30_000, False, 120_000)[0])
    assert 400 < len(promoted) < 600


def test_without_caches_every_key_is_left():
    batch, _, second = batch_of(100, False)
    assert HostCaches().gather(batch) == 100
    assert (batch.sources == UNANSWERED).all()
    assert batch.counts.tolist() == [[np.count_nonzero(~second), 0], [np.count_nonzero(second), 0]]
