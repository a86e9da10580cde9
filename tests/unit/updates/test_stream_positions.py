"""Start offsets of streams: the stores' positions, and positions of a topic that was created again."""

import pytest

from hps.tiers.positions import StreamPosition, no_changes
from hps.tiers.rocksdb import RocksDbTier
from hps.types import EmbeddingTable
from hps.updates.stream_positions import FedStore, StoreStreamPositions

ITEMS, USERS = (
    EmbeddingTable.make("items", 2, model="m"),
    EmbeddingTable.make("users", 2, model="m"),
)


@pytest.fixture
def store(tmp_path):
    store = RocksDbTier(tmp_path)
    store.open_tables([ITEMS, USERS])
    yield store
    store.close()


def positions_of(store, contained=lambda *_: None) -> StoreStreamPositions:
    return StoreStreamPositions(
        [FedStore("rocksdb", store)], lambda _topic: [ITEMS, USERS], contained
    )


def note(store, positions, table, position):
    for each in positions.positions_to_record(table, [position]):
        store.apply(table, no_changes(table), [each])


def test_all_tables_restart_when_one_was_fed_by_another_topic(store):
    positions = positions_of(store)
    for table, offset in ((ITEMS, 9), (USERS, 7)):
        note(store, positions, table, StreamPosition("t", 0, offset))
    assert not positions.identify("t", 0, "first")
    assert (positions.start_offset("t", 0), positions.furthest("t", 0)) == (7, 9)
    store.identify(USERS, "t", 0, "another")
    assert positions.identify("t", 0, "first")
    assert (positions.start_offset("t", 0), positions.furthest("t", 0)) == (0, 0)


def test_watermark_of_a_deleted_topic_is_ignored(store):
    positions = positions_of(store, lambda *_: 500)
    assert (positions.start_offset("t", 0), positions.furthest("t", 0)) == (500, 500)
    positions.restart("t", 0)
    assert (positions.start_offset("t", 0), positions.furthest("t", 0)) == (0, 0)
    assert (
        positions.positions_to_record(ITEMS, [StreamPosition("t", 0, 5, continues_from=3)])[
            0
        ].continues_from
        == 3
    )
    again = positions_of(store, lambda *_: 500)
    assert again.start_offset("t", 0) == 0, "nor after a restart of the process"


def test_positions_of_a_deleted_topic_are_not_recorded(store):
    positions = positions_of(store)
    positions.mark_applied([StreamPosition("t", 0, 9), StreamPosition("u", 0, 2)], {ITEMS})
    positions.restart("t", 0)
    assert [each.topic for _, positions in positions.unrecorded() for each in positions] == ["u"]


def test_restarted_partition_is_not_reported_as_a_loss(store):
    positions = positions_of(store)
    positions.mark_applied([StreamPosition("t", 0, 9)], {ITEMS, USERS})
    positions.restart("t", 0)
    assert positions.loss() == ""


def test_positions_are_unknown_without_a_store():
    positions = StoreStreamPositions([], lambda _topic: [ITEMS])
    assert not positions.identify("t", 0, "id")
    positions.restart("t", 0)
    assert (positions.start_offset("t", 0), positions.furthest("t", 0)) == (None, 0)
