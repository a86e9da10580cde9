"""File systems of the other schemes."""

import pytest
from pyarrow import fs

from hps.config.download_settings import DownloadSettings
from hps.config.repository_uri import RepositoryUri
from hps.errors import NotFound
from hps.models.remote import open_repository
from hps.models.remote.arrow_store import open_filesystem
from hps.models.remote.store import StoreUnavailable
from hps.models.repository import Repository
from tests.support.gcs_server import gcs_server
from tests.unit.models.remote.conftest import CHUNK, ROWS


def opened(tmp_path, uri, **settings):
    chosen = {"folder": tmp_path / "cache", "chunk_bytes": CHUNK, "timeout_s": 2.0, **settings}
    return open_repository(RepositoryUri.parse(uri), DownloadSettings(**chosen))


def test_google_cloud_storage(make_version, tmp_path, monkeypatch):
    make_version(1, n=ROWS)
    make_version(2)
    (tmp_path / "models/ctr/2/manifest.json").unlink()
    with gcs_server(tmp_path) as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        repository = opened(tmp_path, "gs://bucket/models")
        assert (repository.names(), repository.versions("ctr")) == (["ctr"], [1])
        local = Repository(tmp_path / "models").open("ctr", 1)
        assert repository.open("ctr").fingerprint == local.fingerprint
        with pytest.raises(NotFound, match="no model 'other' in gs://bucket/models"):
            repository.open("other")


def test_unreachable_google_cloud_storage(tmp_path, monkeypatch):
    """It is given up after `timeout_s`, not after the SDK's 15 minutes."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    with pytest.raises(StoreUnavailable, match="gs://bucket/models"):
        opened(tmp_path, "gs://bucket/models", attempts=1).names()


def test_azure():
    uri = RepositoryUri.parse("abfs://box@account.dfs.core.windows.net/models")
    found, path = open_filesystem(uri, 5.0)
    assert isinstance(found, fs.AzureFileSystem)
    assert path == "box/models"
