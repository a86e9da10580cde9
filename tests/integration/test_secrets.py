"""Secrets are in no output, log or answer of hps: each is planted, all output is searched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.hps_server import Hps, start_hps
from benchmarks.peers.process import free_ports
from benchmarks.peers.redis_server import RedisServer
from tests.support.forked_hps import Commands, commands
from tests.support.redis_servers import need
from tests.support.small_models import write_models
from tests.support.waiting import until

MARK = "planted-secret"
KEYS = {role: f"{MARK}-key-{role}" for role in ("read", "write", "admin")}


def settings(folder: Path, redis: str, kafka: str) -> dict[str, Any]:
    """Every setting that takes a secret, in every form."""
    (folder / "password").write_text(f"{MARK}-redis-file\n")
    (folder / "sasl").write_text(f"{MARK}-sasl-file\n")
    (folder / "keys.yaml").write_text(
        json.dumps([{"name": "web", "role": "read", "key": KEYS["read"]}])
    )
    (folder / "keys.yaml").chmod(0o600)
    return {
        "tiers": {
            "rocksdb": {"path": str(folder / "rocksdb")},
            "redis": {
                "addresses": [redis],
                "password_file": str(folder / "password"),
                "sentinel_password": f"{MARK}-sentinel",
            },
        },
        "updates": {
            "kafka": {
                "brokers": kafka,
                "options": {
                    "security.protocol": "SASL_PLAINTEXT",
                    "sasl.mechanism": "PLAIN",
                    "sasl.username": "me",
                    "ssl.key.password": f"{MARK}-ssl",
                },
                "options_files": {"sasl.password": str(folder / "sasl")},
            }
        },
        "auth": {
            "mode": "api_key",
            "keys_file": str(folder / "keys.yaml"),
            "keys": [{"name": "ops", "role": "admin", "key": KEYS["admin"]}],
        },
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with commands(tmp_path_factory.mktemp("commands")) as made:
        yield made


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hps]:
    """A server with debug logs, whose Redis requires another password and whose Kafka is unavailable."""
    need("redis-server")
    folder = tmp_path_factory.mktemp("server")
    write_models(folder / "models")
    redis = RedisServer(
        folder / "redis", {"requirepass": "another"}, client={"password": "another"}
    )
    redis.start()
    given = settings(folder, redis.address, f"127.0.0.1:{free_ports(1)[0]}")
    (folder / "more.yaml").write_text(json.dumps(given))
    try:
        with start_hps(
            folder,
            limits={"log_level": "debug", "access_log": 1.0},
            tiers=given["tiers"],
            auth=given["auth"],
            updates=given["updates"],
        ) as running:
            yield running
    finally:
        redis.kill()


def answer_text(url: str, key: str | None = None, body: Any = None, bearer: bool = False) -> str:
    """The answer with its headers, whatever its status."""
    headers = {} if key is None else {"X-API-Key": key}
    if bearer:
        headers = {"Authorization": f"Bearer {key}"}
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as got:
            return f"{got.headers}{got.read().decode()}"
    except urllib.error.HTTPError as error:
        with error:
            return f"{error.code} {error.headers}{error.read().decode()}"


def test_server_output_contains_no_secret(server: Hps) -> None:
    data, admin = f"http://{server.address}", f"http://{server.admin}"
    lookup = {"inputs": [{"name": "word", "shape": [1, 1], "datatype": "INT64", "data": [5]}]}
    answers = [
        answer_text(admin + path, KEYS["admin"])
        for path in ("/v1/status", "/v1/updates", "/v1/tables", "/v1/models", "/metrics", "/openapi.json")
    ]  # fmt: skip
    answers.append(answer_text(f"{data}/v2/models/words/infer", KEYS["read"], lookup))
    answers.append(answer_text(f"{data}/v2/models/words/infer", KEYS["read"], lookup, bearer=True))
    assert '"outputs"' in answers[-1]
    # Rejected: an unknown key, one whose role is too low, one in the wrong place.
    for answer in (
        answer_text(f"{data}/v2/models/words/infer", f"{MARK}-of-an-unknown-caller", lookup),
        answer_text(f"{admin}/v1/updates/pause", KEYS["read"], {}),
        answer_text(f"{data}/v2/models/words/infer?api_key={MARK}-in-the-address", None, lookup),
        answer_text(f"{data}/v2/models/words/infer", None, {"key": f"{MARK}-in-the-body"}),
    ):
        assert answer.startswith("40"), answer
        answers.append(answer)
    until(lambda: "refuses this user" in server.log.read_text())
    log = server.log.read_text()
    assert "status=200" in log  # requests are logged
    for text in (*answers, log):
        assert MARK not in text, text


@pytest.mark.parametrize("form", ["table", "json"])
def test_shown_configuration_contains_no_secret(server: Hps, run: Commands, form: str) -> None:
    shown = run.run("config", "show", "--config", more(server), "--output", form)
    assert shown.code == 0, shown.output
    assert MARK not in shown.output
    assert "********" in shown.output


def more(server: Hps) -> Path:
    """The server's settings that have secrets."""
    (path,) = [Path(word) for word in server.process.cmdline() if word.endswith("config.yaml")]
    return path.with_name("more.yaml")


