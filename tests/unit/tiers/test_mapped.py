"""Tables in mapped files with an overlay in RocksDB."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from hps.errors import ModelError, TierError
from hps.native.mapped_format import BLOCK_BYTES, HEADER_BYTES
from hps.tiers.base import FetchContext, Part
from hps.tiers.mapped import MappedChecks, MappedTier
from hps.tiers.mapped.verified_files import FileStamp, VerifiedFiles
from hps.tiers.positions import StreamPosition, TableChanges
from hps.tiers.rocksdb import LoadRecord, RocksDbTuning
from hps.types import EmbeddingTable, make_version
from tests.model.test_tier_model import KEYS, VERSIONS, TierMachine
from tests.support.mapped_tables import map_delta_rows, map_rows, write_files
from tests.support.tiers import TIERS, BesidePrimary, TierUnderTest
from tests.support.waiting import until

NOW_MS = time.time_ns() // 1_000_000
LOADED = make_version(NOW_MS, 1)
OLDER, NEWER = LOADED - 1, LOADED + 1
FILE_KEYS = np.array([1, 2, 3, -5, 2**40])


def rows_of(table, keys, first=0):
    keys = np.asarray(keys)
    return (keys[:, None] % 1000 + first + np.arange(table.dim)).astype(table.dtype)


def versions(keys, version):
    return np.full(len(keys), version, np.uint64)


@pytest.fixture
def table():
    return EmbeddingTable.make("users", 4)


class Opened:
    """Opens the tier again and again; the table's file has ``keys``."""

    def __init__(self, folder, table, keys=FILE_KEYS):
        self.folder, self.table = folder, table
        self.path = write_files(folder, table, keys, rows_of(table, keys)).folder / "mapped"
        self.tier = None

    def open(self, **options):
        if self.tier is not None:
            self.tier.close()
        self.tier = MappedTier(self.folder / "db", **options)
        return self.tier

    def mapped(self, keys=FILE_KEYS):
        tier = self.open()
        map_rows(tier, self.table, self.folder, keys, rows_of(self.table, keys), LOADED)
        return tier


@pytest.fixture
def opened(tmp_path, table):
    one = Opened(tmp_path, table)
    yield one
    if one.tier is not None:
        one.tier.close()


def fetch(tier, table, *keys):
    part = Part.make(table, np.array(keys, np.int64))
    ctx = FetchContext()
    tier.fetch([part], ctx)
    return part, ctx.degraded


def write(tier, table, keys, version, first=100, verb="insert"):
    getattr(tier, verb)(table, np.array(keys), rows_of(table, keys, first), versions(keys, version))


def test_rows_of_the_file_are_served_without_a_load(opened, table):
    tier = opened.mapped()
    part, degraded = fetch(tier, table, 3, 4, 2**40)
    np.testing.assert_array_equal(part.out[[0, 2]], rows_of(table, [3, 2**40]))
    assert part.versions.tolist() == [LOADED, 0, LOADED]
    assert part.missing.tolist() == [1]
    assert not degraded
    assert tier.rows(table) == 5
    assert tier.rows_exact(table)
    assert tier.loaded(table).version == LOADED
    assert not tier.streamed(table)
    assert tier.mapped_figures().mapped_tables == 1


@pytest.mark.parametrize("verb", ["insert", "update"])
def test_writes_older_than_the_file_are_ignored(opened, table, verb):
    tier = opened.mapped()
    write(tier, table, [1, 2], OLDER, verb=verb)
    tier.delete(table, np.array([3]), versions([3], OLDER))
    part, _ = fetch(tier, table, 1, 2, 3)
    np.testing.assert_array_equal(part.out, rows_of(table, [1, 2, 3]))
    write(tier, table, [1, 2], LOADED, verb=verb)
    np.testing.assert_array_equal(fetch(tier, table, 1)[0].out, rows_of(table, [1], 100))


@pytest.mark.parametrize("access", ["primary", "read_only", "secondary"])
def test_overlay_is_found_again_after_a_restart(opened, table, access):
    tier = opened.mapped()
    write(tier, table, [1, 7], NEWER)
    write(tier, table, [2], NEWER, verb="update")
    tier.delete(table, np.array([3, 8]), versions([3, 8], NEWER))
    tier.evict(table, np.array([-5]))
    again = EmbeddingTable.make("users", 4)
    tier = opened.open(access=access)
    part, _ = fetch(tier, again, 1, 7, 2, 3, 8, -5, 2**40)
    np.testing.assert_array_equal(part.out[:3], rows_of(table, [1, 7, 2], 100))
    np.testing.assert_array_equal(part.out[6], rows_of(table, [2**40])[0])
    assert part.versions.tolist() == [NEWER] * 5 + [0, LOADED]
    assert part.missing.tolist() == [5]
    if access == "primary":
        assert tier.mapped_figures().mapped_overridden == 4


