"""``hps top`` against a real server."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time

from typer.testing import CliRunner

from benchmarks.peers.hps_server import Hps
from hps.cli.main import app
from hps.client import Client

NOBODY = "http://127.0.0.1:9"


def test_one_look_tells_of_those_that_are_there_and_of_those_that_are_not(
    small_server: Hps,
) -> None:
    url = f"http://{small_server.admin}"
    result = CliRunner().invoke(app, ["top", url, NOBODY, "--interval", "0.1", "--json"])
    assert result.exit_code == 1
    there, away = json.loads(result.stdout)
    assert (there["server"], there["state"], there["problem"]) == (url, "ready", "")
    assert there["uptime_s"] > 0
    assert {tier["tier"] for tier in there["tiers"]} >= {"cpu", "rocksdb"}
    assert away["state"] == "away"
    assert "nothing listens" in away["problem"]
    shown = CliRunner().invoke(app, ["top", url, "--interval", "0.1", "--once"])
    assert shown.exit_code == 0
    assert url in shown.stdout


def test_live_it_shows_requests_as_they_come_until_q(small_server: Hps) -> None:
    """On a terminal of its own."""
    ours, theirs = pty.openpty()
    words = [f"http://{small_server.admin}", NOBODY, "--interval", "0.2"]
    command = [sys.executable, "-m", "hps.cli.main", "top", *words]
    size = {"COLUMNS": "200", "LINES": "50", "TERM": "xterm"}
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | size
    ) as process:
        os.close(theirs)
        shown = b""
        end = time.monotonic() + 60
        with Client(f"http://{small_server.address}") as client:
            # A model has a line while it is asked.
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
