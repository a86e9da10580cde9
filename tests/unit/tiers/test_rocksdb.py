"""RocksDbTier beyond the contract of every tier: what lies on disk, what a restart finds, and the
errors of a broken folder."""

import os
import resource
import struct
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from rocksdict import Options, Rdict

from hps.errors import TierError
from hps.tiers.base import FetchContext, Part
from hps.tiers.rocksdb import LoadRecord, RocksDbTier, RocksDbTuning, restore
from hps.tiers.rocksdb import database_options as options
from hps.tiers.rocksdb.errors import translate_rocksdb_error
from hps.types import EmbeddingTable, Source, make_version, version_now
from tests.support.waiting import until

DIM = 4
KEYS = np.array([5, -3, 2**62, 0, -(2**63), 2**63 - 1], np.int64)
VECTORS = np.arange(len(KEYS) * DIM, dtype=np.float32).reshape(-1, DIM)
VERSIONS = np.arange(10, 10 + len(KEYS), dtype=np.uint64)


def table(name: str = "items", **settings) -> EmbeddingTable:
    return EmbeddingTable.make(name, DIM, model="ctr", version=7, **settings)


def fetch(tier: RocksDbTier, table: EmbeddingTable, keys: np.ndarray) -> Part:
    part = Part.make(
        table, np.asarray(keys, np.int64), np.full((len(keys), table.dim), -1, table.dtype)
    )
    tier.fetch([part], FetchContext())
    return part


def raw(path: Path, family: str) -> dict[bytes, bytes]:
    """Read a column family's contents with rocksdict alone."""
    families = dict.fromkeys(Rdict.list_cf(str(path)), Options(raw_mode=True))
    db = Rdict(str(path), Options(raw_mode=True), families)
    found = dict(db.get_column_family(family).items())
    db.close()
    return found


class TestOnDisk:
    def test_native_rows_have_version_and_flags_in_key_order(self, tmp_path):
        items = table()
        tier = RocksDbTier(tmp_path, clock=lambda: 0.0)
        tier.insert(items, KEYS, VECTORS, VERSIONS)
        tier.delete(items, KEYS[:1], VERSIONS[:1] + np.uint64(1))
        tier.close()
        found = raw(tmp_path, "ctr/7/items")
        order = np.argsort(KEYS)
        assert list(found) == [struct.pack(">Q", (int(k) + 2**63)) for k in KEYS[order]]
        for i in order[order != 0]:
            stored = found[struct.pack(">Q", int(KEYS[i]) + 2**63)]
            assert stored == struct.pack("<QB4f", int(VERSIONS[i]), 0, *VECTORS[i])
        assert found[struct.pack(">Q", 5 + 2**63)] == struct.pack("<QB", 11, 1)

    @pytest.mark.parametrize(("bits", "form"), [(64, "<q"), (32, "<I")])
    def test_hps_layout_stores_bare_keys_and_rows(self, tmp_path, bits, form):
        keys = KEYS if bits == 64 else np.array([5, 2**32 - 1, 2**31, 0, 258, 70_000])
        tier = RocksDbTier(tmp_path, layout="hps")
        tier.insert(table(key_bits=bits), keys, VECTORS, VERSIONS)
        tier.close()
        found = raw(tmp_path, "hps_et.ctr.items")
        assert found == {
            struct.pack(form, int(k)): v.tobytes() for k, v in zip(keys, VECTORS, strict=True)
        }

    @pytest.mark.parametrize(("bits", "form"), [(64, "<q"), (32, "<I")])
    def test_database_written_by_hps_is_read(self, tmp_path, bits, form):
        options = Options(raw_mode=True)
        db = Rdict(str(tmp_path), options)
        family = db.create_column_family("hps_et.ctr.items", options)
        for key in (1, 258, 70_000):
            family[struct.pack(form, key)] = np.full(DIM, key, np.float32).tobytes()
        del family
        db.close()
        tier = RocksDbTier(tmp_path, layout="hps")
        items = table(key_bits=bits)
        part = fetch(tier, items, [70_000, 2, 258, 1])
        assert part.missing.tolist() == [1]
        assert part.out[:, 0].tolist() == [70_000, -1, 258, 1]
        assert part.versions.tolist() == [0, 0, 0, 0]
        tier.insert(items, np.array([2]), np.full((1, DIM), 9, np.float32), VERSIONS[:1])
        assert fetch(tier, items, [2]).out[0, 0] == 9
        tier.close()
        assert struct.pack(form, 2) in raw(tmp_path, "hps_et.ctr.items")

    def test_narrow_keys_keep_their_low_32_bits(self, tmp_path):
        tier = RocksDbTier(tmp_path)
        items = table(key_bits=32)
        keys = np.array([7, 7 + 2**32, -1], np.int64)
        tier.insert(items, keys, VECTORS[:3], np.array([2, 1, 1], np.uint64))
        part = fetch(tier, items, [7, 0xFFFF_FFFF])
        assert part.out.tolist() == VECTORS[[0, 2]].tolist()
        assert tier.rows(items) == 2
        tier.close()


