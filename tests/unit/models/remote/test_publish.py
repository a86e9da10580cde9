"""Publishing to a remote repository, and publishers that meet."""

import os
import threading

import pytest

from hps.config.download_settings import DownloadSettings
from hps.config.repository_uri import RepositoryUri
from hps.errors import ConfigError, ModelError
from hps.models.check import check_version
from hps.models.remote import open_repository
from hps.models.remote import publish as module
from hps.models.remote.arrow_store import ArrowStore
from hps.models.remote.cache import folder_bytes
from hps.models.remote.download import VersionDownload
from hps.models.remote.opening import open_writable_store
from hps.models.remote.publish import publish_remote
from hps.models.repository import Repository
from hps.types import NoProgress
from tests.unit.models.remote.conftest import ROWS
from tests.unit.models.remote.test_repository import write_mapped_users


@pytest.fixture
def uri(s3, tmp_path):
    return RepositoryUri.parse(f"s3://bucket/{tmp_path.name}-published")


def version(tmp_path, number=1):
    return Repository(tmp_path / "models").open("ctr", number)


def publish(uri, opened, **settings):
    return publish_remote(opened, ArrowStore(uri, 5.0), NoProgress(), **settings)


def test_published_version_is_opened(uri, s3, make_version, tmp_path):
    make_version(1, n=ROWS)
    assert publish(uri, version(tmp_path)) == f"{uri}/ctr/1"
    repository = open_repository(uri)
    assert repository.names() == ["ctr"]
    assert repository.versions("ctr") == [1]
    names = s3.files(f"{tmp_path.name}-published")
    assert not [name for name in names if ".publish" in name]
    for path in ("model.yaml", "1/manifest.json", "1/tables/items/emb_vector"):
        remote = s3.read(f"{tmp_path.name}-published/ctr/{path}")
        assert remote == (tmp_path / "models/ctr" / path).read_bytes()


def test_mapped_files_are_written_and_published(uri, s3, make_version, tmp_path):
    """Those that the version misses are written into it first; the others stay as they are."""
    written = write_mapped_users(make_version(1, n=ROWS))
    before = written.stat().st_ino
    publish(uri, version(tmp_path))
    assert written.stat().st_ino == before
    assert (tmp_path / "models/ctr/1/tables/items/mapped").is_file()
    downloaded = open_repository(uri, DownloadSettings(folder=tmp_path / "cache")).open("ctr")
    for table in ("users", "items"):
        path = f"tables/{table}/mapped"
        local = (tmp_path / "models/ctr/1" / path).read_bytes()
        assert (downloaded.folder / path).read_bytes() == local
    assert {each.level for each in check_version(downloaded, NoProgress())} == {"OK"}
    assert sorted(p.name for p in (tmp_path / "models/ctr").iterdir()) == ["1", "model.yaml"]


@pytest.mark.parametrize("mapped", [True, False])
def test_damaged_mapped_file_is_not_published(uri, s3, make_version, tmp_path, mapped):
    written = write_mapped_users(make_version(1, n=ROWS))
    content = written.read_bytes()
    written.write_bytes(content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])
    with pytest.raises(ModelError, match=r"users/mapped is not published: 1 of .* Remove the file"):
        publish(uri, version(tmp_path), mapped=mapped)
    assert not s3.files(f"{tmp_path.name}-published")
    written.unlink()
    publish(uri, version(tmp_path))
    assert (tmp_path / "models/ctr/1/tables/users/mapped").read_bytes() == content


def test_mapped_file_that_the_store_has_is_verified_if_uploaded(
    uri, s3, make_version, tmp_path, monkeypatch
):
    written = write_mapped_users(make_version(1, n=ROWS))
    publish(uri, version(tmp_path))
    tables = version(tmp_path).tables
    for number in (2, 3):
        make_version(number, tables={n: (t.keys(), t.vectors()) for n, t in tables.items()})
    content = written.read_bytes()
    with written.open("r+b") as file:  # and in the other versions, which have links to it
        file.seek(5000)
        file.write(bytes([content[5000] ^ 1]))
    publish(uri, version(tmp_path, 2))
    assert s3.read(f"{tmp_path.name}-published/ctr/2/tables/users/mapped") == content
    monkeypatch.setattr(ArrowStore, "copy", lambda *_: False)
    with pytest.raises(ModelError, match="users/mapped is not published"):
        publish(uri, version(tmp_path, 3))


def test_version_is_published_without_mapped_files(uri, s3, make_version, tmp_path):
    make_version(1)
    publish(uri, version(tmp_path), mapped=False)
    assert not [each for each in s3.files(f"{tmp_path.name}-published") if "mapped" in each]
    assert not [*(tmp_path / "models").rglob("mapped")]


def test_manifest_is_written_last(uri, s3, make_version, tmp_path):
    make_version(1, n=ROWS)

    class Stops(NoProgress):
        def task(self, title, total, unit="rows"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publish_remote(version(tmp_path), ArrowStore(uri, 5.0), Stops())
    assert not [name for name in s3.files(f"{tmp_path.name}-published") if "manifest" in name]
    publish(uri, version(tmp_path))
    assert open_repository(uri).versions("ctr") == [1]


def test_existing_version_is_refused(uri, make_version, tmp_path):
    make_version(1)
    publish(uri, version(tmp_path))
    with pytest.raises(
        ModelError, match="has version 1 of model 'ctr' already; versions do not change"
    ):
        publish(uri, version(tmp_path))


def test_differing_description_is_refused(uri, make_version, make_spec, tmp_path):
    make_version(1)
    publish(uri, version(tmp_path))
    changed = make_spec(users=4, items=8, more=2)
    make_version(2, spec=changed, replace_spec=True)
    with pytest.raises(ModelError, match=r"ctr/model.yaml differs .* --replace-spec"):
        publish(uri, version(tmp_path, 2))
    publish(uri, version(tmp_path, 2), replace_spec=True)
    assert open_repository(uri).spec("ctr") == changed


def test_damaged_file_is_not_published(uri, make_version, tmp_path):
    folder = make_version(1)
    path = folder / "tables/users/emb_vector"
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        ModelError, match="users/emb_vector: the contents do not match the manifest"
    ):
        publish(uri, version(tmp_path))
    assert not [*(tmp_path / "models").rglob("mapped")], "it would serve the damaged rows"
    with pytest.raises(ModelError, match="the contents do not match the manifest"):
        publish(uri, version(tmp_path), mapped=False)
    assert open_repository(uri).names() == []


