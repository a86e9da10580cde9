"""The README's commands and Python code run unchanged, in a copy of a checkout."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peers.process import free_ports
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
LISTENERS = ("HTTP", "GRPC", "ADMIN")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Copy of the parts of a checkout that the README's commands use."""
    (tmp_path / "hps").symlink_to(ROOT / "hps", target_is_directory=True)
    (tmp_path / ".venv").symlink_to(sys.prefix, target_is_directory=True)
    return tmp_path


def blocks(language: str, section: str) -> list[str]:
    """The code of one section."""
    text = README.partition(f"## {section}\n")[2].partition("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_python_examples_run_and_find_their_keys(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(checkout)
    (block,) = blocks("python", "Serve your own")
    names: dict[str, object] = {}
    exec(block, names)
    rows = names["rows"]
    assert rows.vectors["user"].shape == (2, 16)  # type: ignore[attr-defined]
    assert rows.defaulted == 0  # type: ignore[attr-defined]


@pytest.fixture
def environment() -> dict[str, str]:
    """Environment with free ports instead of the default ones."""
    ports = zip(LISTENERS, map(str, free_ports(len(LISTENERS))), strict=True)
    return os.environ | {f"HPS__SERVER__{name}__PORT": port for name, port in ports}


def test_commands_serve_the_demo_model(checkout: Path, environment: dict[str, str]) -> None:
    first, second, _containers = blocks("sh", "Serve your own")

    def run(script: str) -> str:
        done = subprocess.run(
            ["bash", "-e", "-c", script], cwd=checkout, env=environment, capture_output=True,
            text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, (script, done.stdout, done.stderr)
        return done.stdout

    before, serve, after = first.partition("hps serve ")
    assert not after.strip("\n").count("\n"), "hps serve comes last: it runs until Ctrl-C"
    assert "my.yaml: ok" in run(before)
    with (checkout / "log").open("w") as log:
        server = subprocess.Popen(
            ["bash", "-c", f"source .venv/bin/activate; exec {serve}{after}"],
            cwd=checkout, env=environment, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        until(lambda: "is ready after" in (checkout / "log").read_text(), 60)
        admin = environment["HPS__SERVER__ADMIN__PORT"]
        commands = second.replace("hps status", f"hps status -s localhost:{admin}")
        commands = commands.replace("hps lookup", f"hps lookup -s localhost:{admin}").replace(
            "8002", admin
        )
        shown = run(commands)
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0, (checkout / "log").read_text()
    assert "ctr" in shown
    assert "default " not in shown.partition("key ")[2].partition("\n\n")[0]
    assert "All is well." in shown
