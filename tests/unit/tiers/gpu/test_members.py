"""Tables that share the arrays of a GPU cache, on a device: their twin, every reader of rows, a race."""

import threading
import time

import numpy as np
import pytest

from hps.cuda import layout
from hps.cuda.layout import EMPTY, ROOMY_LOAD, TOMBSTONE, EvictionPolicy
from hps.cuda.loader import cupy
from hps.cuda.twin import TwinTable
from hps.tiers.base import FetchContext
from hps.tiers.gpu.cache import GpuCache
from hps.tiers.gpu.checks import DevicePooling
from hps.types import EmbeddingTable, JaggedKeys
from tests.support.rows import distinct_rows
from tests.unit.tiers.gpu.test_cache import (
    NOW,
    POLICIES,
    check,
    fetch,
    marked_rows,
    part_of,
    scores_in,
    scores_of,
    slots_of,
    versions_of,
)

pytestmark = pytest.mark.gpu


def tables_of(count, dim=4):
    return [EmbeddingTable.make("t", dim, model="m", version=n + 1) for n in range(count)]


class Shared:
    """A cache whose ``tables`` share arrays; keys in ``changed`` of one are not common there."""

    def __init__(self, tables, rows, **options):
        self.tables = tables
        self.changed = {table: set() for table in tables}
        self.cache = GpuCache({})
        self.cache.add_table(tables[0], rows, **options)
        for table in tables[1:]:
            assert self.cache.share_table(table, tables[0], self.common_rows)

    def common_rows(self, table, keys):
        """Common rows have a higher version in later tables."""
        mine = [key not in self.changed[table] for key in keys.tolist()]
        return np.array(mine, bool), NOW + 5 * self.tables.index(table)

    @property
    def used_slots(self):
        held = next(iter(self.cache._tables.values()))
        return int((slots_of(held)["word"] < EMPTY).sum())


