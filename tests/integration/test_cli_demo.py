"""``hps demo``: every check passes, each can fail, and no file or process remains."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import hps
from hps.cli.demo_data import FOLDER, REQUESTS, load_demo
from hps.errors import ConfigError
from tests.support.waiting import until

COMMAND = [sys.executable, "-m", "hps.cli.main", "demo"]
# A program starts with the signals of the first argument ignored, no others.
LAUNCH = """
import os, signal, sys
for name in ("SIGINT", "SIGTERM", "SIGHUP"):
    ignored = name in sys.argv[1].split()
    signal.signal(getattr(signal, name), signal.SIG_IGN if ignored else signal.SIG_DFL)
os.execv(sys.argv[2], sys.argv[2:])
"""
SAMPLES = 96


@pytest.fixture(scope="module")
def small_demo(small_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in the demo's format, with scores computed in this process."""
    folder = tmp_path_factory.mktemp("demo")
    shutil.copytree(small_repository / "clicks", folder / "clicks")
    random = np.random.default_rng(1)
    keys = {
        "user": random.integers(0, 100, (SAMPLES, 1)),
        "item": random.integers(-50, 50, (SAMPLES, 1)),
        "history": random.integers(-50, 50, (SAMPLES, 2)),
    }
    dense = random.normal(size=(SAMPLES, 3)).astype(np.float32)
    settings = {
        "models": {"repository": str(folder)},
        "tiers": {"rocksdb": {"path": str(tmp_path_factory.mktemp("rocksdb"))}},
    }
    scores: dict[str, list[float]] = {"score": []}
    with hps.open(settings) as node:
        for i in range(0, SAMPLES, 32):
            part = {name: value[i : i + 32] for name, value in keys.items()}
            found = node.predict("clicks", part, {"dense": dense[i : i + 32]})
            scores["score"] += found.outputs["score"].reshape(-1).tolist()
    requests = {
        "model": "clicks",
        "features": {name: value.tolist() for name, value in keys.items()},
        "dense": {"dense": dense.tolist()},
        "scores": scores,
    }
    (folder / REQUESTS).write_text(json.dumps(requests))
    return folder


def changed(small_demo: Path, to: Path, change: Any) -> Path:
    shutil.copytree(small_demo, to)
    data = json.loads((to / REQUESTS).read_text())
    change(data)
    (to / REQUESTS).write_text(json.dumps(data))
    return to


def demo(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, words)], capture_output=True, text=True, timeout=180, check=False
    )


@contextmanager
def serving(folder: Path, ignored: str = "") -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """The demo as a process that was started with the signals ``ignored``, and what it has printed
    until it serves; killed at the end."""
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCH, ignored, *COMMAND, "--model", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        try:
            shown = []
            for line in process.stdout:
                shown.append(line)
                if "Serving until" in line:
                    break
            else:
                pytest.fail("".join(shown) + process.communicate()[1])
            yield process, shown
        finally:
            process.kill()


def address(shown: list[str]) -> tuple[str, int]:
    url = re.search(r"http://127.0.0.1:(\d+)", "".join(shown))
    assert url is not None
    return "127.0.0.1", int(url[1])


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder for everything that must be gone after a demo."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def scratch_folders(temporary: Path) -> list[Path]:
    return list(temporary.glob("hps-demo-*"))


def test_once_passes_every_check_and_leaves_no_file(small_demo: Path, temporary: Path) -> None:
    done = demo("--once", "--model", small_demo)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("OK   ") == 5
    assert "FAIL" not in done.stdout
    for word in ("p50", "p99", "rocksdb", "hit rate", "curl -s http", "hps lookup", "hps status"):
        assert word in done.stdout
    assert not scratch_folders(temporary)
    # The second pass over the same keys is answered from memory.
    cpu = next(line for line in done.stdout.splitlines() if line.startswith("cpu "))
    assert float(re.findall(r"([\d.]+) %", cpu)[1]) > 90


