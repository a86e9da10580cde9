"""The layout of a table on the device: constants, sizes, hashes."""

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
    *("WAYS", "BUCKET_BYTES", "WORDS_AT", "STAMPS_AT", "STAMP_BITS", "AGES", "EMPTY", "TOMBSTONE"),
    *("CLAIMED", "ROW_MASK", "NO_ROW", "PREFER", "MARGIN"),
]
INT64 = st.integers(-(2**63), 2**63 - 1)


def constants_of_the_header():
    values = {}
    for name, text in re.findall(r"^constexpr \w+ (\w+) = ([^;]+);", HEADER, re.M):
        values[name] = eval(re.sub(r"\b(0x[0-9a-f]+|\d+)u\b", r"\1", text), {}, values)
    return values


def test_the_header_repeats_the_constants():
    header = constants_of_the_header()
    assert {name: header[name] for name in SHARED} == {n: getattr(layout, n) for n in SHARED}
    assert header["BLOCK"] == loader.BLOCK


def test_a_bucket_is_one_line():
    assert layout.BUCKET.itemsize == layout.BUCKET_BYTES
    assert layout.BUCKET.fields["words"][1] == layout.WORDS_AT
    assert layout.BUCKET.fields["stamps"][1] == layout.STAMPS_AT
    assert layout.WAYS * layout.STAMP_BITS <= 64


@pytest.mark.parametrize(
    ("file", "struct", "dtype"),
    [
        ("fetch.cu", "FetchPart", launch.FETCH_PART),
        ("write.cu", "WriteArgs", launch.WRITE_ARGS),
        ("scan.cu", "ScanArgs", launch.SCAN_ARGS),
    ],
)
def test_argument_structs_have_the_same_fields(file, struct, dtype):
    """Same names, same order, same width; nvcc checks the total."""
    body = re.search(rf"struct {struct} {{(.*?)}};", (loader.FOLDER / file).read_text(), re.S)[1]
    fields = re.findall(r"^ +([^;/]*?)(\w+);", body, re.M)
    assert [name for _, name in fields] == list(dtype.names)
    widths = [8 if "*" in kind or kind.strip() == "u64" else 4 for kind, _ in fields]
    assert widths == [dtype[name].itemsize for name in dtype.names]


@given(st.lists(INT64, min_size=1, max_size=50), st.integers(layout.MIN_BUCKETS, 2**27))
def test_a_key_has_two_different_buckets(keys, buckets):
    both = layout.buckets_of(np.array(keys, np.int64), buckets)
    assert (both >= 0).all()
    assert (both < buckets).all()
    assert (both[:, 0] != both[:, 1]).all()


def test_buckets_are_filled_evenly():
    both = layout.buckets_of(np.arange(-50_000, 50_000), 1000)
    for choice in both.T:
        load = np.bincount(choice, minlength=1000)
        assert load.min() > 50
        assert load.max() < 160


@given(st.integers(layout.MIN_BUCKETS, 5000))
def test_fillers_belong_to_other_buckets(buckets):
    keys = layout.fillers(buckets)
    assert keys.shape == (buckets,)
    assert (layout.buckets_of(keys, buckets) != np.arange(buckets)[:, None]).all()


@pytest.mark.parametrize(("dim", "dtype", "stride"), [(3, "f2", 32), (8, "f4", 32), (9, "f4", 64)])
def test_rows_share_no_sector(dim, dtype, stride):
    table = EmbeddingTable.make("t", dim, dtype=dtype)
    assert layout.shape_of(table, 1000).stride == stride


@given(st.integers(1, 10**9))
def test_capacity_is_rounded_up_to_buckets(capacity):
    shape = layout.shape_of(EmbeddingTable.make("t", 8), capacity)
    assert shape.capacity >= capacity
    assert shape.capacity - capacity < layout.WAYS or shape.buckets == layout.MIN_BUCKETS


def test_rows_that_cannot_be_numbered_are_refused():
    table = EmbeddingTable.make("t", 8)
    with pytest.raises(ConfigError, match="at most"):
        layout.shape_of(table, 2**30)


@pytest.mark.parametrize("free", [0, 100, 10**6, 10**9, 10**11, 10**13])
def test_the_fitting_capacity_fits_and_no_more_would(free):
    table = EmbeddingTable.make("t", 16)
    rows = layout.fitting_capacity(table, free)
    assert rows == 0 or layout.shape_of(table, rows).bytes <= free
    assert rows == layout.MAX_ROWS or layout.shape_of(table, rows + 1).bytes > free


@pytest.mark.parametrize(
    ("row_bytes", "pointers", "unit"),
    [(128, [], 16), (128, [8], 4), (12, [], 4), (6, [], 2), (128, [2], 2)],
)
def test_copies_use_the_widest_unit_that_divides(row_bytes, pointers, unit):
    assert launch.unit_of(row_bytes, pointers) == unit


def test_blocks_cover_all_keys():
    for tile in (1, 2, 4, 8):
        for n in (1, 63, 64, 65, 1000):
            blocks = launch.blocks_of(n, tile)
            assert (blocks - 1) * loader.BLOCK < n * tile <= blocks * loader.BLOCK


@pytest.mark.parametrize(
    ("row_bytes", "tile", "unit", "moves"),
    [
        (128, 8, 16, 1),
        (512, 8, 16, 4),
        (256, 4, 16, 4),
        (48, 4, 16, 0),
        (128, 8, 4, 0),
        (32, 4, 16, 0),
    ],
)
def test_threads_move_alike_or_in_a_loop(row_bytes, tile, unit, moves):
    assert launch.moves_of(row_bytes, tile, unit) == moves
