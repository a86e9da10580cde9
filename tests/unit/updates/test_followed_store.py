"""Caches of a node that feeds no store: after any order of events they equal the store."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hps.errors import TierError
from hps.observability.meters import UpdateMeter
from hps.observability.metrics import Metrics
from hps.tiers.base import FetchContext, Part
from hps.tiers.cpu.cache import CpuCache
from hps.tiers.positions import Applied, StreamPosition, TableChanges
from hps.tiers.rocksdb import RocksDbTier
from hps.types import EmbeddingTable, make_version
from hps.updates.cache_writer import CacheWriter, PromotionSources
from hps.updates.followed_store import FollowedStore
from hps.updates.ingest_thread import IngestThread
from hps.updates.ingestor import Ingestor
from hps.updates.source import MESSAGE, TableUpdate, UpdateBatch
from hps.updates.stream_positions import FedStore
from hps.updates.topics import by_name
from tests.support.letters import Letters
from tests.support.waiting import until

KEYS = 2
NOW_MS = int(time.time() * 1000)
_NAMES = itertools.count()


TABLES = [EmbeddingTable.make(f"t{i}", 2, model="m") for i in range(2)]


class Stream:
    """One partition of single rows and deletions, which alternate between two tables.

    Polled from ``start_offset``. Topic and keys are unique: tables are costly to make."""

    def __init__(self, tables: int) -> None:
        number = next(_NAMES)
        self.topic, self.keys = f"t{number}", np.arange(KEYS) + number * KEYS
        self.tables = {f"m/{table.name}": table for table in TABLES[:tables]}
        self.changes: list[tuple[int, bool]] = []  # key, deleted
        self.next = 0
        self.problem = None

    def batch(self, start: int, stop: int) -> UpdateBatch:
        updates = []
        for number in range(start, stop):
            key, deleted = self.changes[number]
            keys, none = self.keys[[key]], np.empty(0, np.int64)
            version = np.array([make_version(NOW_MS, number)], np.uint64)
            row = np.full((1, 2), number + 1.0, np.float32)
            changes = (
                TableChanges(none, row[:0], version[:0], keys, version)
                if deleted
                else TableChanges(keys, row, version, none, version[:0])
            )
            message = np.zeros(1, MESSAGE)
            message["event_ms"], message["upserts"], message["deletes"] = (
                NOW_MS,
                not deleted,
                deleted,
            )
            name = list(self.tables)[number % len(self.tables)]
            ends = [StreamPosition(self.topic, 0, number + 1)]
            updates.append(TableUpdate(name, changes, message, np.array([number]), ends))
        return UpdateBatch(updates, [StreamPosition(self.topic, 0, stop, start)])

    def poll(self, timeout_s):
        stop = min(self.next + 2, len(self.changes))
        if stop == self.next:
            return None
        start, self.next = self.next, stop
        return self.batch(start, stop)

    def commit(self, batch):
        pass

    def keep_alive(self):
        pass

    def restart(self):
        self.next = self.start_offset(self.topic, 0) or 0

    rewind = restart

    def close(self):
        pass


class Node:
    """A cache, its promotions from ``store``, and the updates that ``store`` is fed with."""

    def __init__(self, store, stream: Stream, other_writer=None, versioned=True) -> None:
        self.store, self.stream = store, stream
        self.tables = list(stream.tables.values())
        self.followed = FollowedStore(store, FedStore("store", store, versioned))
        self.cache = CpuCache(dict.fromkeys(self.tables, 64))
        self.writer = CacheWriter(
            self.cache, PromotionSources([self.followed], self.followed), 1024
        )
        self.positions = self.followed.positions(
            lambda _topic: self.tables, lambda *_: None, other_writer
        )
        self.ingestor = Ingestor(
            stream,
            by_name(self.tables),
            self.positions,
            self.writer,
            Letters(),
            UpdateMeter(Metrics()),
        )
        stream.start_offset = self.positions.start_offset

    def promote(self, key: int) -> None:
        for table in self.tables:
            self.writer.promote(table, self.stream.keys[[key]])
        assert self.writer.flush(60)

    def evict(self, key: int) -> None:
        keys = self.stream.keys[[key]]
        for table in self.tables:
            self.writer.run(lambda table=table: self.cache.evict(table, keys)).result()

    def rows(self, tier, number: int = 0) -> list[float | None]:
        """Each key's value; None without a row."""
        part = Part.make(self.tables[number], self.stream.keys)
        tier.fetch([part], FetchContext())
        return [float(part.out[i, 0]) if part.source[i] else None for i in range(KEYS)]

    def step(self) -> None:
        self.ingestor.step(0.0)

    def finish(self) -> None:
        """Apply the remaining updates. The store has all of them."""
        for _ in range(len(self.stream.changes) + 2):
            self.step()
        assert not self.ingestor.is_waiting
        assert self.stream.next == len(self.stream.changes)

    def judge(self) -> None:
        """Check that resident rows equal the store's."""
        for number, table in enumerate(self.tables):
            part = Part.make(table, self.stream.keys)
            self.cache.fetch([part], FetchContext())
            resident = np.setdiff1d(np.arange(KEYS), part.missing)
            cached, stored = self.rows(self.cache, number), self.rows(self.store, number)
            assert {k: cached[k] for k in resident} == {k: stored[k] for k in resident}

    def close(self) -> None:
        self.writer.close()


