"""Readers in parallel with the writing process: the rows that they see and when; they never write."""

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
from hps.tiers.rocksdb import LoadRecord, RocksDbTier, RocksDbTuning, database_handle
from hps.tiers.rocksdb.database_options import existing_families
from hps.types import EmbeddingTable, version_now

DIM = 4
AT_ONCE = RocksDbTuning(catch_up_s=0.0)
ON_DEMAND = RocksDbTuning(catch_up_s=1e9)


def table(name: str = "items") -> EmbeddingTable:
    return EmbeddingTable.make(name, DIM, model="ctr", version=7)


def put(tier: RocksDbTier, table: EmbeddingTable, keys: list[int], value: float) -> None:
    rows = np.full((len(keys), DIM), value, np.float32)
    tier.insert(table, np.array(keys), rows, np.full(len(keys), version_now(), np.uint64))


def fetch(tier: RocksDbTier, table: EmbeddingTable, keys: list[int]) -> list[float]:
    """Return the rows' first values, -1 for missing rows."""
    part = Part.make(table, np.array(keys), np.full((len(keys), DIM), -1, np.float32))
    tier.fetch([part], FetchContext())
    return part.out[:, 0].tolist()


def load(tier: RocksDbTier, table: EmbeddingTable, keys: list[int], value: float) -> None:
    codes = tier.codes(table, np.array(keys))
    rows = np.full((len(keys), DIM), value, np.float32)
    tier.bulk_load(table, [(codes, rows)], LoadRecord(f"{value}"))


@pytest.fixture
def primary(tmp_path):
    tier = RocksDbTier(tmp_path / "db")
    put(tier, table(), [1, 2], 1.0)
    yield tier
    tier.close()


@pytest.fixture
def secondary(primary):
    tier = RocksDbTier(primary.path, access="secondary", tuning=ON_DEMAND)
    yield tier
    tier.close()