@pytest.mark.parametrize("load", [1.0, ROOMY_LOAD])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
def test_single_key_operations_match_twin(policy, load):
    tables = tables_of(layout.MOST_MEMBERS)
    shared = Shared(tables, 80, policy=policy, load=load)
    cache, held = shared.cache, shared.cache.held(tables[0])
    twin, rng = TwinTable(held.shape, 4, policy=policy), np.random.default_rng(5)
    verbs = ["common"] * 4 + ["insert", "insert", "update", "delete", "evict", "fetch"]
    for step in range(3000):
        twin.member, keys = int(rng.integers(len(tables))), rng.integers(-70, 70, 1)
        table, verb = tables[twin.member], rng.choice(verbs)
        versions = versions_of(keys, 1 + rng.integers(0, 4) + step // 100)
        rows, scores = distinct_rows(table, keys, step), scores_of(policy, rng)
        if verb == "common":
            versions, rows = versions_of(keys), distinct_rows(table, keys)
        elif verb in ("insert", "update", "delete"):
            shared.changed[table].add(int(keys[0]))
        if verb == "evict":
            twin.evict(keys)
            cache.evict(table, keys)
        elif verb == "fetch":
            part = fetch(cache, table, keys)
            vectors, words, seen = twin.fetch(keys)
            assert len(part.missing) == (words[0] == EMPTY)
            if words[0] < TOMBSTONE:
                np.testing.assert_array_equal(part.out.get(), vectors)
            np.testing.assert_array_equal(part.versions.get(), seen)
        elif verb == "delete":
            twin.write(keys, None, versions)
            cache.delete(table, keys, versions)
        elif verb == "update":
            twin.write(keys, rows, versions, update=True, scores=scores)
            cache.update(table, keys, rows, versions, scores)
        else:
            adapted = cache._with_members(cache.held(table), {"keys": keys, "versions": versions})
            members, lowered = adapted["members"], adapted["versions"]
            twin.write(keys, rows, lowered, scores=scores, members=members)
            cache.insert(table, keys, rows, versions, scores)
        assert twin.clock == held.clock.ticks
        if step % 50 == 49:
            slots, full = slots_of(held), twin.words < EMPTY
            np.testing.assert_array_equal(slots["word"] >= EMPTY, ~full)
            seen = np.uint32(EMPTY | TOMBSTONE | layout.MEMBERS)
            np.testing.assert_array_equal(slots["word"][full] & seen, twin.words[full] & seen)
            np.testing.assert_array_equal(slots["key"][full], twin.keys[full])
            np.testing.assert_array_equal(scores_in(held, slots)[full], twin.scores[full])
            check(held)
    assert twin.evicted > 20 or load < 1
    assert (twin.evicted, twin.dropped) == (held.state.evicted, held.state.dropped)
    for twin.member, table in enumerate(tables):
        assert sorted(cache.export(table)[0].get().tolist()) == twin.resident().tolist()
        assert cache.size(table) == len(twin.resident())
        twin.leave()
        cache.clear(table)
        np.testing.assert_array_equal(slots_of(held)["word"] < EMPTY, twin.words < EMPTY)
        check(held)
    assert shared.used_slots == 0


@pytest.mark.parametrize("load", [1.0, ROOMY_LOAD])
@pytest.mark.parametrize("dim", [3, 8, 32, 128])
def test_every_reader_finds_the_rows_of_its_member(dim, load):
    """Each of two tables has its rows, of which 1 % are its own; then one is dropped, and a third added."""
    count, tables = 200_000, tables_of(2, dim)
    shared = Shared(tables, int(1.25 * count), load=load)
    cache, keys = shared.cache, np.random.default_rng(3).permutation(count)
    shared.changed[tables[1]].update(keys[: count // 100].tolist())
    common = distinct_rows(tables[0], keys)
    own = common.copy()
    own[: count // 100] = distinct_rows(tables[1], keys[: count // 100], 2)
    for table, rows in zip(tables, (common, own), strict=True):
        cache.insert(table, keys, rows, versions_of(keys))
    lost = count // 25 if load == 1 else 0
    assert count - lost <= shared.used_slots <= 1.01 * count
    read_in_all_forms(cache, tables[0], keys, common, lost)
    read_in_all_forms(cache, tables[1], keys, own, lost)
    shared.changed[tables[0]].update(keys.tolist())
    cache.update(tables[0], keys, distinct_rows(tables[0], keys, 7), versions_of(keys, 1))
    read_in_all_forms(cache, tables[1], keys, own, lost)
    cache.drop_table(tables[0])
    read_in_all_forms(cache, tables[1], keys, own, lost)
    third = EmbeddingTable.make("t", dim, model="m", version=3)
    shared.changed[third] = set()
    shared.tables.append(third)
    assert cache.share_table(third, tables[1], shared.common_rows)
    assert cache.size(third) == 0
    cache.insert(third, keys, common, versions_of(keys))
    read_in_all_forms(cache, third, keys, common, lost)
    assert shared.used_slots <= 1.01 * count
    check(cache.held(third))


def read_in_all_forms(cache, table, keys, expected, lost):
    """All but ``lost`` keys have the ``expected`` rows, for each kernel that reads rows."""
    cp = cupy()
    part = fetch(cache, table, keys)  # with versions
    found = np.setdiff1d(np.arange(len(keys)), part.missing)
    assert len(part.missing) <= lost
    np.testing.assert_array_equal(part.out.get()[found], expected[found])
    assert (part.versions.get()[found] == NOW).all()
    assert (cache.contains(table, keys).get() == np.isin(np.arange(len(keys)), found)).all()
    plain = part_of(table, keys)
    plain.versions = None
    cache.fetch([plain], FetchContext())
    np.testing.assert_array_equal(plain.out.get()[found], expected[found])
    bags, out = keys[found][:4000], cp.zeros((1000, table.dim), np.float32)
    assert cache.pool([DevicePooling(table, JaggedKeys(bags, 1000), "sum", out)])
    total = expected[found][:4000].reshape(1000, 4, -1).astype(np.float64).sum(axis=1)
    np.testing.assert_allclose(out.get(), total, rtol=1e-4)
    exported, vectors, *_ = (array.get() for array in cache.export(table))
    order, at = np.argsort(exported), np.argsort(keys[found])
    np.testing.assert_array_equal(exported[order], keys[found][at])
    np.testing.assert_array_equal(vectors[order], expected[found][at])
    assert len(cache.top_k(table, len(keys))[0]) == len(found)


def test_arrays_are_freed_with_their_last_table():
    cp, tables = cupy(), tables_of(2, 32)
    cp.get_default_memory_pool().free_all_blocks()
    before = cp.get_default_memory_pool().used_bytes()
    shared = Shared(tables, 1 << 18)
    opened = cp.get_default_memory_pool().used_bytes()
    shared.cache.drop_table(tables[0])
    assert cp.get_default_memory_pool().used_bytes() == opened
    assert shared.cache.capacity(tables[1]) >= 1 << 18
    shared.cache.drop_table(tables[1])
    shared.cache.close()
    assert cp.get_default_memory_pool().used_bytes() - before < 1 << 24


def test_tables_that_cannot_share():
    tables = tables_of(layout.MOST_MEMBERS + 1)
    shared = Shared(tables[:-1], 1000)
    assert not shared.cache.share_table(tables[-1], tables[0], shared.common_rows)
    assert not GpuCache({tables[0]: 1000}).share_table(
        EmbeddingTable.make("t", 8, model="m", version=9), tables[0], shared.common_rows
    )
    cache = GpuCache({})
    cache.add_table(tables[0], 1000, static=True)
    assert not cache.share_table(tables[1], tables[0], shared.common_rows)


RACE_KEYS, RACE_BATCH, RACE_DIM = 120_000, 200_000, 32


def read_member(cache, table, member, started, stop, wrong, found):
    """Count rows that are not of one piece, and those that are neither common nor of ``member``."""
    cp = cupy()
    rng = np.random.default_rng(member)
    with cp.cuda.Stream(non_blocking=True) as stream:
        keys = cp.asarray(rng.integers(0, RACE_KEYS, RACE_BATCH))
        out = cp.empty((RACE_BATCH, RACE_DIM), np.float32)
        misses = cp.empty(4 + RACE_BATCH, np.uint32)
        total, bad = cp.zeros((), np.int64), cp.zeros((), np.int64)
        while not stop.is_set():
            out.view(np.uint32).fill(0xFFFFFFFF)
            misses[:4] = 0
            cache.direct.fetch(cache.held(table), keys, out, misses)
            rows = out.view(np.uint32)
            untouched = (rows == np.uint32(0xFFFFFFFF)).all(axis=1)
            right = (rows == marked_rows(cp, keys, rows[:, 1])).all(axis=1)
            right &= (rows[:, 1] == 0) | (rows[:, 1] % 2 == member)
            bad += (~untouched & ~right).sum() + abs(untouched.sum() - misses[0].astype(np.int64))
            total += (~untouched).sum()
            stream.synchronize()
            started.release()
        wrong.append(int(bad))
        found.append(int(total))


def change_members(shared, until):
    """Insert common rows of all members, and rows that one of them has changed: of the upper half of keys."""
    rng, sequence, tables = np.random.default_rng(9), 1, shared.tables
    while time.monotonic() < until:
        for member, table in enumerate(tables):
            sequence += 1 + (sequence + 1 + member) % 2
            assert sequence % 2 == member
            keys = np.unique(rng.integers(0, RACE_KEYS, 6000))
            keys = keys[shared.common_rows(table, keys)[0]]
            rows = marked_rows(np, keys, 0).view(np.float32)
            shared.cache.insert(table, keys, rows, versions_of(keys))
            own = np.unique(rng.integers(RACE_KEYS // 2, RACE_KEYS, 1000))
            shared.changed[table].update(own.tolist())
            rows = marked_rows(np, own, sequence).view(np.float32)
            change = shared.cache.insert if sequence % 3 else shared.cache.update
            change(table, own, rows, versions_of(own, sequence))
            some = rng.choice(own, 50, replace=False)
            shared.cache.delete(table, some, versions_of(some, sequence))
            shared.cache.evict(table, rng.integers(0, RACE_KEYS, 100))
    return sequence


@pytest.mark.parametrize("load", [1.0, ROOMY_LOAD])
def test_concurrent_readers_see_rows_of_their_member(load):
    tables = tables_of(2, RACE_DIM)
    shared = Shared(tables, RACE_KEYS // 2, load=load, policy=EvictionPolicy.LRU)
    started, stop, wrong, found = threading.Semaphore(0), threading.Event(), [], []
    readers = [
        threading.Thread(
            target=read_member, args=(shared.cache, table, n, started, stop, wrong, found)
        )
        for n, table in enumerate(tables)
    ]
    for reader in readers:
        reader.start()
    for _ in range(3 * len(readers)):  # compiled and running
        assert started.acquire(timeout=60)
    rounds = change_members(shared, time.monotonic() + 8)
    stop.set()
    for reader in readers:
        reader.join()
    assert len(wrong) == len(readers)
    assert sum(wrong) == 0
    assert rounds > 50
    assert min(found) > 10 * RACE_KEYS
    check(shared.cache.held(tables[0]))
