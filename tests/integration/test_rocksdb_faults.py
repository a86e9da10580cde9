"""RocksDB on a full or bad disk: answers are degraded and counted, never wrong.

Nothing leaks; it recovers without a restart."""

import gc
import os
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hps.errors import TierError
from hps.tiers.base import FetchContext, Part
from hps.tiers.rocksdb import LoadRecord, RocksDbTier, RocksDbTuning
from hps.tiers.rocksdb import write_throttle as space
from hps.tiers.wrappers import GuardedTier
from hps.types import EmbeddingTable, version_now
from tests.support.rows import constant_rows
from tests.support.waiting import until

ITEMS = EmbeddingTable.make("items", 64)
OTHER = EmbeddingTable.make("other", 64)


rows_of = partial(constant_rows, dim=64)


def insert(tier, table, keys) -> None:
    keys = np.asarray(keys)
    tier.insert(table, keys, rows_of(keys), np.ones(len(keys), np.uint64))


def load(tier, table, keys) -> None:
    chunks = [(tier.codes(table, keys), rows_of(keys))]
    tier.bulk_load(table, chunks, LoadRecord("x", len(keys)))


def fetch(tier, table, keys) -> tuple[Part, list[str]]:
    ctx = FetchContext()
    part = Part.make(table, np.asarray(keys), np.full((len(keys), 64), -1, np.float32))
    tier.fetch([part], ctx)
    found = part.source > 0
    assert (part.out[found] == rows_of(part.keys[found])).all(), "a wrong row"
    assert (part.out[~found] == -1).all()
    return part, ctx.degraded


# -- a full disk -----------------------------------------------------------------------------------