def test_folder_that_cannot_be_written_is_published_on_request(
    uri, make_version, tmp_path, monkeypatch
):
    make_version(1)
    # Root may write everywhere, except on a file system that is read-only.
    monkeypatch.setattr(os, "access", lambda *_args: False)
    with pytest.raises(ModelError, match=r"ctr cannot be written, .*--no-mapped"):
        publish(uri, version(tmp_path))
    publish(uri, version(tmp_path), mapped=False)


def test_one_of_two_publishers_wins_at_most(uri, make_version, tmp_path):
    make_version(1, n=ROWS)
    start, results = threading.Barrier(4), []

    def run():
        opened = version(tmp_path)
        start.wait()
        try:
            results.append(publish(uri, opened))
        except ModelError as error:
            results.append(str(error))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert sum(result == f"{uri}/ctr/1" for result in results) <= 1
    for result in results:
        assert result == f"{uri}/ctr/1" or "by another process" in result or "already" in result
    if f"{uri}/ctr/1" not in results:
        publish(uri, version(tmp_path))
    assert open_repository(uri).versions("ctr") == [1]


def test_claim_of_a_killed_publisher_expires(uri, s3, make_version, tmp_path, monkeypatch):
    make_version(1)
    s3.write(f"{tmp_path.name}-published/ctr/.publish-1/dead", b"")
    with pytest.raises(ModelError, match=r"is being published to s3://.*by another process"):
        publish(uri, version(tmp_path))
    modified = ArrowStore.modified

    def two_minutes_later(self, folder):
        times = modified(self, folder)
        return times | {"dead": times["dead"] - module.CLAIM_S} if "dead" in times else times

    monkeypatch.setattr(ArrowStore, "modified", two_minutes_later)
    publish(uri, version(tmp_path))


def test_store_of_another_kind(make_version, tmp_path):
    """fsspec's stores, such as its memory: publish, list, open."""
    make_version(1, n=ROWS)
    uri = RepositoryUri.parse(f"memory://{tmp_path.name}/models")
    publish(uri, version(tmp_path))
    from hps.config.download_settings import DownloadSettings

    repository = open_repository(uri, DownloadSettings(folder=tmp_path / "cache"))
    assert repository.names() == ["ctr"]
    opened = repository.open("ctr")
    assert opened.fingerprint == version(tmp_path).fingerprint


def test_store_whose_package_is_missing():
    with pytest.raises(ConfigError, match=r"fsspec cannot open a store 'oss': .*ossfs"):
        open_repository(RepositoryUri.parse("oss://bucket/models"))


def test_web_server_is_read_only():
    with pytest.raises(ConfigError, match="repositories on web servers are read-only"):
        open_writable_store(RepositoryUri.parse("https://host/models"))


def test_shared_files_are_uploaded_and_downloaded_once(uri, make_version, tmp_path, monkeypatch):
    """A version with another network: files are copied in the store, and linked in the cache."""
    write_mapped_users(make_version(1, n=ROWS))
    users = Repository(tmp_path / "models").open("ctr", 1).tables["users"]
    items = Repository(tmp_path / "models").open("ctr", 1).tables["items"]
    tables = {
        "users": (users.keys(), users.vectors()),
        "items": (items.keys(), items.vectors() + 1),
    }
    make_version(2, tables=tables)
    uploads, downloads = [], []
    create, run = ArrowStore.create, VersionDownload.run

    def recorded_create(self, path):
        uploads.append(path)
        return create(self, path)

    def recorded_run(self, files, advance):
        downloads.extend(file.relative for file in files)
        run(self, files, advance)

    monkeypatch.setattr(ArrowStore, "create", recorded_create)
    monkeypatch.setattr(VersionDownload, "run", recorded_run)
    repository = open_repository(uri, DownloadSettings(folder=tmp_path / "cache"))
    publish(uri, version(tmp_path))
    first = repository.open("ctr", 1)
    uploads.clear(), downloads.clear()
    publish(uri, version(tmp_path, 2))
    assert [each for each in uploads if "users" in each] == []
    assert sorted(each for each in uploads if "items" in each) == [
        "ctr/2/tables/items/emb_vector",
        "ctr/2/tables/items/mapped",
    ]
    second = repository.open("ctr", 2)
    assert [each for each in downloads if "users" in each] == []
    for file in ("key", "emb_vector", "mapped"):
        path = f"tables/users/{file}"
        assert (second.folder / path).samefile(first.folder / path)
        assert (second.folder / path).read_bytes() == (
            tmp_path / "models/ctr/1" / path
        ).read_bytes()
    assert {each.level for each in check_version(second, NoProgress())} <= {"OK"}
    assert folder_bytes(tmp_path / "cache") < 1.6 * folder_bytes(first.folder)
