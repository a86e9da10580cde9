"""Stages of the engine: fetches, answers, promotions and counters."""

import asyncio
import threading
import time
from concurrent.futures import wait

import numpy as np
import pytest

from hps.errors import DeadlineExceeded, TierError, Unavailable
from hps.lookup import engine as engine_module
from hps.lookup.engine import LookupEngine
from hps.threads import BoundedThreadPool, LookupPools
from hps.tiers.chain import TierChain
from hps.tiers.wrappers import GuardedTier
from hps.types import JaggedKeys, LookupRequest, Source, version_now
from tests.support.memory_tier import MemoryTier
from tests.support.waiting import until
from tests.unit.lookup.conftest import CACHE


def request(**features):
    options = {k: features.pop(k) for k in list(features) if k in LookupRequest.__slots__}
    return LookupRequest({n: JaggedKeys.dense(keys) for n, keys in features.items()}, **options)


def test_cached_rows_are_answered_inline(make_world):
    world = make_world()
    world.put(world.cache, "user", [1, -5, 2**63 - 1])
    future = world.engine.submit(request(user=[-5, 1, -5, 2**63 - 1], want_source=True))
    assert future.done()
    result = future.result()
    user = world.tables["user"]
    np.testing.assert_array_equal(result.vectors["user"], world.row(user, [-5, 1, -5, 2**63 - 1]))
    assert result.sources["user"].tolist() == [Source.CPU] * 4
    assert result.versions["user"].tolist() == [7] * 4
    assert result.defaulted == 0
    assert world.store.calls == 0
    assert world.answered == [("user", [Source.CPU] * 4)]
    assert world.finished == [()]


def test_misses_are_fetched_from_the_store_on_a_pool_thread(make_world):
    world = make_world()
    world.put(world.cache, "user", [1])
    world.put(world.store, "user", [1, 2], version=9)
    world.store.leave.clear()
    future = world.engine.submit(request(user=[1, 2, 3, 2, 3], want_source=True))
    assert not future.done()
    world.store.leave.set()
    result = future.result(60)
    user = world.tables["user"]
    expected = np.vstack(
        [world.row(user, [1, 2]), user.default, world.row(user, [2]), user.default]
    )
    np.testing.assert_array_equal(result.vectors["user"], expected)
    assert result.sources["user"].tolist() == [2, 4, 0, 4, 0]
    assert result.versions["user"].tolist() == [7, 9, 0, 9, 0]
    assert result.defaulted == 2  # keys, not unique keys
    assert world.promoted == [("user", [2])]
    assert world.store.threads <= {"hps-test-0", "hps-test-1"}


def test_non_blocking_store_is_fetched_inline(make_world):
    world = make_world(blocking=False)
    world.put(world.store, "user", [2])
    assert world.engine.submit(request(user=[2, 3])).done()
    assert world.store.threads == {threading.current_thread().name}


def test_cached_tombstone_gives_the_default_without_a_store_fetch(make_world):
    world = make_world()
    world.put(world.store, "user", [1])
    world.cache.delete(world.tables["user"], np.array([1]), np.array([version_now()], np.uint64))
    result = world.engine.lookup(request(user=[1], want_source=True))
    np.testing.assert_array_equal(result.vectors["user"], [[-1, -2, -3]])
    assert (result.defaulted, world.store.calls, world.promoted) == (1, 0, [])
    assert result.sources["user"].tolist() == [Source.DEFAULT]


def test_features_of_one_table_add_key_offsets_mod_2_64(make_world):
    world = make_world(
        [
            {"name": "home", "table": "user", "pooling": "none"},
            {"name": "work", "table": "user", "pooling": "none", "key_offset": 10},
            {"name": "wrap", "table": "user", "pooling": "none", "key_offset": 2**64 - 1},
        ]
    )
    world.put(world.cache, "user", [10, 11, -(2**63)])
    keys = {"home": [10, -(2**63)], "work": [1, 0], "wrap": [12, -(2**63) + 1]}
    result = world.engine.lookup(request(**keys))
    user = world.tables["user"]
    for name, expected in {
        "home": [10, -(2**63)], "work": [11, 10], "wrap": [11, -(2**63)]
    }.items():  # fmt: skip
        np.testing.assert_array_equal(result.vectors[name], world.row(user, expected))
    assert list(result.vectors) == ["home", "work", "wrap"]
    assert len(world.answered) == 1  # one part for all three
    overflow = world.engine.lookup(request(work=[2**63 - 1], want_source=True))
    assert overflow.defaulted == 1


