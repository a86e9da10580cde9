"""Importing hps.torch without PyTorch, or with one that is too old; runs with or without PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import hps
from hps.errors import PackageMissing

IMPORT = """
import sys, types
{}
import hps
from hps.errors import HpsError
try:
    import hps.torch
except HpsError as error:
    print(type(error).__name__, isinstance(error, ImportError), error)
"""
MISSING = "sys.modules['torch'] = None"
OLD = "sys.modules['torch'] = types.SimpleNamespace(library=None, __version__='2.3.1')"


@pytest.mark.parametrize(
    ("torch", "cause"),
    [(MISSING, "needs PyTorch"), (OLD, "does not work with PyTorch 2.3.1;")],
    ids=["missing", "old"],
)
def test_import_raises_an_error_with_the_remedy(torch, cause):
    done = subprocess.run(
        [sys.executable, "-c", IMPORT.format(torch)], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"PackageMissing True hps.torch {cause}")
    assert done.stdout.endswith("install PyTorch 2.4 or newer: pip install torch\n")


def test_hps_alone_imports_no_torch():
    assert "torch" not in dir(hps)
    assert issubclass(PackageMissing, hps.HpsError)
    code = "import sys, hps; hps.open; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_pytorch_is_there_in_continuous_integration():
    """The other tests of this folder are skipped without it."""
    try:
        import tests.support.pytorch  # noqa: F401
    except pytest.skip.Exception as missing:
        if os.environ.get("CI"):
            pytest.fail(str(missing))
        raise
