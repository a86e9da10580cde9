"""Each operation of `Table` on each backend: the cases of HierarchicalKV's own tests, in our words.

The cases are those of merlin_hashtable_test, insert_and_evict_test, find_or_insert_test,
accum_or_assign_test, assign_score_test, assign_values_test, find_with_missed_keys_test and
reserved_keys_test. A table of one bucket evicts exactly.
"""

import numpy as np
import pytest

from hps.errors import BadRequest
from tests.support.tables import (
    BACKENDS,
    BUCKET,
    DIM,
    POLICIES,
    check_rows,
    everything,
    make,
    rows_of,
    scores_for,
)

pytestmark = pytest.mark.parametrize("backend", BACKENDS)
RNG = np.random.default_rng(7)


def random_keys(n):
    return np.unique(RNG.integers(-(2**63), 2**63 - 1, 2 * n))[:n]


def filled(backend, n=BUCKET, first_score=1000, **options):
    table = make(backend, **options)
    keys = np.arange(n)
    table.insert_or_assign(keys, rows_of(keys), scores_for(table, first_score + keys))
    return table, keys


def test_rows_inserted_are_found_and_rows_erased_are_not(backend):
    table, keys = make(backend, 1 << 12), random_keys(2000)
    assert (table.size, table.load_factor) == (0, 0.0)
    assert not table.insert_or_assign(keys, rows_of(keys), keys.view(np.uint64)).any()
    assert table.size == 2000
    assert table.load_factor == pytest.approx(2000 / 4096)
    rows, found, scores = table.find(keys, with_scores=True)
    assert found.all()
    np.testing.assert_array_equal(rows, rows_of(keys))
    np.testing.assert_array_equal(scores, keys.view(np.uint64))
    assert table.contains(keys).all()
    assert table.insert_or_assign(keys, rows_of(keys, 1), keys.view(np.uint64)).all()
    np.testing.assert_array_equal(table.find(keys).rows, rows_of(keys, 1))
    assert table.size == 2000
    erased = table.erase(keys[:500])
    assert erased.all()
    assert not table.erase(keys[:500]).any()
    assert table.size == 1500
    assert table.contains(keys).tolist() == [False] * 500 + [True] * 1500
    table.clear()
    assert (table.size, table.capacity) == (0, 4096)
    assert not table.contains(keys).any()


def test_empty_batches_change_nothing(backend):
    table, _ = filled(backend, 5)
    none, rows, scores = (
        np.empty(0, np.int64),
        np.empty((0, DIM), np.float32),
        np.empty(0, np.uint64),
    )
    assert table.find(none).rows.shape == (0, DIM)
    assert table.find_rows([]).shape == table.contains(none).shape == (0,)
    assert table.insert_or_assign(none, rows, scores).shape == (0,)
    assert table.insert_and_evict(none, rows, scores).rows.shape == (0, DIM)
    assert table.find_or_insert(none, rows, scores).rows.shape == (0, DIM)
    assert table.accum_or_assign(none, rows, np.empty(0, bool), scores).shape == (0,)
    assert table.assign(none, rows, scores).shape == table.erase(none).shape == (0,)
    assert table.size == 5


def test_missing_keys_leave_the_callers_array_and_zero_a_new_one(backend):
    table, _ = filled(backend, 3)
    out = np.full((4, DIM), 7, np.float32)
    found = table.find([1, 77, 2, -5], out=out, with_scores=True)
    assert found.rows is out
    assert found.found.tolist() == [True, False, True, False]
    assert found.scores.tolist() == [1001, 0, 1002, 0]
    np.testing.assert_array_equal(out[[0, 2]], rows_of([1, 2]))
    assert (out[[1, 3]] == 7).all()
    assert (table.find([77]).rows == 0).all()


def test_find_in_an_empty_table_and_in_a_full_one(backend):
    keys = np.arange(BUCKET * 3)
    table = make(backend, BUCKET)
    assert not table.find(keys).found.any()
    table.insert_or_assign(keys[:BUCKET], rows_of(keys[:BUCKET]), keys[:BUCKET])
    assert table.load_factor == 1
    assert table.find(keys).found.tolist() == [True] * BUCKET + [False] * 2 * BUCKET


