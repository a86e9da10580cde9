"""Capacity plans of the GPU cache; needs no GPU."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hps.cuda import layout
from hps.cuda.launch import windows_of
from hps.cuda.layout import MOST_ROOMY_LOAD, ROOMY_LOAD, EvictionPolicy
from hps.errors import ConfigError
from hps.tiers.gpu.plan import (
    GpuTableRequest,
    check_fits,
    check_pinned,
    device_bytes,
    host_bytes_of,
    plan_gpu,
)
from hps.types import EmbeddingTable

SMALL, LARGE = EmbeddingTable.make("small", 8), EmbeddingTable.make("large", 64)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 300)), min_size=1, max_size=6),
    st.integers(0, 1 << 28),
    st.integers(0, 1 << 24),
)
def test_plan_fits_and_leaves_little_unused(sizes, capacity, host):
    tables = {EmbeddingTable.make(f"t{i}", d): GpuTableRequest(n) for i, (n, d) in enumerate(sizes)}
    plan = plan_gpu(tables, capacity_bytes=capacity, host_bytes=host)
    assert device_bytes(plan) <= capacity
    assert host_bytes_of(plan) <= host
    full_plan = all(p.rows >= (tables[t].table_rows or 1) for t, p in plan.items())
    # A table's least size can't be divided, nor can a row.
    floor = sum(200_000 + 1100 * table.row_bytes for table in tables)
    assert full_plan or device_bytes(plan) >= min(capacity, 0.98 * capacity - floor)


def test_own_shares_and_rows_take_precedence():
    tables = {SMALL: GpuTableRequest(10_000, rows=500), LARGE: GpuTableRequest(10_000, share=0.25)}
    plan = plan_gpu(tables, capacity_bytes=0, share=0.9)
    assert [place.rows for place in plan.values()] == [500, 2500]
    assert plan_gpu({SMALL: GpuTableRequest(10_000, rows=0)}, capacity_bytes=1)[SMALL].rows == 0
    assert (
        plan_gpu({SMALL: GpuTableRequest(10_000)}, capacity_bytes=0, share=0.9)[SMALL].rows == 9000
    )
    assert plan_gpu({SMALL: GpuTableRequest(0)}, capacity_bytes=0, share=1.0)[SMALL].rows == 1024


def test_pinned_memory_is_split_in_proportion():
    tables = {SMALL: GpuTableRequest(100_000), LARGE: GpuTableRequest(100_000)}
    plan = plan_gpu(tables, capacity_bytes=1 << 30, host_bytes=100_000 * 144)
    assert [place.host_rows for place in plan.values()] == [50_000, 50_000]
    plan = plan_gpu(tables, capacity_bytes=1 << 30, host_bytes=1 << 40)
    assert [place.host_rows for place in plan.values()] == [100_000, 100_000]


def test_ample_memory_gives_every_row_a_slot():
    """With capacity_bytes, a share of 1, or a capacity of the table's own."""
    for requests, sizes in [
        ({SMALL: GpuTableRequest(10_000)}, {"capacity_bytes": 1 << 30}),
        ({SMALL: GpuTableRequest(10_000)}, {"capacity_bytes": 0, "share": 1.0}),
        ({SMALL: GpuTableRequest(10_000, rows=10_000)}, {"capacity_bytes": 0, "share": 0.1}),
        ({SMALL: GpuTableRequest(10_000, share=1.0)}, {"capacity_bytes": 0, "share": 0.1}),
        (
            {SMALL: GpuTableRequest(10_000, share=1.0), LARGE: GpuTableRequest(10**6)},
            {"capacity_bytes": 1 << 26},
        ),
    ]:
        plan = plan_gpu(requests, **sizes)
        assert (plan[SMALL].rows, plan[SMALL].load) == (10_000, ROOMY_LOAD)
        assert plan[SMALL].shape(SMALL).capacity == 10_000
    assert plan[LARGE].load == 1


def test_less_memory_gives_fewer_slots_and_then_fewer_rows():
    tables = {LARGE: GpuTableRequest(100_000)}
    sizes = range(27_000_000, 32_000_000, 250_000)
    plans = [plan_gpu(tables, capacity_bytes=size)[LARGE] for size in sizes]
    loads = [place.load for place in plans if place.rows == 100_000]
    assert all(place.load == 1 for place in plans if place.rows < 100_000)
    assert 1 < len(loads) < len(plans)
    assert loads == sorted(loads, reverse=True)
    assert loads[-1] == ROOMY_LOAD
    assert any(ROOMY_LOAD < load < MOST_ROOMY_LOAD for load in loads)


def test_free_memory_bounds_the_slots_but_not_the_rows():
    tables = {LARGE: GpuTableRequest(100_000)}
    loads = [
        plan_gpu(tables, capacity_bytes=0, share=1.0, free_bytes=free)[LARGE].load
        for free in (1 << 30, 33_000_000, 1000)
    ]
    assert loads[0] == ROOMY_LOAD < loads[1] < loads[2] == 1


