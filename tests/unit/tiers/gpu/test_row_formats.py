"""Narrow rows on a device: fetched as they are stored, pooled and decoded to the bits of the host."""

import time

import numpy as np
import pytest

from hps.cuda import pool as pooling
from hps.cuda import prepared as prepared_poolings
from hps.cuda.loader import cupy
from hps.cuda.pool import PoolShape, RowBags
from hps.errors import ConfigError
from hps.lookup.pooling import pool
from hps.row_format import ROW_FORMAT_NAMES
from hps.tiers.base import FetchContext, Part, TierInfo
from hps.tiers.gpu.cache import GpuCache
from hps.tiers.gpu.checks import DevicePooling
from hps.tiers.gpu.host_bridge import HostBridge
from hps.tiers.gpu.replicas import GpuReplicas
from hps.tiers.stored_rows import to_rows, to_vectors
from hps.types import EmbeddingTable, JaggedKeys, Source, make_version
from tests.support.memory_tier import MemoryTier

NOW = make_version(time.time_ns() // 1_000_000)
HELD = 5000
FORMATS = [
    (rows, dtype)
    for rows in ROW_FORMAT_NAMES
    for dtype in ("float32", "float16")
    if rows != dtype or rows == "float32"
]


def table_of(dim, rows, dtype="float32"):
    return EmbeddingTable.make(f"t{dim}{rows}", dim, dtype=dtype, rows=rows, default=0.1)


def rows_of(table, keys, salt=0):
    """Rows that differ by key, some of equal values, some of negative zeros."""
    rng = np.random.default_rng(table.dim + salt)
    vectors = rng.standard_normal((HELD, table.dim)).astype(np.float32)
    vectors *= rng.choice(np.array([1e-6, 0.1, 1, 50], np.float32), (HELD, 1))
    vectors[7], vectors[8] = -0.0, 1.5
    return to_rows(table, vectors)[keys]


def filled(tables):
    cache, keys = GpuCache(dict.fromkeys(tables, 2 * HELD)), np.arange(HELD)
    for table in tables:
        cache.insert(table, keys, rows_of(table, keys), np.full(HELD, NOW, np.uint64))
    return cache


def jagged(rng, batch, longest, *, weighted):
    """Bags of 0 to ``longest`` keys, the last one empty."""
    lengths = np.append(rng.integers(0, longest + 1, batch - 1), 0)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    keys = rng.integers(0, HELD, offsets[-1])
    weights = rng.standard_normal(len(keys)).astype(np.float32) if weighted else None
    return JaggedKeys(keys, batch, offsets, weights)


def expected_of(table, keys, combiner):
    vectors = to_vectors(table, rows_of(table, keys.keys), dtype=np.float32)
    return pool(vectors, keys, combiner, dtype=table.dtype)


def check_pooling(cache, table, keys, combiner):
    out = cupy().full((keys.batch, table.dim), 9, table.dtype)
    assert cache.pool([DevicePooling(table, keys, combiner, out)])
    assert out.get().tobytes() == expected_of(table, keys, combiner).tobytes()


def test_one_kernel_pools_tables_of_one_format_and_a_common_dim():
    table = table_of(128, "int8")

    def kernel(*tables, out=4096, **how):
        return PoolShape.of(tables, [0, out], **({"single": False} | how)).kernel

    assert kernel(table, table_of(128, "int8")) == "pool_warp_kernel<4, 128, 4, false>"
    assert kernel(table_of(64, "float16"), weighted=True) == "pool_warp_kernel<1, 64, 4, true>"
    assert kernel(table_of(64, "int4"), single=True) == "decode_warp_kernel<5, 64>"
    assert kernel(table, single=True, weighted=True) == "pool_warp_kernel<4, 128, 4, true>"
    assert kernel(table, table_of(128, "int4"), single=True) == "pool_kernel<32, 4>"
    assert kernel(table_of(32, "int8")) == "pool_warp_kernel<4, 32, 4, false>"
    assert kernel(table_of(36, "int8")) == "pool_kernel<16, 4>"
    assert kernel(table, out=4) == "pool_kernel<32, 4>"  # out is not aligned
    for single, bags_a_block in ((False, 8), (True, 64)):
        shape = PoolShape.of([table], [0], single=single)
        assert [shape.blocks(n * bags_a_block) for n in (1, 2, 7)] == [1, 2, 7]
        assert shape.blocks(bags_a_block + 1) == 2


def test_vectors_of_other_types_are_refused():
    table = EmbeddingTable.make("t", 8, dtype=np.float64)
    with pytest.raises(ConfigError, match="vectors of float32 and float16"):
        GpuCache.add_table(None, table, 5)


@pytest.mark.gpu
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("rows", "dtype"), FORMATS)
@pytest.mark.parametrize("dim", [1, 3, 8, 32, 36, 64, 128, 200])
def test_pooled_rows_have_the_bits_of_the_host(dim, rows, dtype, weighted, combiner):
    table = table_of(dim, rows, dtype)
    cache, rng = filled([table]), np.random.default_rng(1)
    for longest in (6, 80):
        check_pooling(cache, table, jagged(rng, 300, longest, weighted=weighted), combiner)
    for hotness in (1, 2, 20, 33):
        n = 301 * hotness
        weights = rng.random(n, np.float32) if weighted else None
        check_pooling(
            cache, table, JaggedKeys(rng.integers(0, HELD, n), 301, None, weights), combiner
        )
    cache.close()


