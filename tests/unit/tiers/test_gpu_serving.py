"""The device's functions for lookups: poolings prepared ahead, bags of fetched rows, repeated keys over the
bridge, parts in one block, several caches as one."""

import time

import numpy as np
import pytest

from hps.cuda.loader import cupy
from hps.cuda.pool import RowBags
from hps.errors import ConfigError
from hps.lookup.pooling import pool
from hps.tiers.base import FetchContext, Part, TierInfo
from hps.tiers.gpu.cache import GpuCache
from hps.tiers.gpu.host_bridge import HostBridge
from hps.tiers.gpu.plan import GpuTableRequest, check_fits, plan_gpu
from hps.tiers.gpu.replicas import GpuReplicas
from hps.types import EmbeddingTable, JaggedKeys, Source, make_version
from tests.support.memory_tier import MemoryTier
from tests.support.rows import distinct_rows

pytestmark = pytest.mark.gpu
POOLINGS = ["sum", "mean", "sqrtn"]
NOW = make_version(time.time_ns() // 1_000_000)


def filled(tables, held=5000):
    cache = GpuCache(dict.fromkeys(tables, 2 * held))
    for table in tables:
        keys = np.arange(held)
        cache.insert(table, keys, distinct_rows(table, keys), np.full(held, NOW, np.uint64))
    return cache


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("dim", [1, 3, 8, 32, 200])
@pytest.mark.parametrize("hotness", [0, 1, 5, None])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_pooling_of_fetched_rows_equals_host_pooling(dim, dtype, hotness, pooling):
    cp, rng = cupy(), np.random.default_rng(dim)
    table = EmbeddingTable.make("t", dim, dtype=dtype, default=3.0)
    cache, asks, expected = filled([table]), [], []
    stream = cache.space.take_stream()
    for batch in (1, 300, *range(2, 40)):
        if hotness is None:
            offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 6, batch))])
            n = int(offsets[-1])
            weights = rng.random(n, np.float32)
        else:
            offsets, weights, n = None, None, batch * hotness
        keys = JaggedKeys(rng.integers(0, 6000, n), batch, offsets, weights)
        block = cache.space.parts([(table, keys.keys)], stream)
        (part,) = block.parts
        cache.fetch([part], FetchContext(stream=stream))
        found = keys.keys < 5000
        np.testing.assert_array_equal(block.reports(stream)[1][0] != 0, found)
        out = cp.full((batch, dim), 9, dtype)
        asks.append(
            RowBags(
                part.out,
                part.source,
                table.default,
                offsets,
                weights,
                out,
                hotness or 0,
                pooling,
                table.row_format,
            )
        )
        rows = distinct_rows(table, keys.keys)
        rows[~found] = 3
        expected.append(pool(rows, keys, pooling))
    cp.cuda.get_current_stream().synchronize()
    cache.pool_rows(asks, stream)
    for request, values in zip(asks, expected, strict=True):
        assert request.out.get().tobytes() == values.tobytes()


@pytest.mark.parametrize("count", [1, 26, 70])
def test_prepared_pooling_equals_pooling(count):
    cp, rng = cupy(), np.random.default_rng(count)
    tables = [EmbeddingTable.make(f"t{i}", [32, 16, 3][i % 3]) for i in range(count)]
    cache, batch = filled(tables, 500), 60
    outs = [cp.empty((batch, table.dim), np.float32) for table in tables]
    hot = [1 + i % 4 for i in range(count)]
    poolings = [POOLINGS[i % 3] for i in range(count)]
    asks = [
        (table, batch * h, h, pooling, out)
        for table, h, pooling, out in zip(tables, hot, poolings, outs, strict=True)
    ]
    prepared, stream = cache.prepare(asks), cache.space.take_stream()
    for turn in range(4):
        requested_keys = [rng.integers(0, 500, batch * h) for h in hot]
        if turn == 2:
            requested_keys[-1][5] = requested_keys[0][0] = 777
        for resident, keys in zip(prepared.keys, requested_keys, strict=True):
            resident[:] = keys
        prepared.launch(stream)
        stream.synchronize()
        assert prepared.missing() == (2 if turn == 2 else 0)
        if turn == 2:
            continue
        for i, (table, keys) in enumerate(zip(tables, requested_keys, strict=True)):
            bags = JaggedKeys(keys, batch)
            expected = pool(distinct_rows(table, keys), bags, poolings[i])
            assert outs[i].get().tobytes() == expected.tobytes()


