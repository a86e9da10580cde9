"""Servers on a remote repository, and downloads that are killed."""

import http.client
import json
import logging
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from benchmarks.peers.hps_server import start_hps
from hps.config.model_schema import ModelSpec
from hps.config.schema import ModelsSettings
from hps.models.remote import repository_of
from hps.models.repository import Repository
from hps.models.version_writer import write_version
from tests.support.object_store import EXPIRED, object_store
from tests.support.small_models import LOOKUP, write_models
from tests.support.waiting import until
from tests.support.web_repository import web_repository


@pytest.fixture(scope="module")
def s3_server():
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with object_store() as store:
        yield store


@pytest.fixture
def s3(s3_server, monkeypatch):
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    yield s3_server
    relay = s3_server.relay
    relay.cut_after = relay.budget = relay.bytes_per_s = relay.refusal = None


def request(address, method, path, body=None):
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request(method, path, None if body is None else json.dumps(body))
    reply = connection.getresponse()
    text = reply.read().decode()
    connection.close()
    return reply.status, text


def word(server, key=7):
    inputs = [{"name": "word", "datatype": "INT64", "shape": [1, 1], "data": [key]}]
    status, text = request(server.address, "POST", "/v2/models/words/infer", {"inputs": inputs})
    assert status == 200, text
    return json.loads(text)["outputs"][0]["data"][0]


def load(server, model, version):
    path = f"/v2/repository/models/{model}/load"
    return request(server.admin, "POST", path, {"parameters": {"version": version}})


def write_words(root, version, first=0.0, rows=1000):
    keys = np.arange(rows)
    vectors = np.full((rows, 8), first, np.float32) + keys[:, None]
    tables = {"words": (keys, vectors)}
    write_version(root, ModelSpec.model_validate(LOOKUP), version, tables, mapped=False)


@pytest.mark.parametrize("workers", [0, 1])
def test_server_on_an_object_store(s3, tmp_path, workers):
    """Start, load of another version at run time, expired credentials, metrics."""
    write_models(tmp_path / "source")
    models = {
        "repository": s3.upload(tmp_path / "source", f"serve-{workers}"),
        "download": {"folder": str(tmp_path / "cache")},
    }
    limits = {"workers": workers} if workers else {}
    with start_hps(tmp_path, models=models, limits=limits) as server:
        assert word(server) == 7.0
        write_words(tmp_path / "source", 2, first=1000.0)
        s3.upload(tmp_path / "source/words/2", f"serve-{workers}/words/2")
        s3.relay.refusal = EXPIRED
        status, text = load(server, "words", 2)
        assert status == 409
        assert (
            "models.repository/words/2/manifest.json: the credentials have expired; renew them"
            in text
        )
        assert word(server) == 7.0
        s3.relay.refusal = None
        assert load(server, "words", 2)[0] == 200
        assert word(server) == 1007.0
        _, metrics = request(server.admin, "GET", "/metrics")
        (count,) = [
            line
            for line in metrics.splitlines()
            if line.startswith('hps_model_download_bytes_total{model="words"')
        ]
        assert float(count.split()[-1]) >= 40_000
        assert "test-secret-key" not in metrics
    assert not [*(tmp_path / "cache").rglob("*.part")]


def test_watched_store(s3, tmp_path):
    """A version that is published while a node serves is served once its manifest is there."""
    write_models(tmp_path / "source")
    models = {
        "repository": s3.upload(tmp_path / "source", "watched"),
        "download": {"folder": str(tmp_path / "cache")},
        "watch_s": 0.2,
    }
    with start_hps(tmp_path, models=models) as server:
        assert word(server) == 7.0
        write_words(tmp_path / "source", 2, first=1000.0)
        command = [sys.executable, "-m", "hps.cli.main", "model", "publish", "words"]
        command += ["-r", str(tmp_path / "source"), "--to", models["repository"]]
        subprocess.run(command, check=True, capture_output=True)
        until(lambda: word(server) == 1007.0)
        s3.relay.refusal = "InternalError", "try again"
        time.sleep(1.0)
        assert word(server) == 1007.0, "what a store that fails does not list is served on"
        s3.relay.refusal = None