def test_wrong_score_fails_the_demo(small_demo: Path, tmp_path: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        data["scores"]["score"][77] += 3e-5

    done = demo("--once", "--model", changed(small_demo, tmp_path / "m", change))
    assert done.returncode == 1
    assert "FAIL all 96 scores equal the trainer's" in done.stdout


def test_key_without_a_row_fails_the_demo(small_demo: Path, tmp_path: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        data["features"]["item"][5] = [4711]

    done = demo("--once", "--model", changed(small_demo, tmp_path / "m", change))
    assert done.returncode == 1
    assert "FAIL every key was found in a table" in done.stdout


def test_demo_reports_a_server_that_does_not_start(small_demo: Path, tmp_path: Path) -> None:
    model = changed(small_demo, tmp_path / "m", lambda _data: None)
    (model / "clicks" / "1" / "dense.onnx").write_bytes(b"nonsense")
    done = demo("--once", "--model", model)
    assert done.returncode == 1
    assert "error: the demo's server did not start" in done.stderr
    assert "dense.onnx" in done.stderr


def test_demo_reports_a_missing_model(tmp_path: Path) -> None:
    done = demo("--once", "--model", tmp_path)
    assert done.returncode == 2
    assert f"no demo's model: there is no {tmp_path / REQUESTS};" in done.stderr
    (tmp_path / REQUESTS).write_text("{")
    with pytest.raises(ConfigError, match="is damaged"):
        load_demo(tmp_path)


def test_demo_reports_a_taken_port(small_demo: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = demo("--once", "--model", small_demo, "--port", str(port))
    assert done.returncode == 2
    assert f"port {port} is in use" in done.stderr


def test_replacement_of_a_port_in_use_is_named(
    small_demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hps.cli import demo_process as module
    from hps.cli.demo import app

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(module, "PORTS", {"http": port, "grpc": 0, "admin": 0})
        shown = CliRunner().invoke(app, ["--once", "--model", str(small_demo)]).stdout
    named = re.search(rf"Port {port} is in use; the http port is (\d+)\.", shown)
    assert named is not None, shown
    assert f"It answers at http://127.0.0.1:{named[1]}, gRPC at 127.0.0.1:" in shown
    assert f"curl -s http://127.0.0.1:{named[1]}/" in shown
    for step in ("1/2 Starting a server", "2/2 Sending 96 requests"):
        assert re.search(rf"^{step}.*: done, [\d.]+ s$", shown, re.MULTILINE)


def test_demo_tolerates_a_port_taken_at_the_last_moment(
    small_demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hps.cli import demo_process as module
    from hps.cli.demo import app

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr(
            module, "PORTS", {"http": taken.getsockname()[1], "grpc": 0, "admin": 0}
        )
        monkeypatch.setattr(module, "_is_free", lambda _port: True)
        result = CliRunner().invoke(app, ["--once", "--model", str(small_demo)])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_demo_serves_until_it_is_stopped(
    number: signal.Signals, small_demo: Path, temporary: Path, program: Callable[[str], str]
) -> None:
    program("curl")
    with serving(small_demo) as (process, shown):
        assert scratch_folders(temporary)
        command = next(line for line in shown if line.startswith("curl -s"))
        answer = json.loads(subprocess.check_output(["sh", "-c", command], text=True))
        first = float(next(line for line in shown if line.split()[:1] == ["0"]).split()[1])
        outputs = {out["name"]: out["data"] for out in answer["outputs"]}
        assert float(np.ravel(outputs["score"])[0]) == pytest.approx(first, abs=1e-5)
        ours = next(line for line in shown if line.startswith("hps predict"))
        ours = ours.replace("hps", f"{sys.executable} -m hps.cli.main", 1).strip()
        report = json.loads(subprocess.check_output(["sh", "-c", f"{ours} -o json"], text=True))
        assert report["outputs"]["score"][0][0] == pytest.approx(first, abs=1e-5)
        process.send_signal(number)
        assert process.wait(60) == 0, shown
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address(shown), 5)
    assert not scratch_folders(temporary)


def test_background_job_stops_on_a_signal(small_demo: Path) -> None:
    """A shell's ``hps demo &`` begins with SIGINT ignored, one under nohup with SIGHUP ignored; the
    first is to stop it nevertheless, the second is not."""
    with serving(small_demo, "SIGINT SIGHUP") as (process, shown):
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        socket.create_connection(address(shown), 5).close()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address(shown), 5)


def test_server_exits_with_the_demo(small_demo: Path, temporary: Path) -> None:
    """A killed demo cannot clean up; its server does."""
    with serving(small_demo) as (process, shown):
        process.kill()
    until(lambda: not scratch_folders(temporary))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address(shown), 5)


def test_starting_server_exits_with_the_demo(tmp_path: Path) -> None:
    """Its standard input closes before it can have read its configuration."""
    folder = tmp_path / "hps-demo"
    folder.mkdir()
    command = [sys.executable, "-m", "hps.cli.demo_server", str(folder / "config.yaml")]
    subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    assert not folder.exists()


def test_bundled_model_passes_the_demo() -> None:
    data = load_demo()
    assert data.samples >= 100
    size = sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file())
    assert size <= 2_000_000
    done = demo("--once")
    assert done.returncode == 0, done.stdout + done.stderr
