"""A write-ahead log that lost acknowledged writes: detected at a start, rejected or accepted, counted."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hps.errors import TierError
from hps.tiers.base import FetchContext, Part
from hps.tiers.file_lock import is_locked
from hps.tiers.positions import StreamPosition, TableChanges
from hps.tiers.rocksdb import LoadRecord, RocksDbTier
from hps.tiers.rocksdb import acknowledged_writes as acknowledged
from hps.types import EmbeddingTable

A, B = EmbeddingTable.make("a", 8), EmbeddingTable.make("b", 8)
ROWS = 1000
NONE, NO_VERSIONS = np.empty(0, np.int64), np.empty(0, np.uint64)


def apply(tier: RocksDbTier, table: EmbeddingTable, key: int, offset: int) -> None:
    """Apply one row, and the stream position ``offset``."""
    row, version = np.full((1, 8), key, np.float32), np.array([offset], np.uint64)
    changes = TableChanges(np.array([key]), row, version, NONE, NO_VERSIONS)
    tier.apply(table, changes, [StreamPosition("stream", 0, offset)])


def write_and_die(path: str, kind: str) -> None:
    """In a separate process: rows 0 to 999 in turns into two tables, then ``kill -9``."""
    acknowledged._LIST_EVERY_S = 0.0  # as if it took seconds
    tier = RocksDbTier(path)
    tier.open_tables([A, B])
    tier.bulk_load(A, [(tier.codes(A, NONE), np.empty((0, 8), np.float32))], LoadRecord("x"))
    if kind == "many logs":
        # A is written to table files all the time, B never: every log file is needed.
        tier._database.family(A).data.set_options({"write_buffer_size": "65536"})
    for key in range(ROWS):
        apply(tier, B if key % 2 else A, key, key + 1)
        if kind == "many logs" and key % 100 == 49:
            tier._database.family(A).data.flush()
    if kind == "flushed":  # without anything acknowledged afterwards
        for family in tier._database._families.values():
            family.data.flush()
        tier._database.db.flush()
    os.kill(os.getpid(), 9)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """By kind, the folder of a database whose process was killed."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("killed") / "db"
            code = f"from {__name__} import write_and_die as w; w({str(made[kind])!r}, {kind!r})"
            ended = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE)
            assert ended.returncode == -9, ended.stderr
        return made[kind]

    return make


@pytest.fixture
def folder(killed, tmp_path):
    def copy(kind: str = "one log") -> Path:
        return shutil.copytree(killed(kind), tmp_path / "db")

    return copy


def logs(path: Path) -> list[Path]:
    return sorted(file for file in path.glob("*.log"))


