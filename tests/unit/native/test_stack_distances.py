"""Stack distances: the compiled ones equal their twin's and those of an LRU list."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hps import native
from hps.native import twin

KERNELS = (
    [native.stack_distances, twin.stack_distances] if native.COMPILED else [twin.stack_distances]
)


def of_a_list(ids):
    """The distances by an LRU list, in O(n²)."""
    held, distances = [], []
    for each in ids:
        distances.append(held.index(each) + 1 if each in held else -1)
        if each in held:
            held.remove(each)
        held.insert(0, each)
    return distances


@pytest.mark.parametrize("kernel", KERNELS)
@given(st.lists(st.integers(0, 12), max_size=80))
def test_distances_are_positions_in_an_lru_list(kernel, accesses):
    ids, distinct = np.array(accesses, np.int64), len(set(accesses))
    ids = np.unique(ids, return_inverse=True)[1].astype(np.int64)
    assert kernel(ids, distinct).tolist() == of_a_list(ids.tolist())


@pytest.mark.skipif(not native.COMPILED, reason="the native core is not built")
def test_large_trace_equals_the_twins():
    ids = native.dedup(np.random.default_rng(1).zipf(1.2, 30_000).astype(np.int64))[1]
    distinct = int(ids.max()) + 1
    assert (native.stack_distances(ids, distinct) == twin.stack_distances(ids, distinct)).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_ids_outside_their_range_are_rejected(kernel):
    for ids in ([0, 2], [-1, 0]):
        with pytest.raises(IndexError, match="outside"):
            kernel(np.array(ids), 2)
    with pytest.raises(ValueError, match="distinct"):
        kernel(np.zeros(2, np.int64), 3)
