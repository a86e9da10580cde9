"""docs/table.md: its examples run, and it names every public member."""

import inspect
import re
from pathlib import Path

from hps.table import Policy, Table
from tests.support.page_examples import run_examples

PAGE = Path(__file__).parents[3] / "docs" / "table.md"


def test_examples_of_the_page_run():
    run_examples(PAGE, 7)


def test_the_page_names_every_member_and_policy():
    named = set(re.findall(r"\w+", PAGE.read_text()))
    members = {name for name in vars(Table) if not name.startswith("_")}
    assert members - {"dim", "row_bytes", "max_capacity"} <= named
    assert {*Policy} <= named
    for name in members:
        assert inspect.getdoc(getattr(Table, name)), name
