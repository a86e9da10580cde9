"""SingleFlight: keys that several fetches miss at the same time are read once."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hps.errors import BadRequest, TierError
from hps.native import InFlight
from hps.tiers.base import FetchContext, Part, TierInfo
from hps.tiers.single_flight import SingleFlight
from hps.types import EmbeddingTable, Source, version_now
from tests.support.memory_tier import MemoryTier
from tests.support.waiting import until

TABLE, OTHER = EmbeddingTable.make("items", 2), EmbeddingTable.make("users", 2)
NOW = version_now()


class Store(MemoryTier):
    """Rows 0..99 of both tables, whose first value is the key. A fetch stays inside until ``gate``
    opens; ``fault(call, parts, ctx)`` then does what it likes."""

    def __init__(self):
        super().__init__(TierInfo("store", Source.ROCKSDB, blocking=True))
        for table in (TABLE, OTHER):
            put(self, table, np.arange(100))
        self.requested = []  # per call: the keys by table name
        self.inside = threading.Semaphore(0)
        self.gate = threading.Event()
        self.fault = lambda call, parts, ctx: None

    def fetch(self, parts, ctx):
        call = len(self.requested)
        self.requested.append({p.table.name: p.keys[p.missing].tolist() for p in parts})
        self.inside.release()
        assert self.gate.wait(30)
        super().fetch(parts, ctx)
        self.fault(call, parts, ctx)


def put(tier, table, keys):
    rows = np.repeat(np.float32(keys)[:, None], 2, axis=1)
    tier.insert(table, keys, rows, np.full(len(keys), NOW, np.uint64))


@pytest.fixture
def store():
    store = Store()
    yield store
    store.gate.set()


@pytest.fixture
def pool():
    with ThreadPoolExecutor(32) as pool:
        yield pool


@pytest.fixture
def flights(store, pool):
    """``start(keys, ...)`` begins a fetch on a thread and returns once it is in the store, or waits for
    another; its future is ``(parts, degraded)``."""
    return Flights(store, pool)


class Flights:
    def __init__(self, store, pool):
        self.left = []  # per fetch that follows others: how many keys it leaves to them
        self.tier, self.store, self.pool = SingleFlight(store, self.left.append), store, pool

    def start(self, *keys, table=TABLE, more=(), timeout=None, asks=True):
        deadline = None if timeout is None else time.monotonic() + timeout
        parts = [Part.make(table, np.array(keys, np.int64)), *more]
        waiting = len(self.left)
        future = self.pool.submit(self.run, parts, FetchContext(deadline))
        if asks:
            assert self.store.inside.acquire(timeout=30)
        else:
            until(lambda: len(self.left) > waiting)
        return future

    def run(self, parts, ctx):
        self.tier.fetch(parts, ctx)
        return parts, ctx.degraded

    def land(self):
        self.store.gate.set()


def rows(future):
    """Return the first value of each key's row, or None, and the skipped tiers."""
    (part, *_), degraded = future.result(30)
    assert part.missing.tolist() == np.flatnonzero(part.source == 0).tolist()
    assert (part.versions[part.source != 0] == NOW).all()
    found = [float(r[0]) if s else None for r, s in zip(part.out, part.source, strict=True)]
    return found, degraded


def assert_all_forgotten(tier):
    assert (tier._flights, len(tier._in_flight)) == ({}, 0)


def test_parallel_fetches_of_same_keys_read_once(flights):
    first = flights.start(3, 1, 2)
    others = [flights.start(2, 3, 1, asks=False) for _ in range(20)]
    flights.land()
    assert rows(first) == ([3, 1, 2], [])
    assert all(rows(other) == ([2, 3, 1], []) for other in others)
    assert flights.store.requested == [{"items": [3, 1, 2]}]
    assert_all_forgotten(flights.tier)


def test_key_common_to_all_fetches_is_read_once(flights):
    """The key is a small share of each fetch."""
    first = flights.start(7, *range(1000, 1999))
    others = [flights.start(*range(n, n + 500), 7) for n in range(2000, 12000, 1000)]
    flights.land()
    for other in others:
        assert rows(other)[0][-1] == 7
    first.result(30)
    assert sum(7 in requested["items"] for requested in flights.store.requested) == 1


def test_rows_are_published_before_waiting_for_others(flights):
    """The third waits for the second, which waits for the first: not for the first's end."""
    gates = [threading.Event() for _ in range(3)]
    flights.store.fault = lambda call, _parts, _ctx: gates[call].wait(30)
    flights.land()
    first = flights.start(1)
    second = flights.start(1, 2)
    third = flights.start(2, 3)
    gates[1].set()
    gates[2].set()
    assert rows(third) == ([2, 3], [])
    assert not second.done()
    gates[0].set()
    assert rows(second) == ([1, 2], [])
    assert rows(first) == ([1], [])


