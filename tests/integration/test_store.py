"""`hps store` on a real Redis and a real database: every command, with good and bad input."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from rocksdict import Options, SstFileWriter
from typer.testing import CliRunner, Result

import hps
from benchmarks.peers.redis_server import RedisServer
from hps.cli.main import app
from hps.config.model_schema import ModelSpec
from hps.models.version_writer import write_version
from tests.support.redis_servers import shared_server
from tests.support.waiting import PATIENT_GUARD, until

V4 = "1,2,3,4"


def run(*words: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["store", *map(str, words)], input=stdin)


def printed(*words: object, code: int = 0) -> Any:
    result = run(*words, "--output", "json")
    assert result.exit_code == code, (result.stderr, result.stdout)
    return json.loads(result.stdout)


def error_line(*words: object, code: int = 2) -> str:
    """Run a command that fails; return its one error line."""
    result = run(*words)
    assert result.exit_code == code, (result.stdout, result.stderr)
    assert "Traceback" not in result.stderr
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    return line


@pytest.fixture
def server() -> RedisServer:
    return shared_server()


@pytest.fixture
def config(tmp_path: Path, small_repository: Path, server: RedisServer) -> Path:
    settings = {
        "models": {"repository": str(small_repository)},
        "tiers": {
            "redis": {
                "addresses": [server.address],
                "partitions": 3,
                "guard": {"deadline_ms": 10_000},
            },
            "rocksdb": {"path": str(tmp_path / "db"), "guard": PATIENT_GUARD},
        },
    }
    path = tmp_path / "hps.yaml"
    path.write_text(json.dumps(settings))
    return path


@pytest.fixture
def loaded(config: Path) -> tuple[str, Path]:
    """``--config FILE`` with every table in both stores."""
    for tier in ("redis", "rocksdb"):
        printed("load", "--config", config, "--tier", tier)
    return ("--config", config)


def row(key: int, dim: int = 4) -> list[float]:
    """Return a row of the repository's files."""
    return (key + np.arange(dim) / 8).tolist()


# -- tables ----------------------------------------------------------------------------------------


def test_tables_lists_state_before_and_after_load(config: Path) -> None:
    warned = run("ls", "--config", config)
    assert warned.exit_code == 1
    assert "there is no database" in warned.stderr
    for _ in range(2):
        assert {entry["how"] for entry in printed("load", "--config", config)} == {"mapped"}
    entries = printed("ls", "--config", config)
    states = {(e["tier"], e["table"]): (e["rows"], e["dim"], e["state"]) for e in entries}
    assert states == {
        ("redis", "users"): (0, 4, "not there"),
        ("redis", "items"): (0, 2, "not there"),
        ("redis", "words"): (0, 8, "not there"),
        ("rocksdb", "users"): (100, 4, "ok"),
        ("rocksdb", "items"): (100, 2, "ok"),
        ("rocksdb", "words"): (1000, 8, "ok"),
    }
    assert not any(entry["rows_approximate"] for entry in entries if entry["rows"])
    printed("put", "clicks", "users", 5, "--vector", V4, "--config", config, "--tier", "rocksdb")
    changed = printed("ls", "clicks", "--config", config, "--tier", "rocksdb")
    found = {e["table"]: (e["rows"], e["rows_approximate"]) for e in changed}
    assert found == {"items": (100, False), "users": (100, True)}
    shown = run("ls", "clicks", "--config", config, "--tier", "rocksdb").stdout
    assert "~100" in shown
    only = printed("ls", "words", "--config", config, "--tier", "rocksdb")
    assert [(e["model"], e["version"], e["layout"]) for e in only] == [("words", 1, "native")]
    assert only[0]["bytes"] == 1000 * (8 + 9 + 8 * 4)
    assert run("ls", "nobody", "--config", config, "--tier", "rocksdb").exit_code == 2


def test_load_into_database_is_done_once(config: Path) -> None:
    unmapped = ("--config", config, "--set", "tiers.mapped.enabled=false")
    for how in ("loaded", "reused"):
        assert {entry["how"] for entry in printed("load", *unmapped)} == {how}


