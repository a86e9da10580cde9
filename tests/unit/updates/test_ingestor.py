"""Ingestor: stores first, then caches, then commit; and failures in between."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest

from hps.backoff import Backoff
from hps.errors import TierError, Unavailable
from hps.observability.meters import UpdateMeter
from hps.observability.metric_names import UPDATE_BATCH, UPDATE_DEAD, UPDATE_ROWS, UPDATE_VISIBLE
from hps.observability.metrics import Metrics
from hps.tiers.base import FetchContext, Part
from hps.tiers.cpu.cache import CpuCache
from hps.tiers.positions import StreamPosition, TableChanges
from hps.tiers.rocksdb import RocksDbTier
from hps.types import EmbeddingTable, make_version
from hps.updates.cache_writer import CacheWriter, PromotionSources
from hps.updates.codec import MessageAttributes, decode_native, encode_native
from hps.updates.ingest_thread import IngestThread
from hps.updates.ingestor import CACHES, Ingestor
from hps.updates.source import DeadLetter, Reason, UpdateBatch
from hps.updates.stream_positions import FedStore, StoreStreamPositions
from tests.support.letters import Letters
from tests.support.waiting import until

ITEMS = EmbeddingTable.make("items", 2, model="m")
USERS = EmbeddingTable.make("users", 2, model="m", dtype=np.float16, key_bits=32)
TABLES = {"m/items": (ITEMS,), "m/users": (USERS,)}
NOW_MS = int(time.time() * 1000)


def version(n: int) -> int:
    return make_version(NOW_MS, n)


def changes(rows=(), deleted=(), dim: int = 2, dtype=np.float32) -> TableChanges:
    """``rows``: (key, value, version); ``deleted``: (key, version)."""
    return TableChanges(
        np.array([r[0] for r in rows], np.int64),
        np.repeat(np.array([[r[1]] for r in rows], dtype).reshape(-1, 1), dim, axis=1),
        np.array([version(r[2]) for r in rows], np.uint64),
        np.array([d[0] for d in deleted], np.int64),
        np.array([version(d[1]) for d in deleted], np.uint64),
    )


def batch(offset: int, *, dead=(), ttl_s: int = 0, event_ms: int = NOW_MS, **tables) -> UpdateBatch:
    """Messages of partition 0 up to ``offset`` with changes of the tables; through the wire format."""
    payloads = []
    for name, each in tables.items():
        payloads += encode_native(f"m/{name}", each, MessageAttributes(event_ms, ttl_s=ttl_s))
    decoded = decode_native(payloads)
    assert not decoded.faults()
    return UpdateBatch(decoded.updates, [StreamPosition("t", 0, offset)], dead)


class Stream:
    """A source of fixed batches; ``log`` has the calls that it received."""

    def __init__(self, batches=()) -> None:
        self.batches = list(batches)
        self.log: list[str] = []
        self.committed: list[UpdateBatch] = []

    def poll(self, timeout_s):
        if self.batches:
            return self.batches.pop(0)
        time.sleep(min(timeout_s, 0.005))
        return None

    def commit(self, batch):
        self.log.append("commit")
        self.committed.append(batch)

    def keep_alive(self):
        self.log.append("alive")

    def restart(self):
        self.log.append("again")

    def rewind(self):
        self.log.append("rewind")

    def close(self):
        self.log.append("close")


class Harness:
    """A store, a cache, their writer, and an ingestor for them."""

    def __init__(self, folder, source: Stream) -> None:
        self.store = RocksDbTier(folder)
        self.store.open_tables([ITEMS, USERS])
        self.cache = CpuCache({ITEMS: 64, USERS: 64})
        self.writer = CacheWriter(self.cache, PromotionSources([self.store]), 1024)
        self.metrics, self.letters, self.source = Metrics(), Letters(), source
        self.readers = {"t": [ITEMS, USERS]}
        self.ingestor = self.make([FedStore("rocksdb", self.store)], self.writer)

    def make(self, stores, caches) -> Ingestor:
        """Make an ingestor; ``places`` are its positions from then on."""
        readers = self.readers
        self.positions = StoreStreamPositions(stores, lambda t: readers.get(t, []))
        meter = UpdateMeter(self.metrics)
        return Ingestor(self.source, TABLES, self.positions, caches, self.letters, meter)

    def rows(self, tier, keys, table=ITEMS) -> dict[int, float | None]:
        part = Part.make(table, np.array(keys, np.int64))
        tier.fetch([part], FetchContext())
        values = part.out[:, 0].tolist()
        return {k: v if s else None for k, v, s in zip(keys, values, part.source, strict=True)}

    def counted(self, result: str, table=ITEMS) -> int:
        return self.metrics.counter(UPDATE_ROWS, "m", table.name, result).value


@pytest.fixture
def source():
    return Stream()


@pytest.fixture
def harness(tmp_path, source):
    opened = Harness(tmp_path, source)
    yield opened
    opened.writer.close()
    opened.store.close()


def resident(harness: Harness, *keys: int) -> None:
    """Put rows of value 0 into store and cache."""
    update = changes([(key, 0.0, 0) for key in keys])
    harness.store.insert(ITEMS, update.keys, update.vectors, update.versions)
    harness.cache.insert(ITEMS, update.keys, update.vectors, update.versions)


def test_rows_and_deletions_reach_the_store_and_resident_rows(harness):
    resident(harness, 1, 2, 3)
    harness.source.batches = [
        batch(7, items=changes([(1, 1.0, 1), (-9, 9.0, 1)], [(2, 1)]), users=changes([(4, 0.5, 1)]))
    ]
    assert harness.ingestor.step() == 4
    wanted = {1: 1.0, -9: 9.0, 2: None, 3: 0.0}
    assert harness.rows(harness.store, [1, -9, 2, 3]) == wanted
    assert harness.rows(harness.cache, [1, -9, 2, 3]) == {**wanted, -9: None}, (
        "only what is resident"
    )
    assert harness.rows(harness.store, [4], USERS) == {4: 0.5}
    assert [harness.store.applied(table, "t", 0) for table in (ITEMS, USERS)] == [7, 7]
    assert harness.source.log == ["commit"]
    assert (harness.counted("upserted"), harness.counted("deleted")) == (2, 1)
    for tier in ("rocksdb", CACHES):
        counts, _ = harness.metrics.histogram(UPDATE_VISIBLE, "m", "items", tier).read()
        assert sum(counts) == 1


def test_replays_and_reordered_batches_change_nothing(harness):
    resident(harness, 1, 2)
    first = batch(1, items=changes([(1, 1.0, 5)], [(2, 5)]))
    second = batch(2, items=changes([(1, 2.0, 6)]))
    late = batch(3, items=changes([(2, 7.0, 4)]))
    harness.source.batches = [second, first, second, late, first]
    for _ in range(5):
        harness.ingestor.step()
    for tier in (harness.store, harness.cache):
        assert harness.rows(tier, [1, 2]) == {1: 2.0, 2: None}
    assert harness.store.applied(ITEMS, "t", 0) == 3, "positions never go back"


def test_highest_version_of_a_key_in_a_batch_wins_and_deletions_win_ties(harness):
    resident(harness, 1, 2, 3)
    rows = [(1, 1.0, 9), (1, 2.0, 8), (2, 5.0, 3), (3, 6.0, 4)]
    harness.source.batches = [batch(1, items=changes(rows, [(2, 3), (3, 2)]))]
    harness.ingestor.step()
    for tier in (harness.store, harness.cache):
        assert harness.rows(tier, [1, 2, 3]) == {1: 1.0, 2: None, 3: 6.0}


def test_cache_is_refreshed_after_the_store_and_before_the_commit(harness):
    order = []

    class Caches:
        def update(self, table, keys, vectors, versions):
            order.append(("cache", harness.rows(harness.store, [1])[1], list(harness.source.log)))
            done: Future[None] = Future()
            done.set_result(None)
            return done

        delete = update

    harness.source.batches = [batch(1, items=changes([(1, 3.0, 1)]))]
    harness.make([FedStore("rocksdb", harness.store)], Caches()).step()
    assert order == [("cache", 3.0, [])]
    assert harness.source.log == ["commit"]


class Failing:
    """A store that fails some times, then passes calls on."""

    def __init__(self, store, times: int) -> None:
        self.store, self.times = store, times

    def apply(self, table, update, positions):
        if self.times:
            self.times -= 1
            raise TierError("rocksdb", "No space left on device")
        self.store.apply(table, update, positions)

    def applied(self, table, topic, partition):
        return self.store.applied(table, topic, partition)


def test_failed_store_is_retried_without_loss(harness, monkeypatch):
    monkeypatch.setattr("hps.updates.ingestor.BACKOFF", Backoff(0.001, 5))
    resident(harness, 1)
    harness.source.batches = [batch(1, items=changes([(1, 3.0, 1)]))]
    ingestor = harness.make([FedStore("rocksdb", Failing(harness.store, 3))], harness.writer)
    ingestor.step()
    assert harness.source.log == ["alive"] * 3 + ["commit"]
    assert harness.rows(harness.cache, [1]) == {1: 3.0}
    assert ingestor.problem is None


def test_cache_is_not_refreshed_while_the_store_fails(harness):
    resident(harness, 1)
    harness.source.batches = [batch(1, items=changes([(1, 3.0, 1)]))]
    ingestor = harness.make([FedStore("rocksdb", Failing(harness.store, 10**9))], harness.writer)
    given_up = []

    def step():
        with pytest.raises(Unavailable) as raised:
            ingestor.step()
        given_up.append(str(raised.value))

    thread = threading.Thread(target=step)
    thread.start()
    until(lambda: ingestor.problem is not None)
    assert "No space left" in str(ingestor.problem)
    assert harness.rows(harness.cache, [1]) == {1: 0.0}
    ingestor.close()
    thread.join(60)
    assert given_up == ["closed while updates waited for rocksdb; they will be read again"]
    assert "commit" not in harness.source.log


def test_non_finite_rows_are_dropped_and_counted(harness):
    resident(harness, 1, 2)
    harness.source.batches = [
        batch(1, items=changes([(1, np.nan, 1), (2, 4.0, 1), (3, np.inf, 1)]))
    ]
    harness.ingestor.step()
    for tier in (harness.store, harness.cache):
        assert harness.rows(tier, [1, 2]) == {1: 0.0, 2: 4.0}
    assert harness.rows(harness.store, [3]) == {3: None}
    assert (harness.counted("not_finite"), harness.counted("upserted")) == (2, 1)


def test_values_that_overflow_the_dtype_count_as_not_finite(harness):
    harness.source.batches = [
        batch(1, users=changes([(5, 0.25, 1), (6, 1e6, 1), (7, -65504.0, 1)]))
    ]
    harness.ingestor.step()
    assert harness.rows(harness.store, [5, 6, 7], USERS) == {5: 0.25, 6: None, 7: -65504.0}
    assert (harness.counted("not_finite", USERS), harness.counted("upserted", USERS)) == (1, 2)


def test_expired_rows_are_dropped_and_counted(harness):
    resident(harness, 1)
    past = NOW_MS - 60_000
    harness.source.batches = [
        batch(1, items=changes([(1, 1.0, 1)]), ttl_s=59, event_ms=past),
        batch(2, items=changes([(1, 2.0, 1)]), ttl_s=3600, event_ms=past),
    ]
    harness.ingestor.step()
    assert harness.rows(harness.store, [1]) == {1: 0.0}
    harness.ingestor.step()
    assert harness.rows(harness.store, [1]) == {1: 2.0}
    assert harness.counted("expired") == 1


def test_only_messages_with_a_lifetime_expire(harness):
    past = NOW_MS - 60_000
    messages = []
    for key, ttl_s in ((1, 0), (2, 1), (3, 3600)):
        row = changes([(key, 1.0, 1)])
        messages += encode_native("m/items", row, MessageAttributes(past, ttl_s=ttl_s))
    updates = decode_native(messages).updates
    harness.source.batches = [UpdateBatch(updates, [StreamPosition("t", 0, 3)])]
    harness.ingestor.step()
    assert harness.rows(harness.store, [1, 2, 3]) == {1: 1.0, 2: None, 3: 1.0}
    assert harness.counted("expired") == 1


def test_duration_of_each_applied_batch_is_measured(harness):
    harness.source.batches = [batch(1, items=changes([(1, 1.0, 1)])), batch(2)]
    for _ in range(3):
        harness.ingestor.step(0.0)
    counts, _ = harness.metrics.histogram(UPDATE_BATCH).read()
    assert sum(counts) == 2


def test_keys_are_narrowed_and_rows_converted_to_the_dtype_of_the_table(harness):
    wide = (1 << 40) + 5
    harness.source.batches = [batch(1, users=changes([(wide, 0.25, 1)], [((1 << 40) + 6, 1)]))]
    harness.ingestor.step()
    assert harness.rows(harness.store, [5], USERS) == {5: 0.25}


def test_dead_letters_are_kept_before_the_commit_and_counted(harness):
    letter = DeadLetter(Reason.CHECKSUM, 8, StreamPosition("t", 0, 3), b"HPSU...")
    harness.source.batches = [batch(4, dead=[letter], items=changes([(1, 1.0, 1)]))]
    harness.ingestor.step()
    assert harness.letters.kept == [letter]
    assert harness.metrics.counter(UPDATE_DEAD, "checksum").value == 1
    assert harness.rows(harness.store, [1]) == {1: 1.0}


def test_dead_letters_are_reported_when_positions_are_recorded(harness, monkeypatch):
    monkeypatch.setattr("hps.updates.ingestor.RECORD_EVERY_S", 0.0)
    reports = []
    monkeypatch.setattr(harness.letters, "report", lambda: reports.append(1))
    harness.ingestor.step(0.0)
    assert reports == [1]


def test_batch_is_not_committed_until_its_dead_letters_are_kept(harness, monkeypatch):
    monkeypatch.setattr("hps.updates.ingestor.BACKOFF", Backoff(0.001, 5))
    left = [2]

    def keep(letters):
        if left[0]:
            left[0] -= 1
            raise Unavailable("Kafka does not take dead letters")
        return letters

    monkeypatch.setattr(harness.letters, "keep", keep)
    letter = DeadLetter(Reason.CHECKSUM, 8, StreamPosition("t", 0, 3), b"HPSU...")
    harness.source.batches = [batch(4, dead=[letter])]
    harness.ingestor.step()
    assert harness.source.log == ["alive", "alive", "commit"]


def test_position_of_an_untouched_table_is_recorded_later(harness, monkeypatch):
    harness.source.batches = [batch(5, items=changes([(1, 1.0, 1)]))]
    harness.ingestor.step()
    assert harness.store.applied(USERS, "t", 0) is None
    assert harness.positions.start_offset("t", 0) is None, "users may miss all of it"
    monkeypatch.setattr("hps.updates.ingestor.RECORD_EVERY_S", 0.0)
    harness.ingestor.step()
    assert harness.store.applied(USERS, "t", 0) == 5
    assert harness.positions.start_offset("t", 0) == 5


def test_unrecorded_position_is_recorded_with_the_next_rows_of_its_table(harness):
    first = batch(5, items=changes([(1, 1.0, 1)]))
    other = UpdateBatch(batch(2, users=changes([(4, 1.0, 1)])).updates, [StreamPosition("u", 1, 2)])
    harness.source.batches = [first, other]
    harness.readers["u"] = [USERS]
    harness.ingestor.step()
    harness.ingestor.step()
    assert (harness.store.applied(USERS, "t", 0), harness.store.applied(USERS, "u", 1)) == (5, 2)
    assert harness.store.applied(ITEMS, "u", 1) is None


def test_polling_starts_at_the_lowest_position_of_all_stores(harness, tmp_path):
    second = RocksDbTier(tmp_path / "second")
    second.open_tables([ITEMS, USERS])
    both = [FedStore("rocksdb", harness.store), FedStore("other", second)]
    harness.make(both, None)
    nothing = changes()
    for store, offset in ((harness.store, 9), (second, 6)):
        for table in (ITEMS, USERS):
            store.apply(table, _for(table, nothing), [StreamPosition("t", 0, offset)])
    assert harness.positions.start_offset("t", 0) == 6
    harness.make([], None)
    assert harness.positions.start_offset("t", 0) is None, "no store to ask"
    second.close()


def _for(table, update):
    return TableChanges(
        update.keys,
        np.empty((0, table.dim), table.dtype),
        update.versions,
        update.deleted,
        update.deleted_versions,
    )


def test_store_without_versions_refreshes_caches_without_versions(tmp_path, source):
    store = RocksDbTier(tmp_path, layout="hps")
    store.open_tables([ITEMS, USERS])
    cache = CpuCache({ITEMS: 64, USERS: 64})
    writer = CacheWriter(cache, PromotionSources([store]), 1024)
    meter, letters = UpdateMeter(Metrics()), Letters()
    stores = [FedStore("rocksdb", store, versioned=False)]
    places = StoreStreamPositions(stores, lambda _t: [ITEMS])
    ingestor = Ingestor(source, TABLES, places, writer, letters, meter)
    update = changes([(1, 0.0, 0)])
    cache.insert(ITEMS, update.keys, update.vectors, np.zeros(1, np.uint64))
    source.batches = [batch(1, items=changes([(1, 5.0, 8)]))]
    ingestor.step()
    part = Part.make(ITEMS, np.array([1]))
    cache.fetch([part], FetchContext())
    assert (part.out[0, 0], part.versions[0]) == (5.0, 0)
    writer.close()
    store.close()


# -- the thread ----------------------------------------------------------------------------------------


def test_thread_applies_until_closed_and_then_records_positions(harness):
    harness.source.batches = [batch(i, items=changes([(i, 1.0, 1)])) for i in range(1, 6)]
    thread = IngestThread(harness.ingestor, harness.source, "ingest")
    thread.start()
    until(lambda: len(harness.source.committed) == 5)
    thread.close()
    thread.close()
    assert harness.source.log[-1] == "close"
    assert harness.store.applied(USERS, "t", 0) == 5


def test_paused_thread_applies_nothing_and_keeps_the_source_alive(harness):
    thread = IngestThread(harness.ingestor, harness.source, "ingest")
    thread.start()
    thread.pause().result(60)
    harness.source.batches = [batch(1, items=changes([(1, 1.0, 1)]))]
    harness.source.log.clear()
    until(lambda: harness.source.log.count("alive") > 1)
    assert "commit" not in harness.source.log
    thread.resume()
    until(lambda: "commit" in harness.source.log)
    thread.close()


def test_call_runs_on_the_thread_and_returns_errors(harness):
    thread = IngestThread(harness.ingestor, harness.source, "ingest")
    thread.start()
    where = []
    thread.call(lambda: where.append(threading.current_thread().name)).result(60)
    assert where == ["ingest"]
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 / 0).result(60)  # type: ignore[arg-type,return-value]
    thread.close()
    assert thread.call(lambda: None).cancelled()


def test_unexpected_exception_does_not_end_the_stream(harness, monkeypatch, caplog):
    monkeypatch.setattr("hps.updates.ingest_thread.BACKOFF", Backoff(0.001, 5))
    apply, left = harness.ingestor.apply, [2]

    def broken(update):
        if left[0]:
            left[0] -= 1
            harness.source.batches.insert(0, update)  # as a rewound source does
            raise ValueError("a mistake")
        apply(update)

    rewind, refused = harness.source.rewind, [1]

    def once():
        if refused[0]:
            refused[0] -= 1
            raise TierError("redis", "it cannot say where it is")
        rewind()

    monkeypatch.setattr(harness.source, "rewind", once)
    monkeypatch.setattr(harness.ingestor, "apply", broken)
    harness.source.batches = [batch(1, items=changes([(1, 1.0, 1)]))]
    thread = IngestThread(harness.ingestor, harness.source, "ingest")
    thread.start()
    until(lambda: "commit" in harness.source.log)
    thread.close()
    assert harness.source.log.count("rewind") == 2
    assert "a mistake" in caplog.text
    assert harness.rows(harness.store, [1]) == {1: 1.0}


class Rewound(Stream):
    """A source that rewinds to the last commit; ``refused``: failures of `keep_alive`."""

    def __init__(self, batches, refused: int) -> None:
        super().__init__(batches)
        self.all, self.refused = list(batches), refused

    def keep_alive(self):
        super().keep_alive()
        if self.refused:
            self.refused -= 1
            raise Unavailable("Kafka: t/0 at 1: Erroneous state")

    def rewind(self):
        super().rewind()
        self.batches = self.all[len(self.committed) :]


def test_abandoned_batch_is_polled_again(harness):
    source = Rewound([batch(i, items=changes([(i, 1.0, 1)])) for i in (1, 2, 3)], refused=1)
    harness.source = source
    ingestor = harness.make([FedStore("rocksdb", Failing(harness.store, 1))], None)
    thread = IngestThread(ingestor, source, "ingest")
    thread.start()
    until(lambda: len(source.committed) == 3)
    thread.close()
    assert harness.rows(harness.store, [1, 2, 3]) == {1: 1.0, 2: 1.0, 3: 1.0}


def test_source_error_while_paused_does_not_end_the_stream(harness):
    source = harness.source = Rewound([batch(1, items=changes([(1, 1.0, 1)]))], refused=1)
    thread = IngestThread(
        harness.make([FedStore("rocksdb", harness.store)], None), source, "ingest"
    )
    thread.pause()
    thread.start()
    until(lambda: source.log.count("alive") > 1)
    thread.resume()
    until(lambda: source.committed)
    thread.close()


def test_problem_before_the_first_poll_is_reported(harness, monkeypatch):
    poll = harness.source.poll

    def away(timeout_s):
        raise TierError("redis", "it cannot be reached")

    monkeypatch.setattr(harness.source, "poll", away)
    thread = IngestThread(harness.ingestor, harness.source, "ingest")
    thread.start()
    until(lambda: harness.ingestor.problem == "redis: it cannot be reached")
    until(lambda: "alive" in harness.source.log)  # else the group would remove it
    monkeypatch.setattr(harness.source, "poll", poll)
    until(lambda: harness.ingestor.problem is None)
    thread.close()


def test_position_is_recorded_with_the_last_rows_of_its_table(harness):
    """A batch may have two updates of a table: the first must not record the batch's position."""
    recorded = []

    class Watched:
        def apply(self, table, update, positions):
            recorded.append((update.keys.tolist(), [p.offset for p in positions]))
            harness.store.apply(table, update, positions)

        def applied(self, table, topic, partition):
            return harness.store.applied(table, topic, partition)

    single, half = changes([(1, 1.0, 1)]), changes([(2, 2.0, 1)], dtype=np.float16)
    both = [*batch(1, items=single).updates, *batch(1, items=half).updates]
    harness.source.batches = [UpdateBatch(both, [StreamPosition("t", 0, 9)])]
    harness.make([FedStore("rocksdb", Watched())], None).step()
    assert recorded == [([1], []), ([2], [9])]
    assert harness.rows(harness.store, [1, 2]) == {1: 1.0, 2: 2.0}