def test_oldest_fetch_with_few_common_keys_is_followed(flights):
    """All fetches with many common keys are followed."""
    first = flights.start(*range(100, 200))
    second = flights.start(*range(200, 300))
    third = flights.start(*range(300, 400))
    last = flights.start(150, 250, 251, *range(300, 332), *range(1000, 1100))
    assert flights.store.requested[3] == {"items": [250, 251, *range(1000, 1100)]}
    put(flights.store, TABLE, np.arange(100, 400))
    flights.land()
    assert rows(last)[0] == [150, 250, 251, *range(300, 332)] + [None] * 100
    for each in (first, second, third):
        each.result(30)


@pytest.mark.parametrize("in_time", [True, False])
def test_answer_is_reused_while_it_is_copied(flights, monkeypatch, in_time):
    """The reuse is limited in time, even while followers copy continuously."""
    copy, copying, go_on = SingleFlight._copy, threading.Event(), threading.Event()

    class Landing(InFlight):
        def land(self, number, until):
            return super().land(number, np.inf if in_time else 0.0)

    def slow(tier, followed, ctx):
        followed.flight.landed.wait(30)
        copying.set()
        assert go_on.wait(30)
        return copy(tier, followed, ctx)

    monkeypatch.setattr(SingleFlight, "_copy", slow)
    flights.tier._in_flight = Landing()
    first = flights.start(1, 2)
    second = flights.start(2, asks=False)
    flights.land()
    assert rows(first) == ([1, 2], [])
    assert copying.wait(30)
    third = flights.pool.submit(flights.run, [Part.make(TABLE, np.array([1, 2]))], FetchContext())
    requested = {"items": [1]} if in_time else {"items": [1, 2]}
    assert flights.store.inside.acquire(timeout=30)
    assert flights.store.requested[1:] == [requested]
    go_on.set()
    assert rows(second) == ([2], [])
    assert rows(third) == ([1, 2], [])
    assert_all_forgotten(flights.tier)


def test_small_fetch_does_not_wait_for_much_larger_read(flights):
    first = flights.start(*range(8001))
    flights.start(5, *range(9000, 9999))
    assert flights.store.requested[1] == {"items": [5, *range(9000, 9999)]}
    second = flights.start(5, *range(10000, 11001))
    assert flights.store.requested[2] == {"items": list(range(10000, 11001))}
    flights.land()
    assert rows(second)[0][0] == 5
    first.result(30)


def test_keys_not_in_flight_are_fetched_immediately(flights):
    first = flights.start(1, 2, 3)
    second = flights.start(9, 3, 4, 1)
    third = flights.start(4, 2, 500, 5)
    assert flights.store.requested == [{"items": k} for k in ([1, 2, 3], [9, 4], [500, 5])]
    flights.land()
    assert rows(third) == ([4, 2, None, 5], [])
    assert rows(second) == ([9, 3, 4, 1], [])
    assert rows(first) == ([1, 2, 3], [])


def test_keys_of_different_tables_are_not_shared(flights):
    first = flights.start(1, 2, more=[Part.make(OTHER, np.array([7, 8]))])
    second = flights.start(8, 1, table=OTHER)
    flights.land()
    assert flights.store.requested[1] == {"users": [1]}
    assert rows(second) == ([8, 1], [])
    (_, users), _ = first.result(30)
    assert users.out[:, 0].tolist() == [7, 8]


def test_only_missing_keys_are_shared_and_other_rows_unchanged(flights):
    first = flights.start(1, 2, 3)
    part = Part.make(TABLE, np.array([1, 2, 3]), np.full((3, 2), -7, np.float32))
    part.missing = np.array([0, 2])
    second = flights.pool.submit(flights.run, [part], FetchContext())
    until(lambda: flights.left)
    flights.land()
    second.result(30)
    first.result(30)
    assert part.out[:, 0].tolist() == [1, -7, 3]
    assert part.missing.tolist() == []
    assert len(flights.store.requested) == 1


def test_followers_take_tombstones_and_misses(flights):
    flights.store.delete(TABLE, np.array([2]), np.array([NOW + 1], np.uint64))
    first = flights.start(1, 2, 777)
    second = flights.start(777, 2, asks=False)
    flights.land()
    (part,), degraded = second.result(30)
    assert part.missing.tolist() == [0]
    assert part.source.tolist() == [0, 0]
    assert part.versions.tolist() == [0, NOW + 1]
    assert degraded == []
    first.result(30)
    assert len(flights.store.requested) == 1


def test_followers_get_separate_arrays(flights):
    """The caller of the first fetch may overwrite its arrays immediately."""
    part = Part.make(TABLE, np.array([1, 2]))

    def fetch_and_spoil():
        flights.tier.fetch([part], FetchContext())
        part.out[:] = -1
        part.keys[:] = 0

    first = flights.pool.submit(fetch_and_spoil)
    assert flights.store.inside.acquire(timeout=30)
    others = [flights.start(1, 2, asks=False) for _ in range(4)]
    flights.land()
    first.result(30)
    assert all(rows(other) == ([1, 2], []) for other in others)


