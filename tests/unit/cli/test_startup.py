"""Commands start fast: they import only what they need."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hps import __version__
from hps.cli.main import COMMANDS, app
from hps.tiers.rocksdb import RocksDbTier

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


def test_version_option_prints_the_version() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"hps {__version__}\n")


def imported_by(*words: str) -> list[str]:
    """The heavy modules that a command has imported when it ends."""
    code = (
        "import sys\nfrom hps.cli.main import app\n"
        f"try: app({list(words)!r}, standalone_mode=False)\n"
        "except BaseException as error: print(repr(error))\n"
        f"print(*(m for m in {HEAVY!r} if m in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.splitlines()[-1].split()


@pytest.mark.parametrize("command", ["status", "tables", "hotkeys"])
def test_commands_that_query_a_server_import_no_numpy(command: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    assert set(imported_by(command, "--server", address)) <= {"rich"}


def test_store_command_imports_no_redis_unless_configured(tmp_path: Path) -> None:
    RocksDbTier(tmp_path / "db").close()
    (tmp_path / "models").mkdir()
    config = tmp_path / "hps.yaml"
    config.write_text(
        f"models: {{repository: {tmp_path}/models}}\ntiers: {{rocksdb: {{path: {tmp_path}/db}}}}\n"
    )
    imported = imported_by("store", "ls", "--config", str(config))
    assert "rocksdict" in imported
    assert "redis" not in imported


def test_client_package_exports_exactly_its_names() -> None:
    import hps.client

    assert all(getattr(hps.client, name) for name in dir(hps.client))
    with pytest.raises(AttributeError, match=r"module 'hps.client' has no attribute 'Clients'"):
        _ = hps.client.Clients
