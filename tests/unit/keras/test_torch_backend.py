"""The tests of layers on Keras's backend PyTorch, in another process: a process has one backend."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.keras3 import BACKEND

LAYERS = Path(__file__).with_name("test_layers.py")


@pytest.mark.skipif(BACKEND == "torch", reason="this process's backend is PyTorch")
def test_layers_on_pytorch():
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", str(LAYERS)]
    done = subprocess.run(
        command,
        env=os.environ | {"KERAS_BACKEND": "torch"},
        cwd=LAYERS.parents[3],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    skipped = re.search(r"SKIPPED .*", done.stdout)
    if skipped and not os.environ.get("CI"):
        pytest.skip(skipped[0])
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^[4-9]\d passed", done.stdout, re.MULTILINE), done.stdout