def test_output_of_doctor_and_other_commands_contains_no_secret(server: Hps, run: Commands) -> None:
    config = more(server)
    for words in (
        ("doctor", "--config", config),
        ("config", "validate", config),
        ("store", "ls", "--config", config, "--tier", "redis"),
        ("status", "--server", f"http://{server.admin}", "--api-key", f"{MARK}-wrong"),
        ("updates", "dlq", "list", "--config", config),
    ):
        done = run.run(*words)
        assert done.code is not None
        assert MARK not in done.output, done.output


WRONG = {
    "a mapping": {"tiers": {"redis": {"password": {"value": f"{MARK}-1"}}}},
    "a list": {"updates": {"kafka": {"brokers": "x:1", "options": {"sasl.password": [MARK]}}}},
    "no section": {"tiers": {"redis": f"redis://:{MARK}@host"}},
    "a key too short": {
        "auth": {"mode": "api_key", "keys": [{"name": "a", "role": "read", "key": MARK[:15]}]}
    },
    "keys without names": {"auth": {"mode": "api_key", "keys": [f"{MARK}-2"]}},
    "misspelt": {"tiers": {"redis": {"pasword": f"{MARK}-3"}}},
    "an option of ours": {
        "updates": {"kafka": {"brokers": "x:1", "options": {"group.id": f"{MARK}-4"}}}
    },
    "an unknown option": {
        "updates": {"kafka": {"brokers": "x:1", "options": {"sasl.pasword": f"{MARK}-5"}}}
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_contain_no_secret(
    name: str, run: Commands, small_repository: Path, tmp_path: Path
) -> None:
    config = tmp_path / "hps.yaml"
    base = {
        "models": {"repository": str(small_repository)},
        "server": {"http": {"port": 0}, "grpc": {"port": 0}, "admin": {"port": 0}},
    }
    config.write_text(json.dumps(base | WRONG[name]))
    ended = run.run("serve", "--config", config, "--set", f"tiers.rocksdb.path={tmp_path / 'db'}")
    assert ended.code == 2, ended.output
    assert len(ended.errors) == 1
    assert MARK[:14] not in ended.output


def test_environment_variables_are_quoted_by_name_only(
    small_repository: Path, tmp_path: Path
) -> None:
    """Invalid values in the environment are not quoted either."""
    variables = {
        "HPS__TIERS__REDIS__PASSWORD": f"{MARK}-7",
        "HPS__TIERS__REDIS__PASSWORD_FILE": "/nowhere",
        "HPS__AUTH__KEYS": f"[{MARK}-8]",
    }
    done = subprocess.run(
        [sys.executable, "-m", "hps.cli.main", "serve"],
        env={**os.environ, **variables},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "environment HPS__AUTH__KEYS" in done.stderr
    assert MARK not in done.stdout + done.stderr
