"""Other versions of a ps.json's model while a node serves: from the changed file, or a model repository."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hps
from hps.config import load_config
from hps.config.model_schema import ModelSpec
from hps.errors import ConfigError, ModelError, NotFound
from hps.models.version_writer import write_version
from hps.node.node import Node
from tests.support.waiting import until

ROWS = 50


class PsJson:
    """A ps.json whose model's rows begin with 1000 × their version."""

    def __init__(self, folder: Path, **persistent: Any) -> None:
        self.path = folder / "ps.json"
        self.document: dict[str, Any] = {
            "supportlonglong": True,
            "volatile_db": {"type": "multi_process_hash_map", "shared_memory_name": "hps_versions"},
            "models": [
                {
                    "model": "wdl",
                    "sparse_files": ["one/sparse.model"],
                    "embedding_vecsize_per_table": [4],
                    "embedding_table_names": ["user"],
                    "maxnum_catfeature_query_per_table_per_sample": [ROWS],
                    "default_value_for_each_table": [0.0],
                    "deployed_device_list": [0],
                    "hit_rate_threshold": 1.1,
                }
            ],
        }
        if persistent:
            self.document["persistent_db"] = persistent
        self.folder = folder
        self.rows("one", 1)
        self.write()

    @property
    def model(self) -> dict[str, Any]:
        found: dict[str, Any] = self.document["models"][0]
        return found

    def rows(self, folder: str, version: int) -> str:
        target = self.folder / folder / "sparse.model"
        target.mkdir(parents=True)
        np.arange(ROWS).tofile(target / "key")
        np.full((ROWS, 4), 1000 * version, np.float32).tofile(target / "emb_vector")
        return f"{folder}/sparse.model"

    def write(self) -> None:
        self.path.write_text(json.dumps(self.document))

    def change(self, folder: str, version: int) -> None:
        """Name other files, as another version of the model."""
        self.model.update(sparse_files=[self.rows(folder, version)], version=version)
        self.write()

    def configuration(self, *overrides: str) -> Any:
        folders = (
            f"tiers.rocksdb.path={self.folder / 'db'}",
            f"models.repository={self.folder / 'models'}",
            f"server.runtime={self.folder / 'run'}",
            f"tiers.cpu_cache.shared.folder={self.folder}",
        )
        return load_config(self.path, [*folders, *overrides], environ={})


@pytest.fixture(params=["native", "rocks_db"])
def ps(tmp_path: Path, request: pytest.FixtureRequest) -> PsJson:
    """Without a database of HPS's, and with one, whose names have no version."""
    if request.param == "native":
        return PsJson(tmp_path)
    return PsJson(tmp_path, type="rocks_db", path=str(tmp_path / "db"))


@pytest.fixture
def node(ps: PsJson) -> Iterator[Node]:
    with hps.open(ps.configuration()) as opened:
        yield opened


def version_in(side: Any, version: int | None = None) -> int:
    found = side.lookup("wdl", {"user": np.arange(ROWS)}, version=version)
    assert not found.defaulted
    (value,) = set(found.vectors["user"][:, 0].tolist())
    return int(value) // 1000


def test_changed_file_is_another_version(ps: PsJson, node: Node) -> None:
    assert version_in(node) == 1
    ps.change("two", 2)
    assert node.load("wdl") == 2
    assert (version_in(node), version_in(node, 1)) == (2, 1)
    assert node.rollback("wdl") == 1
    assert node.load("wdl", 2, switch=False, labels=["next"]) == 2
    assert version_in(node, 1) == 1
    assert node.switch("wdl", "next") == 2
    ps.change("three", 3)
    assert node.load("wdl") == 3
    assert node.load("wdl", 1) == 1  # a version that the file had before
    assert version_in(node) == 1


def test_restart_serves_the_version_of_the_file(ps: PsJson) -> None:
    with hps.open(ps.configuration()) as node:
        ps.change("two", 2)
        node.load("wdl")
    with hps.open(ps.configuration()) as node:
        assert [(m.version, version_in(node)) for m in node.models.values()] == [(2, 2)]
    ps.change("three", 3)
    with hps.open(ps.configuration()) as node:
        assert version_in(node) == 3