class TestSecondary:
    def test_secondary_sees_writes_after_catch_up(self, primary, secondary):
        assert fetch(secondary, table(), [1, 2, 3]) == [1.0, 1.0, -1.0]
        put(primary, table(), [1, 3], 2.0)
        primary.delete(table(), np.array([2]), np.array([version_now()], np.uint64))
        assert fetch(secondary, table(), [1, 2, 3]) == [1.0, 1.0, -1.0]
        secondary.catch_up()
        assert fetch(secondary, table(), [1, 2, 3]) == [2.0, -1.0, 2.0]

    def test_fetch_catches_up_when_due(self, primary):
        tier = RocksDbTier(primary.path, access="secondary", tuning=AT_ONCE)
        for value in (2.0, 3.0):
            put(primary, table(), [1], value)
            assert fetch(tier, table(), [1]) == [value]
        tier.close()

    def test_secondary_sees_bulk_loads_flushes_and_compactions(self, primary, secondary):
        load(primary, table(), list(range(3000)), 5.0)
        primary.flush()
        secondary.catch_up()
        assert fetch(secondary, table(), [0, 2999]) == [5.0, 5.0]
        assert secondary.loaded(table()).digest == "5.0"
        assert not secondary.streamed(table())
        load(primary, table(), list(range(10)), 6.0)
        # The files that held these rows are gone from the folder by now.
        assert fetch(secondary, table(), [2999]) == [5.0]
        secondary.catch_up()
        assert fetch(secondary, table(), [0, 2999]) == [6.0, -1.0]
        put(primary, table(), [1], 7.0)
        secondary.catch_up()
        assert secondary.streamed(table())

    def test_secondary_finds_table_created_later(self, primary, secondary):
        with pytest.raises(TierError, match="holds no table ctr/7/new, and access: secondary"):
            secondary.open_tables([table("new")])
        assert fetch(secondary, table("new"), [1]) == [-1.0]
        put(primary, table("new"), [1], 4.0)
        assert fetch(secondary, table("new"), [1]) == [-1.0]
        secondary.catch_up()
        assert fetch(secondary, table("new"), [1]) == [4.0]
        put(primary, table("newer"), [1], 5.0)
        secondary.open_tables([table("newer")])
        assert fetch(secondary, table("newer"), [1]) == [5.0]
        assert fetch(secondary, table(), [1]) == [1.0]

    def test_secondary_follows_writer_in_another_process(self, primary):
        put(primary, table(), [1], 9.0)
        code = (
            "import numpy as np\nfrom hps.tiers.rocksdb import RocksDbTier\n"
            "from hps.tiers.base import FetchContext, Part\nfrom hps.types import EmbeddingTable\n"
            f"tier = RocksDbTier({str(primary.path)!r}, access='secondary')\n"
            "part = Part.make(EmbeddingTable.make('items', 4, model='ctr', version=7), np.array([1]))\n"
            "tier.fetch([part], FetchContext())\nprint(part.out[0, 0])\ntier.close()"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout == "9.0\n", done.stderr

    def test_readers_see_whole_rows_during_catch_up(self, primary):
        tier = RocksDbTier(primary.path, access="secondary", tuning=AT_ONCE)
        stop, wrong = threading.Event(), []

        def read() -> None:
            while not stop.is_set():
                part = Part.make(table(), np.array([1, 2]))
                tier.fetch([part], FetchContext())
                if len(part.missing) or (part.out != part.out[:, :1]).any():
                    wrong.append(part.out)

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        for value in range(50):
            put(primary, table(), [1, 2], float(value))
            put(primary, table(f"t{value % 5}"), [1], 1.0)
            fetch(tier, table(f"t{value % 5}"), [1])
        stop.set()
        for reader in readers:
            reader.join()
        tier.close()
        assert not wrong

    def test_secondary_finds_replaced_database(self, primary, tmp_path):
        tier = RocksDbTier(primary.path, access="secondary", tuning=ON_DEMAND)
        assert fetch(tier, table(), [1]) == [1.0]
        primary.close()
        primary.path.rename(tmp_path / "old")
        other = RocksDbTier(tmp_path / "db")
        for turn in range(3):
            put(other, table(), [1], 8.0 + turn)
        other.flush()
        tier.catch_up()
        assert fetch(tier, table(), [1]) == [10.0]
        tier.close()
        other.close()


class TestReadOnly:
    def test_read_only_reader_keeps_its_snapshot(self, primary):
        reader = RocksDbTier(primary.path, access="read_only", tuning=AT_ONCE)
        assert fetch(reader, table(), [1, 3]) == [1.0, -1.0]
        put(primary, table(), [1, 3], 2.0)
        load(primary, table(), list(range(3000)), 5.0)
        reader.catch_up()
        assert fetch(reader, table(), [1, 3]) == [1.0, -1.0]
        reader.close()

    @pytest.mark.parametrize("access", ["read_only", "secondary"])
    def test_reader_opens_after_its_list_of_tables_was_replaced(self, primary, access, monkeypatch):
        """As when the primary replaces the MANIFEST that the reader is about to read."""
        failures = [TierError("rocksdb", "MANIFEST-000005: No such file or directory")]

        def families(path):
            if failures:
                raise failures.pop()
            return existing_families(path)

        monkeypatch.setattr(database_handle, "existing_families", families)
        reader = RocksDbTier(primary.path, access=access, tuning=AT_ONCE)
        assert fetch(reader, table(), [1, 3]) == [1.0, -1.0]
        reader.close()

    def test_reader_opens_while_writer_replaces_files(self, primary):
        stop, failed = threading.Event(), []

        def write() -> None:
            while not stop.is_set():
                load(primary, table(), list(range(100)), 1.0)
                primary.flush()

        writer = threading.Thread(target=write)
        writer.start()
        for _ in range(20):
            try:
                reader = RocksDbTier(primary.path, access="read_only")
                reader.close()
            except TierError as error:
                failed.append(str(error))
        stop.set()
        writer.join()
        assert not failed


@pytest.mark.parametrize("access", ["read_only", "secondary"])
@pytest.mark.parametrize(("bits", "form"), [(64, "<q"), (32, "<I")])
def test_database_opened_by_hps_is_read_in_place(tmp_path, access, bits, form):
    """The database has HPS's options and family name; rows are in the log, in table files, or both."""
    options = Options(raw_mode=True)
    options.optimize_for_point_lookup(8)
    options.optimize_level_style_compaction(64 << 20)
    hps = Rdict(str(tmp_path), options)
    family = hps.create_column_family("hps_et.ctr.items", options)
    for key in (1, 258, 2**31):
        family[struct.pack(form, key)] = np.full(DIM, key, np.float32).tobytes()
    family.flush()
    family[struct.pack(form, 7)] = np.full(DIM, 7, np.float32).tobytes()
    reader = RocksDbTier(tmp_path, layout="hps", access=access)
    items = EmbeddingTable.make("items", DIM, model="ctr", version=7, key_bits=bits)
    assert fetch(reader, items, [7, 2**31, 2, 258, 1]) == [7.0, 2.0**31, -1.0, 258.0, 1.0]
    assert sorted(k for chunk in reader.scan(items) for k in chunk.keys.tolist()) == [
        1, 7, 258, 2**31,
    ]  # fmt: skip
    reader.close()
    hps.close()


@pytest.mark.parametrize("access", ["read_only", "secondary"])
def test_rejected_writes_leave_no_change(primary, access):
    reader = RocksDbTier(primary.path, access=access)
    keys = np.array([1])
    rows, versions = np.ones((1, DIM), np.float32), np.array([version_now()], np.uint64)
    for call in (
        lambda: reader.insert(table(), keys, rows, versions),
        lambda: reader.update(table(), keys, rows, versions),
        lambda: reader.delete(table(), keys, versions),
        lambda: reader.evict(table(), keys),
        lambda: reader.drop(table()),
        lambda: reader.flush(),
        lambda: reader.adopt(table(), LoadRecord("x"), 1),
        lambda: reader.bulk_load(table(), [], LoadRecord("x")),
    ):
        with pytest.raises(TierError, match=rf"access: {access}; writing is off. Write where"):
            call()
    reader.close()
    assert fetch(primary, table(), [1]) == [1.0]


@pytest.mark.parametrize("access", ["read_only", "secondary"])
def test_reader_requires_a_database(tmp_path: Path, access):
    with pytest.raises(
        TierError, match=rf"holds no database, and access: {access} does not create"
    ):
        RocksDbTier(tmp_path / "none", access=access)
    assert not (tmp_path / "none").exists()
