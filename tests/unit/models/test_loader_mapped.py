"""Versions with mapped files: mapped instead of loaded, wherever that keeps every row."""

import shutil

import numpy as np
import pytest

from hps.config.model_schema import ModelSpec
from hps.errors import ModelError, TierError
from hps.models.loader import load_tables, version_of_rows
from hps.models.mapped_file import MAPPED_FILE, MappedOptions, write_mapped
from hps.models.repository import Repository
from hps.row_format import row_format
from hps.tiers.base import FetchContext, Part
from hps.tiers.mapped import MappedTier
from hps.tiers.rocksdb import RocksDbTier
from hps.types import NoProgress, version_now

USERS = ModelSpec.model_validate({"name": "ctr", "tables": [{"name": "users", "dim": 4}]})


@pytest.fixture
def published(tmp_path, make_version):
    """A version whose table has a mapped file; returns its path."""

    def publish(**options):
        folder = make_version(spec=USERS, n=1000, **options)
        version = Repository(tmp_path / "models").open("ctr")
        path = folder / "tables/users" / MAPPED_FILE
        write_mapped(version.tables["users"], path, MappedOptions(threads=1))
        return path

    return publish


@pytest.fixture
def load(tmp_path):
    """Opens the store and loads the newest version; returns the store, the table and the report."""
    stores = []

    def start(kind=MappedTier, *, rebuild=False, **options):
        for store in stores:
            store.close()
        store = kind(tmp_path / "db", **options)
        stores.append(store)
        version = Repository(tmp_path / "models").open("ctr")
        tables = version.embedding_tables()
        (report,) = load_tables(version, tables, store, NoProgress(), rebuild=rebuild)
        files = version.tables["users"]
        return store, tables["users"], report, files

    yield start
    for store in stores:
        store.close()


def assert_rows(store, table, files, *, but=()):
    keys, vectors = files.head(files.rows)
    at = ~np.isin(keys, but)
    part = Part.make(table, keys[at])
    store.fetch([part], FetchContext())
    assert not len(part.missing)
    np.testing.assert_array_equal(part.out, vectors[at])
    return part


def put(store, table, *keys, first=500):
    keys = np.array(keys)
    rows = np.full((len(keys), 4), first, np.float32)
    store.insert(table, keys, rows, np.full(len(keys), version_now(), np.uint64))


def test_mapped_table_is_not_copied(published, load):
    published()
    for _ in range(2):
        store, table, report, files = load()
        assert (report.how, report.rows, report.reused) == ("mapped", 1000, True)
        mapped = assert_rows(store, table, files)
        assert RocksDbTier.entries(store, table) == 0
        assert version_of_rows(store, table, files) == mapped.versions[0]
    put(store, table, 5)
    assert version_of_rows(store, table, files) is None


def test_rows_equal_those_of_a_loaded_table(published, load):
    published()
    store, table, _, files = load()
    mapped = assert_rows(store, table, files)
    store, table, report, files = load(rebuild=True)
    assert report.how == "loaded"
    loaded = assert_rows(store, table, files)
    assert mapped.out.tobytes() == loaded.out.tobytes()
    assert mapped.versions.tolist() == loaded.versions.tolist()
    assert RocksDbTier.entries(store, table) == 1000
    assert load()[2].how == "reused"


def test_a_database_of_an_earlier_release_is_reused(published, load):
    path = published()
    path.rename(path.with_name("later"))
    store, table, report, _ = load(RocksDbTier)
    assert report.how == "loaded"
    put(store, table, 5)
    path.with_name("later").rename(path)
    store, table, report, files = load()
    assert report.how == "reused"
    assert_rows(store, table, files, but=[5])
    assert not store.is_mapped(table)


@pytest.mark.parametrize("how", ["off", "missing", "damaged", "foreign"])
def test_without_the_file_the_other_files_are_loaded_under_the_overlay(published, load, how):
    path = published()
    store, table, _, files = load()
    keys = files.keys(0, 4)
    put(store, table, keys[0], 70_000)
    store.delete(table, keys[1:2], np.array([version_now()], np.uint64))
    store.evict(table, keys[2:3])
    if how == "missing":
        path.unlink()
    elif how == "damaged":
        path.write_bytes(path.read_bytes()[:-5])
    elif how == "foreign":
        other = path.with_name("other")
        write_mapped(files, other, MappedOptions(row_format("float16"), threads=1))
        other.rename(path)
    store, table, report, files = load(maps=how != "off")
    assert report.how == "merged"
    part = Part.make(table, np.array([*keys[:3], 70_000]))
    store.fetch([part], FetchContext())
    assert (part.source != 0).tolist() == [True, False, False, True]
    assert_rows(store, table, files, but=keys[:3])
    assert not store.is_mapped(table)
    assert load()[2].how == "reused"


def test_replaced_files_are_refused_once_rows_were_streamed(published, load, make_rows):
    path = published()
    store, table, _, _ = load()
    put(store, table, 5)
    shutil.rmtree(path.parents[2])
    published(tables={"users": make_rows(1000, 4, seed=9)})
    with pytest.raises(ModelError, match="would be lost"):
        load()


def test_readers_use_the_file_once_the_primary_has_mapped_it(published, load):
    published()
    with pytest.raises(TierError):
        load(access="read_only")
    load()
    for access in ("read_only", "secondary"):
        store, table, report, files = load(access=access)
        assert report.how == "mapped"
        assert_rows(store, table, files)