class SmallDisk:
    """A file system of 64 MB, and a file on it that takes up space."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ballast = path / "ballast"

    def fill(self, leave: int) -> None:
        disk = os.statvfs(self.path)
        size = disk.f_bavail * disk.f_frsize - leave
        with self.ballast.open("ab") as file:
            while size > 0:
                size -= file.write(bytes(min(size, 1 << 20)))

    def make_room(self) -> None:
        self.ballast.unlink()


@pytest.fixture
def small_disk(tmp_path) -> Iterator[SmallDisk]:
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", path]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        message = f"a small file system cannot be mounted: {mounted.stderr.strip()}; run as root"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(message)
    yield SmallDisk(path)
    subprocess.run(["umount", "-l", path], check=True)


def test_checkpoint_to_full_disk_names_that_disk(small_disk, tmp_path):
    """The disk of the database has space; no files are left on the full one."""
    tier = RocksDbTier(tmp_path / "db")
    tier.insert(ITEMS, np.arange(20_000), np.ones((20_000, 64), np.float32), np.ones(20_000, "u8"))
    small_disk.fill(leave=1 << 20)
    saved = small_disk.path / "saved"
    with pytest.raises(
        TierError, match=rf"{saved}: the disk is full: .* name a folder on another disk"
    ):
        tier.checkpoint(saved)
    assert [file.name for file in small_disk.path.iterdir()] == ["ballast"]
    tier.insert(ITEMS, np.arange(5), np.ones((5, 64), np.float32), np.ones(5, "u8"))
    small_disk.make_room()
    tier.checkpoint(saved)
    tier.close()


def test_writes_stop_before_disk_is_full(small_disk):
    tier = RocksDbTier(small_disk.path / "db", tuning=RocksDbTuning(min_free_bytes=16 << 20))
    insert(tier, ITEMS, range(100))
    small_disk.fill(leave=12 << 20)
    expected = (
        rf"{tier.path}: the disk is full: [0-9,]+ bytes are free, 16,[0-9,]+ bytes are needed"
    )
    for write in (
        lambda: insert(tier, ITEMS, range(200)),
        lambda: load(tier, OTHER, np.arange(10)),
        lambda: tier.delete(ITEMS, np.arange(5), np.full(5, 9, np.uint64)),
        lambda: tier.checkpoint(small_disk.path / "saved"),
    ):
        with pytest.raises(TierError, match=expected):
            write()
    assert tier.figures().free_bytes < 16 << 20
    assert len(fetch(tier, ITEMS, range(100))[0].missing) == 0
    small_disk.make_room()
    insert(tier, ITEMS, range(200))
    load(tier, OTHER, np.arange(10))
    assert len(fetch(tier, ITEMS, range(200))[0].missing) == 0
    tier.close()


def test_load_larger_than_disk_is_rejected_before_start(small_disk):
    tier = RocksDbTier(small_disk.path / "db", tuning=RocksDbTuning(min_free_bytes=1))
    with pytest.raises(TierError, match=r"the disk is full: .* 2,650,000,001 bytes are needed"):
        tier.bulk_load(ITEMS, iter(()), LoadRecord("x", 10_000_000))
    tier.close()


def test_full_disk_keeps_serving_and_recovers(small_disk):
    tier = RocksDbTier(small_disk.path / "db", tuning=RocksDbTuning(min_free_bytes=0))
    acknowledged = 0
    small_disk.fill(leave=4 << 20)
    failure = ""
    while not failure and acknowledged < 25_600:
        try:
            insert(tier, ITEMS, np.arange(acknowledged, acknowledged + 256))
            acknowledged += 256
        except TierError as error:
            failure = str(error)
    assert "the disk is full" in failure
    assert "While appending" in failure
    with pytest.raises(TierError, match="the disk is full"):
        load(tier, OTHER, np.arange(30_000))
    assert acknowledged
    assert tier.loaded(OTHER) is None
    assert not list(tier.path.glob("hps-ingest/*.sst"))
    assert len(fetch(tier, ITEMS, np.arange(acknowledged))[0].missing) == 0
    small_disk.make_room()

    def recovered():
        with suppress(TierError):
            insert(tier, ITEMS, np.arange(acknowledged, acknowledged + 256))
            load(tier, OTHER, np.arange(3000))
            return True
        return False

    until(recovered)
    acknowledged += 256
    tier.close()
    tier = RocksDbTier(small_disk.path / "db", tuning=RocksDbTuning(min_free_bytes=0))
    assert len(fetch(tier, ITEMS, np.arange(acknowledged))[0].missing) == 0
    assert tier.loaded(OTHER).rows == 3000
    tier.close()


# -- compactions that are behind -------------------------------------------------------------------

_BEHIND = {
    "write_buffer_size": "65536",
    "max_write_buffer_number": "6",
    "level0_file_num_compaction_trigger": "2",
    "level0_slowdown_writes_trigger": "2",
    "level0_stop_writes_trigger": "2",
}


def write_faster_than_it_compacts(tier, enough=lambda: True) -> None:
    wide = EmbeddingTable.make("wide", 256)
    tier.open_tables([wide])
    tier._database.family(wide).data.set_options(_BEHIND)
    rows = np.ones((3000, 256), np.float32)
    for version in range(1, 1000):
        tier.insert(wide, np.arange(3000), rows, np.full(3000, version, np.uint64))
        if version >= 3 and enough():
            return


def test_only_writes_wait_for_compactions(tmp_path):
    tier = RocksDbTier(tmp_path)
    longest, stop = [0.0], threading.Event()

    def beat() -> None:
        last = time.monotonic()
        while not stop.wait(0.001):
            now = time.monotonic()
            longest[0], last = max(longest[0], now - last), now

    heart = threading.Thread(target=beat)
    heart.start()
    write_faster_than_it_compacts(tier, lambda: tier.figures().stalled_seconds > 0.3)
    stop.set()
    heart.join()
    stalled = tier.figures().stalled_seconds
    assert stalled > 0.3
    assert longest[0] < 0.5 * stalled, "a stalled write held everybody up"
    tier.close()


def test_writes_stalled_too_long_are_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(space, "STALL_SECONDS", 0.0)
    tier = RocksDbTier(tmp_path)
    with pytest.raises(TierError, match=r"writes have been stopped for .*tiers.rocksdb.threads"):
        write_faster_than_it_compacts(tier)
    tier.close()


# -- bad blocks at run time ------------------------------------------------------------------------


def flip(file: Path, at: int) -> None:
    """Flip bits in place, in the file that is open."""
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 1]))


def used() -> tuple[float, int, int]:
    """Megabytes, handles and threads of this process."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    rss = int(status.split("RssAnon:")[1].split()[0]) / 1024
    return rss, len(os.listdir("/proc/self/fd")), threading.active_count()


@pytest.fixture
def broken(tmp_path) -> Iterator[tuple[RocksDbTier, Path]]:
    tier = RocksDbTier(tmp_path / "db")
    load(tier, ITEMS, np.arange(5000))
    (file,) = tier.path.glob("*.sst")
    load(tier, OTHER, np.arange(5000))
    yield tier, file
    tier.close()