def test_get_shows_store_that_has_table(config: Path) -> None:
    printed("load", "words", "--config", config)  # so that there is a database
    printed("load", "clicks", "users", "--config", config, "--tier", "redis")
    shown = run("get", "clicks", "users", 5, "--config", config, "--output", "json")
    assert shown.exit_code == 0, shown.stderr
    (row,) = json.loads(shown.stdout)["rows"]
    assert (row["tier"], row["found"]) == ("redis", True)
    assert "holds no table clicks/1/users" in shown.stderr
    assert "holds no table" in error_line("get", "clicks", "items", 5, "--config", config)
    assert "holds no table" in error_line(
        "get", "clicks", "users", 5, "--config", config, "--tier", "rocksdb"
    )


@pytest.mark.parametrize("folder", ["missing", "empty"])
def test_get_shows_redis_row_without_database(config: Path, tmp_path: Path, folder: str) -> None:
    if folder == "empty":
        (tmp_path / "db").mkdir()
    printed("load", "clicks", "users", "--config", config, "--tier", "redis")
    shown = run("get", "clicks", "users", 5, "--config", config, "--output", "json")
    assert shown.exit_code == 0, shown.stderr
    (row,) = json.loads(shown.stdout)["rows"]
    assert (row["tier"], row["found"]) == ("redis", True)
    assert f"there is no database in {tmp_path}/db" in shown.stderr
    only = error_line("get", "clicks", "users", 5, "--config", config, "--tier", "rocksdb")
    assert "there is no database" in only
    assert "holds no table" in error_line("get", "clicks", "items", 5, "--config", config)


def test_version_that_node_may_serve_is_listed_as_configured(
    tmp_path: Path, small_repository: Path
) -> None:
    """A start serves the newest version; a load by the API may have restored the previous one."""
    repository = tmp_path / "models"
    shutil.copytree(small_repository, repository)
    options = (
        "--set",
        f"models.repository={repository}",
        "--set",
        f"tiers.rocksdb.path={tmp_path}/db",
    )
    (tmp_path / "hps.yaml").write_text("{}")
    options = ("--config", tmp_path / "hps.yaml", *options)
    printed("load", "words", *options)
    shutil.copytree(repository / "words" / "1", repository / "words" / "2")
    manifest = repository / "words" / "2" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 2'))
    found = {e["version"]: e["state"] for e in printed("ls", "words", *options)}
    assert found == {1: "another version, a start serves 2", 2: "not there"}
    shutil.rmtree(repository / "words")
    (entry,) = printed("ls", "words", *options)
    assert entry["state"] == "not configured"


