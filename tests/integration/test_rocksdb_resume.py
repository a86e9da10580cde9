"""A killed bulk load continues after the last file that it had linked into the table."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hps.config.model_schema import ModelSpec
from hps.models.loader import load_tables
from hps.models.repository import Repository
from hps.models.version_writer import write_version
from hps.tiers.base import FetchContext, Part
from hps.tiers.rocksdb import RocksDbTier
from hps.tiers.rocksdb import load as load_module
from hps.types import NoProgress

ROWS, DIM = 60_000, 8
FILE_BYTES = 256 << 10

# Killed while the store takes block ``at``: by then some files have been linked into the table.
LOAD = f"""
import os, signal, sys
from hps.models import loader
from hps.models.repository import Repository
from hps.tiers.rocksdb import load as load_module
from hps.tiers.rocksdb import RocksDbTier
from hps.types import NoProgress
load_module._FILE_BYTES = {FILE_BYTES}
load_module._BLOCK_ROWS = 1000
append, calls = load_module.BulkLoad._append, []
def killed_at(self, code, vectors, pool):
    calls.append(1)
    if len(calls) == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    append(self, code, vectors, pool)
load_module.BulkLoad._append = killed_at
version = Repository(sys.argv[1]).open("m")
loader.load_tables(version, version.embedding_tables(), RocksDbTier(sys.argv[2]), NoProgress())
"""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    write(tmp_path / "models", 1.0)
    return tmp_path / "models"


def write(root: Path, value: float) -> None:
    keys = np.random.default_rng(1).permutation(ROWS)
    rows = np.repeat(keys[:, None], DIM, 1).astype(np.float32) * value
    spec = ModelSpec.model_validate({"name": "m", "tables": [{"name": "t", "dim": DIM}]})
    write_version(root, spec, 1, {"t": (keys, rows)}, replace=True)


def kill_a_load(models: Path, db: Path, at: int) -> None:
    command = [sys.executable, "-c", LOAD, models, db, str(at)]
    assert subprocess.run(command).returncode == -signal.SIGKILL


def load(models: Path, db: Path, monkeypatch) -> tuple[int, np.ndarray]:
    """Return the number of rows written, and the first values of all rows afterwards."""
    written = []
    append = load_module.BulkLoad._append

    def counted(self, code, vectors, pool):
        written.append(len(code))
        append(self, code, vectors, pool)

    monkeypatch.setattr(load_module.BulkLoad, "_append", counted)
    version = Repository(models).open("m")
    (table,) = version.embedding_tables().values()
    store = RocksDbTier(db)
    (report,) = load_tables(version, [table], store, NoProgress())
    assert (report.how, report.rows) == ("loaded", ROWS)
    assert store.loaded(table).rows == ROWS
    part = Part.make(table, np.arange(ROWS))
    store.fetch([part], FetchContext())
    assert len(part.missing) == 0
    assert not list(db.glob("hps-ingest/*"))
    store.close()
    return sum(written), part.out[:, 0]


def test_killed_load_continues_and_completes(tmp_path, models, monkeypatch):
    db, left = tmp_path / "db", ROWS
    for at in (20, 30):
        kill_a_load(models, db, at)
    written, values = load(models, db, monkeypatch)
    assert 0 < written < left - 30_000
    assert (values == np.arange(ROWS)).all()


def test_incomplete_load_is_not_served(tmp_path, models):
    kill_a_load(models, tmp_path / "db", 30)
    store = RocksDbTier(tmp_path / "db")
    (table,) = Repository(models).open("m").embedding_tables().values()
    assert store.loaded(table) is None
    store.close()


@pytest.mark.parametrize("change", ["others", "touched"])
def test_changed_files_are_loaded_from_start(tmp_path, models, monkeypatch, change):
    kill_a_load(models, tmp_path / "db", 30)
    if change == "others":
        write(models, 2.0)
    else:
        os.utime(models / "m" / "1" / "tables" / "t" / "emb_vector", ns=(1, 1))
    written, values = load(models, tmp_path / "db", monkeypatch)
    assert written == ROWS
    assert (values == np.arange(ROWS) * (2 if change == "others" else 1)).all()


def test_load_of_table_written_meanwhile_is_not_continued(tmp_path, models, monkeypatch):
    kill_a_load(models, tmp_path / "db", 30)
    store = RocksDbTier(tmp_path / "db")
    (table,) = Repository(models).open("m").embedding_tables().values()
    store.evict(table, np.arange(5))
    store.close()
    version = Repository(models).open("m")
    store = RocksDbTier(tmp_path / "db")
    load_tables(version, [table], store, NoProgress())
    part = Part.make(table, np.arange(ROWS))
    store.fetch([part], FetchContext())
    assert len(part.missing) == 0
    store.close()
