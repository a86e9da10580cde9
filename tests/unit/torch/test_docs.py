"""docs/torch.md: its examples run, and it names every public member."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.pytorch import hps_torch

PAGE = Path(__file__).parents[3] / "docs" / "torch.md"


@pytest.mark.filterwarnings("ignore")  # PyTorch's own
def test_examples_of_the_page_run(tmp_path, monkeypatch):
    text = PAGE.read_text()
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) >= 7
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        # Blank lines in front, so that a traceback names the line of the page.
        exec(compile("\n" * line + block[1], str(PAGE), "exec"), names)


def test_the_page_names_every_member():
    assert {*hps_torch.__all__} <= set(re.findall(r"\w+", PAGE.read_text()))