def test_follower_waits_until_its_deadline(flights):
    first = flights.start(1, 2)
    start = time.monotonic()
    second = flights.start(1, timeout=0.2, asks=False)
    assert rows(second) == ([None], ["store"])
    assert 0.2 <= time.monotonic() - start < 20
    flights.land()
    assert rows(first) == ([1, 2], [])


def test_follower_with_exceeded_deadline_does_not_wait(flights):
    first = flights.start(1)
    start = time.monotonic()
    second = flights.pool.submit(
        flights.run, [Part.make(TABLE, np.array([1]))], FetchContext(time.monotonic() - 1)
    )
    assert rows(second) == ([None], ["store"])
    assert time.monotonic() - start < 20
    flights.land()
    first.result(30)


def test_degraded_fetch_degrades_its_followers(flights):
    def skip(_call, parts, ctx):
        ctx.degraded.append("redis")

    flights.store.fault = skip
    first = flights.start(1, 500)
    second = flights.start(500, 1, asks=False)
    flights.land()
    assert rows(first) == ([1, None], ["redis"])
    assert rows(second) == ([None, 1], ["redis"])
    assert len(flights.store.requested) == 1


def test_followers_read_when_followed_fetch_was_cut_short(flights):
    """The followed fetch exceeded its own deadline; the store may be healthy."""

    def out_of_time(call, parts, ctx):
        if call == 0:
            ctx.degraded.append("store")
            for part in parts:
                part.missing = np.arange(len(part.keys))
                part.source[:] = 0

    flights.store.fault = out_of_time
    first = flights.start(1, 2, timeout=0.05)
    second = flights.start(2, timeout=30, asks=False)
    time.sleep(0.1)
    flights.land()
    assert rows(second) == ([2], [])
    assert rows(first) == ([None, None], ["store"])
    assert flights.store.requested == [{"items": [1, 2]}, {"items": [2]}]


@pytest.mark.parametrize("error", [TierError("store", "on fire"), BadRequest("odd"), KeyError("x")])
def test_followers_read_when_followed_fetch_raised(flights, error):
    def fail_first(call, _parts, _ctx):
        if call == 0:
            raise error

    flights.store.fault = fail_first
    first = flights.start(1, 2)
    second = flights.start(2, 1, asks=False)
    flights.land()
    with pytest.raises(type(error)):
        first.result(30)
    assert rows(second) == ([2, 1], [])
    assert_all_forgotten(flights.tier)


def test_own_error_is_raised_and_ends_fetch(flights):
    def fail_second(call, _parts, _ctx):
        if call == 1:
            raise TierError("store", "on fire")

    flights.store.fault = fail_second
    first = flights.start(1)
    second = flights.start(1, 2)
    flights.land()
    with pytest.raises(TierError, match="on fire"):
        second.result(30)
    assert rows(first) == ([1], [])
    assert_all_forgotten(flights.tier)


def test_fetch_after_end_reads_again(flights):
    flights.land()
    for _ in range(2):
        (part,), _ = flights.run([Part.make(TABLE, np.array([1]))], FetchContext())
        assert part.out[0, 0] == 1
    assert len(flights.store.requested) == 2


def test_writes_pass_through_and_followed_keys_are_counted(store, pool):
    flights = Flights(store, pool)
    put(flights.tier, TABLE, np.array([500]))
    first = flights.start(500, 1)
    second = flights.start(1, 500, 3)
    flights.land()
    assert rows(second) == ([1, 500, 3], [])
    first.result(30)
    assert flights.left == [2]


def test_many_threads_with_overlapping_keys_get_their_rows(store, pool):
    """Every answer is right."""
    store.gate.set()
    store.fault = lambda *_: time.sleep(0.0005)
    store.evict(OTHER, np.arange(100))
    put(store, OTHER, np.arange(50))
    tier = SingleFlight(store)

    def work(seed):
        random = np.random.default_rng(seed)
        for _ in range(30):
            known = {TABLE: 100, OTHER: 50}
            parts = [
                Part.make(table, random.permutation(140)[: random.integers(1, 60)])
                for table in random.permutation(list(known))
            ]
            tier.fetch(parts, FetchContext(time.monotonic() + 30))
            for part in parts:
                found = part.keys < known[part.table]
                assert (part.out[found, 0] == part.keys[found]).all()
                assert part.missing.tolist() == np.flatnonzero(~found).tolist()

    for done in [pool.submit(work, seed) for seed in range(8)]:
        done.result(60)
    assert_all_forgotten(tier)
    assert (
        sum(len(keys) for requested in store.requested for keys in requested.values()) < 8 * 30 * 60
    )
