"""Repositories on web servers, listed by index.json."""

import json
import ssl

import pytest
from typer.testing import CliRunner

from hps.cli.model import app
from hps.config.download_settings import DownloadSettings
from hps.config.repository_uri import RepositoryUri
from hps.errors import ModelError, NotFound
from hps.models.remote import open_repository
from hps.models.remote.store import StoreUnavailable
from hps.models.repository import Repository
from tests.support.certificates import made
from tests.support.web_repository import web_repository
from tests.unit.models.remote.conftest import CHUNK, ROWS


@pytest.fixture
def web(make_version, tmp_path):
    make_version(1, n=ROWS)
    with web_repository(tmp_path / "models") as server:
        yield server


def opened(tmp_path, url, **settings):
    chosen = {"folder": tmp_path / "cache", "chunk_bytes": CHUNK, "timeout_s": 5.0, **settings}
    return open_repository(RepositoryUri.parse(url), DownloadSettings(**chosen))


def index(tmp_path):
    done = CliRunner().invoke(app, ["index", str(tmp_path / "models")])
    assert done.exit_code == 0, done.output
    return json.loads((tmp_path / "models/index.json").read_text())


def test_indexed_repository(web, make_version, tmp_path):
    folder = make_version(2)
    (folder / "manifest.json").unlink()
    assert index(tmp_path) == {"format": 1, "models": {"ctr": [1]}}
    repository = opened(tmp_path, web.url)
    assert (repository.names(), repository.versions("ctr")) == (["ctr"], [1])
    local = Repository(tmp_path / "models").open("ctr", 1)
    assert repository.open("ctr").fingerprint == local.fingerprint
    with pytest.raises(NotFound, match="no model 'other' in http://"):
        repository.open("other")


def test_stated_version_needs_no_index(web, tmp_path):
    repository = opened(tmp_path, web.url)
    assert repository.open("ctr", 1).tables["users"].rows == ROWS
    with pytest.raises(ModelError, match=r"index.json does not exist: .*hps model index DIR"):
        repository.open("ctr")


@pytest.mark.parametrize("text", ["no json", "[]", '{"format": 1, "models": {"ctr": ["1"]}}'])
def test_wrong_index(web, tmp_path, text):
    (tmp_path / "models/index.json").write_text(text)
    with pytest.raises(ModelError, match=r"/index\.json: "):
        opened(tmp_path, web.url).names()


def test_failing_server(web, tmp_path):
    web.status = 503
    with pytest.raises(StoreUnavailable, match="the server failed: HTTP 503"):
        opened(tmp_path, web.url).open("ctr", 1)
    web.status = 403
    with pytest.raises(ModelError, match=r"access denied \(HTTP 403 Forbidden\); put the host's"):
        opened(tmp_path, web.url).open("ctr", 1)


def test_server_without_ranges(web, tmp_path):
    web.ranges = False
    with pytest.raises(
        ModelError, match=r"ignores range requests .* raise models.download.chunk_bytes"
    ):
        opened(tmp_path, web.url).open("ctr", 1)
    assert (
        opened(tmp_path, web.url, chunk_bytes=8 << 20).open("ctr", 1).tables["users"].rows == ROWS
    )


def test_unreachable_server(tmp_path):
    with pytest.raises(StoreUnavailable, match="does not respond"):
        opened(tmp_path, "http://127.0.0.1:1/models").open("ctr", 1)


def test_credentials_go_to_trusted_servers_alone(web, tmp_path, monkeypatch):
    key, certificate = made(tmp_path, "localhost", ["DNS:localhost"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    web.tls(context)
    web.login = "reader", "secret-password"
    (tmp_path / "netrc").write_text("machine localhost login reader password secret-password\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    url = f"https://localhost:{web.port}"
    with pytest.raises(ModelError, match=r"certificate is not trusted .* set SSL_CERT_FILE"):
        opened(tmp_path, url).open("ctr", 1)
    assert not web.seen, "nothing was sent before the certificate was checked"
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert opened(tmp_path, url).open("ctr", 1).tables["users"].rows == ROWS
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(ModelError, match="access denied") as error:
        opened(tmp_path, url).names()
    assert "secret-password" not in str(error.value)
