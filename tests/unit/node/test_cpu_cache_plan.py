"""Plan of the CPU cache: tables whose files are in memory need room for changed rows only."""

import re

import pytest

from hps.config.schema import Settings
from hps.node.cpu_cache_plan import is_cached, plan_rows, plan_rows_for_new_model
from hps.tiers.capacity import TABLE_BYTES, slot_bytes
from hps.types import EmbeddingTable

ONE, OTHER = (EmbeddingTable.make(name, 8, model="m", version=1) for name in ("one", "other"))


def settings(cpu_cache=None, **override):
    serve = {"m": {"tables": {"one": override}}} if override else {}
    return Settings.model_validate(
        {"models": {"serve": serve}, "tiers": {"cpu_cache": cpu_cache or {}}}
    )


@pytest.mark.parametrize(
    ("override", "cpu_cache", "rows"),
    [
        ({}, {}, 12_500),
        ({"cache_share": 0.5}, {}, 50_000),
        ({"cache_rows": 7}, {}, 7),
        ({}, {"share": 1.0}, 100_000),
    ],
)
def test_table_in_memory_counts_with_an_eighth_unless_its_capacity_is_set(
    override, cpu_cache, rows
):
    plan = plan_rows(settings(cpu_cache, **override), {ONE: 100_000, OTHER: 100_000}, {ONE})
    assert plan == {ONE: rows, OTHER: 100_000}


@pytest.mark.parametrize(("rows", "planned"), [(10, 10), (2_000, 1_024), (80_000, 10_000)])
def test_small_tables_get_no_more_than_their_rows(rows, planned):
    assert plan_rows(settings(), {ONE: rows}, {ONE}) == {ONE: planned}


def test_warning_is_about_the_capacity_that_a_start_would_give():
    """A start would give the model an eighth of its rows, and it gets half of that."""
    planned = 100_000 // 8
    room = slot_bytes(OTHER) * planned // 2 + 2 * TABLE_BYTES
    taken = slot_bytes(ONE) * 100_000
    chosen = settings({"capacity_bytes": taken + room})
    rows = {ONE: 100_000, OTHER: 100_000}
    plan, warning = plan_rows_for_new_model(chosen, rows, [OTHER], {ONE: 100_000}, {OTHER})
    assert plan == {OTHER: pytest.approx(planned / 2, rel=0.05)}
    assert re.match("the model gets [45][0-9] % of the CPU cache capacity that a start", warning)


def test_table_is_kept_out_by_its_rows_only():
    assert is_cached(settings(), ONE)
    assert not is_cached(settings(cache_rows=0), ONE)
    assert is_cached(settings(cache_rows=0), OTHER)
