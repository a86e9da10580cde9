"""Versions of a remote repository: listed, downloaded, cached, refused."""

import gc
import json
import os
import resource
import shutil
import time
from contextlib import contextmanager

import pytest

from hps.config.download_settings import DownloadSettings
from hps.config.repository_uri import RepositoryUri
from hps.errors import ModelError, NotFound, Unavailable
from hps.models.mapped_file import MappedOptions, write_mapped
from hps.models.remote import open_repository
from hps.models.remote.store import StoreUnavailable
from hps.models.repository import Repository
from hps.types import NoProgress
from tests.support.object_store import DENIED, EXPIRED
from tests.unit.models.remote.conftest import ROWS


def same(tmp_path, opened, version=1):
    local = Repository(tmp_path / "models").open("ctr", version)
    for name, files in local.tables.items():
        assert (opened.tables[name].keys() == files.keys()).all()
        assert (opened.tables[name].vectors() == files.vectors()).all()
    assert opened.fingerprint == local.fingerprint
    return True


def parts(tmp_path):
    return sorted(p.name for p in (tmp_path / "cache").rglob("*.part"))


def test_opened_version_equals_the_local_one(opened, tmp_path):
    repository = opened()
    assert repository.names() == ["ctr"]
    assert repository.versions("ctr") == [1]
    version = repository.open("ctr")
    assert same(tmp_path, version)
    assert version.folder.is_relative_to(tmp_path / "cache")
    assert version.warnings == ()
    assert not parts(tmp_path)
    assert sorted(p.name for p in version.folder.parent.iterdir()) == ["1", "model.yaml"]


def test_cached_version_is_not_downloaded_again(opened, s3):
    first = opened().open("ctr")
    before = s3.relay.passed
    assert opened().open("ctr").folder == first.folder
    assert s3.relay.passed - before < 10_000


def test_version_without_manifest_is_not_listed(opened, published, s3, make_version, tmp_path):
    folder = make_version(2)
    prefix = f"{tmp_path.name}/ctr/2"
    s3.write(f"{prefix}/tables/users/key", (folder / "tables/users/key").read_bytes())
    repository = opened()
    assert repository.versions("ctr") == [1]
    with pytest.raises(NotFound, match="has no version 2 in s3://bucket/"):
        repository.open("ctr", 2)
    s3.upload(tmp_path / "models", tmp_path.name)
    assert repository.versions("ctr") == [1, 2]
    assert same(tmp_path, repository.open("ctr"), 2)


def test_unknown_model_names_those_there_are(opened):
    with pytest.raises(NotFound, match=r"no model 'other' in s3://.*\(models: ctr\)"):
        opened().open("other")
    with pytest.raises(NotFound):
        opened().open("../ctr")


def test_cut_connections_are_repeated(opened, s3, tmp_path):
    s3.relay.cut_after, s3.relay.cuts = 30_000, 12
    assert same(tmp_path, opened(attempts=20).open("ctr"))
    assert s3.relay.cuts == 0


def test_failed_download_resumes(opened, s3, tmp_path):
    s3.relay.budget = 600_000
    with pytest.raises(StoreUnavailable, match="ctr/1/tables/"):
        opened(attempts=2, parallel=1).open("ctr")
    assert parts(tmp_path), "partial files remain"
    assert not [*(tmp_path / "cache").glob("*/ctr/1")]
    s3.relay.budget, before = None, s3.relay.passed
    assert same(tmp_path, opened(parallel=1).open("ctr"))
    total = sum(
        e.bytes for e in Repository(tmp_path / "models").open("ctr").manifest.files().values()
    )
    assert s3.relay.passed - before < total - 400_000, (
        "what was downloaded before is not downloaded again"
    )
    assert not parts(tmp_path)


def test_wrong_checksum_is_refused(opened, s3, tmp_path):
    path = f"{tmp_path.name}/ctr/1/tables/items/emb_vector"
    right = s3.read(path)
    s3.write(path, right[:-1] + bytes([right[-1] ^ 1]))
    with pytest.raises(
        ModelError, match=r"items/emb_vector: the contents do not match the manifest"
    ):
        opened().open("ctr")
    s3.write(path, right)
    assert same(tmp_path, opened().open("ctr"))


