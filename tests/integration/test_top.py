"""``hps top`` against a real server."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.peers.hps_server import Hps
from hps.cli import top_screen
from hps.cli.main import app
from hps.client import Client
from hps.tools import output

NOBODY = "http://127.0.0.1:9"


def test_top_shows_reachable_and_unreachable_servers(
    small_server: Hps,
) -> None:
    url = f"http://{small_server.admin}"
    result = CliRunner().invoke(
        app, ["top", "--server", url, "-s", NOBODY, "--interval", "0.1", "--json"]
    )
    assert result.exit_code == 1
    there, away = json.loads(result.stdout)
    assert (there["server"], there["state"], there["problem"]) == (url, "ready", "")
    assert there["uptime_s"] > 0
    assert {tier["tier"] for tier in there["tiers"]} >= {"cpu", "rocksdb"}
    assert away["state"] == "away"
    assert "nothing listens" in away["problem"]
    shown = CliRunner().invoke(app, ["top", "--server", url, "--interval", "0.1", "--once"])
    assert shown.exit_code == 0
    assert url in shown.stdout


def test_live_screen_shows_requests_until_q(small_server: Hps) -> None:
    """Runs on a pseudo-terminal."""
    ours, theirs = pty.openpty()
    words = ["-s", f"http://{small_server.admin}", "-s", NOBODY, "--interval", "0.2"]
    command = [sys.executable, "-m", "hps.cli.main", "top", *words]
    size = {"COLUMNS": "200", "LINES": "50", "TERM": "xterm"}
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | size
    ) as process:
        os.close(theirs)
        shown = b""
        end = time.monotonic() + 60
        with Client(f"http://{small_server.address}") as client:
            # A model has a line while it gets requests.
            while b"words.lookup" not in shown or b"nothing listens" not in shown:
                assert time.monotonic() < end, shown
                client.lookup("words", {"word": [1, 2, 3]})
                if select.select([ours], [], [], 0.05)[0]:
                    shown += os.read(ours, 65536)
        os.write(ours, b"q")
        while process.poll() is None:
            assert time.monotonic() < end, shown
            if select.select([ours], [], [], 0.05)[0]:
                try:
                    os.read(ours, 65536)
                except OSError:  # it has hung up
                    break
        assert process.wait(20) == 0
    os.close(ours)


def test_server_without_hps_metrics_is_away() -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b"nv_inference_count 3\n"
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever).start()
        url = f"http://127.0.0.1:{server.server_port}"
        done = CliRunner().invoke(app, ["top", "--server", url, "--interval", "0.1", "--json"])
        server.shutdown()
    (found,) = json.loads(done.stdout)
    assert (done.exit_code, found["state"]) == (1, "away")
    assert "none of hps" in found["problem"]


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_narrow_terminal_shows_fewer_columns_without_wrapping(width: int) -> None:
    tier = {"tier": "rocksdb", "keys_per_s": 1e5, "hit_rate": 0.5, "p50_s": 0.001, "p99_s": 0.002}
    model = {"requests_per_s": 1234.0, "errors_per_s": 0.0, "p50_s": 0.001, "p99_s": 0.01}
    server = {
        **model,
        "server": "http://127.0.0.1:8002",
        "state": "not ready",
        "problem": "",
        "uptime_s": 100_000.0,
        "refused_per_s": 0.0,
        "running": 3.0,
        "queued": 12.0,
        "keys_per_s": 1_234_567.0,
        "defaulted": 0.001,
        "degraded_per_s": 0.0,
        "age_s": 0.1,
        "lag_messages": 12.0,
        "models": [{**model, "model": "a_model_with_a_name"}],
        "tiers": [{**tier, "skipped_per_s": 0.0}],
        "lookup_nodes": [
            {
                "address": "10.0.0.1:8001",
                "up": True,
                "requests_per_s": 1.0,
                "errors_per_s": 0.0,
                "running": 1.0,
                "retries_per_s": 0.0,
            }
        ],
    }
    wide = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "console", lambda: wide)
        wide.print(top_screen.screen([server]))
    lines = wide.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == 11, lines
    assert ("degraded/s" in lines[0]) == (width == 200)
    for column in ("server", "state", "req/s", "p99 ms"):
        assert column in lines[0]


def test_dumb_terminal_prints_screens_below_each_other(
    small_server: Hps,
) -> None:
    ours, theirs = pty.openpty()
    words = ["--server", f"http://{small_server.admin}", "--interval", "0.1"]
    command = [sys.executable, "-m", "hps.cli.main", "top", *words]
    size = {"COLUMNS": "200", "LINES": "50", "TERM": "dumb"}
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | size
    ) as process:
        os.close(theirs)
        shown = b""
        end = time.monotonic() + 60
        while shown.count(b"up for") < 3:
            assert time.monotonic() < end, shown
            if select.select([ours], [], [], 0.05)[0]:
                shown += os.read(ours, 65536)
        again = time.monotonic()
        while process.poll() is None:
            assert time.monotonic() < end, shown
            if time.monotonic() >= again:  # Python drops an interrupt that arrives in a finalizer
                process.send_signal(signal.SIGINT)
                again += 10
            if select.select([ours], [], [], 0.05)[0]:
                try:
                    os.read(ours, 65536)
                except OSError:
                    break
        assert process.wait(60) == 130
    os.close(ours)
    assert b"\x1b" not in shown
