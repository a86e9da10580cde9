"""`hps model publish`, `import --to` and `inspect` on a remote repository."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from hps.cli.model import app
from hps.config.repository_uri import RepositoryUri
from hps.errors import ConfigError, HpsError
from hps.models.remote import open_repository


@pytest.fixture
def run(s3, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def invoke(*words):
        done = CliRunner().invoke(app, [*map(str, words), "--output", "json"])
        if isinstance(done.exception, HpsError):
            raise done.exception
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    return invoke


def test_publish_and_inspect(run, make_version, tmp_path):
    make_version(1)
    make_version(2)
    uri = f"s3://bucket/{tmp_path.name}-cli"
    command = ["publish", "ctr", "--repository", tmp_path / "models", "--to", uri]
    assert run(*command) == {"model": "ctr", "version": 2, "uri": f"{uri}/ctr/2"}
    run(*command, "--version", 1, "--no-mapped")
    assert run("inspect", "--repository", uri) == [
        {"model": "ctr", "versions": [1, 2], "tables": 2}
    ]
    found = run("verify", "ctr", "--repository", uri)
    assert {each["result"] for each in found} == {"OK"}
    assert [*(tmp_path / "cache/hps/models").glob("s3-*/ctr/2/tables/users/key")]
    assert (tmp_path / "models/ctr/2/tables/users/mapped").is_file()
    assert not (tmp_path / "models/ctr/1/tables/users/mapped").exists()
    with pytest.raises(
        ConfigError, match="is a folder; publish to a URI such as s3://bucket/models"
    ):
        run(*command[:-1], tmp_path / "other")


def test_import_to_a_remote_repository(run, tmp_path):
    uri = f"s3://bucket/{tmp_path.name}-import"
    for first in (0.0, 1.0):
        np.savez(tmp_path / "rows.npz", keys=np.arange(10), vectors=np.full((10, 4), first, "f4"))
        words = ["--table", "items=vectors", "--keys", "items=keys", "--to", uri]
        (imported,) = run("import", tmp_path / "rows.npz", "--name", "words", *words)
        version = int(first) + 1
        assert (imported["version"], imported["folder"]) == (version, f"{uri}/words/{version}")
    repository = open_repository(RepositoryUri.parse(uri))
    assert repository.versions("words") == [1, 2]
    with pytest.raises(ConfigError, match=r"--replace: versions in s3://.* do not change"):
        run("import", tmp_path / "rows.npz", "--name", "words", *words, "--replace")
