"""Stream positions in RocksDB: never ahead of the rows, never decreasing, removed with the rows."""

import numpy as np
import pytest

from hps.errors import TierError
from hps.tiers.base import FetchContext, Part
from hps.tiers.positions import Applied, StreamPosition, TableChanges
from hps.tiers.rocksdb import LoadRecord, RocksDbTier, RocksDbTuning, restore
from hps.types import EmbeddingTable, version_now

ITEMS, USERS = EmbeddingTable.make("items", 2), EmbeddingTable.make("users", 2)


def changes(insert: dict[int, int], delete: dict[int, int] | None = None) -> TableChanges:
    """Keys with the sequence of their version; a row's values are its sequence."""
    now, delete = version_now(), delete or {}
    at = np.array(list(insert.values()), np.uint64)
    return TableChanges(
        np.array(list(insert), np.int64),
        np.repeat(at[:, None], 2, 1).astype(np.float32),
        at + np.uint64(now),
        np.array(list(delete), np.int64),
        np.array(list(delete.values()), np.uint64) + np.uint64(now),
    )


def at(offset: int, partition: int = 0) -> StreamPosition:
    return StreamPosition("updates", partition, offset)


def first_values(tier, keys, table=ITEMS):
    part = Part.make(table, np.asarray(keys), np.full((len(keys), 2), -1, np.float32))
    tier.fetch([part], FetchContext())
    return part.out[:, 0].tolist()


@pytest.fixture(params=["native", "hps"])
def tier(request, tmp_path):
    tier = RocksDbTier(tmp_path / "db", layout=request.param)
    yield tier
    tier.close()


def test_rows_and_positions_survive_restart(tier, tmp_path):
    assert tier.applied(ITEMS, "updates", 0) is None
    tier.apply(ITEMS, changes({1: 1, 2: 2}), [at(10), at(7, 3)])
    tier.apply(USERS, changes({1: 1}), [at(99)])
    tier.checkpoint(tmp_path / "saved")
    tier.close()
    again = RocksDbTier(tmp_path / "db", layout=tier.layout)
    assert first_values(again, [1, 2]) == [1.0, 2.0]
    assert [again.applied(ITEMS, "updates", p) for p in (0, 3, 1)] == [10, 7, None]
    assert again.applied(ITEMS, "other", 0) is None
    assert again.applied(USERS, "updates", 0) == 99
    assert again.streamed(ITEMS)
    again.close()
    restore(tmp_path / "saved", tmp_path / "back")
    back = RocksDbTier(tmp_path / "back", layout=tier.layout)
    assert back.applied(ITEMS, "updates", 0) == 10
    back.close()


def test_positions_never_decrease(tier):
    for offset in (10, 4, 12, 11):
        tier.apply(ITEMS, changes({}), [at(offset)])
    assert tier.applied(ITEMS, "updates", 0) == 12
    tier.apply(ITEMS, changes({}), [at(30), at(20)])
    assert tier.applied(ITEMS, "updates", 0) == 30


def test_position_is_reset_for_recreated_topic(tier):
    tier.apply(ITEMS, changes({1: 1}), [at(10), at(7, 3)])
    assert not tier.identify(ITEMS, "updates", 0, "first id"), "written before ids were kept"
    assert not tier.identify(ITEMS, "updates", 0, "first id")
    assert tier.applied(ITEMS, "updates", 0) == 10
    assert tier.identify(ITEMS, "updates", 0, "second id")
    assert [tier.applied(ITEMS, "updates", p) for p in (0, 3)] == [0, 7]
    assert not tier.identify(ITEMS, "updates", 0, "second id")
    tier.apply(ITEMS, changes({}), [at(2)])
    tier.close()
    again = RocksDbTier(tier.path, layout=tier.layout)
    assert not again.identify(ITEMS, "updates", 0, "second id")
    assert again.applied(ITEMS, "updates", 0) == 2
    again.close()


def test_restarted_position_grows_again(tier):
    tier.apply(ITEMS, changes({1: 1}), [at(10), at(7, 3)])
    tier.restart(ITEMS, "updates", 0)
    assert [tier.applied(ITEMS, "updates", p) for p in (0, 3)] == [0, 7]
    tier.apply(ITEMS, changes({}), [at(4)])
    assert tier.applied(ITEMS, "updates", 0) == 4


def test_higher_version_of_insertion_and_deletion_wins(tier):
    tier.apply(ITEMS, changes({4: 1}), [])
    tier.apply(ITEMS, changes({1: 5, 2: 5, 3: 5}, {1: 4, 2: 5, 3: 6, 4: 2}), [at(1)])
    assert first_values(tier, [1, 2, 3, 4]) == [5.0, -1.0, -1.0, -1.0]


def test_replay_is_harmless(tier):
    replayed = changes({1: 1, 2: 2}, {3: 3})
    for _ in range(2):
        tier.apply(ITEMS, replayed, [at(10)])
        assert first_values(tier, [1, 2, 3]) == [1.0, 2.0, -1.0]


def test_new_load_removes_positions_and_merge_keeps_them(tier):
    tier.apply(ITEMS, changes({1: 1}), [at(10)])
    tier.apply(USERS, changes({1: 1}), [at(20)])
    tier.identify(ITEMS, "updates", 0, "id")
    tier.adopt(ITEMS, LoadRecord("files"), 1)
    assert tier.applied(ITEMS, "updates", 0) == 10
    tier.bulk_load(
        ITEMS, [(tier.codes(ITEMS, np.array([9])), np.ones((1, 2), np.float32))], LoadRecord("x")
    )
    assert tier.applied(ITEMS, "updates", 0) is None
    assert tier.applied(USERS, "updates", 0) == 20
    assert not tier.identify(ITEMS, "updates", 0, "another id"), "forgotten with the positions"
    tier.drop(USERS)
    assert tier.applied(USERS, "updates", 0) is None


def test_failed_write_stores_no_position(tier, monkeypatch):
    def fail(*_args, **_given):
        raise TierError("rocksdb", "the disk is full")

    monkeypatch.setattr(tier._database.throttle, "write", fail)
    with pytest.raises(TierError, match="full"):
        tier.apply(ITEMS, changes({1: 1}), [at(10)])
    assert tier.applied(ITEMS, "updates", 0) is None


def test_readers_read_positions_but_cannot_apply(tier):
    tier.apply(ITEMS, changes({1: 1}), [at(10)])
    reader = RocksDbTier(tier.path, access="secondary", layout=tier.layout)
    assert reader.applied(ITEMS, "updates", 0) == 10
    assert reader.positions(ITEMS) == {("updates", 0): Applied(10)}
    with pytest.raises(TierError, match="access: secondary; writing is off"):
        reader.apply(ITEMS, changes({1: 2}), [at(11)])
    with pytest.raises(TierError, match="access: secondary; writing is off"):
        reader.identify(ITEMS, "updates", 0, "id")
    reader.close()


def test_secondary_reads_positions_of_primary(tier):
    tuning = RocksDbTuning(catch_up_s=0.0)
    reader = RocksDbTier(tier.path, access="secondary", layout=tier.layout, tuning=tuning)
    assert reader.positions(ITEMS) == {}
    tier.apply(ITEMS, changes({1: 1}), [at(10), StreamPosition("other/topic", 3, 7)])
    assert reader.positions(ITEMS) == {("updates", 0): Applied(10), ("other/topic", 3): Applied(7)}
    tier.identify(ITEMS, "updates", 0, "an id")
    assert reader.positions(ITEMS)["updates", 0] == Applied(10, "an id")
    assert reader.positions(USERS) == {}
    reader.close()
