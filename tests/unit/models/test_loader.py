"""Load into RocksDB: loaded, reused, rebuilt, merged or rejected."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from hps.config.model_schema import ModelSpec
from hps.errors import ModelError, TierError
from hps.models import loader
from hps.models.loader import load_tables
from hps.models.repository import Repository, open_legacy
from hps.tiers.base import FetchContext, Part
from hps.tiers.rocksdb import RocksDbTier
from hps.types import NoProgress, make_version, version_now

USERS = ModelSpec.model_validate({"name": "ctr", "tables": [{"name": "users", "dim": 4}]})


def fetch(store, table, keys):
    keys = np.asarray(keys, np.int64)
    part = Part.make(table, keys, np.full((len(keys), table.dim), -1, table.dtype))
    store.fetch([part], FetchContext())
    return part


@pytest.fixture
def load(tmp_path):
    """Opens the store and loads the newest version, as a start does."""
    stores = []

    def start(opened=None, *, layout="native", access="primary", **settings):
        for store in stores:
            store.close()
        store = RocksDbTier(tmp_path / "db", layout=layout, access=access)
        stores.append(store)
        version = opened or Repository(tmp_path / "models").open("ctr")
        tables = version.embedding_tables()
        return store, tables, load_tables(version, tables, store, NoProgress(), **settings)

    yield start
    for store in stores:
        store.close()


@pytest.mark.parametrize("layout", ["native", "hps"])
def test_every_row_is_served(make_version, load, layout):
    folder = make_version(n=3000)
    store, tables, reports = load(layout=layout)
    assert [(r.table, r.how, r.rows, r.duplicates) for r in reports] == [
        ("users", "loaded", 3000, 0),
        ("items", "loaded", 3000, 0),
    ]
    for name, table in tables.items():
        keys = np.fromfile(folder / f"tables/{name}/key", "<i8")
        vectors = np.fromfile(folder / f"tables/{name}/emb_vector", "<f4").reshape(-1, table.dim)
        part = fetch(store, table, keys)
        assert (part.out == vectors).all()
        assert len(fetch(store, table, [10**6]).missing) == 1


def test_rows_carry_the_time_of_the_manifest(tmp_path, make_version, load):
    make_version(spec=USERS)
    store, tables, _ = load()
    created = Repository(tmp_path / "models").open("ctr").manifest.created
    assert set(fetch(store, tables["users"], range(10)).versions.tolist()) == {
        make_version_(created)
    }


def make_version_(created):
    return make_version(int(created.timestamp() * 1000))


def test_half_precision_and_32_bit_keys_are_loaded(tmp_path, make_version, load):
    spec = ModelSpec.model_validate(
        {
            "name": "ctr",
            "tables": [{"name": "t", "dim": 2, "dtype": "float16", "key_dtype": "uint32"}],
        }
    )
    make_version(
        spec=spec,
        tables={"t": (np.array([5, 2**32 + 5, -1]), np.array([[1, 2], [3, 4], [0.1, 6]]))},
    )
    store, tables, (report,) = load()
    part = fetch(store, tables["t"], [5, 2**32 - 1])
    assert part.out.tolist() == [[3, 4], [float(np.float16(0.1)), 6]]
    assert (report.rows, report.duplicates) == (2, 1)


def test_last_row_of_a_repeated_key_wins(make_version, load, caplog):
    keys = np.array([1, 2, 1, 3, 1])
    make_version(spec=USERS, tables={"users": (keys, np.arange(20).reshape(5, 4))})
    store, tables, (report,) = load()
    assert (report.rows, report.duplicates) == (3, 2)
    assert fetch(store, tables["users"], [1, 2, 3]).out[:, 0].tolist() == [16, 4, 12]
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert warning.startswith("table ctr/1/users: 2 rows repeat the key of a later row")


class TestReuse:
    def test_second_start_reads_no_rows(self, make_version, load, monkeypatch):
        make_version()
        load()
        monkeypatch.setattr("hps.models.loader._chunks", None)
        _, _, reports = load()
        assert [r.how for r in reports] == ["reused", "reused"]
        assert [r.rows for r in reports] == [100, 100]

    def test_rows_streamed_in_are_kept(self, make_version, load):
        make_version(spec=USERS)
        store, tables, _ = load()
        now = np.array([version_now()], np.uint64)
        store.insert(tables["users"], np.array([5]), np.full((1, 4), 9, np.float32), now)
        store.delete(tables["users"], np.array([6]), now)
        store, tables, (report,) = load()
        assert report.reused
        part = fetch(store, tables["users"], [5, 6])
        assert part.out[0].tolist() == [9] * 4
        assert part.source.tolist() == [4, 0]

    def test_replaced_files_of_a_version_are_loaded(self, make_version, load):
        make_version(spec=USERS, n=10)
        load()
        make_version(spec=USERS, tables={"users": (np.array([50]), np.ones((1, 4)))}, replace=True)
        store, tables, (report,) = load()
        assert (report.how, report.rows) == ("loaded", 1)
        assert len(fetch(store, tables["users"], [0, 1, 50]).missing) == 2

    def test_replaced_files_are_rejected_after_streamed_rows(self, make_version, load):
        make_version(spec=USERS, n=10)
        store, tables, _ = load()
        now = np.array([version_now()], np.uint64)
        store.insert(tables["users"], np.array([5]), np.full((1, 4), 9, np.float32), now)
        make_version(spec=USERS, n=20, replace=True)
        with pytest.raises(
            ModelError, match=r"rows were streamed .*Publish the files as a new version"
        ):
            load()
        store, tables, (report,) = load(rebuild=True)
        assert report.how == "loaded"
        assert fetch(store, tables["users"], [5]).out[0, 0] != 9

    def test_versions_are_loaded_separately(self, make_version, load):
        make_version(1, spec=USERS)
        load()
        make_version(2, spec=USERS)
        _, tables, (report,) = load()
        assert (report.how, tables["users"].version) == ("loaded", 2)

    def test_streamed_rows_of_an_unloaded_table_are_kept(self, tmp_path, make_version, load):
        make_version(spec=USERS, n=10)
        store = RocksDbTier(tmp_path / "db")
        table = Repository(tmp_path / "models").open("ctr").embedding_tables()["users"]
        now = np.array([version_now()], np.uint64)
        store.insert(table, np.array([0]), np.full((1, 4), 9, np.float32), now)
        store.close()
        store, tables, (report,) = load()
        assert (report.how, report.rows) == ("merged", 10)
        part = fetch(store, tables["users"], range(-5, 5))
        assert (part.source == 4).all()
        assert part.out[5].tolist() == [9] * 4
        assert load()[2][0].how == "reused"


class TestLegacy:
    @pytest.fixture
    def legacy(self, tmp_path):
        folder = tmp_path / "0_sparse.model"
        folder.mkdir()

        class Model:
            version = 1
            spec = USERS.model_copy(update={"name": "old"})
            directories = {"users": (folder,)}  # noqa: RUF012

            @staticmethod
            def write(value, seconds):
                np.arange(3, dtype="<i8").tofile(folder / "key")
                np.full((3, 4), value, "<f4").tofile(folder / "emb_vector")
                for file in folder.iterdir():
                    os.utime(file, (seconds, seconds))

        return Model

    def test_changed_files_are_merged_by_their_time(self, legacy, load):
        legacy.write(1, 1000)
        store, tables, _ = load(open_legacy(legacy))
        users = tables["users"]
        times = np.array([make_version(2_000_000), make_version(4_000_000)], np.uint64)
        store.insert(users, np.array([0, 1]), np.full((2, 4), 7, np.float32), times)
        assert load(open_legacy(legacy))[2][0].how == "reused"
        legacy.write(3, 3000)
        store, tables, (report,) = load(open_legacy(legacy))
        assert report.how == "merged"
        assert fetch(store, tables["users"], [0, 1, 2]).out[:, 0].tolist() == [3, 7, 3]

    def test_files_win_in_hps_layout(self, legacy, load):
        legacy.write(1, 1000)
        store, tables, _ = load(open_legacy(legacy), layout="hps")
        store.insert(
            tables["users"],
            np.array([0, 9]),
            np.full((2, 4), 7, np.float32),
            np.zeros(2, np.uint64),
        )
        legacy.write(3, 3000)
        store, tables, _ = load(open_legacy(legacy), layout="hps")
        assert fetch(store, tables["users"], [0, 9]).out[:, 0].tolist() == [3, 7]


class TestTrouble:
    def test_contents_that_differ_from_the_manifest_are_rejected(self, make_version, load):
        path = make_version() / "tables/items/emb_vector"
        data = bytearray(path.read_bytes())
        data[17] ^= 1
        path.write_bytes(data)
        for _ in range(2):  # and the next start does not take it for loaded
            with pytest.raises(ModelError, match=r"items/emb_vector: the contents do not match"):
                load()

    def test_files_changed_during_the_load_are_an_error(self, make_version, load, monkeypatch):
        folder = make_version()
        key, plain = folder / "tables/users/key", loader.sorted_chunks

        def chunks(*words):
            yield from plain(*words)
            os.utime(key, ns=(1, 1))  # what was written was as long and, at last, the same

        monkeypatch.setattr(loader, "sorted_chunks", chunks)
        with pytest.raises(ModelError, match="users/key was changed while it was read; try again"):
            load()
        monkeypatch.undo()
        assert [r.how for r in load()[2]] == ["loaded", "loaded"]

    def test_interrupted_load_is_repeated(self, make_version, load, monkeypatch):
        make_version(spec=USERS)

        def broken(*_):
            raise TierError("rocksdb", "no space left")

        with monkeypatch.context() as patch:
            patch.setattr("hps.tiers.rocksdb.load.BulkLoad.run", broken)
            with pytest.raises(TierError, match="no space"):
                load()
        store, tables, (report,) = load()
        assert (report.how, report.rows) == ("loaded", 100)
        assert len(fetch(store, tables["users"], range(-50, 50)).missing) == 0

    def test_read_only_reuses_but_never_loads(self, make_version, load):
        make_version(1, spec=USERS)
        load()
        _, _, (report,) = load(access="read_only")
        assert report.reused
        make_version(1, spec=USERS, n=7, replace=True)
        with pytest.raises(
            TierError, match=r"ctr/1/users is not loaded .*access: read_only forbids"
        ):
            load(access="read_only")
        make_version(2, spec=USERS)
        with pytest.raises(TierError, match=r"holds no table ctr/2/users"):
            load(access="read_only")


MEASURE = """
import sys, threading, time
from pathlib import Path
from hps.models import external_sort as sorting
from hps.models import loader
from hps.models.loader import load_tables
from hps.models.repository import Repository
from hps.tiers.rocksdb import RocksDbTier
from hps.types import NoProgress

