"""High-water marks save reads and change nothing else: an older version is never written."""

import numpy as np
import pytest

from hps.tiers.base import FetchContext, Part
from hps.tiers.rocksdb import LoadRecord, RocksDbTier
from hps.tiers.rocksdb.rows import VersionedRows
from hps.types import EmbeddingTable, version_now

DIM = 2
ITEMS = EmbeddingTable.make("items", DIM)


@pytest.fixture
def tier(tmp_path):
    tier = RocksDbTier(tmp_path)
    yield tier
    tier.close()


@pytest.fixture
def reads(monkeypatch):
    """The number of keys of each read of stored versions."""
    read_keys: list[int] = []
    read = VersionedRows.read

    def counted(self, family, code):
        read_keys.append(len(code))
        return read(self, family, code)

    monkeypatch.setattr(VersionedRows, "read", counted)
    return read_keys


def rows(versions):
    return np.repeat(np.array(versions, np.float32)[:, None], DIM, 1)


def insert(tier, keys, versions, table=ITEMS):
    tier.insert(table, np.array(keys), rows(versions), np.array(versions, np.uint64))


def stored(tier, keys, table=ITEMS):
    """Return the version of each key's row; 0 without a row."""
    part = Part.make(table, np.array(keys))
    tier.fetch([part], FetchContext())
    found = part.source > 0
    np.testing.assert_array_equal(part.out[found], rows(part.versions[found]))
    return np.where(found, part.versions, 0).tolist()


def reopened(tier):
    tier.close()
    return RocksDbTier(tier.path)


def load(tier, version, keys=(1, 2)):
    codes = np.sort(tier.codes(ITEMS, np.array(keys)))
    chunk = (codes, rows([version] * len(keys)))
    tier.bulk_load(ITEMS, [chunk], LoadRecord("x", len(keys), version))


def test_newest_versions_are_written_without_reads(tier, reads):
    for version in range(1, 20):
        insert(tier, range(500), [version] * 500)
    tier.delete(ITEMS, np.arange(10), np.full(10, version_now(), np.uint64))
    assert reads == []
    assert stored(tier, [10, 499]) == [19, 19]
    part = Part.make(ITEMS, np.arange(10))
    tier.fetch([part], FetchContext())
    assert not part.source.any()


def test_version_older_than_another_keys_is_read_and_written(tier, reads):
    keys = list(range(5000))
    insert(tier, keys, [50] * 5000)
    insert(tier, [k + 5000 for k in keys], [7] * 5000)
    insert(tier, keys, [40] * 5000)
    assert sum(reads) == 10_000
    assert stored(tier, [3, 4999, 5000, 9999]) == [50, 50, 7, 7]


def test_older_deletion_is_ignored(tier):
    insert(tier, [1], [5])
    tier.delete(ITEMS, np.array([1]), np.array([4], np.uint64))
    assert stored(tier, [1]) == [5]


def test_rows_written_before_restart_are_kept(tier):
    insert(tier, [1, 2], [10, 30])
    again = reopened(tier)
    insert(again, [1, 2], [20, 20])
    assert stored(again, [1, 2]) == [20, 30]
    again.close()


def test_stream_is_soon_written_without_reads_after_restart(tier, reads):
    now = version_now()
    later = now + (60_000 << 20)
    tier.insert(ITEMS, np.arange(9), np.zeros((9, DIM), np.float32), np.full(9, now, np.uint64))
    again = reopened(tier)
    again.insert(ITEMS, np.arange(9), np.zeros((9, DIM), np.float32), np.full(9, later, np.uint64))
    assert reads == []
    again.close()


def test_marks_are_unknown_without_stored_bound(tier):
    insert(tier, [1], [10])
    tier._database.db.delete(f"highest:{ITEMS.id}".encode())
    again = reopened(tier)
    insert(again, [1, 2], [9, 9])
    assert stored(again, [1, 2]) == [10, 9]
    insert(again, [1], [11])
    assert stored(again, [1]) == [11]
    again.close()


def test_loaded_rows_raise_marks(tier):
    load(tier, 5)
    insert(tier, [1], [4])
    assert stored(tier, [1, 2]) == [5, 5]
    load(tier, 9)
    insert(tier, [1, 3], [8, 8])
    assert stored(tier, [1, 2, 3]) == [9, 9, 8]
    again = reopened(tier)
    insert(again, [2], [7])
    assert stored(again, [2]) == [9]
    again.close()


def test_dropped_table_resets_marks(tier, reads):
    insert(tier, [1], [1000])
    tier.drop(ITEMS)
    insert(tier, [1], [3])
    assert reads == []
    assert stored(tier, [1]) == [3]


@pytest.mark.parametrize("seed", range(4))
def test_writes_in_any_order_follow_version_rule(tmp_path, seed):
    """Against a model, over restarts; a tombstone is a row of 0 here."""
    random = np.random.default_rng(seed)
    tier = RocksDbTier(tmp_path)
    rule: dict[int, tuple[int, bool]] = {}
    clock = 10 + version_now()  # so that tombstones are remembered
    for _ in range(150):
        keys = random.choice(300, random.integers(1, 40), replace=False)
        clock += int(random.integers(0, 60))
        versions = (clock - random.integers(0, 100, len(keys))).astype(np.uint64)
        kind = random.choice(["insert", "delete", "evict", "reopen"], p=[0.7, 0.2, 0.05, 0.05])
        if kind == "reopen":
            tier = reopened(tier)
        elif kind == "evict":
            tier.evict(ITEMS, keys)
            for key in keys.tolist():
                rule.pop(key, None)
        else:
            if kind == "insert":
                values = (versions % np.uint64(1 << 20)).astype(np.float32)
                tier.insert(ITEMS, keys, np.repeat(values[:, None], DIM, 1), versions)
            else:
                tier.delete(ITEMS, keys, versions)
            for key, version in zip(keys.tolist(), versions.tolist(), strict=True):
                if version >= rule.get(key, (0, False))[0]:
                    rule[key] = version, kind == "insert"
    part = Part.make(ITEMS, np.arange(300))
    tier.fetch([part], FetchContext())
    assert (part.source > 0).tolist() == [rule.get(k, (0, False))[1] for k in range(300)]
    assert part.versions.tolist() == [rule.get(k, (0, False))[0] for k in range(300)]
    live = part.source > 0
    np.testing.assert_array_equal(part.out[live, 0], part.versions[live] % np.uint64(1 << 20))
    tier.close()
