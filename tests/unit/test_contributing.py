"""CONTRIBUTING.md: its example tests and its make targets exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()


def test_the_tests_it_runs_exist() -> None:
    named = re.findall(r"pytest (tests/\S+)", PAGE) + re.findall(r"`(tests/[^`]+)`", PAGE)
    assert len(named) > 5
    for words in named:
        path, _, test = words.partition("::")
        assert (ROOT / path).exists(), words
        assert not test or f"def {test}(" in (ROOT / path).read_text(), words


def test_its_make_targets_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = set(re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)", PAGE, re.MULTILINE))
    assert {a or b for a, b in named} <= set(targets)
