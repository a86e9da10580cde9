"""Scans of all rows of a table."""

import numpy as np
import pytest

from hps.errors import TierError
from hps.tiers.rocksdb import LoadRecord, RocksDbTier
from hps.types import EmbeddingTable, make_version, version_now

ITEMS = EmbeddingTable.make("items", 4)


def scanned(tier, table=ITEMS):
    chunks = list(tier.scan(table))
    return [np.concatenate([c[i] for c in chunks]) for i in range(3)]


def test_scan_yields_every_row_once_without_deleted(tmp_path):
    tier = RocksDbTier(tmp_path)
    keys = np.random.default_rng(2).integers(-(2**63), 2**63 - 1, 10_000)
    rows = np.random.default_rng(2).random((10_000, 4), np.float32)
    versions = np.arange(10_000).astype(np.uint64)
    tier.insert(ITEMS, keys, rows, versions)
    tier.delete(ITEMS, keys[:5000:2].copy(), np.full(2500, version_now(), np.uint64))
    found, vectors, at = scanned(tier)
    left = np.r_[1:5000:2, 5000:10_000]
    order = left[np.argsort(keys[left])]
    assert found.tolist() == keys[order].tolist()
    assert vectors.tolist() == rows[order].tolist()
    assert at.tolist() == versions[order].tolist()
    tier.close()


def test_scan_sees_rows_as_of_its_start(tmp_path):
    tier = RocksDbTier(tmp_path)
    keys, ones = np.arange(9000), np.ones((9000, 4), np.float32)
    tier.insert(ITEMS, keys, ones, np.ones(9000, np.uint64))
    chunks = tier.scan(ITEMS)
    first = next(chunks)
    tier.insert(
        ITEMS, np.arange(20_000), np.zeros((20_000, 4), np.float32), np.full(20_000, 2, np.uint64)
    )
    assert sum(len(c.keys) for c in [first, *chunks]) == 9000
    tier.close()


@pytest.mark.parametrize("layout", ["native", "hps"])
def test_scan_starts_at_key(tmp_path, layout):
    tier = RocksDbTier(tmp_path, layout=layout)
    keys = np.array([-5, 1, 2, 200])
    tier.insert(ITEMS, keys, np.ones((4, 4), np.float32), np.ones(4, np.uint64))
    for start, first in ((1, 1), (3, 200)):
        found = [k for chunk in tier.scan(ITEMS, start=start) for k in chunk.keys.tolist()]
        assert found[0] == first
    assert list(tier.scan(ITEMS, start=201)) == [] or layout == "hps"
    tier.close()


def test_scan_of_empty_table_yields_nothing(tmp_path):
    tier = RocksDbTier(tmp_path)
    tier.open_tables([ITEMS])
    assert list(tier.scan(ITEMS)) == []
    tier.close()


@pytest.mark.parametrize("where", [0.0, 0.5, 0.9])
def test_damaged_block_raises_instead_of_ending_scan(tmp_path, where):
    tier = RocksDbTier(tmp_path)
    code = tier.codes(ITEMS, np.arange(20_000))
    tier.bulk_load(ITEMS, [(code, np.ones((20_000, 4), np.float32))], LoadRecord("x"))
    tier.close()
    (file,) = tmp_path.glob("*.sst")
    data = bytearray(file.read_bytes())
    data[int(20_000 * 33 * where) + 100] ^= 1
    file.write_bytes(data)
    tier = RocksDbTier(tmp_path)
    with pytest.raises(TierError, match=f"damaged: .*{file.name}"):
        list(tier.scan(ITEMS))
    tier.close()


def test_scan_yields_unexpired_tombstones(tmp_path):
    now = 1_700_000_000
    tier = RocksDbTier(tmp_path, clock=lambda: now)
    versions = np.full(3, make_version(now * 1000), np.uint64)
    tier.insert(ITEMS, np.arange(3), np.ones((3, 4), np.float32), versions)
    tier.delete(ITEMS, np.array([1]), versions[:1] + 1)
    tier.delete(ITEMS, np.array([2]), versions[:1] + 2)
    tier.insert(ITEMS, np.array([2]), np.ones((1, 4), np.float32), versions[:1] + 3)
    ((keys, at),) = tier.tombstones(ITEMS)
    assert (keys.tolist(), at.tolist()) == ([1], [int(versions[0]) + 1])
    now += int(ITEMS.tombstone_ttl_s) + 1
    assert list(tier.tombstones(ITEMS)) == []
    tier.close()
