"""A database as a row source."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any, cast

import numpy as np

from hps.config.schema import RedisSettings
from hps.rows.tiers import RedisRows, RocksDbRows, parse_family
from hps.tiers.base import TableName, TierInfo
from hps.tiers.redis import RedisTier
from hps.tiers.rocksdb import RocksDbTier
from hps.types import EmbeddingTable, Source


def test_family_names_are_parsed() -> None:
    assert parse_family("ctr/3/user", "native") == TableName("ctr", 3, "user")
    assert parse_family("hps_et.ctr.user", "hps") == TableName("ctr", 0, "user")
    for layout, other in (("native", "hps_et.ctr.user"), ("hps", "ctr/3/user")):
        assert parse_family(other, layout) is None
        assert parse_family("default", layout) is None


def test_erase_removes_many_tables_completely(tmp_path: Path) -> None:
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


class Repeating:
    """A Redis that resizes its hashes: it returns some keys twice."""

    info, layout = TierInfo("redis", Source.REDIS), "native"

    def scan(self, _table: EmbeddingTable, _count: int) -> Any:
        for keys in ([1, 2, 3], [3, 4], [1, 5]):
            yield np.array(keys), np.ones((len(keys), 2)), np.ones(len(keys), np.uint64)

    def tombstones(self, _table: EmbeddingTable, _count: int) -> Any:
        for keys in ([7, 8], [8, 9]):
            yield np.array(keys), np.ones(len(keys), np.uint64)


def test_keys_that_redis_repeats_are_returned_once() -> None:
    store = RedisRows(cast(RedisTier, Repeating()), RedisSettings())
    table = EmbeddingTable.make("t", 2)
    assert [k for rows in store.scan(table) for k in rows.keys.tolist()] == [1, 2, 3, 4, 5]
    assert [k for rows in store.tombstones(table) for k in rows.keys.tolist()] == [7, 8, 9]
