"""Compaction: a version has the rows of its base and all that was written over it, and stream positions."""

import json
import shutil

import numpy as np
import pytest
from typer.testing import CliRunner

from hps.cli.main import app
from hps.config import load_config
from hps.config.model_schema import ModelSpec
from hps.errors import ModelError
from hps.models import compaction
from hps.models.check import check_version
from hps.models.compaction import compact_version
from hps.models.delta_files import DeltaFiles
from hps.models.loader import load_tables
from hps.models.manifest import read_manifest
from hps.models.repository import Repository
from hps.models.version_writer import write_version
from hps.node.version_choice import ChoiceFile, VersionChoice
from hps.tiers.mapped import MappedTier
from hps.tiers.positions import StreamPosition, TableChanges
from hps.tiers.stored_rows import to_rows
from hps.types import NoProgress, version_now
from tests.support.waiting import PATIENT_GUARD

ROWS = 2000
KEYS = np.arange(ROWS) * 3


def spec_of(**table):
    tables = [{"name": "users", "dim": 4, **table}, {"name": "items", "dim": 2, **table}]
    dense = {"outputs": [{"name": "y", "shape": [-1]}]}
    return ModelSpec.model_validate({"name": "m", "tables": tables, "dense": dense})


def rows_of(keys, dim, first=0):
    return (np.asarray(keys)[:, None] % 100 + first + np.arange(dim)).astype(np.float32)


class Served:
    """A repository with version 1, and a database that maps or loads it."""

    def __init__(self, folder, *, maps=True, **table):
        self.folder, self.maps = folder, maps
        tables = {"users": (KEYS, rows_of(KEYS, 4)), "items": (KEYS, rows_of(KEYS, 2))}
        mark = {"topic": {"0": 3, "1": 4}}
        write_version(
            folder / "models",
            spec_of(**table),
            1,
            tables,
            dense=b"net",
            mapped=True,
            watermark=mark,
        )
        self.repository = Repository(folder / "models")

    def store(self, name="db", access="primary"):
        return MappedTier(self.folder / name, maps=self.maps, access=access)

    def load(self, store, version):
        opened = self.repository.open("m", version)
        tables = opened.embedding_tables()
        load_tables(opened, tables, store, NoProgress())
        return tables

    def update(self, version, changes, offset=9):
        """Stream ``changes`` (key: first value, None: deleted) into ``users`` of a version."""
        store = self.store()
        table = self.load(store, version)["users"]
        keys = np.array([k for k, v in changes.items() if v is not None], np.int64)
        values = np.array([v for v in changes.values() if v is not None], np.float32)
        vectors = to_rows(table, (values[:, None] + np.arange(4)).astype(table.dtype))
        deleted = np.array([k for k, v in changes.items() if v is None], np.int64)
        now = np.uint64(version_now())
        rows = TableChanges(
            keys, vectors, np.full(len(keys), now), deleted, np.full(len(deleted), now)
        )
        store.apply(table, rows, [StreamPosition("topic", 0, offset)])
        store.close()

    def compact(self, base, **options):
        store = self.store(access="read_only")
        try:
            opened = self.repository.open("m", base)
            return compact_version(opened, store, NoProgress(), **options)
        finally:
            store.close()

    def rows(self, version, db, table="users"):
        """The rows that a store without another version serves: first values by key."""
        store = self.store(db)
        found = {}
        for rows in store.scan(self.load(store, version)[table]):
            found |= dict(zip(rows.keys.tolist(), rows.vectors[:, 0].tolist(), strict=True))
        store.close()
        return found


def expected(*changes):
    rows = dict(zip(KEYS.tolist(), rows_of(KEYS, 4)[:, 0].tolist(), strict=True))
    for each in changes:
        rows |= each
    return {key: value for key, value in rows.items() if value is not None}


FIRST = {0: 1000.0, 3: None, 7: 2000.0, 6: 3000.0}
SECOND = {0: None, 3: 4000.0, 6: 5000.0, 8: 6000.0, 9: None}


@pytest.mark.parametrize("table", [{}, {"dtype": "float16"}, {"key_dtype": "uint32"}])
def test_updates_become_a_delta(tmp_path, table):
    served = Served(tmp_path, **table)
    served.update(1, FIRST)
    folder, tables = served.compact(1)
    assert folder == tmp_path / "models/m/2"
    assert [(t.name, t.how, t.rows) for t in tables] == [
        ("users", "delta", 4),
        ("items", "shared", 0),
    ]
    opened = served.repository.open("m", 2)
    manifest = opened.manifest
    assert manifest.origin("users").version == 2
    assert manifest.origin("users").watermark == {"topic": {"0": 9, "1": 4}}
    assert manifest.origin("users").created == served.repository.open("m", 1).manifest.created
    assert manifest.origin("items").version == 1
    assert manifest.metadata["compacted"] == 1
    assert opened.dense.read_bytes() == b"net"
    assert {each.level for each in check_version(opened, NoProgress())} == {"OK"}
    shutil.rmtree(tmp_path / "models/m/1")
    assert served.rows(2, "other") == expected(FIRST)
    assert served.rows(2, "other", "items") == dict(
        zip(KEYS.tolist(), rows_of(KEYS, 2)[:, 0].tolist(), strict=True)
    )


