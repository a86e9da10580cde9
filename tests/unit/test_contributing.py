"""CONTRIBUTING.md and docs/testing.md: their example tests, helpers and make targets exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTING = (ROOT / "docs/testing.md").read_text()
PAGE = (ROOT / "CONTRIBUTING.md").read_text() + TESTING


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


def test_the_helpers_it_lists_exist() -> None:
    table = TESTING.partition("## Helpers")[2]
    named = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)))
    assert len(named) > 10
    for name in named:
        assert (ROOT / f"tests/support/{name}.py").exists(), name
