"""SECURITY.md names tests and settings that there are."""

from __future__ import annotations

import re
from pathlib import Path

from hps.config.schema import Settings
from hps.config.schema_paths import settings_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text()


def test_the_tests_it_names_are_there() -> None:
    named = re.findall(r"\b((?:\w+/)*test_\w+\.py)(?:::(\w+))?", PAGE)
    assert len(named) > 20
    for file, test in named:
        found = [path for path in ROOT.glob("tests/**/*.py") if path.as_posix().endswith(file)]
        assert found, file
        assert not test or any(f"def {test}(" in path.read_text() for path in found), test


def test_the_settings_it_names_are_there() -> None:
    known = {key for key, _ in settings_of(Settings)}
    sections = {key.rpartition(".")[0] for key in known} | known
    named = re.findall(r"`((?:server|auth|tiers|updates|dense|lookup)\.[a-z_.]+)`", PAGE)
    assert len(named) > 15
    for key in named:
        assert key in sections, key
