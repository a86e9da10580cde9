"""Loads and conversions killed at any moment continue when they are run again."""

from __future__ import annotations

import json
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.peers.redis_server import RedisServer
from hps.cli.main import app
from hps.config.model_schema import ModelSpec
from hps.models.version_writer import write_version
from hps.native import partition_hash
from tests.support.redis_servers import shared_server
from tests.support.waiting import until

ROWS = 200_000


@pytest.fixture
def server() -> RedisServer:
    return shared_server()


@pytest.fixture
def folder(tmp_path: Path, server: RedisServer) -> Path:
    """A model of some size, and its stores' configurations in both layouts."""
    keys = np.random.default_rng(7).permutation(ROWS) * 7919 - 10**9
    vectors = (keys[:, None] % 977 + np.arange(8)).astype(np.float32)
    spec = ModelSpec.model_validate({"name": "big", "tables": [{"name": "t", "dim": 8}]})
    write_version(tmp_path / "models", spec, 1, {"t": (keys, vectors)}, mapped=False)
    for layout, path in (("hps", "old"), ("native", "new")):
        redis = {"addresses": [server.address], "layout": layout}
        tiers = {"redis": redis, "rocksdb": {"path": path, "layout": layout}}
        settings = {"models": {"repository": "models"}, "tiers": tiers}
        (tmp_path / f"{layout}.yaml").write_text(json.dumps(settings))
    return tmp_path


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "hps.cli.main", "store", *map(str, words)]


def killed(
    folder: Path, server: RedisServer, is_running: Callable[[], bool], *words: object
) -> None:
    """Run the command until ``under_way``, then ``kill -9`` it, and wait for its Redis commands."""
    others = clients(server)
    with subprocess.Popen(
        command(*words), cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        while not is_running():
            assert process.poll() is None, (process.returncode, process.communicate()[1])
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
    until(lambda: clients(server) <= others)


def clients(server: RedisServer) -> int:
    return int(server.ask("CLIENT", "LIST").count(b"addr="))


def killed_in_part(folder: Path, server: RedisServer, *words: object) -> int:
    """Return the number of native rows when the command was killed; repeat if it had finished."""
    for _ in range(10):
        for name in server.ask("KEYS", "hps:*"):
            server.ask("DEL", name)
        killed(folder, server, lambda: entries(server, "hps:{*}v") > ROWS // 3, *words)
        if (rows_written := entries(server, "hps:{*}v")) < ROWS:
            return rows_written
    raise AssertionError("it was never killed in the middle")


def printed(folder: Path, *words: object) -> Any:
    done = subprocess.run(
        [*command(*words), "--output", "json"], cwd=folder, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def entries(server: RedisServer, pattern: str) -> int:
    return sum(server.ask("HLEN", name) for name in server.ask("KEYS", pattern))


def test_killed_load_into_redis_continues(folder: Path, server: RedisServer) -> None:
    words = ("load", "--config", "native.yaml", "--tier", "redis")
    rows_written = killed_in_part(folder, server, *words)
    (again,) = printed(folder, *words)
    assert (
        0 < again["rows"] <= ROWS - rows_written + 2 * 65_536
    )  # what was acknowledged is not repeated
    verified = printed(folder, "verify", "--config", "native.yaml", "--tier", "redis")
    assert {finding["result"] for finding in verified} == {"OK"}
    assert entries(server, "hps:{*}v") == ROWS


def test_killed_load_into_rocksdb_continues(folder: Path, server: RedisServer) -> None:
    words = ("load", "--config", "native.yaml")
    started = folder / "new" / "hps-ingest"
    for _ in range(10):
        killed(folder, server, lambda: any(started.glob("*.sst")), *words)
        (again,) = printed(folder, *words)
        if again["how"] == "loaded":
            break
        shutil.rmtree(folder / "new")  # it was killed too late
    assert (again["how"], again["rows"]) == ("loaded", ROWS)
    verified = printed(folder, "verify", "--config", "native.yaml")
    assert {finding["result"] for finding in verified} == {"OK"}
    assert not list(started.glob("*"))


def test_killed_conversion_continues(folder: Path, server: RedisServer) -> None:
    for tier in ("redis", "rocksdb"):
        printed(folder, "load", "--config", "hps.yaml", "--tier", tier)
    partition = int(partition_hash(np.array([-5]))[0]) % 8  # a row that came after the files
    name, key = f"hps_et{{hps_et.big.t/p{partition}}}v", struct.pack("<q", -5)
    server.ask("HSET", name, key, bytes(32))
    words = ("convert", "--config", "hps.yaml", "--into", "native.yaml")
    killed(folder, server, lambda: entries(server, "hps:{*}v") > ROWS // 3, *words)
    assert entries(server, "hps:{*}v") <= ROWS + 1
    killed(folder, server, lambda: (folder / "new" / "CURRENT").exists(), *words)
    on_redis, on_disk = printed(folder, *words)
    assert (on_redis["read"], on_redis["written"]) == (ROWS + 1, 0)
    assert (on_disk["read"], on_disk["written"]) == (ROWS, 0)
    for tier in ("redis", "rocksdb"):
        against = ("--tier", tier, "--against", tier, "--other", "hps.yaml")
        (found,) = printed(folder, "diff", "--config", "native.yaml", *against)
        assert found["compared"] == found["equal"] == (ROWS + (tier == "redis"))
    assert entries(server, "hps:{*}v") == entries(server, "hps_et{*}v") == ROWS + 1


def test_rows_written_before_kill_are_not_written_again(folder: Path, server: RedisServer) -> None:
    """Rows written before the kill are only read."""
    printed(folder, "load", "--config", "hps.yaml", "--tier", "redis")
    words = ("convert", "--config", "hps.yaml", "--into", "native.yaml", "--tier", "redis")
    rows_written = killed_in_part(folder, server, *words)
    (again,) = printed(folder, *words)
    assert again["written"] == ROWS - rows_written


def test_help_shows_examples() -> None:
    runner = CliRunner()
    listed = runner.invoke(app, ["store", "--help"]).stdout
    names = [line.split()[0] for line in listed.split("Commands:")[1].splitlines() if line.strip()]
    assert len(names) == 16
    for name in names:
        shown = runner.invoke(app, ["store", name, "--help"])
        assert shown.exit_code == 0
        assert f"hps store {name}" in shown.stdout.split("Examples:")[1]
    assert "..." not in listed.split("Commands:")[1]
