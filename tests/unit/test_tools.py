"""tools/step: what a setup shows of its steps."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

STEP = [sys.executable, str(Path(__file__).parents[2] / "tools" / "step")]


def step(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*STEP, *words], capture_output=True, text=True, timeout=60, check=False)


def test_a_step_reports_its_end_and_keeps_its_output_back() -> None:
    done = step("1/2 build", "echo", "noise")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "1/2 build …\n1/2 build: done, 0 s\n"


def test_a_step_that_fails_shows_its_output_and_exit_code() -> None:
    done = step("1/2 build", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (done.returncode, done.stderr) == (7, "out\nerr\n")
    assert done.stdout.splitlines()[-1].startswith("1/2 build: failed, ")


def test_a_terminal_sees_the_time_pass() -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*STEP, "build", "sleep", "1.5"], stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        shown = b""
        while b"done" not in shown:
            shown += os.read(ours, 4096)
        assert process.wait(60) == 0
    os.close(ours)
    assert b"\rbuild: running, 1 s" in shown