@pytest.mark.gpu
@pytest.mark.parametrize("counted_behind", [False, True])
@pytest.mark.parametrize("dim", [16, 32, 64, 128])
@pytest.mark.parametrize("rows", ROW_FORMAT_NAMES)
def test_poolings_of_many_bags_have_the_bits_of_the_host(dim, rows, counted_behind, monkeypatch):
    for module in (pooling, prepared_poolings):
        monkeypatch.setattr(module, "COUNTED_BEHIND", 0 if counted_behind else 1 << 30)
    cp, table = cupy(), table_of(dim, rows)
    cache, rng = filled([table]), np.random.default_rng(2)
    stream = cache.space.take_stream()
    for hotness in (1, 3, 20, 33):
        keys = rng.integers(0, HELD, 999 * hotness)
        check_pooling(cache, table, JaggedKeys(keys, 999), "sqrtn")
        out = cp.empty((999, dim), np.float32)
        prepared = cache.prepare([(table, len(keys), hotness, "mean", out)])
        for missing in (0, 2, 0):
            prepared.flat[:] = keys
            prepared.flat[:missing] = HELD + 7
            prepared.launch(stream)
            stream.synchronize()
            assert prepared.missing() == missing
        assert out.get().tobytes() == expected_of(table, JaggedKeys(keys, 999), "mean").tobytes()
    missing = JaggedKeys(np.array([5, HELD + 7, 6, 8]), 4)
    out = cp.empty((4, dim), table.dtype)
    assert not cache.pool([DevicePooling(table, missing, "sum", out)])
    cache.close()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROW_FORMAT_NAMES)
def test_rows_in_pinned_host_memory_are_pooled_and_fetched(rows):
    cp, rng, table = cupy(), np.random.default_rng(3), table_of(128, rows)
    cache, keys = GpuCache({}), np.arange(HELD)
    cache.add_table(table, 2 * HELD, host_rows=HELD)
    cache.insert(table, keys, rows_of(table, keys), np.full(HELD, NOW, np.uint64))
    for hotness in (1, 7):
        check_pooling(cache, table, JaggedKeys(rng.integers(0, HELD, 300 * hotness), 300), "sum")
    out = cp.zeros((HELD, table.row_width), table.row_dtype)
    cache.fetch([Part(table, keys, out, None, None, keys)], FetchContext())
    np.testing.assert_array_equal(out.get(), rows_of(table, keys))
    cache.close()


@pytest.mark.gpu
def test_tables_with_and_without_weights_are_pooled_together():
    cp, rng = cupy(), np.random.default_rng(4)
    tables = [table_of(64, "int8") for _ in range(3)]
    cache = filled(tables)
    bags = [jagged(rng, 90, 9, weighted=index == 1) for index in range(2)]
    bags.append(JaggedKeys(rng.integers(0, HELD, 90 * 40), 90))
    outs = [cp.empty((90, 64), np.float32) for _ in tables]
    asks = [
        DevicePooling(*each, "sqrtn", out) for *each, out in zip(tables, bags, outs, strict=True)
    ]
    assert cache.pool(asks)
    for table, keys, out in zip(tables, bags, outs, strict=True):
        assert out.get().tobytes() == expected_of(table, keys, "sqrtn").tobytes()
    cache.close()