def test_lookup_by_table_returns_rows(make_world):
    world = make_world([{"name": "u", "table": "user", "key_offset": 5}])
    world.put(world.cache, "user", [1])
    world.put(world.cache, "item", [4, 5])
    result = world.engine.lookup(request(item=[5, 4, 5], user=[1], by_table=True))
    np.testing.assert_array_equal(
        result.vectors["item"], world.row(world.tables["item"], [5, 4, 5])
    )
    np.testing.assert_array_equal(result.vectors["user"], world.row(world.tables["user"], [1]))
    assert list(result.vectors) == ["item", "user"]


@pytest.mark.parametrize("batch", [0, 3])
def test_samples_without_keys_pool_to_zeros(make_world, batch):
    world = make_world()
    empty = np.empty(0, np.int64)
    fixed = JaggedKeys(empty, batch)
    jagged = JaggedKeys(empty, batch, np.zeros(batch + 1, np.int64))
    for keys in (fixed, jagged):
        result = world.engine.lookup(LookupRequest({"user": keys, "item": keys}, want_source=True))
        np.testing.assert_array_equal(result.vectors["user"], np.zeros((batch, 3), np.float32))
        assert result.vectors["item"].shape == (0, 2)
        assert result.sources["user"].shape == (0,)
    assert world.store.calls == 0


# -- miss policies -------------------------------------------------------------------------------


def test_default_then_promote_answers_immediately(make_world, promote_policy):
    world = make_world(policy=promote_policy(0.0))
    world.put(world.store, "user", [1, 2])
    future = world.engine.submit(request(user=[1, 2, 1]))
    assert future.done()
    np.testing.assert_array_equal(future.result().vectors["user"], [[-1, -2, -3]] * 3)
    assert future.result().defaulted == 3
    assert world.promoted == [("user", [1, 2])]
    assert world.store.calls == 0


@pytest.mark.parametrize(("rate", "waits"), [(0.5, False), (0.51, True), (1.0, True)])
def test_low_hit_rate_waits_for_the_store(make_world, promote_policy, rate, waits):
    world = make_world(policy=promote_policy(rate))
    world.put(world.cache, "user", [1])
    world.put(world.store, "user", [1, 2])
    result = world.engine.lookup(request(user=[1, 1, 1, 2]))  # half of the unique keys hit
    assert (world.store.calls == 1) == waits
    assert result.defaulted == (0 if waits else 1)


def test_miss_policy_is_per_table(make_world, promote_policy):
    world = make_world(policy=promote_policy(0.0))
    world.put(world.store, "user", [1])
    world.put(world.store, "item", [1])
    result = world.engine.lookup(request(user=[1], item=[1]))
    np.testing.assert_array_equal(result.vectors["user"], [[-1, -2, -3]])
    np.testing.assert_array_equal(result.vectors["item"], world.row(world.tables["item"], [1]))
    assert sorted(world.promoted) == [("item", [1]), ("user", [1])]


# -- faults --------------------------------------------------------------------------------------


def test_broken_store_degrades_with_a_guard_and_fails_without(make_world):
    guarded = make_world(guard=lambda store: GuardedTier(store, 1.0, 5, 1.0))
    unguarded = make_world()
    for world in (guarded, unguarded):
        world.put(world.cache, "user", [1])
        world.store.error = TierError("rocksdb", "disk gone")
    with pytest.raises(TierError, match="disk gone"):
        unguarded.engine.lookup(request(user=[1, 2]))
    result = guarded.engine.lookup(request(user=[1, 2]))
    assert (result.degraded, result.defaulted) == (("rocksdb",), 1)
    assert guarded.finished[-1] == ("rocksdb",)
    assert guarded.promoted == []