def cut(log: Path) -> None:
    os.truncate(log, log.stat().st_size // 2 + 7)


def cut_between_records(log: Path) -> None:
    """Each write is one record: 7 bytes with the length of the rest at 4."""
    data, end = log.read_bytes(), 0
    while end < min(len(data), 32_768) // 2:
        end += 7 + int.from_bytes(data[end + 4 : end + 6], "little")
    os.truncate(log, end)


def flip(log: Path) -> None:
    data = bytearray(log.read_bytes())
    data[len(data) // 2] ^= 1
    log.write_bytes(data)


DAMAGE = {"cut": cut, "cut between": cut_between_records, "flipped": flip, "deleted": Path.unlink}


def keys_with_rows(tier: RocksDbTier) -> np.ndarray:
    """Return a mask of the keys 0 to 999 that have their row."""
    found = np.zeros(ROWS, bool)
    for table, keys in ((A, np.arange(0, ROWS, 2)), (B, np.arange(1, ROWS, 2))):
        part = Part.make(table, keys)
        tier.fetch([part], FetchContext())
        found[keys] = part.source > 0
        assert (part.out[found[keys], 0] == keys[found[keys]]).all()
    return found


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.glob("*.log")}


NEWEST, OLDER = -1, 3


@pytest.mark.parametrize(
    ("kind", "which", "how"),
    [
        *[("one log", NEWEST, how) for how in DAMAGE],
        *[("many logs", NEWEST, how) for how in DAMAGE],
        *[("many logs", OLDER, how) for how in ("cut", "flipped", "deleted")],
    ],
)
def test_start_fails_when_log_lost_acknowledged_writes(folder, kind, which, how):
    path = folder(kind)
    DAMAGE[how](logs(path)[which])
    left = contents(path)
    for _ in range(2):
        with pytest.raises(
            TierError, match=r"damaged: .* acknowledged writes are missing .*on_lost_writes: accept"
        ):
            RocksDbTier(path)
        if how != "cut between":
            assert contents(path) == left


@pytest.mark.parametrize("how", DAMAGE)
def test_accepted_loss_is_counted_and_positions_stay_behind_rows(folder, how, caplog):
    path = folder()
    DAMAGE[how](logs(path)[NEWEST])
    tier = RocksDbTier(path, on_lost_writes="accept")
    found = keys_with_rows(tier)
    lost = int(np.count_nonzero(~found))
    assert lost > 10
    # Two writes a row: the row and its position.
    counted = tier.figures().lost_writes
    assert 2 * lost <= counted <= (2 * ROWS if how == "flipped" else 2 * lost) + 20
    assert "acknowledged writes are missing" in caplog.text
    for table in (A, B):
        applied = tier.applied(table, "stream", 0) or 0
        assert found[:applied].all()
    tier.close()
    again = RocksDbTier(path)
    assert again.figures().lost_writes == 0
    assert (keys_with_rows(again) == found).all()
    again.close()


@pytest.mark.parametrize("how", ["cut", "flipped", "deleted"])
def test_positions_are_reset_when_rows_after_the_lost_ones_exist(folder, how):
    path = folder("many logs")
    DAMAGE[how](logs(path)[OLDER])
    tier = RocksDbTier(path, on_lost_writes="accept")
    found = keys_with_rows(tier)
    assert 0 < np.count_nonzero(~found) < 100
    assert found[-1]
    assert [tier.applied(table, "stream", 0) for table in (A, B)] == [None, None]
    # What the log said of A's highest version may be gone with it: an older row is still refused.
    apply(tier, A, 998, 3)
    part = Part.make(A, np.array([998]))
    tier.fetch([part], FetchContext())
    assert part.versions[0] == 999
    tier.close()


def test_partial_unacknowledged_write_is_no_loss(folder):
    path = folder()
    log = logs(path)[-1]
    with log.open("ab") as file:
        file.write(log.read_bytes()[:30])
    tier = RocksDbTier(path)
    assert keys_with_rows(tier).all()
    assert tier.figures().lost_writes == 0
    tier.close()


def test_unneeded_log_files_may_be_missing(folder):
    path = folder("flushed")
    assert set(acknowledged.read_acknowledged(path).logs) - {log.name for log in logs(path)}
    tier = RocksDbTier(path)
    assert keys_with_rows(tier).all()
    tier.close()


def test_earlier_state_is_opened_and_reported_after_power_failure(folder, monkeypatch, caplog):
    path = folder()
    cut(logs(path)[-1])
    monkeypatch.setattr(acknowledged, "_BOOT", path / "IDENTITY")  # another one
    tier = RocksDbTier(path)
    found = keys_with_rows(tier)
    assert 100 < np.count_nonzero(found) < 900
    assert tier.figures().lost_writes > 200
    assert "after a restart of the machine, up to" in caplog.text
    assert found[: tier.applied(A, "stream", 0)].all()
    tier.close()


@pytest.mark.parametrize("how", ["torn", "flipped"])
def test_only_damage_is_rejected_without_record(folder, how):
    """A database of an earlier version has no record."""
    path = folder()
    (path / "hps-acknowledged").unlink()
    log = logs(path)[-1]
    if how == "torn":
        os.truncate(log, log.stat().st_size - 5)
        tier = RocksDbTier(path)
        assert np.count_nonzero(keys_with_rows(tier)) >= ROWS - 1
        tier.close()
    else:
        flip(log)
        with pytest.raises(TierError, match="an unknown number of acknowledged writes"):
            RocksDbTier(path)


def test_record_of_earlier_format_is_ignored(folder):
    """20 decimal digits, a newline and the list of log files."""
    path = folder()
    record = path / "hps-acknowledged"
    about = record.read_bytes()[8:].partition(b"\n")[0]
    record.write_bytes(b"%020d\n" % 10**12 + about + b"\n")
    assert acknowledged.read_acknowledged(path) is None
    tier = RocksDbTier(path)
    assert keys_with_rows(tier).all()
    tier.close()
    noted = acknowledged.read_acknowledged(path)
    assert noted is not None
    assert ROWS < noted.sequence < 10 * ROWS


def test_file_system_without_shared_mappings_is_reported_and_writable(
    tmp_path, monkeypatch, caplog
):
    def refuse(*_):
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    for offset in (1, 2):
        tier = RocksDbTier(tmp_path / "db")
        tier.open_tables([A])
        apply(tier, A, offset, offset)
        assert tier.applied(A, "stream", 0) == offset
        tier.close()
    assert "mapping hps-acknowledged into memory failed (" in caplog.text


def test_reader_rejects_damaged_log(folder):
    path = folder()
    flip(logs(path)[-1])
    with pytest.raises(TierError, match="damaged: Corruption: checksum mismatch"):
        RocksDbTier(path, access="read_only")


@pytest.mark.parametrize("access", ["read_only", "secondary"])
@pytest.mark.parametrize("how", [os.unlink, cut_between_records, cut])
def test_reader_rejects_log_without_its_end(folder, access, how, caplog):
    path = folder()
    RocksDbTier(path, access=access).close()
    assert not caplog.records
    how(logs(path)[-1])
    with pytest.raises(TierError, match=r"up to [\d,]+ acknowledged writes are missing"):
        RocksDbTier(path, access=access)
    reader = RocksDbTier(path, access=access, on_lost_writes="accept")
    assert reader.figures().lost_writes > 0
    reader.close()
    assert "acknowledged writes are missing from the write-ahead log (its end" in caplog.text


@pytest.mark.parametrize("access", ["read_only", "secondary"])
def test_reader_opens_beside_primary_regardless_of_record(tmp_path, access):
    primary = RocksDbTier(tmp_path / "db")
    record = tmp_path / "db/hps-acknowledged"
    assert is_locked(record)
    with record.open(
        "r+b"
    ) as file:  # acknowledged and in a table file that the reader does not see yet
        file.write((1 << 40).to_bytes(8, sys.byteorder))
    RocksDbTier(tmp_path / "db", access=access).close()
    primary.close()
    assert not is_locked(record)


def test_record_of_another_database_is_ignored(folder, tmp_path):
    path = folder()
    other = RocksDbTier(tmp_path / "other")
    other.open_tables([A])
    other.close()
    shutil.copy(path / "hps-acknowledged", tmp_path / "other" / "hps-acknowledged")
    RocksDbTier(tmp_path / "other").close()