def test_unconfigured_tables_are_listed_and_erased(loaded: Any, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    other_process = (*loaded, "--set", f"models.repository={empty}")
    entries = printed("ls", *other_process)
    assert {e["state"] for e in entries} == {"not configured"}
    assert sum(e["rows"] for e in entries) == 2 * 1200
    prompts = error_line("erase", "clicks", *other_process)
    assert "this would erase clicks/1/items in redis" in prompts
    assert prompts.endswith("give --yes to confirm")
    assert len(printed("erase", "clicks", "--table", "users", "--yes", *other_process)) == 2
    assert len(printed("erase", "clicks", "--version", 1, "--yes", *other_process)) == 2
    left = {(e["tier"], e["table"]): e["rows"] for e in printed("ls", *other_process)}
    assert left == {("redis", "words"): 1000, ("rocksdb", "words"): 1000}
    assert "no store holds that" in error_line("erase", "clicks", "--yes", *other_process)


def test_erase_names_versions_that_share_the_tables(tmp_path: Path) -> None:
    models = tmp_path / "models"
    spec = ModelSpec.model_validate(
        {"name": "m", "tables": [{"name": "same", "dim": 2}, {"name": "new", "dim": 2}]}
    )
    for version in (1, 2):
        rows = np.full((50, 2), version, np.float32)
        tables = {"same": (np.arange(50), rows * 0 + 1), "new": (np.arange(50), rows)}
        write_version(models, spec, version, tables)
    settings = {
        "models": {"repository": str(models)},
        "tiers": {"rocksdb": {"path": str(tmp_path / "db")}, "mapped": {"enabled": False}},
    }
    (config := tmp_path / "hps.yaml").write_text(json.dumps(settings))
    printed("load", "--config", config)
    result = run("erase", "m", "--version", 1, "--yes", "--config", config)
    assert result.exit_code == 0, result.stderr
    assert "version 2 shares same with version 1: its rows are erased too" in result.stderr
    printed("load", "--config", config)
    assert "shares" not in run("erase", "m", "--version", 2, "--yes", "--config", config).stderr


# -- rows ------------------------------------------------------------------------------------------


def test_rows_are_scanned(loaded: Any) -> None:
    found = printed("scan", "clicks", "items", "--from", "-3", "--limit", 3, *loaded)
    assert [(r["key"], r["vector"]) for r in found["rows"]] == [
        (k, row(k, 2)) for k in (-3, -2, -1)
    ]
    found = printed("scan", "words", "words", "--limit", 5000, "--tier", "redis", *loaded)
    assert sorted(r["key"] for r in found["rows"]) == list(range(1000))
    shown = run("scan", "words", "words", "--limit", 2, *loaded).stdout
    assert "0 0.125 0.25" in shown
    assert "Redis keeps rows in no order" in error_line(
        "scan", "words", "words", "--from", 0, "--tier", "redis", *loaded
    )


def test_rows_are_found_for_every_notation_of_key(loaded: Any) -> None:
    biggest = 2**64 - 1
    printed("put", "clicks", "users", "0xFFFFFFFFFFFFFFFF", "--vector", V4, *loaded)
    found = printed("get", "clicks", "users", biggest, -1, 99, "0x7", 1000, *loaded)["rows"]
    held = {(r["key"], r["tier"]): r["vector"] for r in found}
    assert {tier for _, tier in held} == {"redis", "rocksdb"}
    for tier in ("redis", "rocksdb"):
        assert held[-1, tier] == [1, 2, 3, 4]
        assert held[99, tier] == row(99)
        assert held[7, tier] == row(7)
        assert held[1000, tier] is None
    assert str(biggest) in run("get", "clicks", "users", biggest, *loaded).stdout
    assert "… (8 values)" not in run("get", "words", "words", 1, *loaded).stdout


def test_put_and_delete_reach_both_stores(loaded: Any) -> None:
    printed("put", "clicks", "users", 5, "--vector", f"[{V4}]", *loaded)
    printed("del", "clicks", "users", "-3", 6, *loaded)
    for entry in printed("get", "clicks", "users", 5, 6, *loaded)["rows"]:
        assert entry["deleted"] == (entry["key"] == 6)
        assert entry["vector"] == ([1, 2, 3, 4] if entry["key"] == 5 else None)
    with hps.open(loaded[1]) as node:
        found = node.lookup("clicks", {"users": [5, 6]}, by_table=True)
        assert found.vectors["users"].tolist() == [[1, 2, 3, 4], [0.5] * 4]
    only = printed("put", "clicks", "users", 6, "--vector", V4, "--tier", "redis", *loaded)
    assert [entry["tier"] for entry in only] == ["redis"]


def test_newer_row_is_kept_and_reported(loaded: Any) -> None:
    printed("put", "clicks", "users", 5, "--vector", V4, *loaded)
    late = run(
        "put", "clicks", "users", 5, "--vector", "0,0,0,0", "--version", "2001-01-01", *loaded
    )
    assert late.exit_code == 1
    assert late.stderr.count("keeps what is newer of key 5") == 2
    assert run("del", "clicks", "users", 5, "--version", 7, *loaded).exit_code == 1
    rows = printed("get", "clicks", "users", 5, *loaded)["rows"]
    assert [r["vector"] for r in rows] == [[1, 2, 3, 4]] * 2


def test_put_skips_redis_when_rocksdb_has_newer_row(loaded: Any) -> None:
    """Redis is asked first, so lookups would get the older row."""
    newer = ("--version", "2400-01-01", "--tier", "rocksdb")
    printed("put", "clicks", "users", 7000, "--vector", V4, *newer, *loaded)
    late = run("put", "clicks", "users", 7000, "--vector", "0,0,0,0", *loaded)
    assert late.exit_code == 1
    assert "rocksdb keeps what is newer of key 7000" in late.stderr
    found = printed("get", "clicks", "users", 7000, *loaded)["rows"]
    assert {r["tier"]: r["vector"] for r in found} == {"redis": None, "rocksdb": [1, 2, 3, 4]}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["get", "clicks", "users", "1.5"], "'1.5' is not a key"),
        (["get", "clicks", "users", "0xzz"], "'0xzz' is not a key"),
        (["get", "clicks", "users", "18446744073709551616"], "outside -2^63 to 2^64-1"),
        (["get", "clicks", "nothing", "1"], "has no table 'nothing'; it has users, items"),
        (
            ["get", "nobody", "users", "1"],
            "no model 'nobody' is configured; there is clicks, words",
        ),
        (
            ["put", "clicks", "users", "1", "--vector", "1,2"],
            "2 values, table clicks/1/users has dim 4",
        ),
        (["put", "clicks", "users", "1", "--vector", "1,2,x,4"], "give numbers with commas"),
        (["put", "clicks", "users", "1", "--vector", "1,2,nan,4"], "no finite float32"),
        (["put", "clicks", "users", "1", "--vector", "1,2,1e39,4"], "no finite float32"),
        (["put", "clicks", "users", "1", "--vector", V4, "--version", "soon"], "nor a time like"),
        (
            ["put", "clicks", "users", "1", "--vector", V4, "--version", "9" * 20],
            "outside 0 to 2^64-1",
        ),
        (["diff", "--against", "rocksdb"], "is the store itself"),
        (["export", "clicks", "users", "--out", "users.csv"], "*.parquet, *.npz"),
        (["restore", "nothing"], "nothing holds no checkpoint"),
        (["checkpoint"], "give FOLDER and --config FILE, or --server URL"),
        (["checkpoint", "--server", "http://127.0.0.1:1"], "remove FOLDER and --config"),
        (["import-dump", "clicks", "users", "nothing.bin"], "No such file"),
        (["load", "--rebuild", "--tier", "redis"], "erase the model first"),
    ],
)
def test_mistakes_are_reported_before_any_change(
    loaded: Any, words: list[str], message: str
) -> None:
    before = printed("get", "clicks", "users", 1, *loaded)
    assert message in error_line(*words, *loaded)
    assert printed("get", "clicks", "users", 1, *loaded) == before