def test_overload_rejects_only_requests_that_need_a_store(make_world):
    world = make_world(threads=1, queued=1)
    world.put(world.cache, "user", [1])
    world.store.leave.clear()
    accepted = [world.engine.submit(request(user=[2]))]
    while world.workers.waiting:
        time.sleep(0.001)
    accepted.append(world.engine.submit(request(user=[3])))
    with pytest.raises(Unavailable, match="overloaded"):
        world.engine.submit(request(user=[4]))
    assert world.engine.submit(request(user=[1])).done()
    world.store.leave.set()
    assert [future.result(60).defaulted for future in accepted] == [1, 1]


def test_expired_deadline_raises_deadline_exceeded(make_world):
    world = make_world(threads=1)
    with pytest.raises(DeadlineExceeded, match="deadline exceeded before the lookup started"):
        world.engine.submit(request(user=[1], deadline=time.monotonic() - 1))
    world.store.leave.clear()
    first = world.engine.submit(request(user=[1]))
    deadline = time.monotonic() + 0.5
    late = world.engine.submit(request(user=[2], deadline=deadline))
    until(lambda: time.monotonic() > deadline)
    world.store.leave.set()
    first.result(60)
    with pytest.raises(DeadlineExceeded, match="waited"):
        late.result(60)


def test_deadline_exceeded_in_the_store_is_not_answered_with_defaults(make_world):
    world = make_world(guard=lambda store: GuardedTier(store, 60.0, 5, 1.0))
    world.store.leave.clear()
    with pytest.raises(DeadlineExceeded, match="while reading from the stores"):
        world.engine.lookup(request(user=[1], deadline=time.monotonic() + 0.5))


def test_submit_never_blocks_an_event_loop(make_world):
    """Or it would wait for ever: only the loop lets the store answer."""
    world = make_world()
    world.store.leave.clear()

    async def main():
        futures = [asyncio.wrap_future(world.engine.submit(request(user=[k]))) for k in range(4)]
        await asyncio.sleep(0.01)
        assert not any(each.done() for each in futures)
        world.store.leave.set()
        return await asyncio.gather(*futures)

    assert [answer.defaulted for answer in asyncio.run(main())] == [1] * 4


def test_caches_are_read_again_after_a_long_wait_for_a_thread(make_world):
    """Those before it may have had its rows promoted."""
    world = make_world(threads=1)
    world.put(world.store, "item", [1, 2, 3])
    world.store.leave.clear()
    first = world.engine.submit(request(item=[1]))
    second = world.engine.submit(request(item=[2, 3], want_source=True))
    time.sleep(0.02)
    world.put(world.cache, "item", [2])
    world.store.leave.set()
    assert first.result(60).defaulted == 0
    result = second.result(60)
    assert result.sources["item"].tolist() == [Source.CPU, Source.ROCKSDB]
    rows = world.row(world.tables["item"], [2, 3])
    assert result.vectors["item"].tolist() == rows.tolist()
    assert world.promoted == [("item", [1]), ("item", [3])]


def test_large_cached_request_is_not_delayed_by_a_slow_store(make_world, monkeypatch):
    monkeypatch.setattr(engine_module, "INLINE_KEYS", 10)
    world = make_world(threads=2)
    memory = BoundedThreadPool(1, 8, name="memory")
    lanes = LookupPools(memory, world.workers)
    engine = LookupEngine(world.model, TierChain([world.cache]), TierChain([world.store]), lanes)
    world.put(world.cache, "item", range(20))
    world.put(world.store, "item", [500])
    world.store.leave.clear()
    slow = [engine.submit(request(item=[400 + i])) for i in range(4)]  # both threads, and a queue
    large = engine.submit(request(item=list(range(20)))).result(60)
    assert large.defaulted == 0
    assert not any(future.done() for future in slow)
    mixed = engine.submit(request(item=[*range(20), 500]))
    world.store.leave.set()
    rows = world.row(world.tables["item"], [*range(20), 500])
    assert mixed.result(60).vectors["item"].tolist() == rows.tolist()
    assert all(future.result(60).defaulted == 1 for future in slow)
    memory.close()