class TestRows:
    """Number of rows: exact until something is written after the load."""

    @pytest.mark.parametrize("layout", ["native", "hps"])
    def test_rows_are_exact_until_table_is_written(self, tmp_path, monkeypatch, layout):
        monkeypatch.setattr("hps.tiers.rocksdb.load._FILE_BYTES", 20_000)
        items = EmbeddingTable.make("items", 64)
        keys = np.arange(3000)
        tier = RocksDbTier(tmp_path, layout=layout)
        code = np.sort(tier.codes(items, keys))
        record = LoadRecord("x", 3000, 1, 64)
        some = np.ones((75, 64), np.float32)
        tier.bulk_load(items, [(code[i : i + 75], some) for i in range(0, 3000, 75)], record)
        tier.close()
        assert len(list(tmp_path.glob("*.sst"))) >= 20  # RocksDB's own estimate samples so many
        tier = RocksDbTier(tmp_path, layout=layout)
        assert (tier.rows(items), tier.rows_exact(items)) == (3000, layout == "native")
        version = np.array([version_now()], np.uint64)
        for rows in (keys[:1], np.array([5000]), keys):
            versions = np.repeat(version, len(rows))
            tier.insert(items, rows, np.ones((len(rows), 64), np.float32), versions)
            tier.flush()
            # What was added counts once it is compacted.
            assert (tier.rows(items), tier.rows_exact(items)) == (3000, False)
        assert tier.entries(items) == 6002
        tier._database.family(items).data.compact_range(None, None)
        assert tier.rows(items) == tier.entries(items) == 3001
        tier.close()

    def test_rows_of_table_never_loaded_are_not_exact(self, tmp_path):
        tier = RocksDbTier(tmp_path)
        tier.insert(table(), KEYS, VECTORS, VERSIONS)
        assert (tier.rows(table()), tier.rows_exact(table())) == (len(KEYS), False)
        tier.close()


