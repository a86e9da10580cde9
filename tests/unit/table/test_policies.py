"""Scores of each policy, bit for bit as HierarchicalKV defines them, and what is evicted."""

import numpy as np
import pytest

from hps.errors import BadRequest
from tests.support.tables import BACKENDS, BUCKET, Clock, everything, make, rows_of

pytestmark = pytest.mark.parametrize("backend", BACKENDS)
MOST = 2**64 - 1


def scores(table, *keys):
    return table.find(keys, with_scores=True).scores.tolist()


def test_lru_scores_are_nanoseconds_of_the_last_write(backend):
    clock = Clock()
    table = make(backend, policy="lru", clock=clock)
    keys = np.arange(BUCKET)
    table.insert_or_assign(keys, rows_of(keys))
    assert {*scores(table, *keys)} == {clock.now}
    clock.now += 10
    table.find(keys)  # no use
    table.find_or_insert([0], rows_of([0]))
    table.assign([1], rows_of([1]))
    table.assign_scores([2])
    table.accum_or_assign([3], rows_of([3]), [True])
    table.assign_values([4], rows_of([4]))  # keeps its score
    table.accum_or_assign([5], rows_of([5]), [False])  # contradicts the table: no change
    assert scores(table, 0, 1, 2, 3, 4, 5) == [clock.now] * 4 + [clock.now - 10] * 2
    clock.now += 10
    new = np.arange(1000, 1000 + BUCKET - 4)
    evicted = table.insert_and_evict(new, rows_of(new))
    assert {*evicted.keys.tolist()} == {*range(4, BUCKET)}
    assert {0, 1, 2, 3} < {*everything(table)}


def test_a_clock_that_is_set_back_does_not_refuse_new_rows(backend):
    clock = Clock()
    table, keys = make(backend, policy="lru", clock=clock), np.arange(BUCKET)
    table.insert_or_assign(keys, rows_of(keys))
    before, clock.now = clock.now, clock.now - 10**9
    table.insert_or_assign([500], rows_of([500]))
    assert scores(table, 500) == [before]


def test_lfu_scores_are_sums_of_the_callers(backend):
    table = make(backend, policy="lfu")
    keys = np.arange(BUCKET)
    table.insert_or_assign(keys, rows_of(keys), keys + 10)
    table.insert_or_assign([72, 73, 72], rows_of([72, 73, 72]), [5, 6, 7])
    assert scores(table, 71, 72, 73) == [81, 82 + 12, 83 + 6]
    table.assign_scores([5])  # 1 without scores
    table.find_or_insert([6], rows_of([6]), [MOST - 3])
    assert scores(table, 5, 6) == [16, MOST]  # no overflow
    # A new row is admitted however low its score.
    assert table.insert_and_evict([500], rows_of([500]), [1]).keys.tolist() == [0]
    assert scores(table, 500) == [1]
    assert table.insert_and_evict([501], rows_of([501]), [2]).keys.tolist() == [500]


def test_epoch_lru_scores_are_the_epoch_and_milliseconds(backend):
    clock = Clock()
    table = make(backend, policy="epoch_lru", clock=clock)
    keys = np.arange(BUCKET)
    table.epoch = 7
    table.insert_or_assign(keys, rows_of(keys))
    first = 7 << 32 | (clock.now >> 20) & 0xFFFFFFFF
    assert {*scores(table, *keys)} == {first}
    clock.now += 3 << 20
    table.assign_scores([0])
    assert scores(table, 0) == [first + 3]
    table.epoch, clock.now = 8, (500 << 32 | 5) << 20  # only 32 bits of the ticks count
    table.find_or_insert([1], rows_of([1]))
    assert scores(table, 1) == [8 << 32 | 5]
    clock.now += 5 << 20
    new = np.arange(1000, 1000 + BUCKET - 2)
    evicted = table.insert_and_evict(new, rows_of(new))
    assert {*evicted.keys.tolist()} == {*range(2, BUCKET)}
    table.epoch = 3  # older than all: not admitted
    assert table.insert_and_evict([2000], rows_of([2000])).keys.tolist() == [2000]


def test_epoch_lfu_scores_are_the_epoch_and_a_sum_of_32_bits(backend):
    table = make(backend, policy="epoch_lfu")
    keys = np.arange(BUCKET)
    table.epoch = 100
    table.insert_or_assign(keys, rows_of(keys), keys + (9 << 40))  # its low 32 bits count
    assert scores(table, 5, 6) == [100 << 32 | 5, 100 << 32 | 6]
    table.epoch = 101
    table.insert_or_assign([5], rows_of([5]), [10])
    table.assign_scores([6, 7, 8], [0xFFFFFFFF, 0xFFFFFFFF - 7, 0xFFFFFFFF - 9])
    table.assign_scores([9])
    high = 101 << 32
    assert scores(table, 5, 6, 7) == [high | 15, high | 0xFFFFFFFF, high | 0xFFFFFFFF]
    assert scores(table, 8, 9, 10) == [high | 0xFFFFFFFF - 1, high | 10, 100 << 32 | 10]
    table.accum_or_assign([5], rows_of([5]), [True], [4])
    assert scores(table, 5) == [high | 19]
    # A row of the new epoch replaces one of an older epoch, whatever its count; an older row none.
    assert table.insert_and_evict([500], rows_of([500]), [0]).keys.tolist() == [0]
    table.epoch = 99
    assert table.insert_and_evict([501], rows_of([501]), [9999]).keys.tolist() == [501]


def test_customized_scores_are_the_callers(backend):
    table = make(backend)
    table.insert_or_assign([1, 2], rows_of([1, 2]), np.array([MOST, 0], np.uint64))
    assert scores(table, 1, 2) == [MOST, 0]
    table.find_or_insert([1], rows_of([1]), np.array([3], np.uint32))
    table.assign_scores([2], np.array([4], np.int64))
    assert scores(table, 1, 2) == [3, 4]


@pytest.mark.parametrize("policy", ["lru", "epoch_lru"])
def test_policies_of_the_clock_refuse_scores(backend, policy):
    table = make(backend, policy=policy)
    for write in (
        table.insert_or_assign,
        table.insert_and_evict,
        table.find_or_insert,
        table.assign,
    ):
        with pytest.raises(BadRequest, match=f"scores were given, but policy {policy} takes none"):
            write([1], rows_of([1]), [1])
    with pytest.raises(BadRequest, match="takes none"):
        table.assign_scores([1], [1])
    with pytest.raises(BadRequest, match="takes none"):
        table.accum_or_assign([1], rows_of([1]), [False], [1])
    assert table.size == 0


def test_customized_needs_scores(backend):
    table = make(backend)
    with pytest.raises(BadRequest, match="no scores were given, but policy customized needs one"):
        table.insert_or_assign([1], rows_of([1]))
    with pytest.raises(BadRequest, match="ignore_evict_strategy stores them"):
        table.insert_or_assign([1], rows_of([1]), ignore_evict_strategy=True)
    assert table.size == 0


@pytest.mark.parametrize("epoch", [-1, 2**32])
def test_epochs_have_32_bits(backend, epoch):
    table = make(backend, policy="epoch_lfu")
    with pytest.raises(BadRequest, match=f"epoch is {epoch}, but must be from 0 to 4294967295"):
        table.epoch = epoch
    assert table.epoch == 0