def test_expired_tombstones_hide_the_row_for_good(tmp_path, opened, table):
    tier = opened.mapped()
    late = time.time() + table.tombstone_ttl_s + 60
    tier.delete(table, np.array([3]), versions([3], NEWER))
    for access in ("primary", "secondary"):
        tier = opened.open(clock=lambda: late, access=access)
        if access == "primary":
            write(tier, table, [7, 8, 9], NEWER)  # removes expired tombstones
        assert fetch(tier, table, 3)[0].missing.tolist() == [0]
    tier = opened.open()
    assert fetch(tier, table, 3)[0].missing.tolist() in ([0], [])
    assert fetch(tier, table, 3)[0].source.tolist() == [0]


def test_scan_is_ordered_and_has_each_row_once(tmp_path, table):
    keys = np.random.default_rng(1).permutation(100_000)[:50_000] - 50_000
    opened = Opened(tmp_path, table, keys)
    tier = opened.mapped(keys)
    new = np.arange(60_000, 61_000)
    write(tier, table, [*keys[:5000], *new], NEWER)
    tier.delete(table, keys[5000:6000], versions(keys[5000:6000], NEWER))
    wanted = np.sort(np.concatenate([keys[:5000], keys[6000:], new]))
    parts = list(tier.scan(table))
    found = np.concatenate([part.keys for part in parts])
    np.testing.assert_array_equal(found, wanted)
    newer = np.isin(found, [*keys[:5000], *new])
    vectors = np.concatenate([part.vectors for part in parts])
    expected = np.where(newer[:, None], rows_of(table, found, 100), rows_of(table, found))
    np.testing.assert_array_equal(vectors, expected)
    stamps = np.concatenate([part.versions for part in parts])
    assert (stamps == np.where(newer, NEWER, LOADED)).all()
    after = np.concatenate([part.keys for part in tier.scan(table, start=17)])
    np.testing.assert_array_equal(after, wanted[wanted >= 17])
    tier = opened.open(access="secondary")
    np.testing.assert_array_equal(np.concatenate([part.keys for part in tier.scan(table)]), wanted)
    tier.close()


def test_streams_are_applied_with_their_positions(opened, table):
    tier = opened.mapped()
    changes = TableChanges(
        np.array([1, 2, 9]),
        rows_of(table, [1, 2, 9], 100),
        np.array([NEWER, OLDER, NEWER], np.uint64),
        np.array([3, -5]),
        np.array([OLDER, NEWER], np.uint64),
    )
    tier.apply(table, changes, [StreamPosition("t", 0, 5)])
    asked = np.array([1, 2, 3, -5, 9, 10])
    known = tier.versions(table, asked)
    assert known.tolist() == [NEWER, LOADED, LOADED, NEWER, NEWER, 0]
    assert tier.applied(table, "t", 0) == 5
    assert tier.streamed(table)
    tier = opened.open()
    assert tier.versions(table, asked).tolist() == known.tolist()
    tier.drop(table)
    assert fetch(tier, table, 1)[0].missing.tolist() == [0]
    assert not tier.is_mapped(table)


def test_a_database_with_rows_is_not_mapped(opened, table):
    tier = opened.open()
    write(tier, table, [1], NEWER)
    load = LoadRecord("d", 5, LOADED, 4, "float32")
    assert not tier.map(table, opened.path, load)


def test_another_file_is_refused_once_rows_were_streamed(opened, table, tmp_path):
    tier = opened.mapped()
    other = write_files(tmp_path / "other", table, np.array([4]), rows_of(table, [4]))
    load = LoadRecord(other.digest, 1, LOADED, 4, "float32")
    assert tier.map(table, other.folder / "mapped", load)
    assert fetch(tier, table, 4, 1)[0].missing.tolist() == [1]
    write(tier, table, [4], NEWER)
    with pytest.raises(ModelError, match="would be lost"):
        tier.map(table, opened.path, LoadRecord("x", 5, LOADED, 4, "float32"))


def test_missing_file_is_reported(opened, table):
    opened.mapped()
    opened.path.with_name("kept").hardlink_to(opened.path)
    mapped = opened.tier.mapped(table).file.header.path
    mapped.unlink()
    tier = opened.open()
    with pytest.raises(TierError, match=r"mapped file, which cannot be used.*start the node"):
        fetch(tier, table, 1)