def test_large_request_runs_on_a_pool_thread(make_world, monkeypatch):
    monkeypatch.setattr(engine_module, "INLINE_KEYS", 10)
    world = make_world()
    world.put(world.cache, "user", range(11))
    begun, leave = threading.Event(), threading.Event()
    fetch = world.cache.fetch

    def slow(parts, ctx):
        begun.set()
        assert leave.wait(60)
        fetch(parts, ctx)

    monkeypatch.setattr(world.cache, "fetch", slow)
    future = world.engine.submit(request(user=list(range(11))))
    assert begun.wait(60)
    assert not future.done()
    leave.set()
    assert future.result(60).defaulted == 0


# -- out -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("user_keys", [[1, 2, 3], [2, 2, 9]])
def test_out_arrays_are_written_in_place(make_world, user_keys):
    world = make_world()
    world.put(world.cache, "user", [1, 2])
    world.put(world.cache, "item", [5])
    out = {"user": np.full((3, 3), 77, np.float32), "item": np.full((3, 2), 77, np.float32)}
    expected = world.engine.lookup(request(user=user_keys, item=[5, 6, 5]))
    result = world.engine.lookup(request(user=user_keys, item=[5, 6, 5], out=out))
    for name, array in out.items():
        assert result.vectors[name] is array
        np.testing.assert_array_equal(array, expected.vectors[name])


class WritesLate(MemoryTier):
    """A cache whose rows arrive once it may write them."""

    def __init__(self):
        super().__init__(CACHE)
        self.begun, self.may_write = threading.Event(), threading.Event()

    def fetch(self, parts, ctx):
        self.begun.set()
        assert self.may_write.wait(60)
        super().fetch(parts, ctx)


def test_out_is_not_written_after_cancellation(make_world, monkeypatch):
    monkeypatch.setattr(engine_module, "INLINE_KEYS", 0)
    world, cache = make_world(), WritesLate()
    world.put(cache, "user", [1, 2])
    stores = TierChain([world.store])
    engine = LookupEngine(world.model, TierChain([cache]), stores, world.workers)
    out = np.zeros((2, 3), np.float32)
    future = engine.submit(request(user=[1, 2], out={"user": out}))
    assert cache.begun.wait(60)
    future.cancel()
    is_the_callers = future.done()
    cache.may_write.set()
    wait([future], 60)
    world.workers.close()
    assert not (is_the_callers and out.any())
    assert future.cancelled()


@pytest.mark.parametrize("weights", [None, [1, 2, 3, 4, 5, 6]])
@pytest.mark.parametrize("batch", [3, 6])
def test_out_arrays_get_pooled_vectors(make_world, batch, weights):
    world = make_world()
    world.put(world.cache, "user", range(5))
    if weights is not None:
        weights = np.array(weights, np.float32)
    keys = {"user": JaggedKeys(np.arange(6), batch, weights=weights)}
    expected = world.engine.lookup(LookupRequest(keys)).vectors["user"]
    out = {"user": np.full((batch, 3), 77, np.float32)}
    assert world.engine.lookup(LookupRequest(keys, out=out)).vectors["user"] is out["user"]
    np.testing.assert_array_equal(out["user"], expected)
    rows = np.vstack([world.row(world.tables["user"], range(5)), [[-1, -2, -3]]])
    rows = rows if weights is None else rows * weights[:, None]
    np.testing.assert_array_equal(expected, rows.reshape(batch, -1, 3).sum(axis=1))


def test_lookup_over_two_thousand_tables(make_world):
    from hps.lookup.base import Feature
    from hps.types import EmbeddingTable

    world_type = type(make_world())
    tables = [EmbeddingTable.make(f"t{i:04}", 4, default=float(i)) for i in range(2000)]
    world = world_type([Feature(t.name, t) for t in tables], tables)
    for table in tables[::2]:
        world.put(world.store, table.name, [3])
    result = world.engine.lookup(request(**{t.name: [3, 4] for t in tables}))
    for i, table in enumerate(tables):
        found = world.row(table, [3])[0] if i % 2 == 0 else table.default
        np.testing.assert_array_equal(result.vectors[table.name], [found, table.default])
    assert result.defaulted == 3000
    assert world.store.calls == 1
    world.workers.close()