class Feeder:
    """The other process, which writes the stream into the store."""

    def __init__(self, store, stream: Stream) -> None:
        self.store, self.stream = store, stream
        self.at = 0

    def feed(self, messages: int = 1) -> None:
        for _ in range(messages):
            if self.at == len(self.stream.changes):
                return
            batch = self.stream.batch(self.at, self.at + 1)
            (update,) = batch.updates
            for name, table in self.stream.tables.items():
                changes = update.changes if name == update.table else NOTHING
                self.store.apply(table, changes, batch.positions)
            self.at += 1


NOTHING = TableChanges(
    np.empty(0, np.int64),
    np.empty((0, 2), np.float32),
    np.empty(0, np.uint64),
    np.empty(0, np.int64),
    np.empty(0, np.uint64),
)


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    store = RocksDbTier(tmp_path_factory.mktemp("db"))
    yield store
    store.close()


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr("hps.updates.ingestor._SHORTEST_HOLD_S", 0.0)
    monkeypatch.setattr("hps.updates.ingestor.RECORD_EVERY_S", 0.0)


def stream_of(database, changes, tables: int = 1) -> Stream:
    """A stream over new keys, which have rows of value 0."""
    stream = Stream(tables)
    for table in stream.tables.values():
        old = np.full(KEYS, make_version(NOW_MS - 60_000), np.uint64)
        database.insert(table, stream.keys, np.zeros((KEYS, 2), np.float32), old)
    stream.changes = list(changes)
    return stream


EVENT = st.one_of(
    st.sampled_from(["feed", "step", "restart"]),
    st.tuples(st.sampled_from(["promote", "evict"]), st.integers(0, KEYS - 1)),
)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    changes=st.lists(st.tuples(st.integers(0, KEYS - 1), st.booleans()), min_size=1, max_size=8),
    events=st.lists(EVENT, min_size=8, max_size=30),
    tables=st.integers(1, 2),
)
def test_caches_converge_to_the_store_in_any_order_of_events(database, changes, events, tables):
    stream = stream_of(database, changes, tables)
    feeder = Feeder(database, stream)
    node = Node(database, stream)
    begun = False
    try:
        for event in events:
            match event:
                case "feed":
                    feeder.feed()
                case "step":
                    if not begun:  # started this late: rows may be promoted before
                        stream.restart()
                        begun = True
                    node.step()
                case "restart":
                    node.close()
                    node, begun = Node(database, stream), False
                case ("promote", key):
                    node.promote(key)
                case ("evict", key):
                    node.evict(key)
        feeder.feed(len(changes))
        if not begun:
            stream.restart()
        node.finish()
        node.judge()
    finally:
        node.close()


@pytest.fixture
def make(database):
    nodes = []

    def build(changes, **options) -> tuple[Node, Feeder]:
        stream = stream_of(database, changes)
        nodes.append(Node(database, stream, **options))
        return nodes[-1], Feeder(database, stream)

    yield build
    for node in nodes:
        node.close()


def test_old_row_promoted_after_its_update_was_read_is_replaced(make):
    node, feeder = make([(1, False)])
    node.step()
    assert node.ingestor.is_waiting
    node.promote(1)
    assert node.rows(node.cache)[1] == 0.0
    feeder.feed()
    node.finish()
    assert node.rows(node.cache)[1] == 1.0


def test_row_promoted_before_reading_starts_gets_later_updates(make):
    """The store was fed between the promotion and the start."""
    node, feeder = make([(0, False), (1, False)])
    feeder.feed()
    node.promote(1)
    feeder.feed()
    assert node.positions.start_offset(node.stream.topic, 0) == 1
    node.stream.restart()
    node.finish()
    assert node.rows(node.cache)[1] == 2.0


def test_reading_starts_at_the_first_message_without_a_position(make):
    node, _feeder = make([(0, False)])
    node.promote(1)
    assert node.positions.start_offset(node.stream.topic, 0) is None


def test_restarted_reader_continues_at_the_position_of_the_caches(make):
    """The store's position is ahead of it."""
    node, feeder = make([(1, False)] * 6)
    feeder.feed(6)
    node.step()
    assert node.positions.start_offset(node.stream.topic, 0) == 2


class Losing:
    """A store that may lose its position, or not respond."""

    def __init__(self, store) -> None:
        self.store, self.lost, self.error = store, 0, None
        self.info, self.fetch = store.info, store.fetch

    def positions(self, table):
        if self.error is not None:
            raise self.error
        found = self.store.positions(table)
        return {place: Applied(at.offset - self.lost) for place, at in found.items()}