def test_every_64_bit_key_is_a_key(backend):
    """HierarchicalKV reserves some, see its reserved_keys_test."""
    keys = np.array([0, -1, -2, -3, -4, 2**63 - 1, -(2**63), 1 << 62], np.int64)
    table = make(backend, key_dtype=np.uint64)
    table.insert_or_assign(keys, rows_of(keys), np.arange(8))
    assert table.contains(keys.view(np.uint64)).all()
    np.testing.assert_array_equal(table.find(keys).rows, rows_of(keys))
    assert {*table.export_batch(BUCKET).keys.tolist()} == {*keys.view(np.uint64).tolist()}
    assert table.export_batch(BUCKET).keys.dtype == np.uint64


def test_a_full_table_keeps_its_size(backend):
    table, keys = make(backend, 1 << 10), random_keys(4000)
    scores = np.arange(4000)
    table.insert_or_assign(keys, rows_of(keys), scores)
    before = everything(table)
    assert 0.9 * 1024 < table.size <= 1024 == table.capacity
    # Keys that are resident are replaced, so the same batch finds them all.
    resident = np.array([*before])
    table.insert_or_assign(resident, rows_of(resident, 1), [before[k][1] for k in resident])
    assert everything(table).keys() == before.keys()
    np.testing.assert_array_equal(table.find(resident).rows, rows_of(resident, 1))


def test_row_numbers_address_the_rows(backend):
    table, keys = filled(backend, 100, init_capacity=1 << 10)
    numbers = table.find_rows([5, 500, 7])
    assert numbers[1] == -1
    assert len({*table.find_rows(keys).tolist()}) == 100
    if backend == "cuda, half":
        with pytest.raises(BadRequest, match="the rows are in two memories"):
            _ = table.rows
        return
    assert table.rows.shape == (table.capacity, DIM)
    np.testing.assert_array_equal(table.rows[numbers[[0, 2]]], rows_of([5, 7]))
    (table.table if backend == "cuda" else table).rows[numbers[0]] = 3  # in place
    assert (table.find([5]).rows == 3).all()


def test_in_a_batch_the_last_row_of_a_key_wins(backend):
    table = make(backend)
    found = table.insert_or_assign([3, 4, 3], rows_of([1, 2, 5]), [10, 20, 30])
    assert found.tolist() == [False, False, True]
    rows, _, scores = table.find([3, 4], with_scores=True)
    np.testing.assert_array_equal(rows, rows_of([5, 2]))
    assert scores.tolist() == [30, 20]


# -- eviction --------------------------------------------------------------------------------------


def test_the_lowest_score_is_evicted_and_returned(backend):
    table, keys = filled(backend)
    new = 1000 + np.arange(3)
    evicted = table.insert_and_evict(new, rows_of(new), [5000, 5001, 5002])
    order = np.argsort(evicted.scores)
    assert evicted.keys[order].tolist() == [0, 1, 2]
    assert evicted.scores[order].tolist() == [1000, 1001, 1002]
    check_rows(evicted)
    assert {*everything(table)} == {*keys[3:].tolist(), *new.tolist()}


def test_a_lower_score_than_all_is_not_admitted_and_is_returned(backend):
    table, keys = filled(backend)
    evicted = table.insert_and_evict([500, 501], rows_of([500, 501]), [999, 20])
    assert sorted(zip(evicted.keys.tolist(), evicted.scores.tolist(), strict=True)) == [
        (500, 999),
        (501, 20),
    ]
    check_rows(evicted)
    assert {*everything(table)} == {*keys.tolist()}
    assert not table.insert_or_assign([500], rows_of([500]), [999]).any()
    assert not table.contains([500]).any()
    table.insert_or_assign([500], rows_of([500]), [1000])  # an equal score is admitted
    assert table.contains([500, 0]).tolist() == [True, False]


