"""The commands of docs/moving-from-hps.md, run on data in the formats of HPS."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from rocksdict import Options, Rdict
from tritonclient.grpc import model_config_pb2 as pb
from typer.testing import CliRunner, Result

import hps
from benchmarks.peers.redis_server import RedisServer
from hps.cli.main import app
from hps.config import load_config
from tests.support.redis_servers import shared_server

PAGE = Path(__file__).parents[2] / "docs" / "moving-from-hps.md"
DIM, PARTITIONS = 4, 8
KEYS = np.concatenate([np.arange(-40, 260), [2**63 - 1, -(2**63)]])
MASK = 2**64 - 1
TABLES = {"user": 1.0, "item": 100.0}
UPDATED, STREAMED = 17, 100_000
"""A key whose row HPS has updated since its files were written, and one that came later."""

OF_TRITON = """
name: "ctr"
backend: "hps"
max_batch_size: 64
input [
  { name: "KEYS" data_type: TYPE_INT64 dims: [ -1 ] },
  { name: "NUMKEYS" data_type: TYPE_INT32 dims: [ -1 ] }
]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
version_policy: { specific: { versions: 1 } }
instance_group [ { count: 1 kind: KIND_GPU gpus: [ 0 ] } ]
"""
"""What stood in a Triton repository for HPS's backend."""

Command = Callable[..., Result]


def partition_of(key: int) -> int:
    """A second implementation of HPS's partition hash."""

    def rotated(x: int, bits: int) -> int:
        return (x >> bits | x << 64 - bits) & MASK

    x = key & MASK
    x ^= rotated(x, 25) ^ rotated(x, 50)
    x = x * 0xA24BAED4963EE407 & MASK
    x ^= rotated(x, 24) ^ rotated(x, 49)
    x = x * 0x9FB21C651E98DF25 & MASK
    return (x ^ x >> 28) % PARTITIONS


def row(table: str, key: int) -> np.ndarray[Any, Any]:
    return (np.arange(DIM) + TABLES[table] * (key % 1000)).astype("<f4")


def stored(table: str) -> dict[int, bytes]:
    """The rows in HPS: those of the files, one of them updated, and a later one."""
    rows = {int(key): row(table, int(key)).tobytes() for key in KEYS}
    return rows | {key: row(table, key + 1).tobytes() for key in (UPDATED, STREAMED)}


def write_files(folder: Path) -> None:
    """Sparse files and the ps.json that names them."""
    for name in TABLES:
        path = folder / f"{name}.model"
        path.mkdir()
        KEYS.astype("<i8").tofile(path / "key")
        np.stack([row(name, int(key)) for key in KEYS]).tofile(path / "emb_vector")
    model = {
        "model": "ctr",
        "sparse_files": [f"{name}.model" for name in TABLES],
        "embedding_table_names": list(TABLES),
        "embedding_vecsize_per_table": [DIM] * 2,
        "default_value_for_each_table": [0.0, 0.0],
        "maxnum_catfeature_query_per_table_per_sample": [1000, 1000],
        "deployed_device_list": [0],
        "max_batch_size": 64,
        "hit_rate_threshold": 1.1,
    }
    (folder / "ps.json").write_text(json.dumps({"supportlonglong": True, "models": [model]}))


def write_rocksdb(path: Path, key_format: str = "<q") -> None:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    with_db = Rdict(str(path), options)
    for name in TABLES:
        family = with_db.create_column_family(f"hps_et.ctr.{name}", options)
        for key, value in stored(name).items():
            family[packed(key_format, key)] = value
        family.close()
    with_db.close()


def packed(key_format: str, key: int) -> bytes:
    """HPS's 8 bytes, or 4 where its keys are unsigned 32-bit ones."""
    return struct.pack(key_format, key if key_format == "<q" else key & 0xFFFF_FFFF)