@pytest.mark.parametrize("fault", ["flipped", "truncated"])
def test_damaged_block_loses_only_its_rows(broken, fault, caplog):
    tier, file = broken
    fetch(tier, ITEMS, [0, 4999])
    data = file.read_bytes()
    if fault == "flipped":
        flip(file, 1000)
    else:
        os.truncate(file, 500)
    skipped: Counter[str] = Counter()
    guarded = GuardedTier(
        tier, 60.0, 1, 0.05, threads=2, on_skip=lambda reason: skipped.update([reason])
    )
    for _ in range(3):
        part, degraded = fetch(guarded, ITEMS, np.arange(20))
        assert degraded == ["rocksdb"]
        assert 1 <= len(part.missing) <= (4 if fault == "flipped" else 20)
    assert skipped == {"refused": 3}
    assert guarded.state == "closed"
    if fault == "flipped":
        assert fetch(guarded, ITEMS, np.arange(4000, 4020))[1] == []
    assert fetch(guarded, OTHER, np.arange(20))[1] == []
    (logged,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert f"table file {file.name} of table {ITEMS.id} is damaged: Corruption" in logged.message
    assert tier.damage.tables() == {file.name: ITEMS.id}
    assert tier.figures().damaged_files == 1
    with file.open("r+b") as opened:
        opened.write(data)
    part, degraded = fetch(guarded, ITEMS, np.arange(5000))
    assert (degraded, len(part.missing)) == ([], 0), "it recovers by itself"


def test_rows_in_damaged_block_can_be_rewritten(broken):
    tier, file = broken
    flip(file, 1000)
    lost = fetch(tier, ITEMS, np.arange(20))[0].missing
    tier.insert(ITEMS, lost, rows_of(lost), np.full(len(lost), 9, np.uint64))
    tier.delete(ITEMS, lost[:1], np.array([version_now()], np.uint64))
    part, degraded = fetch(tier, ITEMS, np.arange(20))
    assert (degraded, len(part.missing)) == ([], 0)
    assert part.source[lost].tolist() == [0] + [4] * (len(lost) - 1)


def test_ten_thousand_requests_for_damaged_block_leak_nothing(broken):
    tier, file = broken
    guarded = GuardedTier(tier, 60.0, 5, 0.01, threads=2)
    flip(file, 1000)

    def request_rows(times: int, source: RocksDbTier | GuardedTier) -> None:
        for _ in range(times):
            part, degraded = fetch(source, ITEMS, np.arange(20))
            assert degraded == ["rocksdb"]
            assert 1 <= len(part.missing) <= 4

    request_rows(1000, guarded)
    before = used()
    request_rows(5000, guarded)
    request_rows(5000, tier)
    after = used()
    assert after[0] - before[0] < 8
    assert after[1] <= before[1]
    assert after[2] <= before[2] + 1  # the guard's second thread
    assert guarded.state == "closed"


# -- a broken folder at the start ------------------------------------------------------------------


def open_and_fetch(path: Path, access) -> None:
    opened = RocksDbTier(path, access=access)
    try:
        fetch(opened, ITEMS, np.arange(5000))
        fetch(opened, OTHER, np.arange(10))
    finally:
        opened.close()


@pytest.mark.parametrize("file", ["CURRENT", "MANIFEST-*", "*.sst"])
@pytest.mark.parametrize("fault", ["missing", "truncated", "empty", "garbage"])
@pytest.mark.parametrize("access", ["primary", "read_only", "secondary"])
def test_broken_folder_is_reported_with_a_remedy_and_unchanged(tmp_path, file, fault, access):
    tier = RocksDbTier(tmp_path)
    load(tier, ITEMS, np.arange(5000))
    insert(tier, OTHER, range(10))
    tier.close()
    for path in tmp_path.glob(file):
        data = path.read_bytes()
        if fault == "missing":
            path.unlink()
        elif fault == "garbage":
            path.write_bytes(os.urandom(len(data)))
        else:
            path.write_bytes(data[: len(data) // 2] if fault == "truncated" else b"")
    tables = {p.name: p.stat().st_size for p in tmp_path.glob("*.sst")}
    with pytest.raises(TierError) as caught:
        open_and_fetch(tmp_path, access)
    message = str(caught.value)
    assert str(tmp_path) in message
    assert "is damaged: " in message
    assert "run `hps store verify --repair`" in message
    assert "restore the folder from a checkpoint, or remove it" in message
    assert {p.name: p.stat().st_size for p in tmp_path.glob("*.sst")} == tables