# -- comparing -------------------------------------------------------------------------------------


def test_compare_reports_differences_between_stores_and_files(loaded: Any) -> None:
    assert all(entry["rows"] for entry in printed("load", "--tier", "redis", *loaded))
    for words in ((), ("--tier", "redis"), ("--tier", "redis", "--against", "rocksdb")):
        assert all(e["equal"] == e["compared"] > 0 for e in printed("diff", *words, *loaded))
    printed("put", "clicks", "users", 5, "--vector", V4, "--tier", "redis", *loaded)
    printed("del", "clicks", "users", 6, "--tier", "redis", *loaded)
    (found,) = printed(
        "diff", "clicks", "users", "--tier", "redis", "--against", "rocksdb", *loaded, code=1
    )
    assert (found["newer"], found["deleted"], found["equal"]) == (1, 1, 98)
    assert found["keys"] == {"newer": [5], "deleted": [6]}
    ignored = ("--ignore", "newer", "--ignore", "deleted")
    words = ("diff", "clicks", "--tier", "redis", "--against", "rocksdb", *ignored)
    assert run(*words, *loaded).exit_code == 0
    (back,) = printed(
        "diff", "clicks", "users", "--tier", "rocksdb", "--against", "redis", *loaded, code=1
    )
    assert (back["older"], back["extra"]) == (1, 1)
    (few,) = printed("diff", "words", "--sample", 50, *loaded)
    assert few["sampled"]
    assert 0 < few["compared"] <= 50
    shown = run("diff", "clicks", "users", "--tier", "redis", *loaded)
    assert shown.exit_code == 1
    assert "clicks/1/users: newer: 5" in shown.stdout


