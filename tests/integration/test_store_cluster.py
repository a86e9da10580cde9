"""`hps store` on a Redis Cluster with TLS and a user: rows written by HPS's names, read and converted."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from hps.cli.main import app
from hps.native import partition_hash
from tests.support.redis_servers import Cluster, shared_cluster

KEYS = np.arange(0, 100)


def printed(*words: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["store", *map(str, words), "--output", "json"])
    assert result.exit_code == code, (result.stderr, result.stdout)
    return json.loads(result.stdout)


@pytest.fixture
def cluster() -> Cluster:
    return shared_cluster()


def config(folder: Path, repository: Path, cluster: Cluster, layout: str, **options: Any) -> Path:
    redis = cluster.settings(layout=layout, **options).model_dump(mode="json")
    tiers = {"redis": redis, "rocksdb": {"enabled": False}}
    path = folder / f"{layout}.yaml"
    path.write_text(json.dumps({"models": {"repository": str(repository)}, "tiers": tiers}))
    return path


def test_hps_hashes_are_converted_to_native(
    tmp_path: Path, small_repository: Path, cluster: Cluster
) -> None:
    rows = (KEYS[:, None] + np.arange(4, dtype=np.float32) / 8).astype("<f4")  # as in the files
    for key, partition, row in zip(KEYS, partition_hash(KEYS) % 8, rows, strict=True):
        name = f"hps_et{{hps_et.clicks.users/p{partition}}}v"
        cluster.holder(name.encode()).ask("HSET", name, struct.pack("<q", key), row.tobytes())
    old = config(tmp_path, small_repository, cluster, "hps")
    new = config(tmp_path, small_repository, cluster, "native", partitions=16)
    loaded_tables = [e for e in printed("ls", "--config", old) if e["state"] == "ok"]
    assert [(e["table"], e["rows"]) for e in loaded_tables] == [("users", 100)]
    (same,) = printed("diff", "clicks", "users", "--config", old)
    assert same["equal"] == 100
    (done,) = printed("convert", "clicks", "users", "--config", old, "--into", new)
    assert (done["read"], done["written"]) == (100, 100)
    against = ("--against", "redis", "--other", old)
    (found,) = printed("diff", "clicks", "users", "--config", new, *against)
    assert (found["compared"], found["equal"], found["extra"]) == (100, 100, 0)
    printed("put", "clicks", "users", -7, "--vector", "1,2,3,4", "--config", new)
    printed("del", "clicks", "users", 7, "--config", new)
    held = printed("get", "clicks", "users", -7, 7, "--config", new)["rows"]
    assert [(e["vector"], e["deleted"]) for e in held] == [([1, 2, 3, 4], False), (None, True)]
    out = tmp_path / "users.npz"
    assert printed("export", "clicks", "users", "--out", out, "--config", new)["rows"] == 100
    assert len(printed("erase", "clicks", "--yes", "--config", old)) == 1
    left = printed("ls", "clicks", "--config", new)
    assert sum(e["rows"] for e in left) == 101  # one of them a deletion
