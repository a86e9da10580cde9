"""A server with a damaged RocksDB: damage is reported, answers are degraded, verify repairs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import hps
from benchmarks.peers.hps_server import Hps, start_hps, write_lookup_model
from hps.client import Client
from tests.integration.test_store import printed, run
from tests.support.waiting import until

ROWS, DIM = 20_000, 64
KEYS = np.arange(0, ROWS, 7)


def flip_bits(file: Path, offsets: int) -> None:
    """Flip bits in place, in the file that is open."""
    with file.open("r+b") as opened:
        for at in np.linspace(1000, 4_000_000, offsets).astype(int).tolist():
            opened.seek(at)
            byte = opened.read(1)[0]
            opened.seek(at)
            opened.write(bytes([byte ^ 1]))


def lookup(server: Hps) -> tuple[np.ndarray, str]:
    """Return the first value of each row, and the tiers that were skipped."""
    with Client(f"http://{server.address}") as client:
        found = client.lookup("m", {"word": KEYS})
    return found.vectors["word"][:, 0], ",".join(found.degraded)


def ready(address: str) -> int:
    return httpx.get(f"http://{address}/v2/health/ready").status_code


@pytest.fixture
def settings(tmp_path) -> dict[str, Any]:
    rows = np.repeat(np.arange(ROWS, dtype=np.float32)[:, None], DIM, 1)
    write_lookup_model(tmp_path / "models", "m", "word", rows)
    return {
        "rocksdb": {"path": str(tmp_path / "rocksdb"), "on_corruption": "not_ready"},
        "cpu_cache": {"capacity_bytes": 1 << 20, "warm": False, "enabled": True},
    }


def table_file(folder: Path) -> Path:
    (file,) = (f for f in (folder / "rocksdb").glob("*.sst") if f.stat().st_size > 1 << 20)
    return file


@pytest.mark.parametrize("workers", [0, 2])
def test_flipped_bits_are_reported_and_server_is_not_ready(tmp_path, settings, workers):
    with start_hps(tmp_path, tiers=settings, limits={"workers": workers}) as server:
        file = table_file(tmp_path)
        assert ready(server.address) == ready(server.admin) == 200
        flip_bits(file, 60)
        values, degraded = lookup(server)
        assert degraded
        assert 0 < np.count_nonzero(values != KEYS) < 7 * 60
        assert set(values[values != KEYS]) == {0.0}
        until(lambda: ready(server.admin) != 200)
        for _ in range(10):  # on connections of both workers
            until(lambda: ready(server.address) != 200)
        status = httpx.get(f"http://{server.admin}/v1/status").json()
        assert any(f"{file.name} of table m/1/rows" in said for said in status["warnings"])
        metrics = httpx.get(f"http://{server.admin}/metrics").text
        assert 'hps_tier_fact{fact="damaged_files",tier="rocksdb"} 1.0' in metrics
        said = [line for line in server.log.read_text().splitlines() if "is damaged" in line]
        assert len(said) == 1
        assert file.name in said[0]
        assert "m/1/rows" in said[0]


def test_verify_finds_flipped_bits_and_repairs_them(tmp_path, settings):
    config = tmp_path / "config.yaml"
    models = {"repository": str(tmp_path / "models")}
    config.write_text(json.dumps({"models": models, "tiers": settings}))
    assert run("load", "--config", config).exit_code == 0
    file = table_file(tmp_path)
    flip_bits(file, 60)
    checks = {e["check"]: e for e in printed("verify", "--config", config, code=1)}
    assert checks["table files"]["result"] == "FAIL"
    assert file.name in checks["table files"]["detail"]
    checks = {e["check"]: e for e in printed("verify", "--config", config, "--repair")}
    assert {each["result"] for each in checks.values()} == {"OK", "WARN"}  # no manifest
    assert "rows were reset to those of the model's files" in checks["repair"]["detail"]
    assert f"{ROWS:,} of {ROWS:,} as in the files" in checks["rows in rocksdb"]["detail"]
    with hps.open(config) as node:
        found = node.lookup("m", {"word": KEYS})
        assert (found.vectors["word"][:, 0] == KEYS).all()
        assert not found.degraded
        assert node.status()["warnings"] == list(node.warnings)