def test_scores_of_resident_keys_are_replaced_even_by_lower_ones(backend):
    """HierarchicalKV's customized_advanced: four new keys below all, four resident ones."""
    table, keys = filled(backend)
    batch = np.array([900, 901, 902, 903, 72, 73, 74, 75])
    scores = [20, 78, 97, 98, 99, 1010, 1020, 1035]
    found = table.insert_or_assign(batch, rows_of(batch, 1), scores)
    assert found.tolist() == [False] * 4 + [True] * 4
    contents = everything(table)
    assert {*contents} - {*keys.tolist()} <= {900, 901, 902, 903}
    assert [contents[k][1] for k in (73, 74, 75)] == [1010, 1020, 1035]
    assert table.size == BUCKET


@pytest.mark.parametrize("policy", POLICIES)
def test_inserted_rows_are_in_the_table_or_returned_as_evicted(backend, policy):
    """HierarchicalKV's insert_and_evict_advanced, for each policy; no row is lost or made up."""
    table = make(backend, 1 << 10, policy=policy, max_capacity=1 << 11, max_load_factor=0.9)
    table.epoch = 3
    model = {}
    for step in range(8):
        keys = np.unique(RNG.integers(1, 6000, 700))
        before = everything(table)
        scores = scores_for(table, RNG.integers(1, 1000, len(keys)))
        evicted = table.insert_and_evict(keys, rows_of(keys, step), scores)
        after = everything(table)
        model.update(dict.fromkeys(keys.tolist(), step))
        assert {*after} | {*evicted.keys.tolist()} == {*before} | {*keys.tolist()}
        # A resident key of the batch may be evicted by another one before its turn, and come back.
        back = {*before} & {*keys.tolist()}
        assert {*after} & {*evicted.keys.tolist()} <= back
        others = [k for k in evicted.keys.tolist() if k not in back]
        assert len({*others}) == len(others)
        for key, row in zip(evicted.keys.tolist(), evicted.rows.tolist(), strict=True):
            known = [before[key][0]] if key in before else []
            assert row in ([*known, rows_of([key], step)[0].tolist()] if key in keys else known)
        for key, (row, _) in after.items():
            assert row == rows_of([key], model[key])[0].tolist()
    assert table.capacity == 1 << 11


def test_nothing_is_evicted_below_capacity(backend):
    table = make(backend, BUCKET)
    keys = np.arange(BUCKET)
    assert len(table.insert_and_evict(keys, rows_of(keys), keys).keys) == 0
    assert len(table.insert_and_evict(keys, rows_of(keys, 1), keys).keys) == 0


