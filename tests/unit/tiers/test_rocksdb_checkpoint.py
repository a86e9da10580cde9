"""Checkpoints while serving, their restore, and the files left by a kill."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from hps.errors import TierError, Unavailable
from hps.tiers.base import FetchContext, Part
from hps.tiers.rocksdb import (
    CheckpointFolder,
    LoadRecord,
    RocksDbTier,
    bootstrap,
    checkpoint,
    complete_checkpoints,
    restore,
)
from hps.types import EmbeddingTable, version_now

DIM = 4
ITEMS = EmbeddingTable.make("items", DIM, model="ctr", version=7)
USERS = EmbeddingTable.make("users", DIM, model="ctr", version=7)


def put(tier, table, keys, value):
    rows = np.full((len(keys), DIM), value, np.float32)
    tier.insert(table, np.asarray(keys), rows, np.full(len(keys), version_now(), np.uint64))


def fetch(tier, table, keys):
    part = Part.make(table, np.asarray(keys), np.full((len(keys), DIM), -1, np.float32))
    tier.fetch([part], FetchContext())
    return part.out[:, 0].tolist()


@pytest.fixture
def tier(tmp_path):
    tier = RocksDbTier(tmp_path / "db")
    code = tier.codes(ITEMS, np.arange(3000))
    tier.bulk_load(ITEMS, [(code, np.ones((3000, DIM), np.float32))], LoadRecord("abc", version=5))
    put(tier, ITEMS, [1], 2.0)
    tier.delete(ITEMS, np.array([2]), np.array([version_now()], np.uint64))
    yield tier
    tier.close()


def test_checkpoint_contains_rows_tombstones_and_records(tier, tmp_path):
    tier.checkpoint(tmp_path / "saved")
    put(tier, ITEMS, [1, 5000], 3.0)
    restore(tmp_path / "saved", tmp_path / "back")
    back = RocksDbTier(tmp_path / "back")
    assert fetch(back, ITEMS, [0, 1, 2, 2999, 5000]) == [1.0, 2.0, -1.0, 1.0, -1.0]
    assert (back.loaded(ITEMS).digest, back.loaded(ITEMS).version) == ("abc", 5)
    assert back.streamed(ITEMS)
    back.insert(ITEMS, np.array([2]), np.ones((1, DIM), np.float32), np.ones(1, np.uint64))
    assert fetch(back, ITEMS, [2]) == [-1.0], "the tombstone came along"
    put(back, ITEMS, [1], 9.0)
    back.close()
    assert fetch(tier, ITEMS, [1]) == [3.0]
    restore(tmp_path / "saved", tmp_path / "again")
    again = RocksDbTier(tmp_path / "again")
    assert fetch(again, ITEMS, [1]) == [2.0], "a restored database never writes to the checkpoint"
    again.close()


def test_table_files_are_linked_without_temporary_files(tier, tmp_path):
    tier.checkpoint(tmp_path / "saved")
    restore(tmp_path / "saved", tmp_path / "back")
    assert all(file.stat().st_nlink == 3 for file in (tmp_path / "back").glob("*.sst"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "db", "saved"]


def test_files_are_copied_across_file_systems(tier, tmp_path, monkeypatch):
    tier.checkpoint(tmp_path / "saved")

    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(checkpoint.os, "link", refuse)
    restore(tmp_path / "saved", tmp_path / "back")
    back = RocksDbTier(tmp_path / "back", access="read_only")
    assert fetch(back, ITEMS, [0, 1]) == [1.0, 2.0]
    back.close()


def test_checkpoint_is_consistent_across_tables(tier, tmp_path):
    """The writer writes items, then users: no checkpoint has users ahead of items."""
    stop = threading.Event()

    def write() -> None:
        step = 0
        while not stop.is_set():
            step += 1
            put(tier, ITEMS, [7], float(step))
            put(tier, USERS, [7], float(step))

    put(tier, USERS, [7], 0.0)
    writer = threading.Thread(target=write)
    writer.start()
    try:
        for i in range(5):
            time.sleep(0.02)
            tier.checkpoint(tmp_path / f"saved{i}")
    finally:
        stop.set()
        writer.join()
    for i in range(5):
        saved = RocksDbTier(tmp_path / f"saved{i}", access="read_only")
        (items,), (users,) = fetch(saved, ITEMS, [7]), fetch(saved, USERS, [7])
        saved.close()
        assert users in (items, items - 1) or (items, users) == (1.0, 0.0)


def test_target_with_contents_is_rejected(tier, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    (tmp_path / "empty").mkdir()
    for name in ("file", "full"):
        with pytest.raises(TierError, match="not an empty folder; a checkpoint never overwrites"):
            tier.checkpoint(tmp_path / name)
    tier.checkpoint(tmp_path / "empty")
    for name in ("file", "full", "db"):
        with pytest.raises(TierError, match="a restored database never overwrites existing"):
            restore(tmp_path / "empty", tmp_path / name)
    with pytest.raises(TierError, match="holds no checkpoint"):
        restore(tmp_path / "none", tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("damage", ["missing", "truncated", "CURRENT"])
def test_damaged_checkpoint_is_rejected_without_files(tier, tmp_path, damage):
    tier.checkpoint(tmp_path / "saved")
    file = max((tmp_path / "saved").glob("*.sst"), key=lambda f: f.stat().st_size)
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        data = file.read_bytes()
        file.unlink()
        file.write_bytes(data[:-10])
    else:
        (tmp_path / "saved" / "CURRENT").unlink()
    with pytest.raises(TierError, match="damaged"):
        restore(tmp_path / "saved", tmp_path / "back")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["db", "saved"]


def test_readers_cannot_make_checkpoint(tier, tmp_path):
    reader = RocksDbTier(tier.path, access="secondary")
    with pytest.raises(TierError, match="access: secondary; writing is off"):
        reader.checkpoint(tmp_path / "saved")
    reader.close()


CODE = """
import sys
from pathlib import Path
from hps.tiers.rocksdb import RocksDbTier, restore
db, saved, back = map(Path, sys.argv[1:])
tier = RocksDbTier(db)
print("begin", flush=True)
tier.checkpoint(saved)
restore(saved, back)
print("done", flush=True)
tier.close()
"""


def test_kill_leaves_complete_checkpoints_or_none(tier, tmp_path: Path):
    tier.close()
    killed = 0
    # Also without a delay: a fast machine is done before the shortest of the other delays.
    for moment in [0.0, *np.random.default_rng(3).uniform(0, 0.08, 12).tolist()]:
        saved, back = tmp_path / "saved", tmp_path / "back"
        command = [sys.executable, "-c", CODE, tmp_path / "db", saved, back]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "begin\n"
        time.sleep(moment)
        os.kill(process.pid, signal.SIGKILL)
        killed += "done" not in process.communicate()[0]
        if not saved.exists():
            owner = RocksDbTier(tmp_path / "db")
            owner.checkpoint(saved)
            owner.close()
        if not back.exists():
            restore(saved, back)
        opened = RocksDbTier(back, access="read_only")
        assert fetch(opened, ITEMS, [0, 1, 2]) == [1.0, 2.0, -1.0]
        opened.close()
        for folder in (saved, back):
            folder.rename(tmp_path / f"{folder.name}-{moment}")
        assert not list(tmp_path.glob(".*"))
    assert killed, "no kill came before the end: the test shows nothing"


# -- kept in a folder ------------------------------------------------------------------------------


@pytest.fixture(params=["the same disk", "another disk"])
def kept_in(request, tmp_path):
    if request.param == "the same disk":
        yield tmp_path / "kept"
        return
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system here")
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder) / "kept"


def test_newest_checkpoints_are_kept_and_last_one_is_restored(tier, tmp_path, kept_in):
    checkpoints = CheckpointFolder(kept_in, tier.path, tier.checkpoint)
    for day in range(3):
        put(tier, ITEMS, [1], 10.0 + day)
        checkpoints.add(2, lambda day=day: day * 86400.0)
    assert [each.name for each in complete_checkpoints(kept_in)] == [
        "19700102T000000Z",
        "19700103T000000Z",
    ]
    assert sorted(p.name for p in tmp_path.iterdir() if p != kept_in) == ["db"]
    assert bootstrap(kept_in, tmp_path / "new") == kept_in / "19700103T000000Z"
    new = RocksDbTier(tmp_path / "new")
    assert fetch(new, ITEMS, [1, 2999]) == [12.0, 1.0]
    new.close()
    assert bootstrap(kept_in, tmp_path / "new") is None, "the database that is there stays"


def test_bootstrap_skips_damaged_checkpoint(tier, tmp_path, kept_in):
    checkpoints = CheckpointFolder(kept_in, tier.path, tier.checkpoint)
    first, second = (checkpoints.add(2, lambda day=day: day * 86400.0) for day in range(2))
    next(second.glob("*.sst")).unlink()
    assert bootstrap(kept_in, tmp_path / "new") == first
    next(first.glob("*.sst")).unlink()
    with pytest.raises(TierError, match=f"{second}.* cannot be restored"):
        bootstrap(kept_in, tmp_path / "another")


def test_bootstrap_without_checkpoints_restores_nothing(tmp_path):
    assert bootstrap(tmp_path / "none", tmp_path / "new") is None
    assert not (tmp_path / "new").exists()


def test_parallel_checkpoint_is_rejected(tier, tmp_path):
    def make(folder):
        with pytest.raises(Unavailable, match="another checkpoint is in progress"):
            checkpoints.add(1)
        tier.checkpoint(folder)

    checkpoints = CheckpointFolder(tmp_path / "kept", tier.path, make)
    assert fetch_from(checkpoints.add(1), tmp_path) == [1.0]


def fetch_from(folder, tmp_path):
    restore(folder, tmp_path / "back")
    back = RocksDbTier(tmp_path / "back")
    try:
        return fetch(back, ITEMS, [0])
    finally:
        back.close()
