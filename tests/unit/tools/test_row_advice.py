"""The choice of row formats for an AUC budget: greedy, and checked in combination."""

import numpy as np
import pytest

from hps.errors import BadRequest
from hps.models.manifest import RowConversion
from hps.row_format import ROW_FORMAT_NAMES, row_format
from hps.tools.row_advice import FormatFigures, ScoreChange, TableAdvice, choose
from hps.tools.row_scores import auc

LOSS = {"float32": 0, "float16": 0, "bfloat16": 1, "float8_e4m3": 3, "int8": 2, "int4": 8}


def table(name, rows, not_finite=()):
    advice = TableAdvice(name, rows, 64, "float32")
    for each in ROW_FORMAT_NAMES:
        errors = RowConversion(
            rows=each,
            max_error=LOSS[each],
            mean_error=LOSS[each],
            mean_relative_error=0,
            not_finite_rows=each in not_finite,
        )
        size = rows * row_format(each).row_bytes(64)
        advice.formats[each] = FormatFigures(each, size, errors, loss(LOSS[each]))
    return advice


def loss(value):
    return ScoreChange(0, 0, 1 - value, value)


def added(formats):
    return loss(sum(LOSS[name] for name in formats.values()))


@pytest.mark.parametrize(
    ("budget", "chosen"),
    [
        (0, ["float16", "float16"]),
        (2, ["float16", "int8"]),
        (4, ["int8", "int8"]),
        (8, ["float16", "int4"]),
        (10, ["int8", "int4"]),
        (16, ["int4", "int4"]),
    ],
)
def test_losses_of_tables_add_up_to_the_budget(budget, chosen):
    tables = [table("small", 10), table("large", 1000)]
    together = choose(tables, budget, added)
    assert [each.chosen for each in tables] == chosen
    assert together.auc_loss == sum(LOSS[name] for name in chosen) <= budget


def test_more_exact_one_of_two_formats_of_the_same_size_is_first():
    (only,) = tables = [table("t", 10)]
    choose(tables, 3, added)
    assert only.chosen == "int8"


def test_formats_that_cannot_hold_all_rows_are_left_out():
    (only,) = tables = [table("t", 10, not_finite=("int4", "int8", "float16"))]
    choose(tables, 100, added)
    assert only.chosen == "float8_e4m3"


def test_tables_stay_float32_if_nothing_fits():
    (only,) = tables = [table("t", 10)]
    assert choose(tables, -1, added).auc_loss == 0
    assert only.chosen == "float32"


def test_equal_scores_count_half():
    labels = np.array([1, 0, 1, 0], bool)
    assert auc(labels, np.array([2.0, 1, 1, 0])) == pytest.approx(3.5 / 4)
    with pytest.raises(BadRequest, match="all labels are the same"):
        auc(np.ones(3, bool), np.arange(3.0))