def test_updates_lost_by_the_store_are_applied_again(database):
    stream = stream_of(database, [(1, False)] * 6)
    store = Losing(database)
    node, feeder = Node(store, stream), Feeder(database, stream)
    feeder.feed(6)
    node.finish()
    store.lost = 4
    node.step()
    assert stream.next == 2, "where the store is now"
    node.step()
    assert node.ingestor.is_waiting, "until it is fed again"
    store.lost = 0
    node.finish()
    node.judge()
    node.close()


def test_unavailable_store_stops_promotions_and_holds_updates(database):
    stream = stream_of(database, [(1, False)])
    store = Losing(database)
    node, feeder = Node(store, stream), Feeder(database, stream)
    store.error = TierError("store", "gone")
    node.promote(1)
    assert node.rows(node.cache)[1] is None
    feeder.feed()
    with pytest.raises(TierError, match="gone"):
        node.positions.start_offset(node.stream.topic, 0)
    node.step()
    assert node.ingestor.is_waiting
    store.error = None
    node.promote(1)
    node.finish()
    assert node.rows(node.cache)[1] == 1.0
    node.close()


def test_offsets_of_a_writer_without_positions_release_updates(make):
    reached = {}
    node, _feeder = make([(1, False)], other_writer=reached.get)
    node.promote(1)
    reached[node.stream.topic, 0] = 0
    node.step()
    assert node.ingestor.is_waiting
    reached[node.stream.topic, 0] = 1
    node.finish()
    assert node.rows(node.cache)[1] == 1.0


def test_updates_do_not_wait_when_no_writer_has_a_position(make):
    node, _feeder = make([(1, False)], other_writer=lambda _place: None)
    node.promote(1)
    node.finish()
    assert node.rows(node.cache)[1] == 1.0


def test_store_without_versions_refreshes_caches_without_versions(make):
    node, feeder = make([(1, False)], versioned=False)
    feeder.feed()
    node.promote(1)
    node.finish()
    key = node.stream.keys[[1]]
    part = Part.make(node.tables[0], key)
    node.writer.run(lambda: node.cache.evict(node.tables[0], key)).result()
    node.cache.insert(node.tables[0], key, np.zeros((1, 2), np.float32), np.zeros(1, np.uint64))
    node.stream.next = 0
    node.finish()
    node.cache.fetch([part], FetchContext())
    assert (part.out[0, 0], part.versions[0]) == (1.0, 0)


def test_held_batch_is_logged_once(make, monkeypatch, caplog):
    monkeypatch.setattr("hps.updates.ingestor._LATE_S", 0.0)
    node, _ = make([(1, False)])
    for _ in range(4):
        node.step()
    assert node.ingestor.is_waiting
    assert [each.message for each in caplog.records] == [f"updates wait: {node.ingestor.problem}"]


def test_held_batch_is_reported_and_the_reader_can_be_paused(make, monkeypatch):
    monkeypatch.setattr("hps.updates.ingestor._LATE_S", 0.01)
    node, feeder = make([(1, False)])
    thread = IngestThread(node.ingestor, node.stream, "ingest")
    thread.start()
    try:
        until(lambda: "no writer" in (node.ingestor.problem or ""))
        feeder.store.apply(node.tables[0], NOTHING, [StreamPosition(node.stream.topic, 0, 0)])
        thread.pause().result(10)
        feeder.feed()
        node.promote(1)
        thread.resume()
        until(lambda: node.ingestor.problem is None and not node.ingestor.is_waiting)
    finally:
        thread.close()
    assert node.rows(node.cache)[1] == 1.0


def test_recreated_topic_is_read_from_its_first_message_once_the_store_has_it(database):
    stream = stream_of(database, [(1, False)] * 6)
    (table, *_) = stream.tables.values()
    node, feeder = Node(database, stream), Feeder(database, stream)
    feeder.feed(6)
    database.identify(table, stream.topic, 0, "first")
    node.finish()
    assert not node.positions.identify(stream.topic, 0, "first")
    assert (
        node.positions.start_offset(stream.topic, 0),
        node.positions.furthest(stream.topic, 0),
    ) == (
        6,
        6,
    )
    assert node.positions.identify(stream.topic, 0, "second")
    assert (
        node.positions.start_offset(stream.topic, 0),
        node.positions.furthest(stream.topic, 0),
    ) == (
        0,
        0,
    )
    stream.next = 0
    node.step()
    assert node.ingestor.is_waiting, "the store has the updates of the former topic"
    assert database.applied(table, stream.topic, 0) == 6, "which is its writer's"
    for each in stream.tables.values():
        database.identify(each, stream.topic, 0, "second")
        database.restart(each, stream.topic, 0)
    assert "the topic was created again" in node.positions.loss()
    node.close()