class Forgetful:
    """A store that keeps positions as Redis does, and may lose everything."""

    def __init__(self) -> None:
        self.applied_to: dict[EmbeddingTable, int] = {}

    def apply(self, table, update, positions):
        for each in positions:
            if self.applied_to.get(table, 0) >= each.continues_from:
                self.applied_to[table] = max(self.applied_to.get(table, 0), each.offset)

    def applied(self, table, topic, partition):
        return self.applied_to.get(table)


@pytest.mark.parametrize("more", [False, True], ids=["nothing more comes", "more comes"])
def test_store_that_lost_rows_is_filled_again(harness, monkeypatch, more):
    monkeypatch.setattr("hps.updates.ingestor.RECORD_EVERY_S", 0.0)
    store = Forgetful()
    ingestor = harness.make([FedStore("redis", store)], None)
    assert harness.positions.start_offset("t", 0) is None

    def message(since: int) -> UpdateBatch:
        updates = batch(1, items=changes([(1, 1.0, since)])).updates
        return UpdateBatch(updates, [StreamPosition("t", 0, since + 1, since)])

    harness.source.batches = [message(0), message(1)]
    for _ in range(3):
        ingestor.step()
    assert store.applied_to == {ITEMS: 2, USERS: 2}
    assert "again" not in harness.source.log
    store.applied_to.clear()
    if more:
        harness.source.batches = [message(2)]
    ingestor.step()
    assert harness.source.log.count("again") == 1
    assert harness.positions.start_offset("t", 0) is None, "all of it is wanted again"
    harness.source.batches = [message(0), message(1), message(2)]
    for _ in range(4):
        ingestor.step()
    assert store.applied_to == {ITEMS: 3, USERS: 3}
    assert harness.source.log.count("again") == 1


def test_topic_without_tables_is_not_read_again(harness, monkeypatch):
    """No store has a position in it: its messages are dead letters."""
    monkeypatch.setattr("hps.updates.ingestor.RECORD_EVERY_S", 0.0)
    assert harness.positions.start_offset("unknown", 0) is None
    letter = DeadLetter(Reason.UNKNOWN_TABLE, 0, StreamPosition("unknown", 0, 0), b"")
    harness.source.batches = [UpdateBatch((), [StreamPosition("unknown", 0, 1)], [letter])]
    for _ in range(4):
        harness.ingestor.step()
    assert "again" not in harness.source.log
    assert len(harness.letters.kept) == 1


def test_loss_message_names_the_store_and_offsets(harness, monkeypatch, caplog):
    monkeypatch.setattr("hps.updates.ingestor.RECORD_EVERY_S", 0.0)
    store = Forgetful()
    ingestor = harness.make([FedStore("redis", store)], None)
    harness.source.batches = [batch(7, items=changes([(1, 1.0, 1)]))]
    ingestor.step()
    store.applied_to.clear()
    ingestor.step()
    loss = "redis has the updates of t/0 up to 0, but had them up to 7"
    assert f"reading updates again: {loss}" in caplog.text