class TestRestart:
    def test_rows_versions_and_tombstones_survive_restart(self, tmp_path):
        tier = RocksDbTier(tmp_path)
        now = version_now()
        tier.insert(table(), KEYS, VECTORS, VERSIONS)
        tier.delete(table(), KEYS[1:2], np.array([now], np.uint64))
        tier.close()
        tier.close()
        tier = RocksDbTier(tmp_path)
        items = table()
        part = fetch(tier, items, KEYS)
        expected = VECTORS.copy()
        expected[1] = -1
        assert part.out.tolist() == expected.tolist()
        assert part.source.tolist() == [4, 0, 4, 4, 4, 4]
        assert part.versions[1] == now
        assert len(part.missing) == 0
        tier.insert(items, KEYS[1:2], VECTORS[1:2], np.array([now - 1], np.uint64))
        assert fetch(tier, items, KEYS[1:2]).source.tolist() == [Source.DEFAULT]
        tier.close()

    def test_tombstone_expires_after_ttl(self, tmp_path):
        clock = [1_000_000.0]
        tier = RocksDbTier(tmp_path, clock=lambda: clock[0])
        items = table(tombstone_ttl_s=60.0)
        deleted = np.array([make_version(1_000_000_000)], np.uint64)
        tier.insert(items, KEYS[:1], VECTORS[:1], VERSIONS[:1])
        tier.delete(items, KEYS[:1], deleted)
        clock[0] += 59
        tier.insert(items, KEYS[:1], VECTORS[:1], VERSIONS[:1])
        assert len(fetch(tier, items, KEYS[:1]).missing) == 0
        clock[0] += 2
        assert fetch(tier, items, KEYS[:1]).missing.tolist() == [0]
        tier.insert(items, KEYS[:1], VECTORS[:1], VERSIONS[:1])
        assert fetch(tier, items, KEYS[:1]).source.tolist() == [Source.ROCKSDB]
        tier.close()

    def test_tables_of_two_models_and_versions_do_not_mix(self, tmp_path):
        tables = [
            EmbeddingTable.make("items", DIM, model=m, version=v)
            for m in ("a", "b")
            for v in (1, 2)
        ]
        tier = RocksDbTier(tmp_path)
        for i, each in enumerate(tables):
            tier.insert(each, KEYS[:1], np.full((1, DIM), i, np.float32), VERSIONS[:1])
        assert [fetch(tier, t, KEYS[:1]).out[0, 0] for t in tables] == [0, 1, 2, 3]
        tier.drop(tables[0], tables[3])
        assert [len(fetch(tier, t, KEYS[:1]).missing) for t in tables] == [1, 0, 0, 1]
        tier.close()

    def test_table_dropped_through_another_object_is_removed(self, tmp_path):
        tier, items = RocksDbTier(tmp_path), table("items")
        tier.insert(items, KEYS, VECTORS, VERSIONS)
        tier.drop(table("items"))
        assert len(fetch(tier, items, KEYS).missing) == len(KEYS)
        tier.insert(items, KEYS, VECTORS, VERSIONS)
        assert not len(fetch(tier, items, KEYS).missing)
        tier.close()

    def test_tables_can_be_opened_while_rows_are_in_use(self, tmp_path):
        tier = RocksDbTier(tmp_path)
        first = [table(f"t{i}") for i in range(5)]
        tier.open_tables(first)
        more = [table(f"u{i}") for i in range(5)]
        tier.open_tables(more)
        tier.insert(first[0], KEYS, VECTORS, VERSIONS)
        last = [table(f"v{i}") for i in range(5)]
        tier.open_tables(last)
        for each in (*more, *last):
            assert len(fetch(tier, each, KEYS).missing) == len(KEYS)
        assert fetch(tier, first[0], KEYS).out.tolist() == VECTORS.tolist()
        tier.close()


