"""Commands start fast: what one does not need is not imported."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from hps import __version__
from hps.cli.main import COMMANDS, app

# Each takes 20 to 200 ms to import.
HEAVY = [
    *("numpy", "pyarrow", "onnxruntime", "rocksdict", "confluent_kafka", "grpc", "fastapi"),
    *("redis", "tritonclient", "asyncio", "rich"),
]
# Imports every command's module, which is all that --help and the command line's own errors need.
CODE = f"""
import json, sys
from hps.cli.main import COMMANDS, _load
found = {{"": [m for m in {HEAVY!r} if m in sys.modules]}}
for name in COMMANDS:
    before = set(sys.modules)
    _load(name)
    found[name] = [m for m in {HEAVY!r} if m in set(sys.modules) - before]
print(json.dumps(found))
"""


def test_no_command_imports_a_heavy_module_before_it_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, check=True
    )
    assert json.loads(done.stdout) == {name: [] for name in ["", *COMMANDS]}


@pytest.mark.parametrize("words", [["--help"], ["--version"]], ids=" ".join)
def test_the_overview_and_the_version_import_no_heavy_module(words: list[str]) -> None:
    code = (
        "import sys\nfrom hps.cli.main import app\n"
        f"app({words!r}, standalone_mode=False)\n"
        f"print([m for m in {[*HEAVY, 'pydantic']!r} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_version_is_an_option_too() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"hps {__version__}\n")