def test_predictions_for_a_file_in_a_store(s3, tmp_path):
    write_models(tmp_path / "models")
    samples = [{"user": k, "item": k, "history": [k, 1], "dense": [0.1, 0.2, k]} for k in range(40)]
    lines = "".join(json.dumps(sample) + "\n" for sample in samples)
    (tmp_path / "day.jsonl").write_text(lines)
    s3.write("inputs/day.jsonl", lines.encode())
    with start_hps(tmp_path) as server:

        def predict(file):
            command = [sys.executable, "-m", "hps.cli.main", "predict", "clicks", file]
            command += ["--server", f"http://{server.address}"]
            return subprocess.run(command, capture_output=True, text=True)

        local, remote = (
            predict(str(tmp_path / "day.jsonl")),
            predict("s3://bucket/inputs/day.jsonl"),
        )
        assert local.returncode == 0, local.stderr
        assert len(local.stdout.splitlines()) == 40
        assert remote.stdout == local.stdout
        missing = predict("s3://bucket/inputs/none.jsonl")
        assert missing.returncode
        assert "s3://bucket/inputs/none.jsonl does not exist" in missing.stderr


def test_front_end_downloads_networks_alone(s3, tmp_path):
    write_models(tmp_path / "models")
    uri = s3.upload(tmp_path / "models", "split")
    node = {"repository": uri, "download": {"folder": str(tmp_path / "node-cache")}}
    (tmp_path / "front").mkdir()
    with start_hps(tmp_path, models=node, limits={"role": "lookup"}) as below:
        front = {"repository": uri, "download": {"folder": str(tmp_path / "front-cache")}}
        with start_hps(
            tmp_path / "front",
            models=front,
            limits={"role": "frontend"},
            lookup={"nodes": [below.grpc]},
        ) as server:
            assert word(server) == 7.0
    names = {p.name for p in (tmp_path / "front-cache").rglob("*") if p.is_file()}
    assert "dense.onnx" in names
    assert "emb_vector" not in names


def test_unreachable_or_refused_store_ends_a_start_early(s3, tmp_path):
    write_models(tmp_path / "models")
    uri = s3.upload(tmp_path / "models", "refused")
    command = [sys.executable, "-m", "hps.cli.main", "serve"]
    settings = [f"models.repository={uri}", f"models.download.folder={tmp_path}/cache"]
    for setting in [*settings, f"tiers.rocksdb.path={tmp_path}/db"]:
        command += ["--set", setting]
    s3.relay.refusal = EXPIRED
    started = time.monotonic()
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "the credentials have expired" in ended.stderr
    assert time.monotonic() - started < 10


OPEN = """
import sys
from pathlib import Path
from hps.config.download_settings import DownloadSettings
from hps.config.repository_uri import RepositoryUri
from hps.models.remote import open_repository
chosen = DownloadSettings(folder=Path(sys.argv[2]), chunk_bytes=65536, parallel=2)
opened = open_repository(RepositoryUri.parse(sys.argv[1]), chosen).open("words")
print(opened.tables["words"].rows)
"""


def test_killed_download_resumes(s3, tmp_path):
    """``kill -9`` at moments of a download: no partial version, and no byte twice but a few chunks."""
    write_words(tmp_path / "source", 1, rows=50_000)
    uri = s3.upload(tmp_path / "source", "killed")
    cache = tmp_path / "cache"
    total = 50_000 * 40
    s3.relay.bytes_per_s = 1_500_000
    kills, before = 0, s3.relay.passed
    command = [sys.executable, "-c", OPEN, uri, str(cache)]
    for _ in range(4):
        process = subprocess.Popen(command)
        seen = s3.relay.passed
        until(lambda at=seen: s3.relay.passed - at > 400_000)
        assert process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        kills += 1
        assert not [*cache.glob("*/words/1")]
    assert kills == 4
    s3.relay.bytes_per_s = None
    assert subprocess.check_output(command, text=True).strip() == "50000"
    assert s3.relay.passed - before < total + 5 * 2 * 65536 + 400_000
    root = next(cache.glob("s3-*"))
    opened, source = Repository(root).open("words"), Repository(tmp_path / "source").open("words")
    assert (opened.tables["words"].vectors() == source.tables["words"].vectors()).all()
    assert sorted(p.name for p in (root / "words").iterdir()) == ["1", "model.yaml"]


