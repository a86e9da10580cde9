"""Which locations of model repositories are accepted, and what is said of the others."""

from pathlib import Path

import pytest

from hps.config import load_config
from hps.config.effective_settings import effective_settings, json_schema, public_settings
from hps.config.repository_uri import RepositoryUri, parse_location
from hps.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "uri"),
    [
        ("s3://bucket/models/", "s3://bucket/models"),
        ("S3://bucket", "s3://bucket"),
        ("gs://anonymous@bucket/a/b", "gs://anonymous@bucket/a/b"),
        ("abfs://box@account.dfs.core.windows.net/m", "abfs://box@account.dfs.core.windows.net/m"),
        ("hdfs://name-node:8020/models", "hdfs://name-node:8020/models"),
        ("https://host:8443/models", "https://host:8443/models"),
    ],
)
def test_accepted_uris(text, uri):
    found = load_config(None, [f"models.repository={text}"]).settings.models.repository
    assert isinstance(found, RepositoryUri)
    assert found == uri


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("s4://bucket", "unknown scheme 's4'; use one of s3, gs, abfs, abfss, hdfs, https, http"),
        ("s3:///models", "the bucket is missing; write it as s3://bucket/models"),
        ("https:///models", "the host is missing; write it as https://host/models"),
        ("s3:/bucket/models", "a URI has two slashes after the colon"),
        ("file:///srv/models", "a local repository is a path; write /srv/models"),
        ("s3://user:SECRET@bucket/m", "s3://********@bucket/m: a URI must not contain a password"),
        ("https://SECRET@host/m", "https://********@host/m: a URI must not contain a user"),
        (
            "s3://bucket/m?access_key=SECRET",
            "s3://bucket/m?********: a URI must not contain a query",
        ),
        ("s3://bucket/a/../b", "the path must not contain '.' or '..'"),
    ],
)
def test_refused_uris(text, said):
    for act in (
        lambda: parse_location(text),
        lambda: load_config(None, [f"models.repository={text}"]),
    ):
        with pytest.raises(ConfigError) as error:
            act()
        assert said in str(error.value)
        assert "SECRET" not in str(error.value)


def test_other_settings_take_no_uri(tmp_path):
    file = tmp_path / "hps.yaml"
    file.write_text(
        "models: {repository: 's3://bucket/models'}\ntiers: {rocksdb: {path: 's3://b/x'}}"
    )
    with pytest.raises(
        ConfigError, match=r":2: tiers.rocksdb.path: remote locations are not supported"
    ):
        load_config(file)


def test_uri_is_shown_as_text(tmp_path):
    file = tmp_path / "hps.yaml"
    file.write_text("models: {repository: 's3://bucket/models', download: {folder: cache}}")
    configuration = load_config(file)
    shown = effective_settings(configuration)
    assert shown["models.repository"] == ("s3://bucket/models", f"{file}:1")
    assert configuration.settings.models.download.folder == tmp_path / "cache"
    assert public_settings(configuration.settings)["models"]["repository"] == "s3://bucket/models"
    assert json_schema()


def test_folder_stays_a_path():
    assert parse_location("models") == Path("models")
    assert isinstance(parse_location("/srv/models"), Path)