def test_damaged_block_is_answered_by_the_default(tmp_path, table):
    keys = np.arange(100_000)
    opened = Opened(tmp_path, table, keys)
    tier = opened.mapped(keys)
    write(tier, table, [4], NEWER)
    mapped = tier.mapped(table)
    inside = np.flatnonzero(mapped.positions(keys) < 43_000)  # record: 24 bytes
    assert tier.check_blocks(table) == 0
    with mapped.file.header.path.open("r+b") as file:
        file.seek(HEADER_BYTES + 100)
        file.write(b"\xff" * 8)
    calls = []
    tier.damage.changed = lambda: calls.append(1)
    checks = MappedChecks(tier, lambda: [table], 1 << 30, every_s=0.01)
    until(lambda: calls)
    checks.close()
    part, degraded = fetch(tier, table, *keys[inside[:500]], 4)
    assert degraded == ["rocksdb"]
    assert len(part.missing) >= 499
    assert list(tier.damaged_files().values()) == [table.id]
    beyond = np.setdiff1d(keys, keys[mapped.positions(keys) < BLOCK_BYTES // 24 + 2])
    part, degraded = fetch(tier, table, *beyond)
    assert not len(part.missing)
    assert not degraded
    write(tier, table, [keys[inside[0]]], NEWER)
    part, degraded = fetch(tier, table, keys[inside[0]])
    assert not degraded
    tier.close()


def test_a_file_is_verified_once_until_it_is_replaced(tmp_path, table):
    opened = Opened(tmp_path, table, np.arange(1000))
    tier = opened.mapped()
    served, checked, real = [table], [], tier.check_blocks

    def check(*arguments):
        checked.append(arguments)
        return real(*arguments)

    tier.check_blocks = check
    checks = MappedChecks(tier, lambda: list(served), 1 << 30, every_s=0.01)
    until(lambda: len(checked) == 1)
    served.clear()
    time.sleep(0.05)
    served.append(table)
    time.sleep(0.1)
    assert len(checked) == 1, "served again, as after a switch and back"
    path = tier.mapped(table).file.header.path
    os.utime(path, ns=(1, 1))
    until(lambda: len(checked) == 2)
    checks.close()
    tier.close()


def test_file_that_a_load_has_verified_is_not_verified_again(tmp_path, table):
    opened = Opened(tmp_path, table, np.arange(1000))
    tier, verified, checked = opened.mapped(), VerifiedFiles(), []
    (file,) = tier.mapped(table).files
    assert list(verified.verify(file))
    assert not list(verified.verify(file))
    tier.check_blocks = lambda *arguments: checked.append(arguments) or 0
    checks = MappedChecks(tier, lambda: [table], 1 << 30, every_s=0.01, verified=verified)
    time.sleep(0.1)
    assert not checked
    os.utime(file.header.path, ns=(1, 1))
    until(lambda: FileStamp.of(file) in verified)
    checks.close()
    assert checked
    assert not list(verified.verify(file))
    tier.close()


@pytest.mark.skipif(os.environ.get("HPS_NATIVE") == "off", reason="the twin is ended by SIGBUS")
def test_file_cut_short_degrades(tmp_path, table):
    keys = np.arange(100_000)
    opened = Opened(tmp_path, table, keys)
    tier = opened.mapped(keys)
    write(tier, table, [4, 7], NEWER)
    with tier.mapped(table).file.header.path.open("r+b") as file:
        file.truncate(HEADER_BYTES)
    part, degraded = fetch(tier, table, *range(1000))
    assert degraded == ["rocksdb"]
    part, _ = fetch(tier, table, 4, 7)
    np.testing.assert_array_equal(part.out, rows_of(table, [4, 7], 100))
    assert tier.damaged_files()
    tier.close()


class StaticMachine(TierMachine):
    """The tier's files have some rows already, as the model; it is closed and opened now and then."""

    access = "primary"

    def __init__(self):
        super().__init__(open_mapped)

    map_table = staticmethod(map_rows)

    @initialize()
    def fill(self):
        keys = np.array(KEYS[::2], np.int64)
        stamp = VERSIONS[4]
        for table in self.tables:
            rows = self.rows(table, len(keys))
            tier = self.tier._primary if isinstance(self.tier, BesidePrimary) else self.tier
            self.map_table(tier, table, Path(self.folder.name), keys, rows, stamp)
            self.model.insert(table, keys, rows, versions(keys, stamp))

    @rule()
    def restart(self):
        path = self.tier.path
        self.tier.close()
        self.tier = MappedTier(path, tuning=RocksDbTuning(block_cache_bytes=1 << 20))


class DeltaMachine(StaticMachine):
    map_table = staticmethod(map_delta_rows)


class SecondaryMachine(StaticMachine):
    def __init__(self):
        TierMachine.__init__(self, open_secondary)

    restart = None


class SecondaryDeltaMachine(SecondaryMachine):
    map_table = staticmethod(map_delta_rows)


def open_mapped(path):
    tables = [EmbeddingTable.make(name, dim) for name, dim in (("a", 4), ("b", 3), ("c", 64))]
    tier = MappedTier(path, tuning=RocksDbTuning(block_cache_bytes=1 << 20))
    return TierUnderTest(TIERS["mapped"], tier, tables)


def open_secondary(path):
    one = open_mapped(path)
    one.tier.open_tables(one.tables)
    return TierUnderTest(one.case, BesidePrimary(one.tier, one.tables, "secondary"), one.tables)


MACHINES = StaticMachine, DeltaMachine, SecondaryMachine, SecondaryDeltaMachine


@pytest.mark.parametrize("machine", MACHINES)
def test_file_and_overlay_behave_like_one_store(machine):
    run_state_machine_as_test(
        machine, settings=settings(max_examples=20, stateful_step_count=40, deadline=None)
    )