def test_processes_that_start_together_download_once(s3, tmp_path):
    write_words(tmp_path / "source", 1, rows=50_000)
    uri = s3.upload(tmp_path / "source", "together")
    s3.relay.bytes_per_s = 4_000_000
    before = s3.relay.passed
    command = [sys.executable, "-c", OPEN, uri, str(tmp_path / "cache")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate()[0].strip() for process in processes] == ["50000"] * 3
    assert s3.relay.passed - before < 50_000 * 40 + 200_000


KEYS = [
    {"name": "replicas", "role": "admin", "key": "admin-key-of-replicas"},
    {"name": "readers", "role": "read", "key": "a-key-of-readers-1"},
]


def fetch_file(server, path, span="bytes=0-99", key=KEYS[0]["key"]):
    connection = http.client.HTTPConnection(server.admin, timeout=60)
    headers = {"X-API-Key": key} | ({"Range": span} if span else {})
    connection.request("GET", f"/v1/models/words/versions/{path}", headers=headers)
    reply = connection.getresponse()
    found = reply.status, reply.read()
    connection.close()
    return found


def test_replica_downloads_from_its_sibling(s3, tmp_path):
    """All but the manifest and model.yaml comes from the peer; without it, or its key, from the store."""
    write_words(tmp_path / "source", 1, rows=50_000)
    uri = s3.upload(tmp_path / "source", "peers")
    auth = {"mode": "api_key", "keys": KEYS}
    key = tmp_path / "key"
    key.write_text(KEYS[0]["key"])

    def start(name, **models):
        folder = tmp_path / name
        folder.mkdir()
        chosen = {"repository": uri, "download": {"folder": str(folder / "cache")}, **models}
        return start_hps(folder, models=chosen, auth=auth)

    size = 50_000 * 40
    with start("first") as first:
        files = first_files(tmp_path / "source/words/1")
        status, data = fetch_file(first, "1/files/tables/words/key", "bytes=8-23")
        assert (status, data) == (206, files["tables/words/key"][8:24])
        for path, span, sent, expected in (
            ("1/files/manifest.json", "bytes=0-9", KEYS[0]["key"], 206),
            ("1/files/tables/words/key", None, KEYS[0]["key"], 400),
            ("1/files/tables/words/key", "bytes=5-2", KEYS[0]["key"], 400),
            ("1/files/tables/words/key", "bytes=0-999999999", KEYS[0]["key"], 400),
            ("1/files/../../model.yaml", "bytes=0-9", KEYS[0]["key"], 404),
            ("1/files/%2e%2e/%2e%2e/model.yaml", "bytes=0-9", KEYS[0]["key"], 404),
            ("2/files/manifest.json", "bytes=0-9", KEYS[0]["key"], 404),
            ("1/files/manifest.json", "bytes=0-9", KEYS[1]["key"], 403),
            ("1/files/manifest.json", "bytes=0-9", "another-key-of-16", 401),
        ):
            assert fetch_file(first, path, span, sent)[0] == expected, (path, span)
        peers = {"peers": ["http://127.0.0.1:1", f"http://{first.admin}"]}
        before = s3.relay.passed
        with start("second", **peers, peers_api_key_file=str(key)):
            assert s3.relay.passed - before < size / 4
        before = s3.relay.passed
        with start("third", **peers):
            assert s3.relay.passed - before > size, "a peer that refuses is skipped"
    with start("fourth", **peers, peers_api_key_file=str(key)):
        pass
    for name in ("second", "third", "fourth"):
        (folder,) = (tmp_path / name / "cache").glob("s3-*/words/1")
        assert first_files(folder) == files