def test_write_buffers_are_bounded_over_all_tables(tmp_path, monkeypatch):
    """With buffers an eighth of ours; each table's last one is full in part."""
    monkeypatch.setattr(options, "_WRITE_BUFFERS", bound := options._WRITE_BUFFERS // 8)
    monkeypatch.setattr(options, "_WRITE_BUFFER", buffer := options._WRITE_BUFFER // 8)
    tier = RocksDbTier(tmp_path)
    tables = [EmbeddingTable.make(f"wide{i}", 256, model="ctr") for i in range(24)]
    tier.open_tables(tables)
    n = int(3.7 * buffer / 1100)
    rows = np.zeros((n, 256), np.float32)
    for each in tables:
        tier.insert(each, np.arange(n), rows, np.full(n, 1, np.uint64))
    assert len(tables) * n * 1024 > 4 * bound
    data = [tier._database.family(each).data for each in tables]

    def in_memory() -> int:
        return sum(each.property_int_value("rocksdb.cur-size-all-mem-tables") for each in data)

    until(lambda: in_memory() <= bound)
    tier.close()


class TestTombstonesOnDisk:
    """Expired tombstones are removed from disk."""

    TTL = 60.0
    START = 1_000_000.0

    @pytest.fixture
    def clock(self):
        return [self.START]

    @pytest.fixture
    def opened(self, tmp_path, clock):
        return lambda: RocksDbTier(tmp_path, clock=lambda: clock[0])

    def items(self):
        return table(tombstone_ttl_s=self.TTL)

    def at(self, seconds, n=1):
        return np.full(n, make_version(int((self.START + seconds) * 1000)), np.uint64)

    def insert(self, tier, items, keys, seconds):
        keys = np.asarray(keys, np.int64)
        rows = np.zeros((len(keys), DIM), np.float32)
        tier.insert(items, keys, rows, self.at(seconds, len(keys)))

    def left(self, path, tier):
        """Return the keys on disk, and the number of entries in the tombstone index."""
        tier.close()
        stored = raw(path, "ctr/7/items")
        entries = [key for key in raw(path, "default") if key.startswith(b"dead:")]
        return [struct.unpack(">Q", key)[0] - 2**63 for key in stored], len(entries)

    def test_later_writes_remove_expired_tombstones(self, tmp_path, opened, clock):
        tier, items = opened(), self.items()
        self.insert(tier, items, range(10), 0)
        tier.delete(items, np.arange(10), self.at(1, 10))
        clock[0] += self.TTL
        self.insert(tier, items, [20], self.TTL)
        tier.close()
        tier, items = opened(), self.items()
        assert len(fetch(tier, items, np.arange(10)).missing) == 0  # still remembered
        clock[0] += 2
        self.insert(tier, items, range(21, 27), self.TTL)
        self.insert(tier, items, range(27, 31), self.TTL)
        assert self.left(tmp_path, tier) == (list(range(20, 31)), 0)

    def test_one_write_removes_few_expired_tombstones(self, tmp_path, opened, clock):
        tier, items = opened(), self.items()
        for seconds in range(10):
            tier.delete(items, np.arange(100) + 100 * seconds, self.at(seconds, 100))
        clock[0] += self.TTL + 8.5  # those of the last second stay
        self.insert(tier, items, range(2000, 2200), 60)
        keys, entries = self.left(tmp_path, tier)
        assert (min(keys), len(keys), entries) == (200, 1000, 800)
        tier, items = opened(), self.items()
        for _ in range(4):
            self.insert(tier, items, range(2000, 2200), 60)
        keys, entries = self.left(tmp_path, tier)
        assert (min(keys), len(keys), entries) == (900, 300, 100)

    def test_rows_and_later_tombstones_of_same_keys_are_kept(self, tmp_path, opened, clock):
        tier, items = opened(), self.items()
        tier.delete(items, np.arange(3), self.at(0, 3))
        self.insert(tier, items, [0], 1)
        tier.delete(items, np.array([1]), self.at(30))
        clock[0] += self.TTL + 5
        self.insert(tier, items, [5, 6, 7], 60)
        assert len(fetch(tier, items, np.array([1])).missing) == 0
        assert self.left(tmp_path, tier) == ([0, 1, 5, 6, 7], 1)

    def test_deletion_older_than_tombstone_ttl_leaves_no_tombstone(self, tmp_path, opened, clock):
        tier, items = opened(), self.items()
        self.insert(tier, items, [0, 1], -500)
        tier.delete(items, np.array([0]), self.at(-400))
        assert fetch(tier, items, np.array([0, 1])).missing.tolist() == [0]
        assert self.left(tmp_path, tier) == ([1], 0)

    def test_tombstones_of_tables_do_not_mix(self, tmp_path, opened, clock):
        tier, items = opened(), self.items()
        other = table("items:2", tombstone_ttl_s=self.TTL)
        tier.delete(items, np.arange(5), self.at(0, 5))
        tier.delete(other, np.arange(5), self.at(0, 5))
        clock[0] += self.TTL + 1
        self.insert(tier, other, range(5, 10), 60)
        assert self.left(tmp_path, tier) == ([0, 1, 2, 3, 4], 5)

    def test_dropped_table_leaves_no_tombstones(self, tmp_path, opened):
        tier, items = opened(), self.items()
        tier.delete(items, np.arange(5), self.at(0, 5))
        tier.drop(items)
        tier.insert(items, KEYS, VECTORS, VERSIONS)
        assert self.left(tmp_path, tier)[1] == 0


class TestForgetting:
    def test_tables_can_be_dropped_on_full_disk(self, tmp_path, monkeypatch):
        tier, items = RocksDbTier(tmp_path), table()
        tier.insert(items, KEYS, VECTORS, VERSIONS)
        monkeypatch.setattr(tier._database.throttle, "free_bytes", lambda: 0)
        with pytest.raises(TierError, match="min_free_bytes"):
            tier.insert(items, KEYS, VECTORS, VERSIONS)
        tier.drop(items, table("never made"))
        tier.close()
        assert "ctr/7/items" not in Rdict.list_cf(str(tmp_path))

    def test_released_table_is_reopened_on_request(self, tmp_path):
        tier, items = RocksDbTier(tmp_path), table()
        tier.insert(items, KEYS, VECTORS, VERSIONS)
        tier.release(items, table("never opened"))
        assert not tier._database._families
        assert fetch(tier, items, KEYS).out.tolist() == VECTORS.tolist()
        assert tier.streamed(items)
        tier.close()

    def test_table_with_two_objects_is_counted_once(self, tmp_path):
        tier = RocksDbTier(tmp_path)
        tier.insert(table(), KEYS, VECTORS, VERSIONS)
        tier.flush()
        once = tier.figures().table_bytes
        tier.open_tables([table()])
        assert tier.figures().table_bytes == once > 0
        tier.close()


class TestBulkLoad:
    def load(self, tier, items, keys, digest="one", **record):
        code = tier.codes(items, np.asarray(keys, np.int64))
        order = np.argsort(code)
        vectors = np.repeat(np.asarray(keys, np.float32)[order, None], DIM, axis=1)
        chunks = [(code[order][:2], vectors[:2]), (code[order][2:], vectors[2:])]
        return tier.bulk_load(items, chunks, LoadRecord(digest, **record))

    @pytest.mark.parametrize("expected", [0, 4, 1_000_000], ids="expects {}".format)
    @pytest.mark.parametrize("layout", ["native", "hps"])
    def test_loaded_rows_have_version_of_record(self, tmp_path, layout, expected):
        tier = RocksDbTier(tmp_path, layout=layout)
        items = table()
        assert tier.loaded(items) is None
        done = self.load(tier, items, [3, -9, 256, 1], version=77, rows=expected)
        assert (done.rows, done.complete) == (4, True)
        assert tier.loaded(items) == done
        part = fetch(tier, items, [1, 256, 3, -9])
        assert part.out[:, 0].tolist() == [1, 256, 3, -9]
        assert part.versions.tolist() == [77 if layout == "native" else 0] * 4
        tier.close()
        tier = RocksDbTier(tmp_path, layout=layout)
        assert tier.loaded(table()) == done
        tier.close()

    def test_insert_replaces_existing_row(self, tmp_path):
        tier = RocksDbTier(tmp_path)
        items = table()
        first, last = -(2**63), 2**63 - 1
        self.load(tier, items, [1, 2, 3, first, last])
        tier.insert(items, np.array([4]), VECTORS[:1], VERSIONS[:1])
        assert tier.streamed(items)
        self.load(tier, items, [3, 5, 6], "two")
        assert not tier.streamed(items)
        wanted = [1, 2, 3, 4, 5, 6, first, last]
        assert fetch(tier, items, wanted).missing.tolist() == [0, 1, 3, 6, 7]
        assert tier.loaded(items).digest == "two"
        tier.close()

    def test_hps_layout_keeps_rows_not_in_files(self, tmp_path):
        tier = RocksDbTier(tmp_path, layout="hps")
        items = table()
        tier.insert(items, np.array([3, 4]), VECTORS[:2], VERSIONS[:2])
        self.load(tier, items, [1, 2, 3])
        assert fetch(tier, items, [1, 2, 3, 4]).out[:, 0].tolist() == [1, 2, 3, VECTORS[1, 0]]
        tier.close()

    def test_other_tables_are_writable_during_load(self, tmp_path):
        tier = RocksDbTier(tmp_path)
        items, users = table(), table("users")
        tier.open_tables([items, users])

        def chunks():
            writer = threading.Thread(target=tier.insert, args=(users, KEYS, VECTORS, VERSIONS))
            writer.start()
            writer.join(60)
            assert not writer.is_alive()
            yield tier.codes(items, np.array([1])), VECTORS[:1]

        tier.bulk_load(items, chunks(), LoadRecord("x"))
        assert fetch(tier, users, KEYS).out.tolist() == VECTORS.tolist()
        tier.close()

    def test_streamed_mark_survives_restart(self, tmp_path):
        tier = RocksDbTier(tmp_path)
        self.load(tier, table(), [1, 2, 3])
        tier.close()
        tier = RocksDbTier(tmp_path)
        items = table()
        assert not tier.streamed(items)
        tier.delete(items, np.array([2]), np.array([version_now()], np.uint64))
        tier.close()
        tier = RocksDbTier(tmp_path)
        assert tier.streamed(table())
        tier.close()

    def test_failed_load_counts_as_not_loaded_and_leaves_no_files(self, tmp_path):
        tier = RocksDbTier(tmp_path)
        items = table()
        self.load(tier, items, [1, 2, 3])

        def broken():
            yield tier.codes(items, np.array([8])), VECTORS[:1]
            raise TierError("source", "the disk went away")

        with pytest.raises(TierError, match="went away"):
            tier.bulk_load(items, broken(), LoadRecord("three"))
        assert tier.loaded(items) is None
        assert fetch(tier, items, [8]).missing.tolist() == [0]
        assert not list(tmp_path.glob("hps-ingest/*"))
        tier.close()

    @pytest.mark.parametrize("expected", [0, 2])
    def test_unsorted_codes_are_rejected(self, tmp_path, expected):
        tier = RocksDbTier(tmp_path)
        items = table()
        code = tier.codes(items, np.array([2, 1]))
        with pytest.raises(TierError, match="order"):
            tier.bulk_load(items, [(code, VECTORS[:2])], LoadRecord("x", expected))
        assert tier.loaded(items) is None
        tier.close()

    def test_leftover_files_are_removed_at_start(self, tmp_path):
        RocksDbTier(tmp_path).close()
        (tmp_path / "hps-ingest").mkdir()
        (tmp_path / "hps-ingest" / "1.sst").write_bytes(b"half")
        RocksDbTier(tmp_path).close()
        assert not (tmp_path / "hps-ingest").exists()


class TestFetch:
    def test_thousands_of_unsorted_keys_are_fetched(self, tmp_path):
        rng = np.random.default_rng(5)
        keys = np.unique(rng.integers(-(2**63), 2**63 - 1, 20_000))
        rng.shuffle(keys)
        vectors = rng.random((len(keys), DIM), np.float32)
        tier = RocksDbTier(tmp_path)
        items = table()
        tier.insert(items, keys, vectors, np.full(len(keys), 3, np.uint64))
        wanted = rng.permutation(np.concatenate([keys[:15_000], np.arange(100)]))
        part = fetch(tier, items, wanted)
        at = {int(k): i for i, k in enumerate(keys)}
        expected = np.array([vectors[at[k]] if k in at else [-1] * DIM for k in wanted.tolist()])
        assert part.out.tolist() == expected.astype(np.float32).tolist()
        assert len(part.missing) == 100
        tier.close()

    def test_row_of_another_dim_is_rejected_with_both_lengths(self, tmp_path):
        tier = RocksDbTier(tmp_path)
        tier.insert(table(), KEYS, VECTORS, VERSIONS)
        wider = EmbeddingTable.make("items", 8, model="ctr", version=7)
        with pytest.raises(TierError, match=r"ctr/7/items: a stored row has 25 bytes, expected 41"):
            fetch(tier, wider, KEYS)
        tier.close()

    def test_concurrent_readers_see_whole_rows(self, tmp_path):
        tier = RocksDbTier(tmp_path)
        items = EmbeddingTable.make("items", 64)
        keys = np.arange(300)
        rows = np.zeros((300, 64), np.float32)
        tier.insert(items, keys, rows, np.full(300, 1, np.uint64))
        stop, torn = threading.Event(), []

        def read():
            while not stop.is_set():
                part = fetch(tier, items, keys)
                if (part.out != part.out[:, :1]).any() or (
                    part.out[:, 0] + 1 != part.versions
                ).any():
                    torn.append(part.out)

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        for version in range(2, 40):
            rows += 1
            tier.insert(items, keys, rows, np.full(300, version, np.uint64))
        stop.set()
        for reader in readers:
            reader.join()
        assert not torn
        tier.close()

    def test_calls_after_close_are_rejected(self, tmp_path):
        tier = RocksDbTier(tmp_path)
        items = table()
        tier.insert(items, KEYS, VECTORS, VERSIONS)
        tier.close()
        for call in (
            lambda: fetch(tier, items, KEYS),
            lambda: tier.insert(items, KEYS, VECTORS, VERSIONS),
            lambda: tier.loaded(items),
            tier.sync,
        ):
            with pytest.raises(TierError, match="closed"):
                call()


class TestReadOnly:
    def test_read_only_never_changes_folder(self, tmp_path):
        tier = RocksDbTier(tmp_path)
        tier.insert(table(), KEYS, VECTORS, VERSIONS)
        tier.close()
        before = {p.name: (p.stat().st_mtime_ns, p.stat().st_size) for p in tmp_path.iterdir()}
        tier = RocksDbTier(tmp_path, access="read_only")
        items = table()
        assert fetch(tier, items, KEYS).out.tolist() == VECTORS.tolist()
        for call in (
            lambda: tier.insert(items, KEYS, VECTORS, VERSIONS),
            lambda: tier.delete(items, KEYS, VERSIONS),
            lambda: tier.evict(items, KEYS),
            lambda: tier.drop(items),
            lambda: tier.bulk_load(items, [], LoadRecord("x")),
        ):
            with pytest.raises(TierError, match="access: read_only; writing is off"):
                call()
        with pytest.raises(TierError, match=r"holds no table ctr/7/other"):
            tier.open_tables([table("other")])
        tier.close()
        after = {p.name: (p.stat().st_mtime_ns, p.stat().st_size) for p in tmp_path.iterdir()}
        assert after == before

    def test_read_only_opens_while_primary_runs(self, tmp_path):
        owner = RocksDbTier(tmp_path)
        owner.insert(table(), KEYS, VECTORS, VERSIONS)
        reader = RocksDbTier(tmp_path, access="read_only")
        assert fetch(reader, table(), KEYS).out.tolist() == VECTORS.tolist()
        reader.close()
        owner.close()

    def test_read_only_requires_a_database(self, tmp_path):
        with pytest.raises(TierError, match="holds no database"):
            RocksDbTier(tmp_path / "none", access="read_only")
        assert not (tmp_path / "none").exists()


class TestBrokenFolders:
    def test_opening_twice_in_one_process_is_rejected(self, tmp_path):
        tier = RocksDbTier(tmp_path)
        with pytest.raises(TierError, match="already open in this process"):
            RocksDbTier(tmp_path)
        # The failed attempt must not have given up the first one's lock.
        assert "locked by process" in in_another_process(f"RocksDbTier({str(tmp_path)!r})")
        tier.close()

    def test_lock_of_another_process_is_named(self, tmp_path):
        tier = RocksDbTier(tmp_path)
        said = in_another_process(f"RocksDbTier({str(tmp_path)!r})")
        assert f"{tmp_path} is locked by process {os.getpid()} (" in said
        assert "tiers.rocksdb.path" in said
        tier.close()

    @pytest.mark.parametrize("file", ["CURRENT", "MANIFEST-*", "*.sst"])
    def test_damaged_files_are_reported(self, tmp_path, file):
        tier = RocksDbTier(tmp_path)
        items = table()
        keys = np.arange(1000)
        code = tier.codes(items, keys)
        tier.bulk_load(items, [(code, np.zeros((1000, DIM), np.float32))], LoadRecord("x"))
        tier.close()
        for path in tmp_path.glob(file):
            path.write_bytes(os.urandom(path.stat().st_size))
        with pytest.raises(
            TierError, match=r"damaged: .*restore the folder from a checkpoint, or remove"
        ):
            fetch(RocksDbTier(tmp_path), table(), keys)

    def test_killed_creation_is_repeated(self, tmp_path):
        RocksDbTier(tmp_path / "other").close()
        (manifest,) = (tmp_path / "other").glob("MANIFEST-*")
        folder = tmp_path / "db"
        folder.mkdir()
        (folder / "MANIFEST-000001").write_bytes(manifest.read_bytes()[:20])
        (folder / "000001.dbtmp").write_bytes(b"MANIFEST-0000")
        (folder / "LOCK").touch()
        tier = RocksDbTier(folder)
        tier.insert(table(), KEYS, VECTORS, VERSIONS)
        assert len(fetch(tier, table(), KEYS).missing) == 0
        tier.close()

    def test_flipped_bit_makes_row_missing_not_wrong(self, tmp_path, caplog):
        tier = RocksDbTier(tmp_path, tuning=RocksDbTuning())
        items = table()
        keys = np.arange(1000)
        code = tier.codes(items, keys)
        tier.bulk_load(items, [(code, np.zeros((1000, DIM), np.float32))], LoadRecord("x"))
        tier.close()
        (file,) = tmp_path.glob("*.sst")
        data = bytearray(file.read_bytes())
        data[500] ^= 1
        file.write_bytes(data)
        tier = RocksDbTier(tmp_path)
        part, ctx = Part.make(items, keys), FetchContext()
        tier.fetch([part], ctx)
        assert 0 < len(part.missing) < 100
        assert ctx.degraded == ["rocksdb"]
        assert "is damaged: Corruption: block checksum mismatch" in caplog.text
        tier.close()

    def test_file_instead_of_folder_is_reported(self, tmp_path):
        (tmp_path / "db").write_text("")
        with pytest.raises(TierError, match="is not a folder"):
            RocksDbTier(tmp_path / "db")

    def test_missing_permission_is_reported(self, tmp_path):
        RocksDbTier(tmp_path / "db").close()
        said = in_another_process(
            f"os.chmod({str(tmp_path / 'db')!r}, 0)\n"
            "os.getuid() or os.setuid(65534)\n"
            f"RocksDbTier({str(tmp_path / 'db')!r})"
        )
        (tmp_path / "db").chmod(0o700)
        assert "TierError: rocksdb: no permission for" in said

    def test_full_disk_is_reported(self, tmp_path):
        """A file size limit stands in for the device: the write fails at the same place."""
        said = in_another_process(
            f"tier = RocksDbTier({str(tmp_path)!r})\n"
            "items = EmbeddingTable.make('items', 256)\n"
            "tier.open_tables([items])\n"
            "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
            "rows = np.ones((4000, 256), np.float32)\n"
            "tier.insert(items, np.arange(4000), rows, np.ones(4000, np.uint64))"
        )
        assert f"TierError: rocksdb: {tmp_path}: the disk is full" in said
        assert "File too large" in said
        tier = RocksDbTier(tmp_path)
        part = fetch(tier, EmbeddingTable.make("items", 256), np.arange(4000))
        found = part.source > 0
        assert 0 < found.sum() < 4000
        assert (part.out[found] == 1).all()
        tier.close()

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("IO error: No space left on device: While appending to file: x", "the disk is full"),
            ("IO error: Read-only file system: While opening", "read-only file system"),
            ("Corruption: block checksum mismatch", "damaged: Corruption"),
            ("Something else", "db: Something else"),
        ],
    )
    def test_messages_name_cause_and_remedy(self, text, said):
        assert said in str(translate_rocksdb_error(Exception(text), Path("/data/db")))


