"""Importing hps.keras without Keras, or with one that does not fit; runs with or without Keras."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

IMPORT = """
import sys, types
{}
from hps.errors import HpsError
try:
    import hps.keras
except HpsError as error:
    print(type(error).__name__, isinstance(error, ImportError), error)
"""
MISSING = "sys.modules['keras'] = None"
OTHER = (
    "sys.modules['keras'] = types.SimpleNamespace(__version__='{}', "
    "backend=types.SimpleNamespace(backend=lambda: 'jax'))"
)


@pytest.mark.parametrize(
    ("keras", "cause"),
    [
        (MISSING, "needs Keras"),
        (OTHER.format("2.15.0"), "does not work with Keras 2.15.0;"),
        (OTHER.format("3.15.1"), "does not work with Keras's backend jax;"),
    ],
    ids=["missing", "old", "backend"],
)
def test_import_raises_an_error_with_the_remedy(keras, cause):
    done = subprocess.run(
        [sys.executable, "-c", IMPORT.format(keras)], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"PackageMissing True hps.keras {cause}")
    assert "install Keras 3 and a backend: pip install keras tensorflow-cpu" in done.stdout


def test_keras_is_there_in_continuous_integration():
    """The other tests of this folder are skipped without it."""
    try:
        import tests.support.keras3  # noqa: F401  # skips if Keras is missing
    except pytest.skip.Exception as missing:
        if os.environ.get("CI"):
            pytest.fail(str(missing))
        raise
