"""docs/table.md: its examples run, and it names every public member."""

import inspect
import re
from pathlib import Path

from hps.table import Policy, Table

PAGE = Path(__file__).parents[3] / "docs" / "table.md"


def test_examples_of_the_page_run():
    text = PAGE.read_text()
    names: dict[str, object] = {}
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) >= 7
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        # Blank lines in front, so that a traceback names the line of the page.
        exec(compile("\n" * line + block[1], str(PAGE), "exec"), names)


def test_the_page_names_every_member_and_policy():
    named = set(re.findall(r"\w+", PAGE.read_text()))
    members = {name for name in vars(Table) if not name.startswith("_")}
    assert members - {"dim", "row_bytes", "max_capacity"} <= named
    assert {*Policy} <= named
    for name in members:
        assert inspect.getdoc(getattr(Table, name)), name