@pytest.mark.parametrize("rounds", [3])
def test_most_rows_kept_are_those_with_the_highest_scores(backend, rounds):
    """HierarchicalKV's correct_rate: at least 96.4 % of a full table."""
    capacity, step = 1 << 15, 1 << 12
    table = make(backend, capacity)
    for turn in range(rounds):
        for part in range(capacity // step):
            keys = np.arange(step) + capacity * turn + step * part + 1
            table.insert_or_assign(keys, rows_of(keys), keys)
        assert table.size >= 0.964 * capacity if turn == 0 else capacity == table.size
        kept = table.export_batch(capacity)
        assert (kept.scores >= capacity * turn).sum() >= 0.964 * capacity
        assert kept.scores.max() == capacity * (turn + 1)
        check_rows(kept)


# -- find or insert --------------------------------------------------------------------------------


def test_find_or_insert_returns_resident_rows_and_inserts_others(backend):
    table, _ = filled(backend, 10)
    keys = np.array([3, 50, 7, 51])
    given = rows_of(keys, 5)
    rows, found, _ = table.find_or_insert(keys, given, [1, 2, 3, 4])
    assert found.tolist() == [True, False, True, False]
    np.testing.assert_array_equal(rows[[0, 2]], rows_of([3, 7]))
    np.testing.assert_array_equal(rows[[1, 3]], rows_of([50, 51], 5))
    np.testing.assert_array_equal(given, rows_of(keys, 5))  # unchanged
    np.testing.assert_array_equal(table.find(keys).rows, rows)
    assert table.find(keys, with_scores=True).scores.tolist() == [1, 2, 3, 4]
    table.find_or_insert(keys, given, [9] * 4, out=given)
    np.testing.assert_array_equal(given, rows)


def test_find_or_insert_gives_repeated_keys_one_row(backend):
    table = make(backend)
    rows, found, _ = table.find_or_insert([8, 8, 8], rows_of([1, 2, 3]), [5, 6, 7])
    assert found.tolist() == [False, True, True]
    np.testing.assert_array_equal(rows, rows_of([1, 1, 1]))
    assert everything(table) == {8: (rows_of([1])[0].tolist(), 7)}


def test_find_or_insert_returns_given_rows_that_are_not_admitted(backend):
    table, _ = filled(backend)
    rows, found, _ = table.find_or_insert([700, 5], rows_of([700, 5], 2), [3, 4000])
    assert found.tolist() == [False, True]
    np.testing.assert_array_equal(rows, np.concatenate([rows_of([700], 2), rows_of([5])]))
    assert not table.contains([700]).any()


# -- accumulate or assign --------------------------------------------------------------------------


def test_accumulate_adds_to_resident_rows_and_assign_inserts_others(backend):
    """All four cases: the two that contradict the table's state change nothing, scores included."""
    table, _ = filled(backend, 10)
    keys = np.array([1, 2, 40, 41])
    flags = np.array([True, False, True, False])
    found = table.accum_or_assign(keys, rows_of(keys, 1), flags, [7, 8, 9, 10])
    assert found.tolist() == [True, True, False, False]
    rows, found, scores = table.find(keys, with_scores=True)
    assert found.tolist() == [True, True, False, True]
    np.testing.assert_array_equal(rows[0], rows_of([1])[0] + rows_of([1], 1)[0])
    np.testing.assert_array_equal(rows[1], rows_of([2])[0])
    np.testing.assert_array_equal(rows[3], rows_of([41], 1)[0])
    assert scores.tolist() == [7, 1002, 0, 10]


def test_accumulate_adds_every_position_of_a_key(backend):
    table = make(backend)
    flags = np.array([False, True, True, False])
    table.accum_or_assign([6, 6, 6, 6], rows_of([1, 2, 3, 4]), flags, [1, 2, 3, 4])
    np.testing.assert_array_equal(table.find([6]).rows[0], rows_of([1, 2, 3]).sum(0))
    assert table.find([6], with_scores=True).scores.tolist() == [3]


@pytest.mark.parametrize(
    "dtype", ["f4", "f2", "f8", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"]
)
def test_rows_of_every_dtype_are_stored_and_accumulated(backend, dtype):
    table, keys = make(backend, 512, dim=3, dtype=dtype), np.arange(100)
    rows = rows_of(keys, dim=3).astype(dtype)
    deltas = (rows_of(keys, 1, dim=3) / (4 if dtype[0] == "f" else 1)).astype(dtype)
    table.insert_or_assign(keys, rows, keys)
    found = table.find(keys).rows
    assert found.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(found, rows)
    table.accum_or_assign(keys, deltas, np.ones(100, bool), keys)
    np.testing.assert_array_equal(table.find(keys).rows, rows + deltas)


@pytest.mark.parametrize("dim", [1, 2, 3, 8, 33, 64, 129, 224, 1000])
def test_rows_of_every_width_are_stored(backend, dim):
    table, keys = make(backend, 512, dim=dim), np.arange(200)
    table.insert_or_assign(keys, rows_of(keys, dim=dim), keys)
    np.testing.assert_array_equal(table.find(keys).rows, rows_of(keys, dim=dim))
    if backend != "cuda, half":
        np.testing.assert_array_equal(table.rows[table.find_rows(keys)], rows_of(keys, dim=dim))


# -- assign ----------------------------------------------------------------------------------------


def test_assign_changes_resident_keys_only(backend):
    table, _ = filled(backend, 10)
    assert table.assign([4, 99, 5], rows_of([4, 99, 5], 1), [1, 2, 3]).tolist() == [
        True,
        False,
        True,
    ]
    assert table.size == 10
    rows, found, scores = table.find([4, 5, 99], with_scores=True)
    assert found.tolist() == [True, True, False]
    np.testing.assert_array_equal(rows[:2], rows_of([4, 5], 1))
    assert scores.tolist() == [1, 3, 0]


def test_assign_scores_keeps_rows_and_assign_values_keeps_scores(backend):
    table, _ = filled(backend, 10)
    assert table.assign_scores([4, 99], [5, 6]).tolist() == [True, False]
    assert table.assign_values([4, 99, 5], rows_of([1, 2, 3], 2)).tolist() == [True, False, True]
    rows, _, scores = table.find([4, 5, 6], with_scores=True)
    np.testing.assert_array_equal(rows, np.concatenate([rows_of([1, 3], 2), rows_of([6])]))
    assert scores.tolist() == [5, 1005, 1006]
    table.insert_and_evict(np.arange(100, 218), rows_of(np.arange(100, 218)), [2000] * 118)
    assert table.insert_and_evict([900], rows_of([900]), [3000]).keys.tolist() == [4]


# -- erase_if and exports --------------------------------------------------------------------------


def test_erase_if_erases_what_its_predicate_chooses(backend):
    table, keys = filled(backend, 3000, init_capacity=1 << 13)
    erased = table.erase_if(lambda keys, scores: (keys % 3 == 0) & (scores < 2000))
    expected = [k for k in keys.tolist() if not (k % 3 == 0 and k < 1000)]
    assert erased == 3000 - len(expected)
    assert sorted(everything(table)) == expected
    assert table.size_if(lambda keys, scores: scores >= 3000) == 1000
    assert table.erase_if(lambda keys, scores: np.ones(len(keys), bool)) == len(expected)
    assert table.size == 0


def test_erase_if_keeps_rows_that_changed_after_the_predicate_saw_them(backend):
    table, _ = filled(backend, 10)

    def predicate(keys, scores):
        table.assign_scores([3], [1])
        table.erase([4])
        return scores < 1006

    assert table.erase_if(predicate) == 4  # 0, 1, 2 and 5
    assert sorted(everything(table)) == [3, 6, 7, 8, 9]


def test_exports_of_all_slots_contain_every_row_once(backend):
    table, keys = filled(backend, 3000, init_capacity=1 << 13)
    parts = [table.export_batch(1000, offset) for offset in range(0, table.capacity, 1000)]
    assert sorted(np.concatenate([part.keys for part in parts]).tolist()) == keys.tolist()
    for part in parts:
        assert len(part.keys) <= 1000
        check_rows(part)
        np.testing.assert_array_equal(part.scores, part.keys + 1000)
    assert len(table.export_batch(10, table.capacity).keys) == 0
    assert len(table.export_batch(0).keys) == 0


def test_export_batch_if_returns_chosen_rows(backend):
    table, _ = filled(backend, 3000, init_capacity=1 << 13)
    chosen = [
        table.export_batch_if(lambda keys, scores: scores >= 3500, 1 << 12, offset)
        for offset in (0, 1 << 12)
    ]
    keys = np.concatenate([part.keys for part in chosen])
    assert sorted(keys.tolist()) == [*range(2500, 3000)]
    for part in chosen:
        check_rows(part)
        np.testing.assert_array_equal(part.scores, part.keys + 1000)


def test_scores_as_they_are_under_any_policy(backend):
    table = make(backend, policy="lru")
    table.insert_or_assign([1, 2], rows_of([1, 2]), [5, 6], ignore_evict_strategy=True)
    assert table.find([1, 2], with_scores=True).scores.tolist() == [5, 6]
    evicted = table.insert_and_evict([1], rows_of([1]), [7], ignore_evict_strategy=True)
    assert len(evicted.keys) == 0
    assert table.find([1], with_scores=True).scores.tolist() == [7]