def test_every_row_is_verified(loaded: Any) -> None:
    assert {f["result"] for f in printed("verify", *loaded)} == {"OK"}
    printed("put", "clicks", "users", 5, "--vector", V4, *loaded)
    found = printed("verify", "clicks", "users", *loaded)
    assert found[1]["detail"] == "99 of 100 as in the files, 1 newer since"
    from hps.cli.store_open import TierName, open_models, open_store, read_config

    configuration = read_config(loaded[1], None)
    table = open_models(configuration).one("clicks", "users")
    with open_store(configuration, TierName.rocksdb, writing=True) as store:
        store.tier.evict(table, np.array([7]))
    bad = printed("verify", "clicks", "users", *loaded, code=1)
    assert [f["result"] for f in bad] == ["OK", "FAIL", "OK"]
    assert "1 missing (keys 7" in bad[1]["detail"]


@pytest.mark.parametrize("repair", [(), ("--repair",)])
def test_verify_reports_a_table_that_is_not_loaded_and_checks_the_others(
    config: Path, repair: tuple[str, ...]
) -> None:
    printed("load", "words", "--config", config, "--tier", "rocksdb")
    found = printed("verify", *repair, "--config", config, code=1)
    result = {(f["table"], f["check"]): f["result"] for f in found}
    assert result["words/1/words", "rows in rocksdb"] == "OK"
    assert result["clicks/1/users", "rows in rocksdb"] == "FAIL"
    assert (("(all)", "repair") in result) is bool(repair)
    (detail,) = [f["detail"] for f in found if f["table"] == "clicks/1/users"]
    assert "holds no table clicks/1/users" in detail


# -- whole tables ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["redis", "rocksdb"])
def test_export_contains_changes_since_last_export(loaded: Any, tmp_path: Path, tier: str) -> None:
    out = tmp_path / "all.parquet"
    words = ("export", "clicks", "users", "--tier", tier, *loaded)
    first = printed(*words, "--out", out)
    assert (first["rows"], first["deleted"]) == (100, 0)
    assert sorted(pq.read_table(out)["key"].to_pylist()) == list(range(100))
    printed("put", "clicks", "users", 5, "--vector", V4, *loaded)
    printed("del", "clicks", "users", 6, *loaded)
    second = printed(*words, "--out", tmp_path / "new.npz", "--since", first["newest"])
    assert (second["rows"], second["deleted"]) == (2, 1)
    with np.load(tmp_path / "new.npz") as archive:
        assert archive["key"].tolist() == [5, 6]
        assert archive["deleted"].tolist() == [False, True]
        assert archive["vector"][0].tolist() == [1, 2, 3, 4]
    third = printed(*words, "--out", tmp_path / "new.npz", "--since", second["newest"])
    assert third["rows"] == 0


@pytest.mark.parametrize(
    ("tier", "name"), [("redis", "clicks.users.1.npz"), ("rocksdb", "any.parquet")]
)
def test_exported_changes_are_applied_by_another_node(
    loaded: Any, small_repository: Path, tmp_path: Path, tier: str, name: str
) -> None:
    words = ("export", "clicks", "users", "--tier", tier, *loaded)
    first = printed(*words, "--out", tmp_path / "all.npz")
    printed("put", "clicks", "users", 5, "--vector", V4, *loaded)
    printed("put", "clicks", "users", 5000, "--vector", "5,6,7,8", *loaded)
    printed("del", "clicks", "users", 6, *loaded)
    folder = tmp_path / "in"
    settings = {
        "models": {"repository": str(small_repository)},
        "tiers": {
            "rocksdb": {"path": str(tmp_path / "other"), "guard": PATIENT_GUARD},
            "cpu_cache": {"share": 1.0},
        },
        "updates": {"directory": {"path": str(folder)}},
    }
    keys = [4, 5, 5000]
    with hps.open(settings) as node:
        assert node.lookup("clicks", {"user": [6]}).vectors["user"].tolist() == [row(6)]
        part = tmp_path / f"part{Path(name).suffix}"
        printed(*words, "--out", part, "--since", first["newest"])
        part.rename(folder / name)
        until(lambda: (folder / "applied" / name).exists())
        found = node.lookup("clicks", {"user": keys}).vectors["user"].tolist()
        assert found == [row(4), [1, 2, 3, 4], [5, 6, 7, 8]]
        removed, never = node.lookup("clicks", {"user": [6, 7777]}).vectors["user"].tolist()
        assert removed == never
    other = tmp_path / "other.yaml"
    other.write_text(json.dumps(settings))
    both = [
        printed("export", "clicks", "users", "--out", tmp_path / f"{i}.npz", *config)
        for i, config in enumerate([("--tier", tier, *loaded), ("--config", other)])
    ]
    assert both[0]["rows"] == both[1]["rows"] == 100