def test_static_tables_are_complete_and_on_device():
    tables = {SMALL: GpuTableRequest(10_000, static=True), LARGE: GpuTableRequest(10_000)}
    plan = plan_gpu(tables, capacity_bytes=2 << 20, host_bytes=1 << 20)
    assert (plan[SMALL].rows, plan[SMALL].host_rows, plan[SMALL].static) == (10_000, 0, True)
    assert not plan[LARGE].static
    assert plan[LARGE].policy is EvictionPolicy.LRU
    empty = plan_gpu({SMALL: GpuTableRequest(0, static=True)}, capacity_bytes=1 << 20)
    assert (empty[SMALL].rows, empty[SMALL].static) == (0, False)


def test_static_table_is_in_pinned_memory_as_a_whole_if_it_has_room():
    tables = {LARGE: GpuTableRequest(100_000, static=True)}
    plan = plan_gpu(tables, capacity_bytes=6 << 20, host_bytes=100_000 * 256)
    place, shape = plan[LARGE], plan[LARGE].shape(LARGE)
    assert (place.rows, place.host_rows, place.static) == (100_000, 100_000, True)
    assert shape.host_bytes == host_bytes_of(plan) == 25_600_000
    assert device_bytes(plan) < 60 * 100_000
    with pytest.raises(
        ConfigError, match=r"put rows into pinned host memory \(tiers.gpu.host_bytes\)"
    ):
        plan_gpu(tables, capacity_bytes=6 << 20)
    half = plan_gpu(tables, capacity_bytes=20 << 20, host_bytes=50_000 * 256)
    assert (half[LARGE].rows, half[LARGE].host_rows) == (100_000, 50_000)


def test_static_table_of_100_gb_takes_its_keys_on_the_device():
    """Row numbers, windows and sizes fit their fields."""
    rows = 400_000_000
    plan = plan_gpu(
        {LARGE: GpuTableRequest(rows, static=True)}, capacity_bytes=24 << 30, host_bytes=110 << 30
    )
    shape = plan[LARGE].shape(LARGE)
    assert shape.host_bytes == 256 * rows > 100 * 10**9
    assert 48 * rows < device_bytes(plan) < 52 * rows
    assert shape.rows < layout.ROW_MASK
    assert 100 < windows_of(shape.host_bytes, 1 << 20) < 1 << 16
    with pytest.raises(ConfigError, match=r"needs 102,400,000,000 bytes of pinned host memory"):
        check_pinned(plan, 1, 64 << 30)


def test_pinned_memory_has_rows_of_static_tables_only_if_the_others_leave_some():
    tables = {SMALL: GpuTableRequest(100_000, static=True), LARGE: GpuTableRequest(100_000)}
    sizes = {"capacity_bytes": 1 << 30}
    all_of_large = 100_000 * 256
    for host_bytes, expected in [
        (all_of_large // 2, [0, 50_000]),
        (all_of_large, [0, 100_000]),
        (all_of_large + 50_000 * 32, [50_000, 100_000]),
        (1 << 40, [100_000, 100_000]),
    ]:
        plan = plan_gpu(tables, host_bytes=host_bytes, **sizes)
        assert [place.host_rows for place in plan.values()] == expected


def test_settings_beyond_capacity_are_rejected_with_both_sizes():
    with pytest.raises(ConfigError, match=r"take [\d,]+ bytes .*capacity_bytes is 1,000;"):
        plan_gpu({SMALL: GpuTableRequest(10_000, static=True)}, capacity_bytes=1000)


def test_error_names_free_bytes():
    plan = plan_gpu(
        {SMALL: GpuTableRequest(10**6, static=True), LARGE: GpuTableRequest(10)},
        capacity_bytes=1 << 30,
    )
    needed = f"{device_bytes(plan):,}"
    with pytest.raises(ConfigError, match=f"needs {needed} bytes on GPU 3, and 5,000 are free"):
        check_fits(plan, 5000, 3)
    check_fits(plan, device_bytes(plan), 0)


def test_float16_rows_take_half_the_bytes():
    half = EmbeddingTable.make("half", 64, dtype=np.float16)
    locations = [
        plan_gpu({t: GpuTableRequest(10**7)}, capacity_bytes=1 << 28)[t].rows for t in (half, LARGE)
    ]
    assert 1.6 < locations[0] / locations[1] < 2


def test_pinned_memory_of_all_tables_and_gpus_must_fit_on_the_host():
    """Each table alone would fit, and each GPU alone."""
    tables = {SMALL: GpuTableRequest(100_000), LARGE: GpuTableRequest(100_000)}
    plan = plan_gpu(tables, capacity_bytes=1 << 30, host_bytes=20_000_000)
    each = host_bytes_of(plan)
    assert 19_000_000 < each <= 20_000_000
    check_pinned(plan, 1, 22_000_000)
    check_pinned(plan, 2, 44_000_000)
    with pytest.raises(
        ConfigError,
        match=rf"needs {2 * each:,} bytes of pinned host memory \({each:,} for each of 2 GPUs\), and "
        r"32,000,000 are available on the host. Lower tiers.gpu.host_bytes to at most 15,200,000",
    ):
        check_pinned(plan, 2, 32_000_000)
    fitting = plan_gpu(tables, capacity_bytes=1 << 30, host_bytes=15_200_000)
    check_pinned(fitting, 2, 32_000_000)
