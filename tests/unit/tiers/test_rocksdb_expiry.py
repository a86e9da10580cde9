"""Expired rows in RocksDB: bounded steps remove them, and nothing else."""

import numpy as np
import pytest

from hps.errors import TierError
from hps.tiers.base import FetchContext, Part
from hps.tiers.rocksdb import RocksDbTier
from hps.tiers.rocksdb import expiry as expiry_module
from hps.types import EmbeddingTable, make_version
from tests.support.rows import rising_rows

TTL_S, NOW_S = 100, 2_000_000_000
OLD, YOUNG = make_version((NOW_S - TTL_S - 10) * 1000), make_version((NOW_S - 10) * 1000)
TABLE = EmbeddingTable.make("items", 4, ttl_s=TTL_S)


class Clock:
    def __init__(self):
        self.now = float(NOW_S)

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def open_db(tmp_path, clock):
    opened = []

    def make(**options):
        opened.append(RocksDbTier(tmp_path / "db", clock=clock, **options))
        return opened[-1]

    yield make
    for tier in opened:
        tier.close()


def put(tier, keys, version, table=TABLE):
    keys = np.asarray(keys)
    tier.insert(table, keys, rising_rows(keys, 4), np.full(len(keys), version, np.uint64))


def on_disk(tier, table=TABLE):
    """The keys of all rows that are stored, expired or not."""
    alike = EmbeddingTable.make(table.name, table.dim)  # of the same column family
    return sorted(key for chunk in tier.scan(alike) for key in chunk.keys.tolist())


def passed(tier, table=TABLE):
    """Run one pass; return the rows removed by each of its steps."""
    removed, start = [], None
    while True:
        step = tier.expire(table, start)
        removed.append(step.removed)
        if (start := step.following) is None:
            return removed


def test_a_pass_removes_expired_rows_step_by_step(open_db, monkeypatch):
    monkeypatch.setattr(expiry_module, "STEP_ENTRIES", 10)
    tier, keys = open_db(), np.arange(-50, 50)
    put(tier, keys[::2].copy(), OLD)
    put(tier, keys[1::2].copy(), YOUNG)
    tier.delete(TABLE, keys[:4], np.full(4, YOUNG + 1, np.uint64))
    assert sum(len(chunk.keys) for chunk in tier.scan(TABLE)) == 48
    assert len(on_disk(tier)) == 96
    removed = passed(tier)
    assert removed == [3, 5, 5, 5, 5, 5, 5, 5, 5, 5, 0]
    assert on_disk(tier) == keys[5::2].tolist()
    assert passed(tier)[:2] == [0, 0]
    dead = np.concatenate([keys for keys, _ in tier.tombstones(TABLE)])
    assert sorted(dead.tolist()) == keys[:4].tolist()


def test_rows_expire_as_time_passes_and_writes_renew_them(open_db, clock):
    tier = open_db()
    put(tier, [1, 2], YOUNG)
    assert passed(tier) == [0]
    clock.now += TTL_S
    put(tier, [2], make_version(int(clock.now * 1000)))
    part = Part.make(TABLE, np.array([1, 2]))
    tier.fetch([part], FetchContext())
    assert part.missing.tolist() == [0]
    assert passed(tier) == [1]
    assert on_disk(tier) == [2]


def test_removal_outlives_a_restart_and_older_writes_stay_expired(open_db):
    tier = open_db()
    put(tier, [1], OLD)
    assert passed(tier) == [1]
    tier.close()
    tier = open_db()
    assert on_disk(tier) == []
    put(tier, [1], OLD - 1)
    part = Part.make(TABLE, np.array([1]))
    tier.fetch([part], FetchContext())
    assert part.missing.tolist() == [0]
    put(tier, [1], YOUNG)
    tier.fetch([part], FetchContext())
    assert part.versions.tolist() == [YOUNG]


def test_tables_without_a_time_to_live_keep_all_rows(open_db):
    tier, table = open_db(), EmbeddingTable.make("forever", 4)
    put(tier, [1], 1, table)
    assert tier.expire(table) == (0, None)
    assert on_disk(tier, table) == [1]


def test_a_table_that_the_database_does_not_have_is_not_created(open_db):
    tier = open_db()
    tier.open_tables([TABLE])
    assert tier.expire(EmbeddingTable.make("unknown", 4, ttl_s=1)) == (0, None)
    assert "model/1/unknown" not in tier.families()


def test_rows_of_the_hps_layout_have_no_age(open_db):
    tier = open_db(layout="hps")
    put(tier, [1], OLD)
    part = Part.make(TABLE, np.array([1]))
    tier.fetch([part], FetchContext())
    assert not len(part.missing)
    assert tier.expire(TABLE) == (0, None)
    assert sum(len(chunk.keys) for chunk in tier.scan(TABLE)) == 1


def test_only_the_primary_removes_rows(open_db):
    primary = open_db()
    put(primary, [1], OLD)
    primary.flush()
    reader = open_db(access="read_only")
    reader.open_tables([TABLE])
    with pytest.raises(TierError, match="access: read_only"):
        reader.expire(TABLE)
    assert on_disk(primary) == [1]
