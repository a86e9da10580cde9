"""Counting of values in a histogram's buckets: the compiled one equals its twin."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hps import native
from hps.native import twin
from hps.observability.metric_spec import SCORE_BUCKETS

COUNTS = (
    [native.count_in_buckets, twin.count_in_buckets] if native.COMPILED else [twin.count_in_buckets]
)
EDGES = np.array(SCORE_BUCKETS)


def counted(count, values, edges=EDGES):
    counts, sums = np.zeros(len(edges) + 1, np.int64), np.zeros(2)
    count(values, edges, counts, sums)
    return counts.tolist(), sums.tolist()


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_each_value_is_in_its_bucket(count, dtype, data):
    finite = st.one_of(
        st.sampled_from(SCORE_BUCKETS), st.floats(-20, 20, width=np.dtype(dtype).itemsize * 8)
    )
    values = data.draw(arrays.arrays(dtype, st.integers(0, 40), elements=finite.map(dtype)))
    counts, sums = counted(count, values)
    buckets = np.searchsorted(EDGES, values.astype(np.float64))
    assert counts == np.bincount(buckets, minlength=len(EDGES) + 1).tolist()
    wide = values.astype(np.float64)
    assert sums == pytest.approx([wide[wide > 0].sum(), wide[wide <= 0].sum()])


@pytest.mark.parametrize("count", COUNTS)
def test_counts_add_up_over_blocks_and_calls(count):
    values = np.random.default_rng(0).normal(0.3, 1, 5_000).astype(np.float32)
    counts, sums = np.ones(len(EDGES) + 1, np.int64), np.ones(2)
    for part in (values[:17], values[17:3_000], values[3_000:]):
        count(part, EDGES, counts, sums)
    whole, total = counted(twin.count_in_buckets, values)
    assert (counts - 1).tolist() == whole
    assert (sums - 1).tolist() == pytest.approx(total)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("counts", "sums"), [(2, 2), (4, 2), (3, 1)])
def test_arrays_of_other_sizes_are_rejected(count, counts, sums):
    with pytest.raises(ValueError, match="one more than bounds"):
        count(np.zeros(1), np.array([0.0, 1.0]), np.zeros(counts, np.int64), np.zeros(sums))
