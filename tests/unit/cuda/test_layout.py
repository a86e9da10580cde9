"""Layout of a table on the device: constants, sizes, hashes."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hps.cuda import launch, layout, loader
from hps.errors import ConfigError
from hps.types import EmbeddingTable

HEADER = (loader.FOLDER / "hash_table.cuh").read_text()
SHARED = [
    *("WAYS", "HALF", "BUCKET_BYTES", "SLOT_BYTES", "EMPTY", "TOMBSTONE", "CLAIMED", "ROW_MASK"),
    *("NO_ROW", "MEMBERS", "COUNT_BITS", "POLICY_BITS"),
]
INT64 = st.integers(-(2**63), 2**63 - 1)


def header_constants():
    values = {}
    for name, text in re.findall(r"^constexpr \w+ (\w+) = ([^;]+);", HEADER, re.M):
        values[name] = eval(re.sub(r"\b(0x[0-9a-f]+|\d+)u\b", r"\1", text), {}, values)
    return values


def test_header_constants_equal_layout_constants():
    header = header_constants()
    assert {name: header[name] for name in SHARED} == {n: getattr(layout, n) for n in SHARED}
    assert header["BLOCK"] == loader.BLOCK
    for policy in layout.EvictionPolicy:
        assert header[policy.rule.name] == policy.rule


def test_bucket_is_128_bytes_and_slot_is_16():
    assert layout.SLOT.itemsize == layout.SLOT_BYTES == 16
    assert layout.BUCKET_BYTES == 128 == layout.WAYS * layout.SLOT_BYTES
    assert [layout.SLOT.fields[name][1] for name in ("key", "word", "score")] == [0, 8, 12]


@pytest.mark.parametrize(
    ("file", "struct", "dtype"),
    [
        ("fetch.cu", "FetchPart", launch.FETCH_PART),
        ("write.cu", "WriteArgs", launch.WRITE_ARGS),
        ("scan.cu", "ScanArgs", launch.SCAN_ARGS),
        ("pool.cuh", "PoolPart", launch.POOL_PART),
        ("pool.cu", "BagsPart", launch.BAGS_PART),
        ("scatter.cu", "ScatterPart", launch.SCATTER_PART),
        ("partition.cu", "PartitionArgs", launch.PARTITION_ARGS),
    ],
)
def test_argument_structs_match_their_numpy_dtypes(file, struct, dtype):
    """Check names, order and widths of the fields; nvcc checks the total size."""
    body = re.search(rf"struct {struct} {{(.*?)}};", (loader.FOLDER / file).read_text(), re.S)[1]
    fields = re.findall(r"^ +([^;/]*?)(\w+);", body, re.M)
    assert [name for _, name in fields] == list(dtype.names)
    widths = [8 if "*" in kind or kind.strip() == "u64" else 4 for kind, _ in fields]
    assert widths == [dtype[name].itemsize for name in dtype.names]


def test_combiners_have_the_codes_of_the_kernels():
    names = re.search(r"enum Combiner : u32 {(.*?)}", (loader.FOLDER / "pool.cuh").read_text())[1]
    codes = {name.strip().lower(): code for code, name in enumerate(names.split(","))}
    assert codes | {"none": codes["sum"]} == launch.COMBINERS


@given(st.lists(INT64, min_size=1, max_size=50), st.integers(layout.MIN_BUCKETS, 2**26))
def test_key_has_four_halves_in_two_buckets(keys, buckets):
    halves = layout.half_buckets(np.array(keys, np.int64), buckets)
    assert (halves >= 0).all()
    assert (halves < 2 * buckets).all()
    both = halves // 2
    assert (both[:, 0] == both[:, 1]).all()
    assert (both[:, 2] == both[:, 3]).all()
    assert (both[:, 0] != both[:, 2]).all()
    assert (halves[:, 0] != halves[:, 1]).all()
    assert (halves[:, 2] + 1 == halves[:, 3]).all()


def test_hash_spreads_keys_evenly_over_halves():
    halves = layout.half_buckets(np.arange(-50_000, 50_000), 500)
    for choice in (0, 1):
        load = np.bincount(halves[:, choice], minlength=1000)
        assert load.min() > 50
        assert load.max() < 160
    assert np.bincount(halves[:, 2] // 2, minlength=500).min() > 120


@pytest.mark.parametrize(("dim", "dtype", "stride"), [(3, "f2", 32), (8, "f4", 32), (9, "f4", 64)])
def test_row_stride_is_a_multiple_of_the_sector(dim, dtype, stride):
    table = EmbeddingTable.make("t", dim, dtype=dtype)
    assert layout.plan_table_shape(table, 1000).stride == stride


@given(st.integers(1, layout.MAX_ROWS))
def test_capacity_is_rounded_up_to_whole_buckets(capacity):
    shape = layout.plan_table_shape(EmbeddingTable.make("t", 8), capacity)
    assert shape.capacity >= capacity
    assert shape.capacity - capacity < layout.WAYS or shape.buckets == layout.MIN_BUCKETS


@given(st.integers(1, layout.MAX_ROWS), st.floats(layout.ROOMY_LOAD, layout.MOST_ROOMY_LOAD))
def test_roomy_table_has_more_slots_and_hardly_more_rows(capacity, load):
    shape = layout.plan_table_shape(EmbeddingTable.make("t", 8), capacity, load=load)
    assert shape.roomy
    assert shape.capacity == capacity
    assert shape.slots * load >= capacity
    assert shape.rows <= layout.ROW_MASK
    assert shape.rows >= capacity + 2 * shape.batch
    assert shape.rows <= 1.04 * capacity + 2 * layout.MIN_ROOMY_BATCH
    assert abs(shape.load - load) < 0.01 or capacity < 10_000


def test_separate_scores_take_eight_bytes_per_slot():
    table = EmbeddingTable.make("t", 8)
    plain, scored = (
        layout.plan_table_shape(table, 1000, scored=scored) for scored in (False, True)
    )
    assert scored.bytes == plain.bytes + 8 * plain.slots
    assert layout.fitting_capacity(table, scored.bytes, scored=True) == plain.slots


@pytest.mark.parametrize("now", [1, 100, 2**31, 2**32 - 3, 0])
def test_eviction_ranks_keep_their_order_when_scores_wrap(now):
    past = np.array([2**30, 1000, 8, 1, 0, -1])  # ticks ago; -1 comes from a clock read later
    ranks = layout.eviction_ranks((now - past) & layout.SCORE_MASK, now)
    assert (np.diff(ranks) > 0).all()
    assert layout.eviction_ranks(now, now) == ranks[4]


def test_capacity_beyond_29_bit_row_numbers_is_rejected():
    table = EmbeddingTable.make("t", 8)
    with pytest.raises(ConfigError, match=r"at most .* Lower its gpu_rows or gpu_share"):
        layout.plan_table_shape(table, 2**30)


@pytest.mark.parametrize("free", [0, 100, 10**6, 10**9, 10**11, 10**13])
def test_fitting_capacity_is_the_largest_that_fits(free):
    table = EmbeddingTable.make("t", 16)
    rows = layout.fitting_capacity(table, free)
    assert rows == 0 or layout.plan_table_shape(table, rows).bytes <= free
    assert rows == layout.MAX_ROWS or layout.plan_table_shape(table, rows + 1).bytes > free


@pytest.mark.parametrize(
    ("sizes", "unit"),
    [(128, 16), (128 | 8, 4), (12, 4), (6, 2), (128 | 2, 2), (512 | 256, 16), (9, 1), (128 | 5, 1)],
)
def test_copy_unit_is_the_widest_that_divides_all_sizes(sizes, unit):
    assert launch.unit_of(sizes) == unit


def test_large_pinned_memory_is_read_in_windows():
    window, keys = 1 << layout.WINDOW_SHIFT, layout.KEYS_A_WINDOW
    assert [launch.windows_of(size, 1 << 20) for size in (0, window, window + 1)] == [1, 1, 2]
    assert [launch.windows_of(3 * window, n) for n in (3 * keys - 1, 3 * keys)] == [1, 3]


def test_blocks_cover_all_keys():
    for tile in (1, 2, 4, 8):
        for n in (1, 63, 64, 65, 1000):
            blocks = launch.blocks_of(n, tile)
            assert (blocks - 1) * loader.BLOCK < n * tile <= blocks * loader.BLOCK


@pytest.mark.parametrize(
    ("row_bytes", "unit", "units"),
    [
        (32, 16, 2),
        (128, 16, 8),
        (512, 16, 32),
        (48, 16, 0),
        (128, 4, 0),
        (1024, 16, 0),
        (132, 4, 33),
        (36, 4, 9),
    ],
)
def test_common_row_sizes_are_copied_without_a_loop(row_bytes, unit, units):
    assert launch.units_of(row_bytes, unit) == units
