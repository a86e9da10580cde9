"""Pooling on the device against pooling on the host: the same bits."""

import time

import numpy as np
import pytest

from hps.cuda.loader import cupy
from hps.errors import BadRequest
from hps.lookup.pooling import pool
from hps.tiers.gpu.cache import GpuCache
from hps.tiers.gpu.checks import DevicePooling
from hps.types import EmbeddingTable, JaggedKeys, make_version

pytestmark = pytest.mark.gpu
NOW = make_version(time.time_ns() // 1_000_000)
HELD = 5000


def rows_of(table):
    rng = np.random.default_rng(table.dim)
    rows = rng.standard_normal((HELD, table.dim)).astype(table.dtype)
    rows[7] = -0.0
    return rows


def filled(cache, dim, dtype=np.float32):
    table = EmbeddingTable.make(f"t{dim}", dim, dtype=dtype)
    cache.add_table(table, 2 * HELD)
    cache.insert(table, np.arange(HELD), rows_of(table), np.full(HELD, NOW, np.uint64))
    return table


def jagged(rng, batch, *, weighted):
    """Bags of 0 to 6 keys, the last one empty."""
    lengths = np.append(rng.integers(0, 7, batch - 1), 0)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    keys = rng.integers(0, HELD, offsets[-1])
    weights = rng.standard_normal(len(keys)).astype(np.float32) if weighted else None
    return JaggedKeys(keys, batch, offsets, weights)


def requests(table, keys, combiner):
    return DevicePooling(
        table, keys, combiner, cupy().full((keys.batch, table.dim), 9, table.dtype)
    )


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("dim", [1, 3, 8, 32, 128, 200])
def test_device_pooling_equals_host_pooling(dim, dtype, weighted, combiner):
    cache = GpuCache({})
    table = filled(cache, dim, dtype)
    keys = jagged(np.random.default_rng(1), 300, weighted=weighted)
    request = requests(table, keys, combiner)
    assert cache.pool([request])
    expected = pool(rows_of(table)[keys.keys], keys, combiner)
    assert request.out.get().tobytes() == expected.tobytes()
    assert (request.out.get()[-1] == 0).all()


def test_sums_of_negative_zeros_keep_their_sign():
    cache = GpuCache({})
    table = filled(cache, 8)
    request = requests(table, JaggedKeys(np.full(6, 7), 3), "sum")
    assert cache.pool([request])
    assert np.signbit(request.out.get()).all()


def test_fetch_reads_all_tables_with_keys_on_host_or_device():
    cache = GpuCache({})
    rng, asks = np.random.default_rng(3), []
    for i, dim in enumerate(range(2, 42)):
        table = filled(cache, dim)
        keys = JaggedKeys(rng.integers(0, HELD, 60 * (1 + i % 3)), 60)
        if i % 2:
            keys = JaggedKeys(cupy().asarray(keys.keys), 60)
        asks.append(requests(table, keys, "sum"))
    assert cache.pool(asks)
    for request in asks:
        keys = JaggedKeys(cupy().asnumpy(request.keys.keys), 60)
        expected = pool(rows_of(request.table)[keys.keys], keys, "sum")
        assert request.out.get().tobytes() == expected.tobytes()


def test_key_without_row_is_reported():
    cache = GpuCache({})
    table = filled(cache, 8)
    for missing in (HELD + 7, 0):
        if not missing:
            cache.delete(table, np.zeros(1, np.int64), np.full(1, NOW + 1, np.uint64))
        assert not cache.pool([requests(table, JaggedKeys(np.array([5, missing]), 1), "sum")])
        assert cache.pool([requests(table, JaggedKeys(np.array([5, 6]), 1), "sum")])
    stranger = EmbeddingTable.make("stranger", 8)
    assert not cache.pool([requests(stranger, JaggedKeys(np.array([5]), 1), "sum")])


def test_empty_bags_need_no_table():
    cache = GpuCache({})
    table = EmbeddingTable.make("t", 8)
    none = JaggedKeys(np.zeros(0, np.int64), 3, np.zeros(4, np.int64))
    request = requests(table, none, "mean")
    assert cache.pool([request])
    assert (request.out.get() == 0).all()
    assert cache.pool([])


def test_pooling_counts_as_use():
    cache = GpuCache({})
    table = filled(cache, 8)
    held = cache.held(table)
    held.clock.ticks += held.clock.age
    assert cache.pool([requests(table, JaggedKeys(np.arange(100), 10), "sum")])
    exported = cache.export(table, least=held.clock.ticks)[0].get()
    assert set(exported.tolist()) == set(range(100))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (JaggedKeys(np.arange(5), 2), "can't be shared out"),
        (JaggedKeys(np.arange(5), 1, np.array([0, 6])), "ascend"),
        (JaggedKeys(np.arange(5), 2, np.array([0, 5])), "offsets must be"),
        (JaggedKeys(np.arange(5), 1, None, np.ones(4, np.float32)), "weights must be"),
        (JaggedKeys(np.arange(5, dtype=np.int32), 1), "keys must be"),
    ],
)
def test_wrong_bags_are_rejected(keys, message):
    cache = GpuCache({})
    table = filled(cache, 8)
    with pytest.raises(BadRequest, match=message):
        cache.pool([requests(table, keys, "sum")])
