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


def places_of(store, contained=lambda *_: None) -> StoreStreamPositions:
    return StoreStreamPositions(
        [FedStore("rocksdb", store)], lambda _topic: [ITEMS, USERS], contained
    )


def note(store, places, table, position):
    for each in places.positions_to_record(table, [position]):
        store.apply(table, no_changes(table), [each])


def test_all_tables_restart_when_one_was_fed_by_another_topic(store):
    places = places_of(store)
    for table, offset in ((ITEMS, 9), (USERS, 7)):
        note(store, places, table, StreamPosition("t", 0, offset))
    assert not places.identify("t", 0, "first")
    assert (places.start_offset("t", 0), places.furthest("t", 0)) == (7, 9)
    store.identify(USERS, "t", 0, "another")
    assert places.identify("t", 0, "first")
    assert (places.start_offset("t", 0), places.furthest("t", 0)) == (0, 0)


def test_watermark_of_a_deleted_topic_is_ignored(store):
    places = places_of(store, lambda *_: 500)
    assert (places.start_offset("t", 0), places.furthest("t", 0)) == (500, 500)
    places.restart("t", 0)
    assert (places.start_offset("t", 0), places.furthest("t", 0)) == (0, 0)
    assert (
        places.positions_to_record(ITEMS, [StreamPosition("t", 0, 5, continues_from=3)])[
            0
        ].continues_from
        == 3
    )
    again = places_of(store, lambda *_: 500)
    assert again.start_offset("t", 0) == 0, "nor after a restart of the process"


def test_positions_of_a_deleted_topic_are_not_recorded(store):
    places = places_of(store)
    places.mark_applied([StreamPosition("t", 0, 9), StreamPosition("u", 0, 2)], {ITEMS})
    places.restart("t", 0)
    assert [each.topic for _, positions in places.unrecorded() for each in positions] == ["u"]


def test_restarted_partition_is_not_reported_as_a_loss(store):
    places = places_of(store)
    places.mark_applied([StreamPosition("t", 0, 9)], {ITEMS, USERS})
    places.restart("t", 0)
    assert places.loss() == ""


def test_positions_are_unknown_without_a_store():
    places = StoreStreamPositions([], lambda _topic: [ITEMS])
    assert not places.identify("t", 0, "id")
    places.restart("t", 0)
    assert (places.start_offset("t", 0), places.furthest("t", 0)) == (None, 0)