def test_versions_of_a_model_repository_are_loaded_too(ps: PsJson, node: Node) -> None:
    spec = ModelSpec.model_validate({"name": "wdl", "tables": [{"name": "user", "dim": 4}]})
    rows = np.arange(ROWS), np.full((ROWS, 4), 5000, np.float32)
    write_version(ps.folder / "models", spec, 5, {"user": rows})
    assert node.load("wdl", 5) == 5
    assert version_in(node) == 5
    assert node.control is not None
    assert node.control.available() == {"wdl": [1, 5]}
    assert node.load("wdl") == 1  # by default, what the ps.json says


def test_half_copied_version_beside_the_file_is_left_out_at_a_start(
    ps: PsJson, caplog: pytest.LogCaptureFixture
) -> None:
    spec = ModelSpec.model_validate({"name": "wdl", "tables": [{"name": "user", "dim": 4}]})
    rows = np.arange(ROWS), np.full((ROWS, 4), 5000, np.float32)
    for version in (5, 6):
        folder = write_version(ps.folder / "models", spec, version, {"user": rows})
    (folder / "manifest.json").unlink()
    with hps.open(ps.configuration("models.versions.all=true")) as node:
        assert sorted(each.version for each in node.models.of("wdl")) == [1, 5]
        assert version_in(node) == 1
        with pytest.raises(ModelError, match=r"version 6 of model 'wdl' has no manifest\.json"):
            node.load("wdl", 6)
        assert (node.load("wdl", 5), version_in(node)) == (5, 5)
        assert (node.load("wdl", 1), version_in(node)) == (1, 1)  # the ps.json's have none
    assert "model wdl: version 6 is not served" in caplog.text


def test_attached_process_follows_the_node(ps: PsJson, node: Node) -> None:
    configuration = ps.configuration()
    with hps.attach(configuration) as process:
        assert version_in(process) == 1
        ps.change("two", 2)
        node.load("wdl", switch=False)
        assert (version_in(process), version_in(process, 2)) == (1, 2)
    with hps.attach(ps.configuration()) as process:  # the file has version 2 alone
        assert (version_in(process), version_in(process, 2)) == (1, 2)
        node.switch("wdl", 2)
        assert version_in(process) == 2


def test_invalid_file_changes_nothing(ps: PsJson, node: Node) -> None:
    ps.model["sparse_files"] = ["none/sparse.model"]
    ps.model["version"] = 2
    ps.write()
    with pytest.raises(ModelError, match=r"none/sparse\.model"):
        node.load("wdl")
    ps.model["version"] = 0
    ps.write()
    with pytest.raises(ConfigError, match="expected a number from 1, found 0"):
        node.load("wdl")
    ps.path.write_text("{")
    with pytest.raises(ConfigError, match=r"ps\.json"):
        node.load("wdl")
    ps.model.update(version=1, sparse_files=[ps.rows("other", 7)])
    ps.write()
    with pytest.raises(ModelError, match=r"in a ps\.json, another `version`"):
        node.load("wdl")
    with pytest.raises(NotFound, match=r"has no version 9: the ps\.json has version 1"):
        node.load("wdl", 9)
    assert version_in(node) == 1


def test_model_that_was_added_to_the_file_is_served(ps: PsJson, node: Node) -> None:
    ps.document["models"].append({**ps.model, "model": "more"})
    ps.write()
    assert node.load("more") == 1
    found = node.lookup("more", {"user": np.arange(2)}).vectors["user"]
    assert found[:, 0].tolist() == [1000, 1000]
    node.unload("wdl")
    assert list(node.models) == ["more"]


def test_watched_file_is_followed(ps: PsJson) -> None:
    with hps.open(ps.configuration("models.watch_s=0.1")) as node:
        ps.change("two", 2)
        until(lambda: version_in(node) == 2)


def test_config_check_accepts_the_version(ps: PsJson) -> None:
    ps.change("two", 2)
    command = [sys.executable, "-m", "hps.cli.main", "config", "validate", str(ps.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