def test_prepared_pooling_counts_as_use():
    table = EmbeddingTable.make("t", 4)
    cache = filled([table], 64)
    held = cache.held(table)
    held.clock.ticks = 40
    out = cupy().empty((1, 4), np.float32)
    prepared = cache.prepare([(table, 1, 1, "sum", out)])
    held.clock.ticks += held.clock.age
    prepared.keys[0][:] = 7
    stream = cache.space.take_stream()
    prepared.launch(stream)
    stream.synchronize()
    keys, _, _, scores = cache.export(table, least=held.clock.ticks)
    assert (keys.get().tolist(), scores.get().tolist()) == ([7], [held.clock.ticks])


class Once(MemoryTier):
    """Rejects repeated keys."""

    def fetch(self, parts, ctx):
        for part in parts:
            assert len(np.unique(part.keys)) == len(part.keys)
        super().fetch(parts, ctx)


def test_bridge_fetches_repeated_key_once():
    cp, rng = cupy(), np.random.default_rng(1)
    tables = [EmbeddingTable.make(f"t{i}", d) for i, d in enumerate((4, 3, 64))]
    below = Once(TierInfo("cpu", Source.CPU, cache=True))
    for table in tables:
        keys = np.arange(100)
        below.insert(table, keys, distinct_rows(table, keys), np.full(100, NOW, np.uint64))
        below.delete(table, keys[:5], np.full(5, NOW + 1, np.uint64))
    cache, bridge = GpuCache(dict.fromkeys(tables, 100)), HostBridge(below)
    for table in tables:
        cache.insert(
            table,
            np.arange(50, 70),
            distinct_rows(table, np.arange(50, 70)),
            np.full(20, NOW, np.uint64),
        )
    stream = cache.space.take_stream()
    for n in (0, 1, 2, 400):
        requested_keys = [rng.integers(0, 130, n) for _ in tables]
        block = cache.space.parts(list(zip(tables, requested_keys, strict=True)), stream)
        context = FetchContext(stream=stream)
        cache.fetch(block.parts, context)
        bridge.fetch(block.parts, context)
        versions, sources = block.reports(stream)
        for table, keys, part, seen, codes in zip(
            tables, requested_keys, block.parts, versions, sources, strict=True
        ):
            resident = (keys >= 5) & (keys < 100)
            gpu = (keys >= 50) & (keys < 70)
            np.testing.assert_array_equal(codes, np.where(gpu, Source.GPU, Source.CPU) * resident)
            np.testing.assert_array_equal(
                part.out.get()[resident], distinct_rows(table, keys[resident])
            )
            np.testing.assert_array_equal(np.sort(part.missing), np.flatnonzero(keys >= 100))
            np.testing.assert_array_equal(seen[keys < 5], np.full((keys < 5).sum(), NOW + 1))
    cp.cuda.get_current_stream().synchronize()


def test_replicas_answer_host_parts():
    table, other = EmbeddingTable.make("t", 8), EmbeddingTable.make("out", 8)
    replicas = GpuReplicas([filled([table], 100), filled([table], 100)])
    for cache in replicas.caches:
        cache.add_table(other, 0)
    keys = np.array([5, 300, 6, 7])
    replicas.delete(table, keys[2:3], np.full(1, NOW + 1, np.uint64))
    for _ in range(4):
        parts = [Part.make(table, keys), Part.make(other, keys)]
        parts[0].missing = np.array([0, 1, 2])
        replicas.fetch(parts, FetchContext())
        assert parts[0].missing.tolist() == [1]
        assert parts[0].source.tolist() == [Source.GPU, 0, 0, 0]
        assert parts[0].versions[2] == NOW + 1
        np.testing.assert_array_equal(parts[0].out[0], distinct_rows(table, keys[:1])[0])
        assert len(parts[1].missing) == 4
    assert (replicas.rows(table), replicas.capacity(other)) == (99, 0)
    replicas.close()


def test_plan_takes_stated_bytes():
    cp = cupy()
    pool_before = cp.get_default_memory_pool().used_bytes()
    tables = {EmbeddingTable.make(f"t{d}", d): GpuTableRequest(200_000) for d in (3, 32, 64)}
    plan = plan_gpu(tables, capacity_bytes=40 << 20, host_bytes=8 << 20)
    cache = GpuCache({})
    start = cp.get_default_memory_pool().used_bytes()
    for table, place in plan.items():
        cache.add_table(table, place.rows, policy=place.policy, host_rows=place.host_rows)
        assert cache.capacity(table) >= place.rows
    used_bytes = cp.get_default_memory_pool().used_bytes() - start
    assert 0.95 * (40 << 20) < used_bytes <= 1.01 * (40 << 20)
    assert pool_before <= start
    with pytest.raises(ConfigError, match="are free there"):
        check_fits(plan, 1 << 20, 0)
    cache.close()
