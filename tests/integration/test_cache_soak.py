"""The CPU cache in shared memory under load, for some seconds; `make soak` runs it longer."""

import subprocess
import sys
from pathlib import Path

import pytest

from hps.native import COMPILED

pytestmark = pytest.mark.skipif(not COMPILED, reason="the twins share no memory")
SCRIPT = Path(__file__).parents[1] / "support" / "soak_cache.py"


def soak(*arguments):
    command = [sys.executable, SCRIPT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=90)


def test_no_wrong_row_and_no_lost_count_after_kills():
    done = soak("8")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "evicted" in done.stdout


def test_soak_detects_a_wrong_row():
    done = soak("8", "spoil")
    assert done.returncode != 0
    assert "a torn row" in done.stderr
