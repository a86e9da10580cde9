import numpy as np
import pytest

from hps.errors import ConfigError
from hps.tiers.capacity import EMPTY_TABLE_ROWS, TABLE_BYTES, plan_capacity, slot_bytes
from hps.tiers.cpu.cache import CpuCache
from hps.types import EmbeddingTable

SMALL = EmbeddingTable.make("small", 4)
LARGE = EmbeddingTable.make("large", 32)
HALF = EmbeddingTable.make("half", 32, dtype=np.float16)
ROWS = {SMALL: 1_000, LARGE: 1_000_000, HALF: 500_000}


def total_bytes(plan):
    return sum(CpuCache({table: rows}).stats(table).bytes for table, rows in plan.items())


@pytest.mark.parametrize("budget", [0, 1_000, 1 << 20, 64 << 20])
def test_bytes_are_divided_by_size_and_never_exceeded(budget):
    plan = plan_capacity(ROWS, capacity_bytes=budget)
    assert plan.keys() == ROWS.keys()
    spent = total_bytes(plan)
    assert spent <= budget
    if budget >= 1 << 20:
        assert spent > 0.95 * budget
        share = max(plan[table] / ROWS[table] for table in ROWS)
        assert all(share * ROWS[table] - plan[table] <= 1 for table in ROWS)


def test_plan_gives_all_rows_when_they_fit():
    assert plan_capacity(ROWS, capacity_bytes=1 << 40) == ROWS


def test_stated_rows_take_precedence():
    plan = plan_capacity(ROWS, capacity_bytes=10 << 20, rows={LARGE: 50_000, SMALL: 0})
    assert plan[LARGE] == 50_000
    assert plan[SMALL] == 0
    left = (10 << 20) - 50_000 * slot_bytes(LARGE) - 2 * TABLE_BYTES
    assert 0.99 * left < plan[HALF] * slot_bytes(HALF) <= left
    assert plan_capacity(ROWS, capacity_bytes=1_000, rows={LARGE: 50_000})[HALF] == 0


def test_empty_table_gets_capacity_for_later_rows():
    empty = {SMALL: 0}
    planned = EMPTY_TABLE_ROWS
    assert plan_capacity(empty, capacity_bytes=1 << 20) == {SMALL: planned}
    assert plan_capacity(empty, capacity_bytes=0, share=0.5) == {SMALL: EMPTY_TABLE_ROWS // 2}
    assert plan_capacity(empty, capacity_bytes=0, shares={SMALL: 1.0}) == {SMALL: planned}
    assert plan_capacity(empty, capacity_bytes=1 << 20, rows={SMALL: 0}) == {SMALL: 0}


def test_stated_rows_override_share_of_table():
    plan = plan_capacity(ROWS, capacity_bytes=0, shares={SMALL: 0.1, LARGE: 0.1}, rows={LARGE: 5})
    assert plan == {SMALL: 100, LARGE: 5, HALF: 0}


def test_share_gives_that_share_of_rows():
    plan = plan_capacity(ROWS, capacity_bytes=0, share=0.1, rows={HALF: 7})
    assert plan == {SMALL: 100, LARGE: 100_000, HALF: 7}
    assert plan_capacity({SMALL: 3}, capacity_bytes=0, share=0.1) == {SMALL: 1}
    assert plan_capacity({SMALL: 1_000}, capacity_bytes=0, share=1.0) == {SMALL: 1_000}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"share": 0.0}, "share is 0"),
        ({"share": 1.5}, r"share is 1\.5"),
        ({"rows": {SMALL: -1}}, "cache_rows of table model/1/small is -1"),
        ({"rows": {EmbeddingTable.make("other", 1): 1}}, "model/1/other"),
    ],
)
def test_contradictory_settings_are_rejected(wrong, message):
    with pytest.raises(ConfigError, match=message):
        plan_capacity(ROWS, capacity_bytes=1 << 20, **wrong)


@pytest.mark.parametrize("rows", [10, 1_000, 50_000])
def test_cache_planned_for_all_rows_holds_whole_table(rows):
    table = EmbeddingTable.make("items", 1)
    cache = CpuCache({table: rows})
    keys = np.random.default_rng(rows).permutation(rows)
    for start in range(0, rows, 100):  # as promotions come
        some = keys[start : start + 100]
        cache.insert(
            table, some, np.ones((len(some), 1), np.float32), np.ones(len(some), np.uint64)
        )
    assert cache.size(table) >= rows - rows // 50_000
    assert cache.stats(table).evictions == rows - cache.size(table)


def test_slot_bytes_match_cache_size():
    for table in ROWS:
        for rows in (1, 7, 1600, 12_345):
            actual_bytes = CpuCache({table: rows}).stats(table).bytes
            assert actual_bytes <= rows * slot_bytes(table) + TABLE_BYTES
            assert rows < 1000 or actual_bytes > 0.98 * rows * slot_bytes(table)
