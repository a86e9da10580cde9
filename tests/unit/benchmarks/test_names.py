"""Tests of the list of benchmarks, their README and the paths that they measure."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from benchmarks.__main__ import NAMES, PARTS, SCRIPTS
from benchmarks.common import ROOT

HERE = Path(__file__).parents[3] / "benchmarks"


def test_scripts_are_all_modules_with_a_main_call() -> None:
    runnable = {
        path.stem
        for path in HERE.glob("*.py")
        if path.read_text().endswith(" sys.exit(main(BENCHMARK))\n")
    }
    assert runnable == SCRIPTS
    assert PARTS < SCRIPTS
    assert {"rest", "frontend"} <= set(NAMES)


def test_readme_lists_every_script() -> None:
    listed = re.findall(r"^\| `(\w+)\.py` \|", (HERE / "README.md").read_text(), re.MULTILINE)
    halves_of_one = {"frontend_servers", "frontend_triton"}
    assert sorted(listed) == sorted(SCRIPTS - halves_of_one)


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_measured_paths_exist(name: str) -> None:
    benchmark = importlib.import_module(f"benchmarks.{name}").BENCHMARK
    paths = (*benchmark.measured, *benchmark.helpers)
    assert [path for path in paths if not (ROOT / path).exists()] == []
