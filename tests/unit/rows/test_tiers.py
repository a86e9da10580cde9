"""What a database holds, seen from outside."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np

from hps.rows.tiers import RocksDbRows, parse_family
from hps.tiers.redis_layout import TableName
from hps.tiers.rocksdb import RocksDbTier
from hps.types import EmbeddingTable


def test_families_are_taken_apart() -> None:
    assert parse_family("ctr/3/user", "native") == TableName("ctr", 3, "user")
    assert parse_family("hps_et.ctr.user", "hps") == TableName("ctr", 0, "user")
    for layout, other in (("native", "hps_et.ctr.user"), ("hps", "ctr/3/user")):
        assert parse_family(other, layout) is None
        assert parse_family("default", layout) is None


def test_many_tables_are_erased_without_a_trace(tmp_path: Path) -> None:
    tables = [EmbeddingTable.make(f"t{i}", 2, model="m") for i in range(40)]
    with closing(RocksDbTier(tmp_path)) as tier:
        tier.open_tables(tables)
        for table in tables:
            row = np.ones((1, 2), np.float32)
            tier.insert(table, np.array([1]), row, np.array([1], np.uint64))
    with closing(RocksDbTier(tmp_path)) as tier:
        store = RocksDbRows(tier)
        assert len(store.tables()) == 40
        store.erase(store.tables()[1:])
        assert [name.name for name in store.tables()] == ["t0"]
        assert store.get(tables[0], np.array([1])).found.all()
