"""Bad configurations: each command ends with exit code 2 and one line with cause and remedy."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.certificates import expire, made
from tests.support.forked_hps import Commands, Ended, commands

SERVE, INGEST = ("serve",), ("ingest",)
FRONTEND, LOOKUP = ("serve", "--role", "frontend"), ("serve", "--role", "lookup")
KAFKA = {"brokers": "127.0.0.1:1", "shared_writer": "ingest"}
REDIS = {"addresses": ["127.0.0.1:1"]}
TLS = {"certificate_file": "{certificates}/one.crt", "key_file": "{certificates}/one.key"}
WRONG_TLS = {
    "no file": (
        {"certificate_file": "{certificates}/none"},
        "{certificates}/none: No such file or directory",
    ),
    "another's key": (
        {"key_file": "{certificates}/two.key"},
        "/two.key cannot be used: the key does not match the certificate",
    ),
    "expired": (
        {"certificate_file": "{certificates}/old.crt"},
        "{certificates}/old.crt expired at 2020-01-01 00:00 UTC; renew the certificate",
    ),
}

# Settings laid over correct ones, and the expected line.
Wrong = tuple[dict[str, Any], str]

OF_EVERY: dict[str, Wrong] = {
    "unknown key": (
        {"tiers": {"cpu_cach": {}}},
        "config.yaml:1: tiers.cpu_cach: unknown key; did you mean 'cpu_cache'?",
    ),
    "a door that is open": (
        {"server": {"admin": {"host": "0.0.0.0"}}},
        "server.admin.host: 0.0.0.0 is reachable from other machines, so auth.mode must be set",
    ),
    "no file of keys": (
        {"auth": {"mode": "api_key", "keys_file": "{folder}/none"}},
        "auth.keys_file: {folder}/none: No such file or directory; mount the secret there",
    ),
    "a file of no keys": (
        {"auth": {"mode": "api_key", "keys_file": "{empty_file}"}},
        "{empty_file}: expected a list of mappings with name, role, key",
    ),
    "a taken port": (
        {"server": {"admin": {"port": "{taken}"}}},
        "server.admin: cannot listen on 127.0.0.1:{taken}: Address already in use; stop the process",
    ),
    "no repository": (
        {"models": {"repository": "{folder}/none"}},
        "model repository {folder}/none is not a folder; set models.repository",
    ),
    "an old certificate": (
        {"server": {"admin": {"tls": {**TLS, **WRONG_TLS["expired"][0]}}}},
        WRONG_TLS["expired"][1],
    ),
}
OF_ROWS: dict[str, Wrong] = {
    "no secret for Redis": (
        {"tiers": {"redis": {**REDIS, "password_file": "{folder}/none"}}},
        "tiers.redis.password_file: {folder}/none: No such file or directory; mount the secret there",
    ),
    "no secret for Kafka": (
        {"updates": {"kafka": {**KAFKA, "options_files": {"sasl.password": "{folder}/none"}}}},
        "updates.kafka.options_files.sasl.password: {folder}/none: No such file or directory; mount",
    ),
    "no roots for Redis": (
        {"tiers": {"redis": {**REDIS, "tls": {"ca": "{folder}/none"}}}},
        "tiers.redis.tls: {folder}/none cannot be used: No such file or directory",
    ),
    "no roots for Kafka": (
        {
            "updates": {
                "kafka": {
                    **KAFKA,
                    "options": {"security.protocol": "ssl", "ssl.ca.location": "{folder}/none"},
                }
            }
        },
        "updates.kafka.options.ssl.ca.location: {folder}/none: No such file or directory; mount it",
    ),
    "another's key for Kafka": (
        {
            "updates": {
                "kafka": {
                    **KAFKA,
                    "options": {
                        "security.protocol": "ssl",
                        "ssl.certificate.location": "{certificates}/one.crt",
                        "ssl.key.location": "{certificates}/two.key",
                    },
                }
            }
        },
        "updates.kafka.options: {certificates}/one.crt and {certificates}/two.key cannot be used: the key",
    ),
    "an option that Kafka's client does not have": (
        {"updates": {"kafka": {**KAFKA, "options": {"sasl.pasword": "x"}}}},
        'updates.kafka: No such configuration property: "sasl.pasword"; correct updates.kafka.options',
    ),
    "an old certificate for Redis": (
        {
            "tiers": {
                "redis": {
                    **REDIS,
                    "tls": {
                        "certificate": "{certificates}/old.crt",
                        "key": "{certificates}/one.key",
                    },
                }
            }
        },
        WRONG_TLS["expired"][1],
    ),
    "an address with a scheme": (
        {"tiers": {"redis": {"addresses": ["redis://redis:6379"]}}},
        "tiers.redis.addresses[0]: expected text like host:port, without a scheme or a user, found",
    ),
    "no model": ({"models": {"repository": "{empty}"}}, "no model to serve: {empty} holds none"),
    "no such version": (
        {"models": {"serve": {"words": {"version": 7}}}},
        "model 'words' has no version 7 in ",
    ),
    "a table cut short": (
        {"models": {"repository": "{damaged}"}},
        "{damaged}/words/1/tables/words",
    ),
}
OF_SERVE: dict[str, Wrong] = {
    "ingest's role": ({"server": {"role": "ingest"}}, "server.role is ingest: `hps ingest` starts"),
    "a network that is none": (
        {"models": {"repository": "{no_network}"}},
        "{no_network}/clicks/1/dense.onnx",
    ),
    "a taken port of HTTP": (
        {"server": {"http": {"port": "{taken}"}}},
        "server.http: cannot listen on 127.0.0.1:{taken}: Address already in use",
    ),
    "a taken port of gRPC": (
        {"server": {"grpc": {"port": "{taken}"}}},
        "server.grpc: cannot listen on 127.0.0.1:{taken}: Address already in use; stop the process that",
    ),
    "no roots for Triton": (
        {"dense": {"triton": {"url": "127.0.0.1:1", "tls": {"ca_file": "{folder}/none"}}}},
        "dense.triton.tls: {folder}/none cannot be used: No such file or directory",
    ),
    "gRPC at no address": (
        {"server": {"grpc": {"host": "no.such.host.invalid"}}, "auth": {"mode": "off"}},
        "server.grpc.host is 'no.such.host.invalid', which is not a usable address: ",
    ),
    "Triton without a port": (
        {"dense": {"triton": {"url": "triton"}}},
        "dense.triton.url: expected host:port without a scheme, found 'triton'",
    ),
    "a folder that cannot be made": (
        {"tiers": {"rocksdb": {"path": "/proc/none/rocksdb"}}},
        "rocksdb: /proc/none/rocksdb cannot be created (No such file or directory: /proc/none); set tiers",
    ),
    "hot keys below a file": (
        {"tiers": {"cpu_cache": {"snapshot": {"path": "{empty_file}/hot"}}}},
        "tiers.cpu_cache.snapshot.path: {empty_file} is not a folder that this process may write to; mount",
    ),
    "checkpoints below a file": (
        {"tiers": {"rocksdb": {"checkpoints": "{empty_file}/saved"}}},
        "tiers.rocksdb.checkpoints: {empty_file} is not a folder that this process may write to; mount",
    ),
    **{
        f"TLS of {port}: {name}": ({"server": {port: {"tls": {**TLS, **tls}}}}, message)
        for port in ("http", "grpc", "admin")
        for name, (tls, message) in WRONG_TLS.items()
    },
}
OF_FRONTEND: dict[str, Wrong] = {
    "no lookup node": (
        {"lookup": {"nodes": []}},
        "lookup.nodes: is empty, but server.role is frontend; name the gRPC ports of the lookup nodes",
    ),
    "workers": ({"server": {"workers": 2}}, "server.workers: is 2, but server.role is frontend"),
    "no key for lookup nodes": (
        {"lookup": {"api_key_file": "{folder}/none"}},
        "lookup.api_key_file: {folder}/none: No such file or directory; mount the secret there",
    ),
    "what is no key for lookup nodes": (
        {"lookup": {"api_key_file": "{certificates}/one.key"}},
        "lookup.api_key_file: {certificates}/one.key does not contain an API key; expected 16 to 512",
    ),
    "no address of a lookup node": (
        {"lookup": {"nodes": ["lookup"]}},
        "lookup.nodes[0]: expected host:port or dns:///name:port, found 'lookup'",
    ),
    "no roots for lookup nodes": (
        {"lookup": {"tls": {"ca_file": "{folder}/none"}}},
        "lookup.tls: {folder}/none cannot be used: No such file or directory",
    ),
    "another's key for lookup nodes": (
        {"lookup": {"tls": {**TLS, **WRONG_TLS["another's key"][0]}}},
        "cannot be used: the key does not match the certificate",
    ),
}
OF_LOOKUP: dict[str, Wrong] = {
    "no gRPC": ({"server": {"grpc": None}}, "server.grpc: is null, but server.role is lookup"),
    "an old certificate of gRPC": (
        {"server": {"grpc": {"tls": {**TLS, **WRONG_TLS["expired"][0]}}}},
        WRONG_TLS["expired"][1],
    ),
}
OF_INGEST: dict[str, Wrong] = {
    "nothing to feed": ({"tiers": {"redis": None}}, "tiers.redis: no Redis is configured"),
    "nothing to read": ({"updates": {"kafka": None}}, "updates.kafka: no Kafka is configured"),
    "nodes write themselves": (
        {"updates": {"kafka": {**KAFKA, "shared_writer": "nodes"}}},
        "updates.kafka.shared_writer: is nodes",
    ),
}
MATRIX = [
    pytest.param(command, *wrong, id=f"{' '.join(command)}: {name}")
    for command, cases in (
        (SERVE, OF_EVERY | OF_ROWS | OF_SERVE),
        (FRONTEND, OF_EVERY | OF_FRONTEND),
        (LOOKUP, OF_EVERY | OF_LOOKUP),
        (INGEST, OF_EVERY | OF_ROWS | OF_INGEST),
    )
    for name, wrong in cases.items()
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with commands(tmp_path_factory.mktemp("commands")) as made:
        yield made


@pytest.fixture(scope="module")
def places(
    small_repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    """Values of names in braces that are the same for all cases."""
    folder = tmp_path_factory.mktemp("places")
    certificates = folder / "certificates"
    certificates.mkdir()
    for name in ("one", "two"):
        made(certificates, name)
    shutil.copy(certificates / "one.crt", certificates / "old.crt")
    expire(certificates / "old.crt")
    (folder / "empty").mkdir()
    (folder / "empty_file").touch()
    for name, file in (("damaged", "words/1/tables/words/emb_vector"), ("no_network", "")):
        shutil.copytree(small_repository, folder / name)
        broken = folder / name / (file or "clicks/1/dense.onnx")
        broken.write_bytes(broken.read_bytes()[:-8] if file else b"no network")
        for note in (folder / name).glob("*/*/manifest.json"):
            note.unlink()  # which knows the files' checksums
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = ("empty", "empty_file", "damaged", "no_network", "certificates")
        yield {
            **{name: str(folder / name) for name in names},
            "repository": str(small_repository),
            "taken": taken.getsockname()[1],
        }


@pytest.fixture
def write(places: Mapping[str, Any], tmp_path: Path) -> Any:
    """``write(wrong)``: the file of a configuration that is correct except for ``wrong``."""

    def write(wrong: Mapping[str, Any]) -> Path:
        right = {
            "models": {"repository": "{repository}"},
            "tiers": {"rocksdb": {"path": "{folder}/rocksdb"}, "redis": REDIS},
            "updates": {"kafka": KAFKA},
            "lookup": {"nodes": ["127.0.0.1:1"]},
            "server": {"http": {"port": 0}, "grpc": {"port": 0}, "admin": {"port": 0}},
        }
        file = tmp_path / "config.yaml"
        file.write_text(json.dumps(filled(laid_over(right, wrong), here(places, tmp_path))))
        return file

    return write


def here(places: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    return {**places, "folder": str(folder)}


def laid_over(right: Mapping[str, Any], wrong: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(right)
    for name, value in wrong.items():
        below = both.get(name)
        nested = isinstance(below, dict) and isinstance(value, dict)
        both[name] = laid_over(below, value) if nested and below else value
    return both


def filled(data: Any, names: Mapping[str, Any]) -> Any:
    if isinstance(data, dict):
        return {key: filled(value, names) for key, value in data.items()}
    if isinstance(data, list):
        return [filled(value, names) for value in data]
    if isinstance(data, str) and data == "{taken}":
        return names["taken"]
    return data.format_map(names) if isinstance(data, str) else data


def judge(ended: Ended, message: str) -> None:
    assert ended.code == 2, ended.output
    assert len(ended.errors) == 1, ended.output
    assert message in ended.errors[0]
    for word in ("Traceback", " ERROR ", " WARNING "):
        assert word not in ended.output


@pytest.mark.parametrize(("command", "wrong", "message"), MATRIX)
def test_bad_configuration_exits_with_2_and_one_line(
    command: tuple[str, ...],
    wrong: Mapping[str, Any],
    message: str,
    run: Commands,
    write: Any,
    places: Mapping[str, Any],
    tmp_path: Path,
) -> None:
    ended = run.run(*command, "--config", write(wrong))
    judge(ended, message.format_map(here(places, tmp_path)))


def test_read_only_volume_is_reported(write: Any, tmp_path: Path) -> None:
    """Runs the whole process, not a fork."""
    volume = tmp_path / "volume"
    volume.mkdir()
    config = write({"tiers": {"rocksdb": {"path": str(volume / "db")}}})
    mount = f"mount -t tmpfs -o ro none {volume}"
    namespace = ["unshare", "--mount", *(() if os.geteuid() == 0 else ("--map-root-user",))]
    if subprocess.run([*namespace, "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("this system does not allow mounts in a user namespace")
    serve = f"{mount} && exec {sys.executable} -m hps.cli.main serve --config {config}"
    done = subprocess.run(
        [*namespace, "sh", "-c", serve], capture_output=True, text=True, timeout=120, check=False
    )
    judge(
        Ended(done.returncode, done.stdout + done.stderr),
        f"rocksdb: {volume}/db is on a read-only file system; mount it writable, or set tiers.rocksdb.path",
    )


def test_latest_check_fails_within_three_seconds(write: Any) -> None:
    """Start-up is compared with the import time of a server's packages in processor time.

    They take 0.6 s on a fast machine; the machine may be slow or busy."""
    packages = "import fastapi, grpc, numpy, onnxruntime, pydantic, rocksdict, uvicorn"
    _, theirs = spent("-c", packages)
    code, ours = spent("-m", "hps.cli.main", "serve", "--config", write(OF_ROWS["no model"][0]))
    assert code == 2
    assert ours < 5 * theirs


def spent(*arguments: str | Path) -> tuple[int, float]:
    """Exit code and processor seconds of Python."""
    command = [sys.executable, *map(str, arguments)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, used.ru_utime + used.ru_stime
