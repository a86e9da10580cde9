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


SLOT = slot_bytes(ONE)
TIGHT = {"capacity_bytes": 120_000 * SLOT}


@pytest.mark.parametrize(
    ("override", "cpu_cache", "rows"),
    [
        ({}, {}, 100_000),
        ({}, {"capacity_bytes": 140_000 * SLOT}, 70_000),
        ({"cache_share": 0.5}, TIGHT, 50_000),
        ({"cache_rows": 7}, TIGHT, 7),
        ({}, TIGHT | {"share": 1.0}, 100_000),
    ],
)
def test_tables_in_memory_get_half_of_the_bytes_unless_their_capacity_is_set(
    override, cpu_cache, rows
):
    plan = plan_rows(settings(cpu_cache, **override), {ONE: 100_000, OTHER: 10_000}, {ONE})
    assert plan == {ONE: rows, OTHER: 10_000}


@pytest.mark.parametrize(("rows", "planned"), [(10, 10), (2_000, 1_024), (80_000, 10_000)])
def test_tables_in_memory_get_an_eighth_and_1024_rows_at_least(rows, planned):
    chosen = settings({"capacity_bytes": planned * SLOT + TABLE_BYTES})
    assert plan_rows(chosen, {ONE: rows}, {ONE}) == {ONE: planned}


def test_a_second_version_gets_as_much_as_the_first_left():
    chosen = settings({"capacity_bytes": 200_000 * SLOT})
    first = plan_rows(chosen, {ONE: 100_000}, {ONE})
    rows = {ONE: 100_000, OTHER: 100_000}
    second, warning = plan_rows_for_new_model(chosen, rows, [OTHER], first, {ONE, OTHER})
    assert (first, second, warning) == ({ONE: 100_000}, {OTHER: 50_000}, "")


def test_warning_is_about_the_capacity_that_a_start_would_give():
    """A start would give the model more than half of its rows, and a sixteenth is left."""
    planned = 100_000 // 8
    room = slot_bytes(OTHER) * planned // 2 + 2 * TABLE_BYTES
    taken = slot_bytes(ONE) * 100_000
    chosen = settings({"capacity_bytes": taken + room})
    rows = {ONE: 100_000, OTHER: 100_000}
    plan, warning = plan_rows_for_new_model(chosen, rows, [OTHER], {ONE: 100_000}, {OTHER})
    assert plan == {OTHER: pytest.approx(planned / 2, rel=0.05)}
    assert re.match("the model gets 1[0-9] % of the CPU cache capacity that a start", warning)


def test_warning_does_not_round_up_to_all():
    chosen = settings({"capacity_bytes": 200_000 * SLOT})
    rows = {ONE: 100_000, OTHER: 100_000}
    _, warning = plan_rows_for_new_model(chosen, rows, [OTHER], {ONE: 100_200})
    assert warning.startswith("the model gets 99 % of the CPU cache capacity")


def test_table_is_kept_out_by_its_rows_only():
    assert is_cached(settings(), ONE)
    assert not is_cached(settings(cache_rows=0), ONE)
    assert is_cached(settings(cache_rows=0), OTHER)