@pytest.mark.gpu
@pytest.mark.parametrize("with_versions", [False, True])
@pytest.mark.parametrize("rows", ROW_FORMAT_NAMES)
@pytest.mark.parametrize("dim", [1, 5, 32, 64, 100, 128])
def test_rows_are_fetched_as_they_are_stored(dim, rows, with_versions):
    cp, rng = cupy(), np.random.default_rng(dim)
    table = table_of(dim, rows)
    cache = filled([table])
    changed = rng.permutation(HELD)[:900]
    stamps = np.full(len(changed), NOW + 1, np.uint64)
    cache.update(table, changed, rows_of(table, changed, 1), stamps)
    expected = rows_of(table, np.arange(HELD))
    expected[changed] = rows_of(table, changed, 1)
    for n in (1, 8, 100, 3000, 1 << 18):
        keys = rng.integers(0, 2 * HELD, n)
        out = cp.zeros((n, table.row_width), table.row_dtype)
        versions = cp.zeros(n, np.uint64) if with_versions else None
        part = Part(table, keys, out, versions, cp.zeros(n, np.uint8), np.arange(n))
        cache.fetch([part], FetchContext())
        np.testing.assert_array_equal(part.missing, np.flatnonzero(keys >= HELD))
        held = keys < HELD
        np.testing.assert_array_equal(out.get()[held], expected[keys[held]])
        assert not out.get()[~held].any()
        np.testing.assert_array_equal(part.source.get(), held * int(Source.GPU))
    exported = cache.export(table)
    np.testing.assert_array_equal(exported[1].get(), expected[exported[0].get()])
    cache.close()


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "dtype"), FORMATS)
@pytest.mark.parametrize("dim", [1, 3, 8, 64, 128])
def test_rows_of_cache_and_bridge_are_pooled_with_exact_defaults(dim, rows, dtype):
    cp, rng, table = cupy(), np.random.default_rng(dim), table_of(dim, rows, dtype)
    cache, below = filled([table]), MemoryTier(TierInfo("cpu", Source.CPU, cache=True))
    keys = np.arange(4900, 5000)
    below.insert(table, keys + 100, rows_of(table, keys), np.full(len(keys), NOW, np.uint64))
    bridge, stream = HostBridge(below), cache.space.take_stream()
    for hotness in (1, 4):
        wanted = rng.integers(4800, 5200, 300 * hotness)
        (part,) = cache.space.parts([(table, wanted)], stream).parts
        for tier in (cache, bridge):
            tier.fetch([part], FetchContext(stream=stream))
        out = cp.full((300, dim), 9, dtype)
        cp.cuda.get_current_stream().synchronize()
        bags = (part.out, part.source, table.default, None, None, out, hotness, "sum")
        cache.pool_rows([RowBags(*bags, table.row_format)], stream)
        stored = np.where(wanted < HELD, wanted, wanted - 100)
        vectors = to_vectors(table, rows_of(table, stored % HELD), dtype=np.float32)
        vectors[wanted >= 5100] = table.default
        values = pool(vectors, JaggedKeys(wanted, 300), "sum", dtype=table.dtype)
        if hotness == 1:
            values = vectors.astype(table.dtype)
        assert out.get().tobytes() == values.tobytes()
    cache.close()


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [[64] * 3, [128] * 40, [64, 3, 128]])
def test_prepared_poolings_have_the_bits_of_the_host(dims):
    cp, rng = cupy(), np.random.default_rng(len(dims))
    names = ["int8"] * len(dims) if len(set(dims)) == 1 else ["int8", "int4", "bfloat16"]
    tables = [table_of(dim, rows) for dim, rows in zip(dims, names, strict=True)]
    cache, batch = filled(tables), 60
    hot = [1 + i % 4 for i in range(len(dims))]
    combiners = [("sum", "mean", "sqrtn")[i % 3] for i in range(len(dims))]
    outs = [cp.empty((batch, dim), np.float32) for dim in dims]
    prepared = cache.prepare(
        [
            (t, batch * h, h, combiner, out)
            for t, h, combiner, out in zip(tables, hot, combiners, outs, strict=True)
        ]
    )
    stream = cache.space.take_stream()
    for _ in range(3):
        for resident, h in zip(prepared.keys, hot, strict=True):
            resident[:] = rng.integers(0, HELD, batch * h)
        prepared.launch(stream)
        stream.synchronize()
        assert prepared.missing() == 0
        for table, keys, combiner, out in zip(tables, prepared.keys, combiners, outs, strict=True):
            expected = expected_of(table, JaggedKeys(keys, batch), combiner)
            assert out.get().tobytes() == expected.tobytes()
    cache.close()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ["int8", "int4"])
def test_members_and_replicas_keep_stored_rows(rows):
    cache = GpuCache({})
    first, second = table_of(64, rows), table_of(64, rows)
    cache.add_table(first, 2 * HELD)
    assert cache.share_table(second, first, lambda _table, keys: (np.ones(len(keys), bool), NOW))
    for other in (table_of(64, "float16"), table_of(60 if rows == "int8" else 56, rows)):
        assert not cache.share_table(other, first, lambda _table, keys: (keys == keys, NOW))
    keys = np.arange(HELD)
    cache.insert(first, keys, rows_of(first, keys), np.full(HELD, NOW, np.uint64))
    replicas = GpuReplicas([cache])
    for table in (first, second):
        part = Part.make(table, np.arange(HELD + 10))
        replicas.fetch([part], FetchContext())
        np.testing.assert_array_equal(part.missing, np.arange(HELD, HELD + 10))
        np.testing.assert_array_equal(part.out[:HELD], rows_of(table, keys))
    cache.close()
