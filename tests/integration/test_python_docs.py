"""Every example of docs/python.md runs, in the order of the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


def test_examples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAGE.read_text()
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) > 10
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        # Blank lines in front, so that a traceback names the line of the page.
        exec(compile("\n" * line + block[1], str(PAGE), "exec"), names)


def test_two_read_only_nodes_share_one_database(tmp_path: Path) -> None:
    """Two nodes read one database at a time, when both are read-only."""
    import hps

    demo = Path(hps.__file__).parent / "cli" / "demo_model"
    settings = {"models": {"repository": demo}, "tiers": {"rocksdb": {"path": tmp_path / "db"}}}
    with hps.open(settings), pytest.raises(hps.HpsError, match="already open"):
        hps.open(settings)
    settings["tiers"]["rocksdb"]["access"] = "read_only"
    with hps.open(settings) as one, hps.open(settings) as other:
        for node in (one, other):
            assert node.lookup("ctr", {"user": [0]}).defaulted == 0
