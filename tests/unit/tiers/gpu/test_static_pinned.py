"""Static tables in pinned host memory as a whole: their twin, and the kernels that read them."""

import numpy as np
import pytest

from hps.cuda import launch, layout
from hps.cuda.layout import EMPTY, EvictionPolicy
from hps.cuda.loader import cupy
from hps.cuda.twin import TwinTable
from hps.errors import BadRequest
from hps.tiers.base import FetchContext
from hps.tiers.gpu.cache import GpuCache
from hps.tiers.gpu.checks import DevicePooling
from hps.tiers.gpu.plan import GpuTableRequest, plan_gpu
from hps.types import EmbeddingTable, JaggedKeys
from tests.support.rows import distinct_rows

ROWS, DIM = 6000, 16


def plan_of(table):
    request = {table: GpuTableRequest(ROWS, static=True)}
    return plan_gpu(request, capacity_bytes=1 << 20, host_bytes=ROWS * table.row_bytes)[table]


def filled_twin(shape, table, keys):
    twin = TwinTable(shape, table.dim, policy=EvictionPolicy.NONE)
    for start in range(0, len(keys), shape.batch):
        some = keys[start : start + shape.batch]
        twin.write(some, distinct_rows(table, some), np.ones(len(some), np.uint64))
    return twin


def test_all_rows_but_the_first_batches_are_in_host_memory():
    table = EmbeddingTable.make("t", DIM)
    place = plan_of(table)
    shape, keys = place.shape(table), np.arange(-3000, 3000)
    assert (shape.host_rows, shape.device_rows) == (ROWS, shape.reserve)
    twin = filled_twin(shape, table, keys)
    numbers = twin.words[twin.words < EMPTY] & shape.row_mask
    assert len(numbers) == ROWS
    assert twin.dropped == 0
    assert (numbers >= shape.device_rows).sum() >= ROWS - shape.reserve
    vectors, words, _ = twin.fetch(keys)
    assert (words < EMPTY).all()
    np.testing.assert_array_equal(vectors, distinct_rows(table, keys))


@pytest.mark.gpu
@pytest.mark.parametrize("windowed", [False, True])
def test_kernels_read_a_whole_table_from_pinned_memory(windowed, monkeypatch):
    if windowed:
        monkeypatch.setattr(layout, "WINDOW_SHIFT", 16)
        monkeypatch.setattr(layout, "KEYS_A_WINDOW", 100)
    cp, table = cupy(), EmbeddingTable.make("t", DIM)
    place, keys = plan_of(table), np.arange(-3000, 3000)
    cache = GpuCache({})
    how = {"policy": place.policy, "host_rows": place.host_rows, "static": True}
    cache.add_table(table, place.rows, load=place.load, **how)
    held = cache.held(table)
    assert held.shape == place.shape(table)
    assert (launch.windows_of(held.shape.host_bytes, ROWS) > 1) == windowed
    cache.insert(table, keys, distinct_rows(table, keys), np.ones(ROWS, np.uint64))
    assert cache.seal(table) == 0
    twin = filled_twin(held.shape, table, keys)
    asked = np.random.default_rng(1).permutation(np.arange(-3100, 3100))
    expected, words, _ = twin.fetch(asked)
    found = words < EMPTY
    n = len(asked)
    out, misses = cp.zeros((n, DIM), np.float32), cp.zeros(4 + n, np.uint32)
    cache.direct.fetch(held, cp.asarray(asked), out, misses)
    assert int(misses[0]) == (~found).sum() == 200
    np.testing.assert_array_equal(out.get(), np.where(found[:, None], expected, 0))
    part = cache.space.parts([(table, asked)], cp.cuda.get_current_stream()).parts[0]
    cache.fetch([part], FetchContext())
    assert sorted(part.missing.tolist()) == np.flatnonzero(~found).tolist()
    np.testing.assert_array_equal(part.out.get()[found], expected[found])
    pooled = cp.empty((ROWS // 4, DIM), np.float32)
    assert cache.pool([DevicePooling(table, JaggedKeys(keys, ROWS // 4), "sum", pooled)])
    rows = distinct_rows(table, keys).reshape(ROWS // 4, 4, DIM)
    np.testing.assert_array_equal(pooled.get(), rows.sum(axis=1))
    with pytest.raises(BadRequest, match="static"):
        cache.update(table, keys[:1], distinct_rows(table, keys[:1]), np.full(1, 9, np.uint64))
    cache.close()
