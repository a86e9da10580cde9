"""A remote repository of an S3-compatible server, with model ``ctr`` of some hundred kilobytes."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hps.config.download_settings import DownloadSettings
from hps.config.repository_uri import RepositoryUri
from hps.models.remote import open_repository
from hps.models.remote.repository import RemoteRepository
from tests.support.object_store import ObjectStore, object_store

CHUNK = 64 << 10
ROWS = 20_000


@pytest.fixture(scope="session")
def s3_server() -> Iterator[ObjectStore]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with object_store() as store:
        yield store


@pytest.fixture
def s3(s3_server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    yield s3_server
    relay = s3_server.relay
    relay.cut_after = relay.stall_after = relay.budget = relay.bytes_per_s = relay.refusal = None
    relay.cuts = 0


@pytest.fixture
def published(s3: ObjectStore, make_version: Callable[..., Path], tmp_path: Path) -> RepositoryUri:
    """The URI of a repository with version 1 of ``ctr``."""
    make_version(1, n=ROWS)
    return RepositoryUri.parse(s3.upload(tmp_path / "models", tmp_path.name))


@pytest.fixture
def opened(published: RepositoryUri, tmp_path: Path) -> Callable[..., RemoteRepository]:
    """Opens the repository with its cache in ``tmp_path / "cache"``."""

    def make(**settings: Any) -> RemoteRepository:
        chosen = {"folder": tmp_path / "cache", "chunk_bytes": CHUNK, "timeout_s": 5.0, **settings}
        repository = open_repository(published, DownloadSettings(**chosen))
        assert isinstance(repository, RemoteRepository)
        return repository

    return make