def test_checkpoint_is_restored(loaded: Any, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    printed("checkpoint", folder, *loaded)
    printed("del", "clicks", "users", 5, *loaded)
    assert "is not an empty folder" in error_line("checkpoint", folder, *loaded)
    assert "is not an empty folder" in error_line("restore", folder, *loaded)
    other_process = (*loaded, "--set", f"tiers.rocksdb.path={tmp_path / 'restored'}")
    printed("restore", folder, *other_process)
    (entry,) = printed("get", "clicks", "users", 5, "--tier", "rocksdb", *other_process)["rows"]
    assert entry["vector"] == row(5)


@pytest.mark.parametrize("tier", ["redis", "rocksdb"])
def test_dumps_are_exported_and_imported(loaded: Any, tmp_path: Path, tier: str) -> None:
    file = tmp_path / "users.bin"
    assert printed("dump", "clicks", "users", file, "--tier", tier, *loaded)["rows"] == 100
    data = file.read_bytes()
    assert data[:16] == b"bin\0" + struct.pack("<III", 1, 8, 16)
    assert len(data) == 16 + 100 * 24
    printed("del", "clicks", "users", 5, *loaded)
    printed("import-dump", "clicks", "users", file, "--version", 3, "--tier", tier, *loaded)
    get = ("get", "clicks", "users", 5, "--tier", tier, *loaded)
    assert printed(*get)["rows"][0]["deleted"]
    printed("import-dump", "clicks", "users", file, "--tier", tier, *loaded)
    assert printed(*get)["rows"][0]["vector"] == row(5)
    assert "name the table it was dumped from" in error_line(
        "import-dump", "clicks", "items", file, "--tier", tier, *loaded, code=2
    )


def test_dump_is_imported_into_erased_table(loaded: Any, tmp_path: Path) -> None:
    file = tmp_path / "users.bin"
    printed("dump", "clicks", "users", file, *loaded)
    for tier in ("redis", "rocksdb"):
        printed("erase", "clicks", "--table", "users", "--tier", tier, "--yes", *loaded)
        printed("import-dump", "clicks", "users", file, "--tier", tier, *loaded)
        (entry,) = printed("get", "clicks", "users", 5, "--tier", tier, *loaded)["rows"]
        assert entry["vector"] == row(5)
    # The dump is newer than the model's files, which a start merges with it.
    newest = entry["version"]
    assert [entry["how"] for entry in printed("load", "clicks", "users", *loaded)] == ["merged"]
    (entry,) = printed("get", "clicks", "users", 5, "--tier", "rocksdb", *loaded)["rows"]
    assert entry["version"] == newest
    other = ("--set", "tiers.rocksdb.layout=hps", "--set", "tiers.redis.layout=hps")
    message = error_line("import-dump", "clicks", "users", file, *loaded, *other)
    assert "set tiers.rocksdb.layout to that" in message


@pytest.mark.parametrize("tier", ["redis", "rocksdb"])
def test_sst_dump_is_imported(config: Path, tmp_path: Path, tier: str) -> None:
    file = tmp_path / "users.sst"
    writer = SstFileWriter(Options(raw_mode=True))
    writer.open(str(file))
    for key in range(100):
        writer[struct.pack("<q", key)] = np.array(row(key), "<f4").tobytes()
    writer.finish()
    options = ("--config", config, "--tier", tier)
    assert printed("import-dump", "clicks", "users", file, *options)["rows"] == 100
    (entry,) = printed("get", "clicks", "users", 77, *options)["rows"]
    assert entry["vector"] == row(77)
    message = error_line("import-dump", "clicks", "items", file, *options)
    assert "name the table it was dumped from" in message


def test_import_warns_of_rows_that_next_start_overwrites(config: Path, tmp_path: Path) -> None:
    file = tmp_path / "users.bin"
    file.write_bytes(b"bin\0" + struct.pack("<IIIq4f", 1, 8, 16, 5, 9, 9, 9, 9))
    options = ("--config", config, "--set", "tiers.redis=null", "--set", "tiers.rocksdb.layout=hps")
    result = run("import-dump", "clicks", "users", file, *options)
    assert result.exit_code == 0
    assert "the next start writes them over these rows" in result.stderr
    printed("load", "clicks", *options)
    again = run("import-dump", "clicks", "users", file, *options)
    assert (again.exit_code, again.stderr) == (0, "")


# -- faults ----------------------------------------------------------------------------------------


def test_other_layout_is_reported(loaded: Any) -> None:
    other = ("--set", "tiers.redis.layout=hps", "--set", "tiers.rocksdb.layout=hps")
    for tier in ("redis", "rocksdb"):
        message = error_line("scan", "words", "words", "--tier", tier, *loaded, *other)
        assert f"set tiers.{tier}.layout to that" in message
    states = {e["state"] for e in printed("ls", *loaded, *other)}
    assert states == {"there in the native layout"}
    printed("del", "clicks", "users", 6, *loaded)  # the read had no side effect
    since = ("export", "words", "words", "--out", "x.npz", "--since", 1)
    hps_only = ("--set", "tiers.rocksdb.layout=hps", "--set", "tiers.redis.layout=hps")
    assert "keeps no versions" in error_line(*since, *loaded, *hps_only)


def test_wrong_shape_is_reported(loaded: Any, server: RedisServer) -> None:
    wrong = ("--set", "tiers.redis.partitions=4", "--tier", "redis")
    message = "partitions in Redis: 3, here: 4"
    assert message in error_line("diff", *loaded, *wrong)
    assert all(message in e["state"] for e in printed("ls", *loaded, *wrong))
    printed("erase", "clicks", "--tier", "redis", "--yes", *loaded)
    run("diff", *loaded, *wrong)  # the tables are gone by now
    assert "not there" in {e["state"] for e in printed("ls", *loaded, "--tier", "redis")}


def test_unavailable_redis_is_reported(loaded: Any) -> None:
    away = (*loaded, "--set", 'tiers.redis.addresses=["127.0.0.1:1"]')
    for only in ([], ["--tier", "redis"]):
        got = run("get", "clicks", "users", 1, *away, *only, "--output", "json")
        assert got.exit_code == (2 if only else 1)
        assert "127.0.0.1:1 cannot be reached" in got.stderr
        rows = [] if only else json.loads(got.stdout)["rows"]
        assert [(row["tier"], row["found"]) for row in rows] == (
            [] if only else [("rocksdb", True)]
        )
    listed = run("ls", *away, "--output", "json")
    assert listed.exit_code == 1
    assert {entry["tier"] for entry in json.loads(listed.stdout)} == {"rocksdb"}
    assert "127.0.0.1:1 cannot be reached" in listed.stderr
    assert "tiers.redis is not configured" in error_line(
        "ls", "--config", loaded[1], "--set", "tiers.redis=null", "--tier", "redis"
    )


def test_reads_work_and_writes_name_holder_while_node_runs(loaded: Any) -> None:
    """Reading works; writing names the process that holds the database."""

    def other_process(*words: object) -> tuple[int, str]:
        """Run in a separate process: one process opens a database only once."""
        command = [sys.executable, "-m", "hps.cli.main", "store", *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        return done.returncode, done.stderr

    with hps.open(loaded[1]):
        assert other_process("get", "clicks", "users", 5, *loaded) == (0, "")
        assert other_process("diff", "clicks", *loaded) == (0, "")
        for words in (["put", "clicks", "users", 5, "--vector", V4], ["erase", "clicks", "--yes"]):
            code, result = other_process(*words, *loaded)
            assert code == 2
            assert f"is locked by process {os.getpid()}" in result
            assert "stop that process" in result


def test_full_disk_is_reported(config: Path) -> None:
    full = ("--set", f"tiers.rocksdb.min_free_bytes={10**15}")
    message = error_line("load", "--config", config, *full, code=1)
    assert "the disk is full" in message
    assert "tiers.rocksdb.min_free_bytes" in message