def write_redis(server: RedisServer, key_format: str = "<q") -> None:
    """Write with names and bytes from HPS's documentation, without code of this repository."""
    client = server.client()
    for name in TABLES:
        for key, value in stored(name).items():
            hashed = key if key_format == "<q" else key & 0xFFFF_FFFF
            hash_name = f"hps_et{{hps_et.ctr.{name}/p{partition_of(hashed)}}}v"
            client.hset(hash_name, packed(key_format, key), value)
    client.close()


@pytest.fixture
def server() -> RedisServer:
    return shared_server()


@pytest.fixture
def folder(tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of an HPS deployment, and the page's two configurations."""
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    write_rocksdb(tmp_path / "rocksdb")
    write_redis(server)
    for name, text in zip(("hps.yaml", "native.yaml"), configurations("models"), strict=True):
        text = text.replace("127.0.0.1:7000", server.address).replace("cluster", "single")
        (tmp_path / name).write_text(text)
    (more,) = configurations("server")
    (tmp_path / "node.yaml").write_text((tmp_path / "native.yaml").read_text() + more)
    return tmp_path


def configurations(first: str) -> list[str]:
    """The page's configurations that begin with this key."""
    return re.findall(rf"^```yaml\n({first}:.*?)^```", PAGE.read_text(), re.M | re.S)


def commands() -> list[list[str]]:
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    return [shlex.split(line)[1:] for block in blocks for line in block.splitlines()]


def run(*words: object) -> Result:
    return CliRunner().invoke(app, list(map(str, words)))


def printed(*words: object) -> Any:
    result = run(*words, "--output", "json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def contents(server: RedisServer, pattern: str) -> dict[bytes, dict[bytes, bytes]]:
    client = server.client()
    found = {name: client.hgetall(name) for name in client.keys(pattern)}
    client.close()
    return found


def in_rocksdb(path: Path) -> dict[str, dict[bytes, bytes]]:
    options = Options(raw_mode=True)
    names = [name for name in Rdict.list_cf(str(path)) if name.startswith("hps_et.")]
    database = Rdict(str(path), options, dict.fromkeys(names, options))
    found = {name: dict(database.get_column_family(name).items()) for name in names}
    database.close()
    return found


def test_commands_of_migration_page_work(folder: Path, server: RedisServer) -> None:
    before, on_disk = contents(server, "hps_et{*}v"), in_rocksdb(folder / "rocksdb")
    seen = set()
    for words in commands():
        result = run(*words)
        updated = "verify" in words  # the page says that it reports updated rows
        assert result.exit_code == (1 if updated else 0), (words, result.stderr, result.stdout)
        seen.add(words[1])
        if words[1] == "convert":
            assert contents(server, "hps_et{*}v") == before
            assert in_rocksdb(folder / "rocksdb") == on_disk
    assert seen == {
        "validate",
        "import",
        "ls",
        "get",
        "diff",
        "convert",
        "verify",
        "dump",
        "import-dump",
        "erase",
        "export",
    }
    assert contents(server, "hps_et{*}v") == {}
    assert in_rocksdb(folder / "rocksdb") == on_disk
    assert load_config(folder / "converted" / "hps.yaml", environ={}).settings.models.serve is None
    takes_the_place_of_hps(folder)


def takes_the_place_of_hps(folder: Path) -> None:
    """The page's model of a Triton repository, moved as it says, has the name, the inputs and the outputs of
    HPS's."""
    for line in re.findall(r"^(?:mv|sed) .*", PAGE.read_text(), re.M):
        subprocess.run(["sh", "-c", line], cwd=folder, check=True)
    theirs = text_format.Parse(OF_TRITON, pb.ModelConfig())
    written = text_format.Parse(
        (folder / "triton-models" / "ctr" / "config.pbtxt").read_text(), pb.ModelConfig()
    )
    assert written.name == theirs.name
    assert written.max_batch_size == theirs.max_batch_size

    def tensors(declared: Any) -> dict[str, tuple[int, list[int]]]:
        return {each.name: (each.data_type, list(each.dims)) for each in declared}

    assert tensors(theirs.input).items() <= tensors(written.input).items()
    assert tensors(theirs.output).items() <= tensors(written.output).items()
    # Parts that HPS's clients do not use need not match.
    assert all(each.optional for each in written.input)
    assert written.instance_group[0].count == 2


def test_program_of_migration_page_works(folder: Path) -> None:
    (program,) = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    names: dict[str, Any] = {"hps": hps, "keys": KEYS}
    exec(program, names)
    with names["node"]:
        expected = np.stack([row("user", int(key)) for key in KEYS])
        np.testing.assert_array_equal(names["vectors"], expected)


def test_password_is_converted_into_private_file(folder: Path) -> None:
    document = json.loads((folder / "ps.json").read_text())
    document["volatile_db"] = {"type": "redis_cluster", "password": "planted-secret"}
    (folder / "ps.json").write_text(json.dumps(document))
    converted = folder / "converted"
    result = run("config", "convert", "ps.json", "--into", converted)
    assert result.exit_code == 0
    assert "planted-secret" not in result.output
    assert "planted-secret" in (converted / "hps.yaml").read_text()
    assert (converted / "hps.yaml").stat().st_mode & 0o077 == 0


def test_updates_of_migration_page_are_valid_configuration(folder: Path) -> None:
    (updates,) = configurations("updates")
    page = folder / "updates.yaml"
    page.write_text((folder / "hps.yaml").read_text() + updates)
    kafka = load_config(page, environ={}).settings.updates.kafka
    assert kafka is not None
    assert kafka.brokers == "kafka:9092"
    assert kafka.hps_offsets


def test_converted_rows_equal_rows_of_hps(folder: Path, server: RedisServer) -> None:
    run("model", "import", "ps.json")
    converted = printed("store", "convert", "--config", "hps.yaml", "--into", "native.yaml")
    rows = len(KEYS) + 1
    assert [(c["tier"], c["table"], c["read"]) for c in converted] == [
        (tier, table, rows) for tier in ("redis", "rocksdb") for table in TABLES
    ]
    # Into RocksDB only what differs from the files; into Redis everything.
    assert [c["written"] for c in converted] == [rows, rows, 2, 2]
    # The tables count as loaded: the node serves them as they are, and HPS's updates with them.
    with hps.open("native.yaml") as node:
        for table in TABLES:
            keys = np.array([*KEYS.tolist(), STREAMED])
            result = node.lookup("ctr", {table: keys}, by_table=True)
            assert result.defaulted == 0
            expected = stored(table)
            assert [v.tobytes() for v in result.vectors[table]] == [expected[int(k)] for k in keys]
    entries = printed("store", "get", "ctr", "user", UPDATED, STREAMED, "--config", "native.yaml")
    (version,) = {entry["version"] for entry in entries["rows"]}
    assert version > 0


def test_second_conversion_adds_new_rows_and_keeps_newer_ones(
    folder: Path, server: RedisServer
) -> None:
    run("model", "import", "ps.json")
    convert = ("store", "convert", "--config", "hps.yaml", "--into", "native.yaml")
    printed(*convert)
    values = ",".join(["7"] * DIM)
    printed("store", "put", "ctr", "user", 5, "--vector", values, "--config", "native.yaml")
    printed("store", "del", "ctr", "user", 6, "--config", "native.yaml")
    client = server.client()
    for key in (1, 5, 6):  # HPS keeps writing meanwhile
        name = f"hps_et{{hps_et.ctr.user/p{partition_of(key)}}}v"
        client.hset(name, struct.pack("<q", key), row("user", 900).tobytes())
    client.close()
    again = printed(*convert, "--tier", "redis")
    assert [c["written"] for c in again] == [1, 0]
    entries = printed(
        "store", "get", "ctr", "user", 1, 5, 6, "--config", "native.yaml", "-t", "redis"
    )
    one, five, six = entries["rows"]
    assert one["vector"] == row("user", 900).tolist()
    assert five["vector"] == [7.0] * DIM
    assert six["deleted"]
    assert [c["written"] for c in printed(*convert, "--tier", "redis")] == [0, 0]


def test_keys_of_32_bits_are_converted(folder: Path, server: RedisServer, monkeypatch: Any) -> None:
    """``supportlonglong: false``: HPS's keys have 4 bytes."""
    small = KEYS[(KEYS >= 0) & (KEYS < 2**32)]
    monkeypatch.setattr(f"{__name__}.KEYS", small)
    for name in TABLES:
        small.astype("<i8").tofile(folder / f"{name}.model" / "key")
        rows = np.stack([row(name, int(key)) for key in small])
        rows.tofile(folder / f"{name}.model" / "emb_vector")
    text = (folder / "ps.json").read_text()
    (folder / "ps.json").write_text(text.replace("true", "false", 1))
    shutil.rmtree(folder / "rocksdb")
    server.ask("FLUSHALL")
    write_rocksdb(folder / "rocksdb", "<I")
    write_redis(server, "<I")
    assert run("model", "import", "ps.json").exit_code == 0
    converted = printed("store", "convert", "--config", "hps.yaml", "--into", "native.yaml")
    assert {c["read"] for c in converted} == {len(small) + 1}
    for tier in ("redis", "rocksdb"):
        against = ("--tier", tier, "--against", tier, "--other", "hps.yaml")
        found = printed("store", "diff", "--config", "native.yaml", *against)
        assert {d["equal"] for d in found} == {len(small) + 1}


def test_ps_json_is_accepted_as_source_configuration(folder: Path, server: RedisServer) -> None:
    run("model", "import", "ps.json")
    document = json.loads((folder / "ps.json").read_text())
    document["persistent_db"] = {"type": "rocks_db", "path": "rocksdb", "read_only": True}
    (folder / "ps.json").write_text(json.dumps(document))
    words = ("--config", "ps.json", "--into", "native.yaml", "--tier", "rocksdb")
    converted = printed("store", "convert", *words)
    assert [(c["read"], c["written"]) for c in converted] == [(len(KEYS) + 1, 2)] * 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "native.yaml", "--into", "native.yaml"], "layout is native, expected hps"),
        (["--config", "hps.yaml", "--into", "hps.yaml"], "layout is hps, expected native"),
        (["--config", "hps.yaml", "--into", "here.yaml"], "the source, which is left as it is"),
        (["--config", "hps.yaml", "--into", "native.yaml", "nobody"], "no model 'nobody'"),
        (
            ["--config", "hps.yaml", "--into", "disk.yaml", "--tier", "redis"],
            "not configured there",
        ),
    ],
)
def test_unconvertible_configurations_are_reported(
    folder: Path, words: list[str], message: str
) -> None:
    run("model", "import", "ps.json")
    native = (folder / "native.yaml").read_text()
    (folder / "here.yaml").write_text(native.replace("path: native", "path: rocksdb"))
    (folder / "disk.yaml").write_text(re.sub(r"(?ms)^  redis:.*?(?=^  rocksdb:)", "", native))
    result = run("store", "convert", *words)
    assert result.exit_code == 2
    assert message in result.stderr


def test_wrong_number_of_partitions_is_reported_with_the_right_one(folder: Path) -> None:
    run("model", "import", "ps.json")
    wrong = ["--set", "tiers.redis.partitions=5", "--tier", "redis", "--config", "hps.yaml"]
    (entry, _) = printed("store", "ls", *wrong)
    assert "partitions in Redis: 8, here: 5" in entry["state"]
    result = run("store", "diff", *wrong)
    assert result.exit_code == 2
    assert "set tiers.redis.partitions" in result.stderr