def test_wrong_size_is_refused(opened, s3, tmp_path):
    path = f"{tmp_path.name}/ctr/1/tables/users/key"
    s3.write(path, s3.read(path)[:-8])
    with pytest.raises(
        ModelError, match=r"users/key: the manifest says 160000 bytes, but the file ends at"
    ):
        opened().open("ctr")


def test_damaged_progress_costs_one_more_download(opened, s3, tmp_path):
    """As after a power failure: the log names chunks whose contents were lost."""
    s3.relay.budget = 600_000
    with pytest.raises(StoreUnavailable):
        opened(attempts=1, parallel=1).open("ctr")
    s3.relay.budget = None
    damaged = [p for p in (tmp_path / "cache").rglob("*.part") if p.parent.parent.name == "tables"]
    for path in damaged:
        path.write_bytes(bytes(path.stat().st_size))
    assert damaged
    assert same(tmp_path, opened().open("ctr"))


def test_replaced_version_is_downloaded_anew(opened, s3, make_version, tmp_path):
    version = opened().open("ctr")
    shutil.rmtree(tmp_path / "models")
    make_version(1, n=50)
    s3.upload(tmp_path / "models", tmp_path.name)
    with pytest.raises(ModelError, match="was replaced while this version is served"):
        opened().open("ctr")
    del version
    gc.collect()
    assert same(tmp_path, opened().open("ctr"))


def test_least_recently_served_version_is_evicted(opened, s3, make_version, tmp_path):
    for version in (2, 3):
        make_version(version, n=20_000)
    s3.upload(tmp_path / "models", tmp_path.name)
    size = sum(
        e.bytes for e in Repository(tmp_path / "models").open("ctr").manifest.files().values()
    )
    repository = opened(capacity_bytes=size * 2 + 20_000)
    first = repository.open("ctr", 1)
    second = repository.open("ctr", 2)
    with pytest.raises(ModelError, match=r"version ctr/3 needs .* raise models.download.capacity"):
        repository.open("ctr", 3)
    assert same(tmp_path, first)
    os.utime(first.folder)
    gone = second.folder
    del second
    gc.collect()
    assert same(tmp_path, repository.open("ctr", 3), 3)
    assert first.folder.is_dir()
    assert not gone.exists()


def test_full_disk_is_a_clear_error(opened, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(ModelError, match=r"downloading to .* failed: File too large; free"):
            opened().open("ctr")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not parts(tmp_path), "a full disk is not kept full"
    assert same(tmp_path, opened().open("ctr"))


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        (EXPIRED, "the credentials have expired; renew them (set AWS_ACCESS_KEY_ID"),
        (DENIED, "access denied; allow listing and reading"),
        (("InvalidAccessKeyId", "unknown"), "the credentials are missing or wrong; set AWS_ACCESS"),
    ],
)
def test_refused_credentials(opened, s3, refusal, said):
    s3.relay.refusal = refusal
    for act in (lambda r: r.names(), lambda r: r.open("ctr")):
        with pytest.raises(ModelError) as error:
            act(opened())
        assert said in str(error.value)
        assert "test-secret-key" not in str(error.value)


def test_credentials_that_expire_during_a_download(opened, s3, tmp_path):
    class Expires(NoProgress):
        def task(self, title, total, unit="rows"):
            if unit == "bytes":
                s3.relay.refusal = EXPIRED
            return super().task(title, total, unit)

    repository = opened()
    repository._fetcher.progress = Expires()
    with pytest.raises((ModelError, StoreUnavailable)):
        repository.open("ctr")
    s3.relay.refusal = None
    assert same(tmp_path, opened().open("ctr"))


def test_missing_bucket(s3, tmp_path):
    repository = open_repository(
        RepositoryUri.parse("s3://none/models"), DownloadSettings(folder=tmp_path)
    )
    with pytest.raises(ModelError, match=r"s3://none/models: 'none' does not exist; create it"):
        repository.names()


def test_cached_version_opens_without_the_store(opened, s3, tmp_path, monkeypatch):
    opened().open("ctr")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    repository = opened()
    assert repository.names() == ["ctr"]
    version = repository.open("ctr")
    assert same(tmp_path, version)
    assert "opened version 1 from the cache" in version.warnings[0]
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(StoreUnavailable, match="s3://bucket/"):
        opened().open("ctr")


