"""``kill -9`` at any moment of an import, a load or writes: complete or absent afterwards.

Nothing acknowledged is lost, and a rerun succeeds without manual repair."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from hps.models.check import check_version
from hps.models.loader import load_tables
from hps.models.repository import Repository
from hps.tiers.base import FetchContext, Part
from hps.tiers.rocksdb import RocksDbTier
from hps.types import EmbeddingTable, NoProgress

ROWS, DIM = 120_000, 16
ROUNDS = 5


def started(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a Python process; returns when it begins its work."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begin\n"
    return process


def kill_after(process: subprocess.Popen[str], seconds: float) -> str:
    """Kill it after a while (unless it has ended); returns its output since the start."""
    time.sleep(seconds)
    process.kill()
    said, _ = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL)
    return said


def moments(work_s: float, interrupted: Sequence[float] = (0.0,)) -> Iterator[float]:
    """Random moments over slightly more than the undisturbed work's time.

    Then moments near its start, until one has ``interrupted`` it."""
    yield from np.random.default_rng(7).uniform(0, 1.2 * work_s, ROUNDS).tolist()
    for _ in range(30):
        if interrupted:
            return
        yield 0.0


def expected(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.permutation(ROWS), rng.random((ROWS, DIM), np.float32)


IMPORT = f"""
import sys, numpy as np
from hps.config.model_schema import ModelSpec
from hps.models.version_writer import write_version
rng = np.random.default_rng(int(sys.argv[2]))
keys, rows = rng.permutation({ROWS}), rng.random(({ROWS}, {DIM}), np.float32)
spec = ModelSpec.model_validate({{"name": "m", "tables": [{{"name": "t", "dim": {DIM}}}]}})
def chunks():
    for i in range(0, len(keys), 4000):
        yield keys[i : i + 4000], rows[i : i + 4000]
print("begin", flush=True)
write_version(sys.argv[1], spec, int(sys.argv[2]), {{"t": chunks()}})
print("done", flush=True)
"""


def test_killed_import_leaves_no_partial_version(tmp_path: Path) -> None:
    root = tmp_path / "models"
    process = started(IMPORT, root, 1)
    began = time.monotonic()
    process.communicate()
    work = time.monotonic() - began
    interrupted: list[float] = []
    for version, moment in enumerate(moments(work, interrupted), 2):
        said = kill_after(started(IMPORT, root, version), moment)
        repository = Repository(root)
        present = version in repository.versions("m")
        assert present or "done" not in said
        assert repository.open("m").version == (
            version if present else repository.versions("m")[-1]
        )
        if present:
            opened = repository.open("m", version)
            assert {f.level for f in check_version(opened, NoProgress())} == {"OK"}
            keys, rows = expected(version)
            assert (opened.tables["t"].keys() == keys).all()
            assert (opened.tables["t"].vectors() == rows).all()
        else:
            interrupted.append(moment)
            process = started(IMPORT, root, version)
            assert process.communicate()[0] == "done\n"
        names = [p.name for p in (root / "m").iterdir() if p.name.startswith(".")]
        assert present or not names, "a rerun removes what the killed one left"
    assert Repository(root).versions("m") == list(range(1, version + 1))
    assert interrupted, "no kill came before the end: the test shows nothing"


def test_killed_first_import_leaves_no_model(tmp_path: Path) -> None:
    """The model does not exist before its first version is complete."""
    for round_, moment in enumerate(moments(0.25)):
        root = tmp_path / str(round_)
        said = kill_after(started(IMPORT, root, 1), moment)
        repository = Repository(root)
        names = repository.names() if root.is_dir() else []
        if names:
            assert repository.open("m").tables["t"].rows == ROWS
        else:
            assert "done" not in said
            assert started(IMPORT, root, 1).communicate()[0] == "done\n"
            assert Repository(root).open("m").version == 1


LOAD = """
import sys
from hps.models.loader import load_tables
from hps.models.repository import Repository
from hps.tiers.rocksdb import RocksDbTier
from hps.types import NoProgress
version = Repository(sys.argv[1]).open("m")
print("begin", flush=True)
store = RocksDbTier(sys.argv[2])
(report,) = load_tables(version, version.embedding_tables(), store, NoProgress())
print(report.how, flush=True)
store.close()
"""


@pytest.mark.parametrize("rows", [ROWS, 500], ids=["by SST files", "through the log"])
def test_killed_load_is_completed_at_the_next_start(tmp_path: Path, rows: int) -> None:
    root, db = tmp_path / "models", tmp_path / "db"
    keys, vectors = expected(1)
    code = IMPORT.replace('{"t": chunks()}', f'{{"t": (keys[:{rows}], rows[:{rows}])}}')
    started(code, root, 1).communicate()
    process = started(LOAD, root, tmp_path / "warm")
    began = time.monotonic()
    process.communicate()
    work = time.monotonic() - began
    interrupted: list[float] = []
    for round_, moment in enumerate(moments(work, interrupted)):
        folder = db / str(round_)
        said = kill_after(started(LOAD, root, folder), moment)
        store = RocksDbTier(folder)
        version = Repository(root).open("m")
        (table,) = version.embedding_tables().values()
        if store.loaded(table) is None:
            interrupted.append(moment)
        assert store.loaded(table) is not None or "loaded" not in said
        (report,) = load_tables(version, [table], store, NoProgress())
        assert report.rows == rows
        part = Part.make(table, keys[:rows])
        store.fetch([part], FetchContext())
        assert len(part.missing) == 0
        assert (part.out == vectors[:rows]).all()
        store.close()
        assert not list(folder.glob("hps-ingest/*"))
    assert interrupted, "no kill came before the end: the test shows nothing"


SERVE = """
import sys, numpy as np
from hps.tiers.rocksdb import RocksDbTier
from hps.types import EmbeddingTable
store = RocksDbTier(sys.argv[1])
table = EmbeddingTable.make("t", 8, tombstone_ttl_s=1e11)
step = int(sys.argv[2])
print("begin", flush=True)
while True:
    step += 1
    keys = (np.arange(400) * 7 + step) % 1000
    store.insert(table, keys, np.full((400, 8), step, np.float32), np.full(400, step, np.uint64))
    gone = np.array([step % 1000])
    store.delete(table, gone, np.array([step], np.uint64))
    print(step, flush=True)
"""


def test_acknowledged_writes_survive_a_kill(tmp_path: Path) -> None:
    table = EmbeddingTable.make("t", 8, tombstone_ttl_s=1e11)
    last = 0
    held: dict[int, int] = {}
    for moment in moments(0.4):
        said = kill_after(started(SERVE, tmp_path, last), 0.05 + moment)
        acknowledged = int(said.splitlines()[-1]) if said.strip() else last
        for step in range(last + 1, acknowledged + 1):
            held |= dict.fromkeys(((np.arange(400) * 7 + step) % 1000).tolist(), step)
            held[step % 1000] = -step
        store = RocksDbTier(tmp_path)
        part = Part.make(table, np.arange(1000))
        store.fetch([part], FetchContext())
        for key, step in held.items():
            found = int(part.versions[key])
            # One more step may have been written, in whole or in part, without being acknowledged.
            assert found in (abs(step), acknowledged + 1), f"key {key}"
            if part.source[key]:
                assert part.out[key].tolist() == [float(found)] * 8
            elif found == abs(step):
                assert step < 0, f"key {key} was written last, but is gone"
        store.close()
        there = part.versions.astype(np.int64) * np.where(part.source > 0, 1, -1)
        held = {key: int(step) for key, step in enumerate(there) if step}
        last = acknowledged + 1
    assert last > 20, "too few writes to show anything"
