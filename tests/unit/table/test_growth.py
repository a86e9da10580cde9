"""Growth of tables: HierarchicalKV's cases of rehash and of a changed max_capacity; refusals."""

import numpy as np
import pytest

from hps.errors import BadRequest, ConfigError
from hps.native import twin_scored
from hps.table import Table, memory
from tests.support.tables import BACKENDS, BUCKET, DIM, check_rows, everything, make, rows_of

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


def test_a_table_doubles_at_its_load_factor_and_loses_nothing(backend):
    table, keys = make(backend, BUCKET, max_capacity=4 * BUCKET), np.arange(2 * BUCKET)
    capacities = []
    for at in range(0, 2 * BUCKET, 32):
        table.insert_or_assign(keys[at : at + 32], rows_of(keys[at : at + 32]), keys[at : at + 32])
        capacities.append(table.capacity // BUCKET)
    assert capacities == [1, 1, 2, 2, 4, 4, 4, 4]
    assert table.find(keys).found.all()
    check_rows(table.export_batch(table.capacity))
    table.reserve(4 * BUCKET)
    assert (table.capacity, table.size) == (4 * BUCKET, 2 * BUCKET)


def test_one_large_batch_doubles_several_times(backend):
    table, keys = make(backend, 1024, max_capacity=1 << 16), np.arange(20_000)
    table.insert_or_assign(keys, rows_of(keys), keys)
    assert (table.capacity, table.size) == (1 << 16, 20_000)
    np.testing.assert_array_equal(table.find(keys).rows, rows_of(keys))
    assert table.find(keys, with_scores=True).scores.tolist() == keys.tolist()


def test_writes_to_resident_keys_do_not_grow_a_table(backend):
    table, keys = make(backend, BUCKET, max_capacity=1 << 12), np.arange(BUCKET // 2)
    for _ in range(3):
        table.insert_or_assign(keys, rows_of(keys), keys)
        table.insert_or_assign([500] * 10, rows_of([500] * 10), [1] * 10)
        table.erase([500])
    assert table.capacity == 2 * BUCKET  # for the 65th row
    table.find_or_insert(keys, rows_of(keys), keys)
    table.assign(keys, rows_of(keys), keys)
    assert table.capacity == 2 * BUCKET


@pytest.mark.parametrize("write", ["insert_and_evict", "find_or_insert", "accum_or_assign"])
def test_every_insert_grows_a_table(backend, write):
    table, keys = make(backend, BUCKET, max_capacity=1 << 12), np.arange(1000)
    arguments = [np.zeros(1000, bool)] if write == "accum_or_assign" else []
    getattr(table, write)(keys, rows_of(keys), *arguments, keys)
    assert (table.capacity, table.size) == (1 << 11, 1000)
    check_rows(table.export_batch(table.capacity))


def test_capacities_are_rounded_to_whole_buckets(backend):
    table = make(backend, 3 * BUCKET - 5, max_capacity=13 * BUCKET)
    assert (table.capacity, table.max_capacity) == (3 * BUCKET, 12 * BUCKET)
    keys = np.arange(12 * BUCKET)
    table.insert_or_assign(keys, rows_of(keys), keys)
    assert table.capacity == 12 * BUCKET
    check_rows(table.export_batch(table.capacity))


def test_a_table_that_may_not_grow_evicts(backend):
    table, keys = make(backend, BUCKET), np.arange(1000)
    table.insert_or_assign(keys, rows_of(keys), keys)
    assert (table.capacity, table.max_capacity) == (BUCKET, BUCKET)
    assert sorted(everything(table)) == [*range(1000 - BUCKET, 1000)]


def test_max_capacity_may_be_raised(backend):
    """HierarchicalKV's dynamic_max_capacity: insert until full, double the limit, and so on."""
    table, evicted, at = make(backend, 1 << 10, max_capacity=1 << 11), {}, 0
    for limit in (1 << 12, 1 << 13, 1 << 14):
        while table.load_factor < 0.98:
            keys = np.arange(at, at + 1000)
            out = table.insert_and_evict(keys, rows_of(keys), keys)
            check_rows(out)
            evicted.update(zip(out.keys.tolist(), out.scores.tolist(), strict=True))
            at += 1000
        assert table.capacity * 2 == limit
        in_one_memory = backend != "cuda, half"
        if in_one_memory:
            rows, numbers = table.rows, table.find_rows(keys)
        table.max_capacity = limit
        table.reserve(limit)
        assert table.capacity == table.max_capacity == limit
        assert table.load_factor <= 0.5
        if in_one_memory:
            assert rows.shape == (limit // 2, DIM)
            assert np.isfinite(rows[numbers[numbers >= 0]]).all()  # valid memory still
    assert {*everything(table)} | {*evicted} == {*range(at)}
    check_rows(table.export_batch(table.capacity))


def test_a_reserve_beyond_max_capacity_is_refused(backend):
    table, keys = make(backend, BUCKET, max_capacity=4 * BUCKET), np.arange(10)
    table.insert_or_assign(keys, rows_of(keys), keys)
    with pytest.raises(
        BadRequest, match=r"reserve of 513 slots .* to 1024, but max_capacity is 512"
    ):
        table.reserve(513)
    assert (table.capacity, table.size) == (BUCKET, 10)
    table.reserve(0)
    table.reserve(BUCKET + 1)
    assert table.capacity == 2 * BUCKET
    with pytest.raises(BadRequest, match=r"max_capacity of 255 is less than the present .* 256"):
        table.max_capacity = 255


def test_growth_beyond_memory_is_refused_before_anything_changes(backend, monkeypatch):
    table, keys = make(backend, BUCKET, max_capacity=1 << 12), np.arange(50)
    table.insert_or_assign(keys, rows_of(keys), keys)
    for each in (memory.HostMemory, memory.DeviceMemory):
        monkeypatch.setattr(each, "free_bytes", lambda _self: 1000)
    before = everything(table)
    more = np.arange(40, 140)
    for write in (table.insert_or_assign, table.insert_and_evict, table.find_or_insert):
        with pytest.raises(ConfigError, match=r"from 128 to 512 slots needs \d+ bytes .* 1000 are"):
            write(more, rows_of(more), more)
    with pytest.raises(ConfigError, match="needs"):
        table.reserve(200)
    with pytest.raises(ConfigError, match=r"max_capacity of 8192, .* needs \d+ bytes .* 1000 are"):
        table.max_capacity = 1 << 13
    assert everything(table) == before
    assert (table.capacity, table.max_capacity) == (BUCKET, 1 << 12)
    with pytest.raises(ConfigError, match="from 0 to 128 slots needs"):
        make(backend, BUCKET)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init_capacity": 0}, "init_capacity is 0, but"),
        ({"max_capacity": 100}, "max_capacity is 100, less than init_capacity, 128"),
        ({"max_load_factor": 0}, "max_load_factor is 0, but"),
        ({"max_load_factor": 1.5}, "max_load_factor is 1.5, but"),
        ({"dim": 0}, "dim is 0, but"),
        ({"dtype": complex}, "dtype is complex128, but rows are"),
        ({"dtype": ">f4"}, "dtype is >f4, but rows are"),
        ({"key_dtype": np.int32}, "key_dtype is int32, but keys are int64 or uint64"),
        ({"policy": "fifo"}, "policy is 'fifo', but must be one of lru, lfu"),
        ({"backend": "tpu"}, "backend is 'tpu', but must be one of cpu, twin, cuda"),
        ({"max_capacity": 1 << 60}, "is more than a table has"),
        ({"device_share": 0.3}, "device_share is 0.3, but must be a multiple of 1/8"),
        ({"device_share": 1.125}, "device_share is 1.125, but must be a multiple of 1/8"),
        ({"device_share": 0.5, "backend": "cpu"}, "but backend cpu has all rows in host memory"),
    ],
)
def test_invalid_options_are_refused(backend, options, message):
    backend = backend.partition(",")[0]
    options = {"dim": DIM, "init_capacity": BUCKET, "backend": backend, **options}
    with pytest.raises(ConfigError, match=message):
        Table(**options)


def test_growth_that_memory_refuses_leaves_the_table(backend, monkeypatch):
    if backend != "twin":
        pytest.skip("only the twin can be made to fail")

    def fail(_table):
        raise MemoryError("none left")

    table, keys = make(backend, BUCKET, max_capacity=1 << 12), np.arange(50)
    table.insert_or_assign(keys, rows_of(keys), keys)
    before = everything(table)
    monkeypatch.setattr(twin_scored.ScoredTable, "_double", fail)
    with pytest.raises(ConfigError, match=r"from 128 to 256 slots needs more memory .* none left"):
        table.reserve(200)
    assert everything(table) == before