def in_another_process(code: str) -> str:
    """Run code with the tier imported; what it wrote to stderr."""
    preamble = (
        "import os, numpy as np\nfrom hps.tiers.rocksdb import RocksDbTier\n"
        "from hps.types import EmbeddingTable\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", preamble + code], capture_output=True, text=True, timeout=120
    )
    return done.stderr


def test_open_files_are_bounded(tmp_path):
    """RocksDB must leave handles to the process: it gets half of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
    try:
        tier = RocksDbTier(tmp_path)
        tables = [table(f"t{i}") for i in range(400)]
        tier.open_tables(tables)
        for each in tables:
            code = tier.codes(each, KEYS)
            order = np.argsort(code)
            tier.bulk_load(each, [(code[order], VECTORS[order])], LoadRecord("x"))
        parts = [Part.make(t, KEYS) for t in tables]
        tier.fetch(parts, FetchContext())
        assert all((p.out == VECTORS).all() for p in parts)
        tier.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_files_are_private_to_user(tmp_path):
    path = tmp_path / "above" / "db"
    tier = RocksDbTier(path)
    tier.checkpoint(tmp_path / "saved" / "one")
    tier.close()
    restore(tmp_path / "saved" / "one", tmp_path / "back")
    for folder in (path, tmp_path / "saved" / "one", tmp_path / "back"):
        assert folder.stat().st_mode & 0o007 == 0, folder


def test_folder_that_cannot_be_created_is_reported():
    """The error does not report damage."""
    path = Path("/proc/self/none/db")
    with pytest.raises(
        TierError, match=r"none/db cannot be created \(No such file or directory: "
    ) as caught:
        RocksDbTier(path)
    assert "set tiers.rocksdb.path to another folder" in str(caught.value)
    assert "damaged" not in str(caught.value)
