"""Versions that share unchanged tables: links, origins, networks alone, concurrent publishers, damage."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest

from hps.config.model_schema import ModelSpec
from hps.errors import ModelError
from hps.models import table_sharing
from hps.models.check import check_version
from hps.models.derived_version import derive_dense_version
from hps.models.loader import row_version
from hps.models.repository import Repository
from hps.models.version_writer import write_version
from hps.types import NoProgress

SPEC = ModelSpec.model_validate(
    {
        "name": "m",
        "tables": [{"name": "users", "dim": 4}, {"name": "items", "dim": 2}],
        "dense": {"outputs": [{"name": "y", "shape": [-1]}]},
    }
)
KEYS = np.arange(100)
FILES = "key", "emb_vector", "mapped"


def rows(dim, value):
    return KEYS, np.full((100, dim), value, np.float32)


def write(root, version, items=1, spec=SPEC, **options):
    """``users`` is the same in every version."""
    tables = {"users": rows(4, 7), "items": rows(2, items)}
    return write_version(root, spec, version, tables, dense=b"net", mapped=True, **options)


def inodes(folder, table):
    return [os.stat(folder / "tables" / table / file).st_ino for file in FILES]


def test_unchanged_tables_are_the_same_files(tmp_path):
    first = write(tmp_path, 1, watermark={"topic": {"0": 5}})
    second = write(tmp_path, 2, items=2, watermark={"topic": {"0": 9}})
    assert inodes(first, "users") == inodes(second, "users")
    assert not set(inodes(first, "items")) & set(inodes(second, "items"))
    old, new = (Repository(tmp_path).open("m", version) for version in (1, 2))
    assert new.manifest.tables["users"].origin.version == 1
    assert new.manifest.origin("users").watermark == {"topic": {"0": 5}}
    assert new.manifest.origin("items").watermark == {"topic": {"0": 9}}
    assert row_version(old, old.tables["users"]) == row_version(new, new.tables["users"])
    assert row_version(old, old.tables["items"]) < row_version(new, new.tables["items"])
    tables = old.embedding_tables()
    shared = new.embedding_tables(tables.values())
    assert shared["users"] is tables["users"]
    assert shared["items"].id == "m/2/items"
    # The origin is that of the version which introduced the table, however many share it.
    write(tmp_path, 3, items=2)
    origins = json.loads((tmp_path / "m/3/manifest.json").read_text())["tables"]
    assert [origins[name]["origin"]["version"] for name in ("users", "items")] == [1, 2]


def test_versions_without_shared_tables_have_no_new_field(tmp_path):
    write(tmp_path, 1)
    write(tmp_path, 2, items=1, base="none")
    for version in (1, 2):
        assert "origin" not in (tmp_path / f"m/{version}/manifest.json").read_text()
    assert not set(inodes(tmp_path / "m/1", "users")) & set(inodes(tmp_path / "m/2", "users"))


def test_folder_survives_the_deletion_of_the_other_one(tmp_path):
    first = write(tmp_path, 1)
    write(tmp_path, 2, items=2)
    shutil.rmtree(first)
    opened = Repository(tmp_path).open("m")
    assert {each.level for each in check_version(opened, NoProgress())} == {"OK"}
    assert (opened.tables["users"].vectors() == 7).all()


def test_base_is_named_or_the_highest_lower_version(tmp_path):
    write(tmp_path, 1, items=1)
    write(tmp_path, 2, items=2)
    write(tmp_path, 3, items=1, base=1)
    write(tmp_path, 4, items=2)
    opened = {v: Repository(tmp_path).open("m", v).manifest for v in (3, 4)}
    assert [opened[3].origin(t).version for t in ("users", "items")] == [1, 1]
    assert [opened[4].origin(t).version for t in ("users", "items")] == [1, 4]
    with pytest.raises(ModelError, match=r"m/9 cannot be the base of version 5"):
        write(tmp_path, 5, base=9)


def test_damaged_base_is_not_linked(tmp_path):
    first = write(tmp_path, 1)
    with (first / "tables/users/emb_vector").open("r+b") as file:
        file.write(b"\1\2\3\4")
    second = write(tmp_path, 2, items=2)
    opened = Repository(tmp_path).open("m")
    assert opened.manifest.tables["users"].origin is None
    assert {each.level for each in check_version(opened, NoProgress())} == {"OK"}
    assert not set(inodes(first, "users")) & set(inodes(second, "users"))


def test_table_with_another_description_is_not_shared(tmp_path):
    write(tmp_path, 1)
    changed = SPEC.model_dump()
    changed["tables"][0]["default"] = 3.0
    write(tmp_path, 2, spec=ModelSpec.model_validate(changed), replace_spec=True)
    manifest = Repository(tmp_path).open("m").manifest
    assert [manifest.origin(name).version for name in ("users", "items")] == [2, 1]


def test_changed_description_of_a_shared_table_is_an_error(tmp_path):
    write(tmp_path, 1)
    tables = Repository(tmp_path).open("m", 1).embedding_tables()
    write(tmp_path, 2, items=2)
    text = (tmp_path / "m/model.yaml").read_text()
    (tmp_path / "m/model.yaml").write_text(text.replace("dim: 4", "dim: 4, default: 2.0", 1))
    opened = Repository(tmp_path).open("m", 2)
    with pytest.raises(ModelError, match="has changed table 'users', which version 2 shares"):
        opened.embedding_tables(tables.values())


def test_without_links_files_are_copied(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(18, "Invalid cross-device link")

    write(tmp_path, 1)
    monkeypatch.setattr(table_sharing.os, "link", fail)
    folder = derive_dense_version(tmp_path, "m", b"other")
    assert not set(inodes(tmp_path / "m/1", "users")) & set(inodes(folder, "users"))
    opened = Repository(tmp_path).open("m")
    assert opened.manifest.origin("users").version == 1
    assert {each.level for each in check_version(opened, NoProgress())} == {"OK"}


def test_network_alone_is_a_version(tmp_path):
    write(tmp_path, 1, watermark={"topic": {"0": 5}})
    first = Repository(tmp_path).open("m").manifest
    folder = derive_dense_version(tmp_path, "m", b"newer", metadata={"step": 9})
    assert folder == tmp_path / "m/2"
    opened = Repository(tmp_path).open("m")
    assert opened.dense.read_bytes() == b"newer"
    assert opened.manifest.metadata == {"step": 9}
    assert opened.manifest.created - first.created < timedelta(minutes=1)
    assert {table: opened.manifest.origin(table).version for table in opened.tables} == {
        "users": 1,
        "items": 1,
    }
    assert [inodes(folder, t) for t in opened.tables] == [
        inodes(tmp_path / "m/1", t) for t in opened.tables
    ]
    with pytest.raises(ModelError, match="m/2 exists"):
        derive_dense_version(tmp_path, "m", b"newer", version=2)
    with pytest.raises(ModelError, match="version must be from 1 to 999,999,999,999,999,999"):
        derive_dense_version(tmp_path, "m", b"newer", version=10**18)
    with pytest.raises(ModelError, match="has no model 'other'"):
        derive_dense_version(tmp_path, "other", b"newer")
    (tmp_path / "m/1/tables/users/key").unlink()
    with pytest.raises(ModelError, match="tables/users/key is missing"):
        derive_dense_version(tmp_path, "m", b"newer", base=1)


def test_concurrent_publishers_get_numbers_of_their_own(tmp_path):
    write(tmp_path, 1)
    with ThreadPoolExecutor(8) as pool:
        networks = [f"net {i}".encode() for i in range(8)]
        folders = list(pool.map(lambda net: derive_dense_version(tmp_path, "m", net), networks))
    assert sorted(int(each.name) for each in folders) == list(range(2, 10))
    for folder, net in zip(folders, networks, strict=True):
        opened = Repository(tmp_path).open("m", int(folder.name))
        assert opened.dense.read_bytes() == net
        assert {each.level for each in check_version(opened, NoProgress())} == {"OK"}
    assert not list((tmp_path / "m").glob(".import-*"))