def first_files(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_peer_that_returns_other_bytes_is_not_trusted(s3, tmp_path):
    """Its manifest is right, a file is not: the checksum tells, and the store has the right one."""
    write_words(tmp_path / "source", 1, rows=5_000)
    uri = s3.upload(tmp_path / "source", "liar")
    liar = tmp_path / "www/v1/models/words/versions/1/files"
    (liar / "tables/words").mkdir(parents=True)
    (liar / "manifest.json").write_bytes((tmp_path / "source/words/1/manifest.json").read_bytes())
    for name in ("key", "emb_vector"):
        data = (tmp_path / "source/words/1/tables/words" / name).read_bytes()
        (liar / "tables/words" / name).write_bytes(data[::-1])
    models = ModelsSettings.model_validate(
        {"repository": uri, "download": {"folder": str(tmp_path / "cache")}}
    )
    with web_repository(tmp_path / "www") as web:
        found = repository_of(models.model_copy(update={"peers": [web.url]})).open("words")
        assert [each for each in web.reads if each.endswith("/manifest.json")]
        assert [each for each in web.reads if "/tables/words/" in each]
    assert first_files(found.folder) == first_files(tmp_path / "source/words/1")


PUBLISH = """
import sys
from hps.config.repository_uri import RepositoryUri
from hps.models.remote import publish
from hps.models.remote.opening import open_writable_store
from hps.models.repository import Repository
from hps.types import NoProgress
publish.CLAIM_S, publish._RENEW_S = 6.0, 0.5
opened = Repository(sys.argv[1]).open("words")
store = open_writable_store(RepositoryUri.parse(sys.argv[2]))
print("begin", flush=True)
print(publish.publish_remote(opened, store, NoProgress(), parallel=2))
"""


def test_killed_publisher_leaves_no_version(s3, tmp_path):
    """``kill -9`` at moments of an upload; once its claim has expired another one succeeds."""
    write_words(tmp_path / "source", 1, rows=200_000)
    uri = "s3://bucket/killed-publisher"
    command = [sys.executable, "-c", PUBLISH, str(tmp_path / "source"), uri]
    for pause_s in (0.05, 0.15, 0.3):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "begin\n"
        time.sleep(pause_s)
        was_running = process.poll() is None
        process.kill()
        process.communicate()
        complete = [f for f in s3.files("killed-publisher") if f.endswith("manifest.json")]
        assert was_running or complete
        if complete:
            break
        time.sleep(7.1)  # the claim expires; S3's times are in seconds
    else:
        assert subprocess.check_output(command, text=True).splitlines()[-1] == f"{uri}/words/1"
    models = {"repository": uri, "download": {"folder": str(tmp_path / "cache")}}
    found = repository_of(ModelsSettings.model_validate(models)).open("words")
    assert first_files(found.folder) == first_files(tmp_path / "source/words/1")


def test_validation_downloads_no_rows(s3, tmp_path):
    write_models(tmp_path / "source")
    uri = s3.upload(tmp_path / "source", "validated")
    (tmp_path / "hps.yaml").write_text(
        f"models: {{repository: '{uri}', download: {{folder: cache}}}}\n"
        "tiers: {rocksdb: {path: db}}\n"
    )
    command = [
        sys.executable,
        "-m",
        "hps.cli.main",
        "config",
        "validate",
        str(tmp_path / "hps.yaml"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    names = {p.name for p in (tmp_path / "cache").rglob("*") if p.is_file()}
    assert "dense.onnx" in names
    assert "emb_vector" not in names
    s3.relay.refusal = EXPIRED
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode
    assert "the credentials have expired" in done.stdout + done.stderr