def anonymous():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) >> 10

sorting.SORT_ROWS = int(sys.argv[3])
store = RocksDbTier(sys.argv[2])
version = Repository(sys.argv[1]).open("ctr")
tables = version.embedding_tables()
store.open_tables(list(tables.values()))
peak, stop = [before := anonymous()], threading.Event()
def watch():
    while not stop.wait(0.01):
        peak.append(anonymous())
thread = threading.Thread(target=watch)
thread.start()
load_tables(version, tables, store, NoProgress())
stop.set()
thread.join()
print(max(peak) - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_table(tmp_path, make_version):
    """A table of 700 MB: all keys sorted together (56 MB), and in buckets of 128 MB."""
    n, dim = 1_400_000, 128
    spec = ModelSpec.model_validate({"name": "ctr", "tables": [{"name": "users", "dim": dim}]})
    order = np.random.default_rng(0).permutation(n)

    def chunks():
        for start in range(0, n, 50_000):
            keys = order[start : start + 50_000]
            yield keys, np.repeat(keys.astype(np.float32)[:, None], dim, axis=1)

    make_version(spec=spec, tables={"users": chunks()})
    for sort_rows, limit in ((10**9, 150), (0, 400)):
        command = [sys.executable, "-c", MEASURE, tmp_path / "models", tmp_path / "db"]
        done = subprocess.run(
            [*command, str(sort_rows)], capture_output=True, text=True, timeout=240, check=True
        )
        shutil.rmtree(tmp_path / "db")
        assert int(done.stdout) < limit, f"{done.stdout} MB beside what was there before"
