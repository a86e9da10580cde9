"""Update files in a folder: order, destinations, crashes, and rejected files."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

from hps.config.update_settings import DirectorySettings
from hps.errors import ConfigError, Unavailable
from hps.observability.meters import UpdateMeter
from hps.observability.metric_names import UPDATE_DEAD
from hps.observability.metrics import Metrics
from hps.rows.base import TableRows
from hps.rows.export import export
from hps.tiers.base import FetchContext, Part
from hps.tiers.positions import TableChanges
from hps.tiers.rocksdb import RocksDbTier
from hps.types import EmbeddingTable, make_version
from hps.updates.codec import MessageAttributes, encode_native
from hps.updates.files.directory import DirectorySource
from hps.updates.ingestor import Ingestor
from hps.updates.source import Reason
from hps.updates.stream_positions import FedStore, StoreStreamPositions
from tests.support.letters import Letters

ITEMS = EmbeddingTable.make("items", 2, model="m")
USERS = EmbeddingTable.make("users", 3, model="m", dtype=np.float16)
TABLES = {"m/items": (ITEMS,), "m/users": (USERS,)}
NOW_MS = int(time.time() * 1000)


def message(rows=(), deleted=(), table: str = "m/items", dim: int = 2, made_ms=NOW_MS) -> bytes:
    """``rows``: (key, value, sequence); ``deleted``: (key, sequence)."""
    changes = TableChanges(
        np.array([r[0] for r in rows], np.int64),
        np.repeat(np.array([[r[1]] for r in rows], np.float32).reshape(-1, 1), dim, axis=1),
        np.array([make_version(made_ms, r[2]) for r in rows], np.uint64),
        np.array([d[0] for d in deleted], np.int64),
        np.array([make_version(made_ms, d[1]) for d in deleted], np.uint64),
    )
    (one,) = encode_native(table, changes, MessageAttributes(NOW_MS))
    return one


class Harness:
    """A store fed from a folder."""

    def __init__(self, folder, **given) -> None:
        self.folder = folder / "updates"
        self.store = RocksDbTier(folder / "db")
        self.store.open_tables([ITEMS, USERS])
        self.metrics, self.letters = Metrics(), Letters()
        self.open(**given)

    def open(self, block: int = 100, **settings) -> None:
        """Open as after a restart."""
        chosen = DirectorySettings(path=self.folder, **settings)
        self.source = DirectorySource(chosen, TABLES, block)
        self.ingestor = Ingestor(
            self.source, TABLES, StoreStreamPositions([FedStore("rocksdb", self.store)], lambda _topic:
            ()), None, self.letters, UpdateMeter(self.metrics),
        )  # fmt: skip

    def put(self, name: str, data: bytes) -> None:
        part = self.folder / f".{name}"
        part.write_bytes(data)
        part.rename(self.folder / name)

    def run(self) -> int:
        """Step until no file is left."""
        rows = 0
        while self.names():
            rows += self.ingestor.step(0.0)
        return rows

    def names(self, below: str = "") -> list[str]:
        return sorted(p.name for p in (self.folder / below).iterdir() if p.is_file())

    def rows(self, keys, table=ITEMS) -> list[float | None]:
        part = Part.make(table, np.array(keys, np.int64))
        self.store.fetch([part], FetchContext())
        return [v if s else None for v, s in zip(part.out[:, 0].tolist(), part.source, strict=True)]


@pytest.fixture
def harness(tmp_path):
    harness = Harness(tmp_path)
    yield harness
    harness.source.close()
    harness.store.close()


def test_native_files_are_applied_in_name_order(harness):
    harness.put("2.hpsu", message([(1, 2.0, 5)]) + message(deleted=[(2, 6)]))
    harness.put(
        "1.hpsu",
        message([(1, 1.0, 5), (2, 1.0, 5)]) + message([(9, 9.0, 1)], table="m/users", dim=3),
    )
    assert harness.run() == 5
    assert harness.rows([1, 2]) == [2.0, None]
    assert harness.rows([9], USERS) == [9.0]
    assert (harness.names(), harness.names("applied")) == ([], ["1.hpsu", "2.hpsu"])
    assert harness.names("rejected") == []


@pytest.mark.parametrize("ending", ["npz", "parquet"])
def test_exports_are_applied(harness, tmp_path, ending):
    keys = np.arange(250)
    versions = np.full(250, make_version(NOW_MS), np.uint64)
    rows = TableRows(keys, np.repeat(keys[:, None], 3, 1).astype(np.float16), versions)
    harness.put("0.hpsu", message([(7, 1.0, 0)], table="m/users", dim=3))
    name = f"m.users.1.{ending}" if ending == "npz" else "any.parquet"
    part = tmp_path / f"out.{ending}"
    export(part, USERS, [rows.at(slice(5, None))], [rows.at(slice(0, 5))])
    os.rename(part, harness.folder / name)
    assert harness.run() == 251
    assert harness.rows([0, 4, 5, 7, 249], USERS) == [None, None, 5.0, 7.0, 249.0]
    assert harness.names("applied") == ["0.hpsu", name]


def test_rows_without_versions_get_the_modification_time(harness):
    harness.put("0.hpsu", message([(1, 1.0, 0)]))
    np.savez(harness.folder / ".a", key=[1, 2], vector=np.full((2, 2), 3, np.float32))
    os.rename(harness.folder / ".a.npz", harness.folder / "m.items.1.npz")
    np.savez(harness.folder / ".b", key=[1], vector=np.full((1, 2), 4, np.float32))
    os.rename(harness.folder / ".b.npz", harness.folder / "m.items.2.npz")
    os.utime(harness.folder / "m.items.1.npz", (NOW_MS / 1e3 + 60,) * 2)
    os.utime(harness.folder / "m.items.2.npz", (NOW_MS / 1e3 - 60,) * 2)
    harness.run()
    assert harness.rows([1, 2]) == [3.0, 3.0]


def test_poll_returns_a_bounded_number_of_rows(harness):
    harness.open(block=10)
    np.savez(harness.folder / ".a", key=np.arange(35), vector=np.zeros((35, 2), np.float32))
    os.rename(harness.folder / ".a.npz", harness.folder / "m.items.a.npz")
    harness.put("n.hpsu", b"".join(message([(i, 1.0, 1)]) for i in range(25)))
    found = []
    while (batch := harness.source.poll(0.0)) is not None:
        found.append(batch.rows)
        harness.source.commit(batch)
    assert found == [10, 10, 10, 5, 0, 10, 10, 5, 0]


def test_unrelated_and_unfinished_files_are_ignored(harness):
    for name in (".1.hpsu", "notes.txt", "1.hpsu.part"):
        (harness.folder / name).write_bytes(b"?")
    assert harness.source.poll(0.05) is None
    assert harness.names() == [".1.hpsu", "1.hpsu.part", "notes.txt"]


def test_crash_within_a_file_repeats_it(harness):
    harness.open(block=1)
    harness.put("1.hpsu", message([(1, 1.0, 1)]) + message([(2, 1.0, 2)]))
    harness.ingestor.step(0.0)
    assert harness.names() == ["1.hpsu"]
    harness.source.close()
    harness.open()
    assert harness.run() == 2
    assert harness.rows([1, 2]) == [1.0, 1.0]


def test_uncommitted_batches_are_polled_again(harness):
    harness.put("1.hpsu", message([(1, 1.0, 1)]))
    first = harness.source.poll(0.0)
    end = harness.source.poll(0.0)
    assert (first.rows, end.rows) == (1, 0)
    assert harness.source.poll(0.0) is None  # it is not read twice
    harness.source.rewind()
    again = harness.source.poll(0.0)
    assert again.rows == 1
    harness.source.commit(first)  # from before the rewind: moves nothing
    harness.source.commit(again)
    assert harness.names() == ["1.hpsu"]
    harness.source.commit(harness.source.poll(0.0))
    assert harness.names("applied") == ["1.hpsu"]


def test_applied_files_may_be_removed(harness):
    harness.open(keep_applied=False)
    harness.put("1.hpsu", message([(1, 1.0, 1)]))
    harness.run()
    assert harness.names("applied") == harness.names() == []
    assert harness.rows([1]) == [1.0]


def test_file_with_a_used_name_does_not_replace_the_old_one(harness):
    for data in (message([(1, 1.0, 1)]), message([(1, 2.0, 2)]), b"bad", b"worse"):
        harness.put("x.hpsu", data)
        harness.run()
    assert harness.names("applied") == ["x.1.hpsu", "x.hpsu"]
    assert harness.names("rejected") == ["x.1.hpsu", "x.1.hpsu.reason", "x.hpsu", "x.hpsu.reason"]


GOOD = message([(1, 1.0, 1)])
DAMAGED = message([(2, 1.0, 1)])[:-1] + b"\xff"
AHEAD = message([(2, 1.0, 1)], made_ms=NOW_MS + 7_200_000)


@pytest.mark.parametrize(
    ("name", "data", "reason", "report", "applied"),
    [
        ("a.hpsu", GOOD + DAMAGED + message([(3, 1.0, 1)]), Reason.CHECKSUM, "byte 104: checksum", [1, 3]),
        ("a.hpsu", GOOD + GOOD[:-3], Reason.TRUNCATED, "byte 189: truncated", [1]),
        ("a.hpsu", GOOD + GOOD[:30], Reason.TRUNCATED, "byte 96: truncated; the rest was not read", [1]),
        ("a.hpsu", GOOD + bytes(70) + GOOD, Reason.BAD_MAGIC, "byte 96: bad_magic; the rest was", [1]),
        ("a.hpsu", GOOD[:12] + b"\xff" * 4 + GOOD[16:], Reason.OVERSIZE, "byte 0: oversize", []),
        ("a.hpsu", GOOD[:12] + bytes(4) + GOOD[16:], Reason.TRUNCATED, "byte 0: truncated", []),
        ("a.hpsu", message([(1, 1.0, 1)], table="m/unknown"), Reason.UNKNOWN_TABLE, "unknown_table", []),
        ("a.hpsu", message([(1, 1.0, 1)], dim=3), Reason.ROW_SIZE, "row_size", []),
        ("a.hpsu", GOOD + AHEAD + message([(3, 1.0, 1)]), Reason.AHEAD, "byte 96: ahead", [1, 3]),
        ("m.items.npz", b"PK" + bytes(99), Reason.MALFORMED, "not an npz file", []),
        ("m.items.a.parquet", b"PAR1" + bytes(99), Reason.MALFORMED, "not a Parquet file", []),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # of messages, the bytes are random
)  # fmt: skip
def test_bad_files_are_rejected_and_later_ones_applied(
    harness, name, data, reason, report, applied
):
    harness.put(name, data)
    harness.put("z.hpsu", message([(50, 1.0, 1)]))
    harness.run()
    assert harness.rows([50]) == [1.0]
    assert harness.rows([1, 2, 3]) == [1.0 if k in applied else None for k in (1, 2, 3)]
    assert harness.names("rejected") == [name, f"{name}.reason"]
    assert (harness.folder / "rejected" / name).read_bytes() == data
    assert report in (harness.folder / "rejected" / f"{name}.reason").read_text()
    (letter,) = harness.letters.kept
    assert (letter.reason, letter.position.topic) == (reason, name)
    assert harness.metrics.counter(UPDATE_DEAD, reason.name.lower()).value == 1


@pytest.mark.parametrize(
    ("name", "dim", "report"),
    [
        ("items.npz", 2, "names no table: call it <model>.<table>.<anything>.npz"),
        ("m.unknown.1.npz", 2, "unknown_table: m/unknown"),
        ("m.items.1.npz", 4, "row_size: m/items, dim 4"),
    ],
)
def test_row_files_of_unknown_tables_are_rejected(harness, name, dim, report):
    np.savez(harness.folder / ".a", key=[1], vector=np.zeros((1, dim), np.float32))
    os.rename(harness.folder / ".a.npz", harness.folder / name)
    harness.run()
    assert report in (harness.folder / "rejected" / f"{name}.reason").read_text()


def test_row_file_with_future_versions_is_rejected(harness):
    versions = np.array([make_version(NOW_MS + 7_200_000)], np.uint64)
    row = np.ones((1, 2), np.float32)
    np.savez(harness.folder / ".a", key=[1], vector=row, version=versions)
    np.savez(harness.folder / ".b", key=[2], vector=row, version=versions - np.uint64(2**52))
    for name in "ab":
        os.rename(harness.folder / f".{name}.npz", harness.folder / f"m.items.{name}.npz")
    harness.run()
    assert harness.rows([1, 2]) == [None, 1.0]
    assert "ahead: m/items" in (harness.folder / "rejected/m.items.a.npz.reason").read_text()
    assert harness.names("applied") == ["m.items.b.npz"]


def test_unexpected_read_error_rejects_the_file(harness, monkeypatch):
    def broken(_path):
        raise ZeroDivisionError("?")

    monkeypatch.setattr("hps.updates.files.update_files.open_rows", broken)
    harness.put("m.items.1.npz", b"x")
    harness.run()
    assert "ZeroDivisionError" in (harness.folder / "rejected" / "m.items.1.npz.reason").read_text()


def test_report_of_a_file_with_thousands_of_faults_is_short(harness):
    harness.put("a.hpsu", DAMAGED * 1200)
    harness.run()
    lines = (harness.folder / "rejected" / "a.hpsu.reason").read_text().splitlines()
    assert (len(lines), lines[-1]) == (1001, "and 200 more")
    assert len(harness.letters.kept) == 1200


def test_removed_file_is_skipped(harness):
    harness.put("1.hpsu", GOOD)
    harness.put("2.hpsu", GOOD)
    first = harness.source.poll(0.0)
    (harness.folder / "1.hpsu").unlink()
    (harness.folder / "2.hpsu").unlink()
    harness.source.commit(first)
    for _ in range(2):
        harness.source.commit(harness.source.poll(0.0))
    assert harness.source.poll(0.0) is None
    assert harness.names("rejected") == harness.names("applied") == []


def test_missing_folder_is_polled_until_it_is_back(harness, caplog):
    harness.folder.rename(harness.folder.with_name("moved"))
    began = time.monotonic()
    assert harness.source.poll(0.1) is None
    assert time.monotonic() - began >= 0.1
    assert "cannot be read: No such file" in caplog.text
    assert "cannot be read" in harness.source.problem
    harness.folder.with_name("moved").rename(harness.folder)
    harness.put("1.hpsu", GOOD)
    assert harness.run() == 1
    assert harness.source.problem is None


def test_file_that_cannot_be_moved_raises_and_is_retried(harness):
    harness.put("1.hpsu", GOOD)
    harness.source.commit(harness.source.poll(0.0))
    end = harness.source.poll(0.0)
    (harness.folder / "applied").rmdir()
    (harness.folder / "applied").write_bytes(b"in the way")
    with pytest.raises(Unavailable, match=r"cannot be moved away: .*let this process write"):
        harness.source.commit(end)
    (harness.folder / "applied").unlink()
    (harness.folder / "applied").mkdir()
    harness.source.commit(end)
    assert harness.names("applied") == ["1.hpsu"]


def test_folder_that_cannot_be_created_raises_config_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"updates.directory.path: .* cannot be used: Not a dir"):
        DirectorySource(DirectorySettings(path=tmp_path / "file" / "x"), TABLES)


def test_lag_counts_waiting_files(harness):
    for name in ("1.hpsu", "2.hpsu", "3.hpsu"):
        harness.put(name, GOOD)
    assert harness.source.lag() is None  # not listed yet
    harness.source.poll(0.0)
    assert list(harness.source.lag().values()) == [3]
    harness.source.rewind()
    assert harness.source.lag() is None
    harness.run()
    assert list(harness.source.lag().values()) == [0]