def test_cancelled_download_ends_at_once(opened, s3):
    s3.relay.bytes_per_s = 50_000

    steps = []

    class Cancels:
        @contextmanager
        def task(self, title, total, unit="rows"):
            def step(size):
                steps.append(size)
                if len(steps) > 3:
                    raise Unavailable("cancelled")

            yield step

    repository = opened()
    repository._fetcher.progress = Cancels()
    started = time.monotonic()
    with pytest.raises(Unavailable, match="cancelled"):
        repository.open("ctr")
    assert time.monotonic() - started < 15, "the whole takes over 20 s at this rate"


def test_manifest_of_another_model_is_refused(opened, s3, tmp_path):
    path = f"{tmp_path.name}/ctr/1/manifest.json"
    manifest = json.loads(s3.read(path))
    s3.write(path, json.dumps(manifest | {"model": "other"}).encode())
    with pytest.raises(ModelError, match="describes model 'other' version 1, but lies in 'ctr'"):
        opened().open("ctr")


def test_network_alone_is_downloaded_for_a_front_end(s3, tmp_path):
    from tests.support.small_models import write_models

    write_models(tmp_path / "models")
    uri = RepositoryUri.parse(s3.upload(tmp_path / "models", tmp_path.name))
    repository = open_repository(uri, DownloadSettings(folder=tmp_path / "cache"))
    version = repository.without_rows("clicks", 1)
    assert version.dense is not None
    assert version.dense.read_bytes() == (tmp_path / "models/clicks/1/dense.onnx").read_bytes()
    assert not [*(tmp_path / "cache").rglob("emb_vector")]
    assert repository.open("clicks").tables["users"].rows == 100
    assert repository.without_rows("words", 7).dense is None


def test_folder_that_cannot_be_written(opened, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ModelError, match=r"models.download.folder: cannot (make|write)"):
        opened().open("ctr")


def write_mapped_users(folder, seed=None):
    """The served form of table ``users``, which the manifest does not have."""
    files = Repository(folder.parent.parent).open("ctr", int(folder.name)).tables["users"]
    write_mapped(files, folder / "tables/users/mapped", MappedOptions(threads=1))
    return folder / "tables/users/mapped"


def test_mapped_file_is_downloaded_with_its_table(s3, published, opened, tmp_path):
    written = write_mapped_users(tmp_path / "models/ctr/1")
    s3.upload(tmp_path / "models", tmp_path.name)
    version = opened().open("ctr")
    assert (version.folder / "tables/users/mapped").read_bytes() == written.read_bytes()
    assert not (version.folder / "tables/items/mapped").exists()


def test_mapped_files_are_not_downloaded_where_they_are_not_served(s3, published, opened, tmp_path):
    write_mapped_users(tmp_path / "models/ctr/1")
    s3.upload(tmp_path / "models", tmp_path.name)
    version = opened(mapped=False).open("ctr")
    assert (version.folder / "tables/users/key").exists()
    assert not (version.folder / "tables/users/mapped").exists()


@pytest.mark.parametrize("damage", ["header", "block", "other"])
def test_mapped_file_that_does_not_fit_is_left_out(
    s3, published, opened, make_version, tmp_path, damage, caplog
):
    written = write_mapped_users(tmp_path / "models/ctr/1")
    if damage == "other":
        shutil.copyfile(write_mapped_users(make_version(2, n=ROWS)), written)
    else:
        data = bytearray(written.read_bytes())
        data[20 if damage == "header" else len(data) // 2] ^= 1
        written.write_bytes(data)
    s3.upload(tmp_path / "models", tmp_path.name)
    version = opened().open("ctr", 1)
    assert not (version.folder / "tables/users/mapped").exists()
    assert same(tmp_path, version)
    assert "is not used: " in caplog.text


def test_store_that_stalls_is_asked_again(s3, opened, tmp_path):
    """A connection on which nothing arrives ends after `timeout_s`, and the range is asked for again."""
    s3.relay.stall_after, s3.relay.cuts = 30_000, 3
    started = time.monotonic()
    assert same(tmp_path, opened(timeout_s=1.0, attempts=10).open("ctr"))
    assert s3.relay.cuts == 0
    assert time.monotonic() - started < 30
