"""What `python -m benchmarks` runs, and what its README lists."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.__main__ import NAMES, PARTS, SCRIPTS

HERE = Path(__file__).parents[3] / "benchmarks"


def test_every_script_that_can_be_run_is_one_and_no_helper_is() -> None:
    can_be_run = {
        path.stem
        for path in HERE.glob("*.py")
        if path.read_text().endswith(" sys.exit(main(BENCHMARK))\n")
    }
    assert can_be_run == SCRIPTS
    assert PARTS < SCRIPTS
    assert {"rest", "frontend"} <= set(NAMES)


def test_the_readme_lists_every_script() -> None:
    listed = re.findall(r"^\| `(\w+)\.py` \|", (HERE / "README.md").read_text(), re.MULTILINE)
    halves_of_one = {"frontend_servers", "frontend_triton"}
    assert sorted(listed) == sorted(SCRIPTS - halves_of_one)