@pytest.mark.parametrize("table", [{}, {"dtype": "float16"}, {"key_dtype": "uint32"}])
def test_versions_are_compacted_again(tmp_path, table):
    served = Served(tmp_path, **table)
    served.update(1, FIRST)
    served.compact(1)
    served.update(2, SECOND, offset=12)
    folder, tables = served.compact(2)
    assert folder.name == "3"
    assert [t.how for t in tables] == ["delta", "shared"]
    opened = served.repository.open("m", 3)
    assert isinstance(opened.tables["users"], DeltaFiles)
    assert opened.manifest.origin("users").watermark["topic"]["0"] == 12
    assert opened.manifest.origin("items").version == 1
    assert {each.level for each in check_version(opened, NoProgress())} == {"OK"}
    assert served.rows(3, "other") == expected(FIRST, SECOND)
    assert served.rows(2, "third") == expected(FIRST)


@pytest.mark.parametrize("how", ["loaded", "many"])
def test_other_tables_are_written_whole(tmp_path, how):
    served = Served(tmp_path, maps=how != "loaded")
    changes = dict.fromkeys(range(0, 1500, 3), 7.0) if how == "many" else FIRST
    served.update(1, changes)
    _, tables = served.compact(1, version=5)
    assert [t.how for t in tables] == ["whole", "shared"]
    opened = served.repository.open("m", 5)
    assert {each.level for each in check_version(opened, NoProgress())} == {"OK"}
    assert served.rows(5, "other") == expected(changes)
    assert opened.manifest.origin("users").watermark["topic"]["0"] == 9


def test_nothing_to_fold_is_an_error(tmp_path):
    served = Served(tmp_path)
    store = served.store()
    served.load(store, 1)
    store.close()
    with pytest.raises(ModelError, match="has no updates of model 'm' version 1"):
        served.compact(1)
    served.update(1, FIRST)
    with pytest.raises(ModelError, match=r"m/1 exists"):
        served.compact(1, version=1)
    assert sorted(each.name for each in (tmp_path / "models/m").iterdir()) == ["1", "model.yaml"]


def test_failed_compaction_leaves_nothing(tmp_path, monkeypatch):
    served = Served(tmp_path)
    served.update(1, FIRST)

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compaction, "link_file", fail)
    with pytest.raises(ModelError, match="models/m failed: No space"):
        served.compact(1)
    assert sorted(each.name for each in (tmp_path / "models/m").iterdir()) == ["1", "model.yaml"]
    assert served.rows(1, "db") == expected(FIRST)


def invoke(*words):
    result = CliRunner().invoke(app, list(map(str, words)))
    assert result.exit_code == 0, result.output
    return result


def test_command(tmp_path):
    served = Served(tmp_path)
    served.update(1, FIRST)
    config = tmp_path / "hps.yaml"
    config.write_text(
        json.dumps(
            {
                "models": {"repository": str(tmp_path / "models")},
                "tiers": {"rocksdb": {"path": str(tmp_path / "db"), "guard": PATIENT_GUARD}},
            }
        )
    )
    result = invoke("store", "compact", "m", "--config", config, "--output", "json")
    report = json.loads(result.stdout)
    assert (report["version"], report["base"]) == (2, 1)
    assert report["tables"][0] == {
        "name": "users",
        "how": "delta",
        "updates": 4,
        "watermark": {"topic": {"0": 9, "1": 4}},
    }
    served.update(2, SECOND)
    result = invoke("model", "publish", "m", "--with-updates", config)
    assert "Published m/3" in result.stdout
    assert served.rows(3, "other") == expected(FIRST, SECOND)
    # The node was switched back, so that is the version with updates worth keeping.
    ChoiceFile(load_config(config).settings).write("m", VersionChoice(1))
    report = json.loads(invoke("store", "compact", "m", "-c", config, "-o", "json").stdout)
    assert (report["version"], report["base"]) == (4, 1)


@pytest.mark.parametrize("rows", ["bfloat16", "int8"])
def test_narrow_rows_are_folded_as_vectors(tmp_path, rows):
    served = Served(tmp_path, rows=rows)
    served.update(1, {int(key): 7.0 for key in KEYS})
    folder, done = served.compact(1)
    assert done[0].how == "whole"
    vectors = np.fromfile(folder / "tables/users/emb_vector", np.float32).reshape(-1, 4)
    assert np.allclose(vectors, [7, 8, 9, 10], atol=0.01)
    assert read_manifest(folder / "manifest.json").tables["users"].conversion.rows == rows


def test_folded_rows_have_the_errors_of_their_second_conversion(tmp_path):
    served = Served(tmp_path, rows="int8")
    served.update(1, FIRST)
    folder, _ = served.compact(1)
    users, items = (read_manifest(folder / "manifest.json").tables[n] for n in ("users", "items"))
    base = read_manifest(tmp_path / "models/m/1/manifest.json").tables
    assert users.conversion == base["users"].conversion is not None
    assert users.delta.conversion.max_error == 0  # they were narrow before
    assert items.conversion == base["items"].conversion is not None


def test_updates_of_rows_that_expire_are_not_folded(tmp_path):
    served = Served(tmp_path, ttl_s=3600)
    served.update(1, FIRST)
    with pytest.raises(ModelError, match=r"table m/1/users has ttl_s: 3600, and folded rows"):
        served.compact(1)
