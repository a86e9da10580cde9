"""Downloads from sibling nodes that are busy, dead, or return other bytes."""

import shutil
import time
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import uvloop

import hps
from hps.config.download_settings import DownloadSettings
from hps.config.model_schema import ModelSpec
from hps.config.repository_uri import RepositoryUri
from hps.config.server_settings import ServerSettings
from hps.models.mapped_file import write_mapped
from hps.models.remote import open_repository
from hps.models.remote.peers import PeerAccess, PeerVersion
from hps.models.repository import Repository
from hps.models.version_writer import write_version
from services.frontend.auth import Authorizer
from services.frontend.http import version_files
from services.frontend.http.app import admin_app
from services.frontend.http.server import HttpPortOptions, HttpServer
from services.frontend.listening import listen
from services.frontend.state import FrontendState
from tests.support.fallbacks import HTTP_PROTOCOL
from tests.support.server_thread import Running
from tests.support.small_models import LOOKUP
from tests.support.web_repository import web_repository

ROWS = 100_000
CHUNK = 64 << 10


@pytest.fixture
def store(tmp_path):
    """A web server with the repository, and version 1 of ``words`` in it: 64 ranges of two files."""
    keys = np.arange(ROWS)
    rows = np.random.default_rng(1).random((ROWS, 8), np.float32)
    spec = ModelSpec.model_validate(LOOKUP)
    write_version(tmp_path / "source", spec, 1, {"words": (keys, rows)}, mapped=False)
    with web_repository(tmp_path / "source") as web:
        yield web


@contextmanager
def sibling(tmp_path):
    """The URL of the admin port of a node that serves the version."""
    node = hps.open(
        {
            "models": {"repository": str(tmp_path / "source")},
            "tiers": {"rocksdb": {"path": str(tmp_path / "database")}},
        }
    )
    with node:
        state = FrontendState()
        state.serve(node)
        app = admin_app(state, ServerSettings(), Authorizer())
        options = HttpPortOptions(60, protocol=HTTP_PROTOCOL)
        running = Running(
            HttpServer(app, listen("127.0.0.1", 0, "server.admin"), options),
            uvloop.new_event_loop(),
        )
        try:
            yield running.server.url
        finally:
            running.stop(force=True)
            running.join()


def download(tmp_path, store, peers, name="cache"):
    """Download the version; returns how many ranges of its tables came from the store."""
    settings = DownloadSettings(folder=tmp_path / name, chunk_bytes=CHUNK, parallel=8)
    store.reads.clear()
    uri = RepositoryUri.parse(store.url)
    opened = open_repository(uri, settings, peers=PeerAccess(peers)).open("words", 1)
    for file in ("key", "emb_vector"):
        path = f"tables/words/{file}"
        source = tmp_path / "source/words/1" / path
        assert (opened.folder / path).read_bytes() == source.read_bytes()
    return sum(path.endswith(("/key", "/emb_vector")) for path in store.reads)


def test_peer_that_reads_one_range_at_a_time_serves_the_file(store, tmp_path, monkeypatch, caplog):
    """Seven of eight ranges are refused at first: a busy peer is asked again, and not dropped."""
    monkeypatch.setattr(version_files, "_MAX_READS", 1)
    with sibling(tmp_path) as url:
        assert download(tmp_path, store, [url]) < 10
    assert "skipping it" not in caplog.text


def write_peer(tmp_path):
    """The folder of a web server that has the version's files where a node has them."""
    files = tmp_path / "www/v1/models/words/versions/1/files"
    shutil.copytree(tmp_path / "source/words/1", files)
    return files


def test_peer_that_returns_other_bytes_is_dropped(store, tmp_path, caplog):
    files = write_peer(tmp_path)
    data = (files / "tables/words/key").read_bytes()
    (files / "tables/words/key").write_bytes(data[::-1])
    with web_repository(tmp_path / "www") as peer:
        download(tmp_path, store, [peer.url])
        assert (
            f"peer {peer.url} failed, skipping it: tables/words/key does not match" in caplog.text
        )


def test_dead_peer_is_dropped_at_once(store, tmp_path, caplog):
    """It answers for the manifest, then it fails: every range is the store's, without pauses."""
    write_peer(tmp_path)
    with web_repository(tmp_path / "www") as peer:
        access = PeerAccess([peer.url])
        manifest = (tmp_path / "source/words/1/manifest.json").read_bytes()
        version = PeerVersion(access, "words", 1, manifest)
        assert version.read("tables/words/key", 100, 0) is not None
        peer.status = 500
        asked = len(peer.reads)
        assert version.read("tables/words/key", 100, 0) is None
        assert (len(peer.reads) - asked, bool(version)) == (1, False)
    assert "skipping it: HTTP Error 500" in caplog.text


def test_peer_that_stays_busy_is_kept(store, tmp_path):
    """A range is left to the store after a bounded time; the peer is asked for the next one."""
    write_peer(tmp_path)
    with web_repository(tmp_path / "www") as peer:
        manifest = (tmp_path / "source/words/1/manifest.json").read_bytes()
        version = PeerVersion(PeerAccess([peer.url]), "words", 1, manifest)
        peer.status = 503
        began = time.monotonic()
        assert version.read("tables/words/key", 100, 0) is None
        assert time.monotonic() - began < 5
        peer.status = None
        assert (
            version.read("tables/words/key", 100, 0) == np.arange(13, dtype="<i8").tobytes()[:100]
        )


def test_mapped_file_of_a_peer_is_compared_with_the_stores(store, tmp_path, caplog):
    """Another file of the same table with checksums of its own, such as one with another row."""
    mapped = tmp_path / "source/words/1/tables/words/mapped"
    files = Repository(tmp_path / "source").open("words", 1).tables["words"]
    write_mapped(files, mapped)
    peer_files = write_peer(tmp_path)
    rows = files.vectors()
    rows[5] += 1
    forged = tmp_path / "forged"
    forged.mkdir()
    shutil.copyfile(files.key_path, forged / "key")
    rows.tofile(forged / "emb_vector")
    write_mapped(replace(files, folder=forged), peer_files / "tables/words/mapped")
    with web_repository(tmp_path / "www") as peer:
        download(tmp_path, store, [peer.url])
        assert any(path.endswith("/mapped") for path in peer.reads)
    (found,) = (tmp_path / "cache").glob("http-*/words/1/tables/words/mapped")
    assert found.read_bytes() == mapped.read_bytes()
    assert "of its blocks do not match their checksums" in caplog.text or "damaged" in caplog.text


def test_right_mapped_file_of_a_peer_is_used(store, tmp_path):
    """All of it but the header is the peer's."""
    mapped = tmp_path / "source/words/1/tables/words/mapped"
    write_mapped(Repository(tmp_path / "source").open("words", 1).tables["words"], mapped)
    write_peer(tmp_path)
    with web_repository(tmp_path / "www") as peer:
        assert download(tmp_path, store, [peer.url]) == 0
    assert 0 < sum(path.endswith("/mapped") for path in store.reads) <= 2, (
        "its size, and its header"
    )
    (found,) = (tmp_path / "cache").glob("http-*/words/1/tables/words/mapped")
    assert found.read_bytes() == mapped.read_bytes()
