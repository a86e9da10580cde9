"""Mapped tables on the fast path: the file first, then the CPU cache, also in attached processes."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from hps.native import COMPILED
from hps.tiers.base import Bags, FetchContext, Part
from hps.tiers.chain import TierChain
from hps.tiers.cpu.attached_cache import AttachedCache
from hps.tiers.cpu.cache import CpuCache
from hps.tiers.cpu.cache_memory import CacheMemory
from hps.tiers.cpu.segments import Segments
from hps.tiers.cpu.use_counts import UseCounts
from hps.tiers.mapped import MappedTier
from hps.types import EmbeddingTable, Source, version_now
from tests.support.mapped_tables import map_rows
from tests.support.waiting import until

ROWS, DIM = 5000, 4
TABLE = EmbeddingTable.make("items", DIM)
shared = pytest.mark.skipif(not COMPILED, reason="a shared cache needs the native core")


def rows_of(keys, add=0):
    return (np.asarray(keys)[:, None] + np.arange(DIM) / 8 + add).astype(np.float32)


class Opened:
    def __init__(self, folder, name=None):
        own = None if name is None else folder
        self.store = MappedTier(folder / "db", shared=own)
        self.store.open_tables([TABLE])
        keys = np.random.default_rng(1).permutation(ROWS)
        map_rows(self.store, TABLE, folder / "files", keys, rows_of(keys), 1)
        self.mapped = self.store.mapped(TABLE)
        segments = None if name is None else Segments(name, folder)
        self.cache = CpuCache({TABLE: 200}, memory=CacheMemory(segments))
        self.cache.map_table(TABLE, self.mapped)
        self.chain = TierChain([self.cache, self.store])
        self.version = version_now()

    def write(self, keys, add):
        """As a node writes: the store, then the rows in the cache; then the write is acknowledged."""
        keys = np.asarray(keys)
        versions = np.full(len(keys), self.version, np.uint64)
        self.version += 1
        self.store.insert(TABLE, keys, rows_of(keys, add), versions)
        self.cache.update(TABLE, keys, rows_of(keys, add), versions)

    def delete(self, keys):
        versions = np.full(len(keys), self.version, np.uint64)
        self.version += 1
        self.chain.delete(TABLE, np.asarray(keys), versions)

    def promote(self, keys):
        part = fetch(self.store, keys)
        at = np.flatnonzero(part.source)
        self.cache.insert(TABLE, part.keys[at], part.out[at], part.versions[at])

    def close(self):
        self.chain.close()


@pytest.fixture
def opened(tmp_path):
    found = Opened(tmp_path)
    yield found
    found.close()


@pytest.fixture
def owner(tmp_path):
    found = Opened(tmp_path, "test")
    yield found
    found.close()


def fetch(tier, keys):
    part = Part.make(TABLE, np.asarray(keys))
    tier.fetch([part], FetchContext())
    return part


def gather(cache, keys):
    """The rows, or None if one is missing."""
    out = np.empty((len(keys), DIM), np.float32)
    return out if cache.gather([(TABLE, np.asarray(keys), out)]) else None


def test_rows_come_from_the_file_without_taking_the_cache_memory(opened):
    keys = np.random.default_rng(2).integers(0, ROWS, 9000)
    np.testing.assert_array_equal(gather(opened.cache, keys), rows_of(keys))
    part = fetch(opened.cache, np.arange(ROWS))
    assert not len(part.missing)
    assert (part.source == Source.CPU).all()
    assert (part.versions == 1).all()
    opened.promote(np.arange(100))
    assert opened.cache.size(TABLE) == 0
    assert opened.cache.status()["mapped_tables"] == 1


def test_overridden_rows_come_from_the_cache_or_the_store(opened):
    opened.write([5, ROWS + 1], 100)
    opened.delete([6])
    opened.cache.evict(TABLE, np.array([5]))
    assert gather(opened.cache, [4, 5]) is None
    part = fetch(opened.cache, [4, 5, 6, 7, ROWS + 1])
    assert part.missing.tolist() == [1, 4]
    assert part.source.tolist() == [Source.CPU, 0, 0, Source.CPU, 0]
    opened.promote([5, ROWS + 1])
    assert opened.cache.size(TABLE) == 2
    np.testing.assert_array_equal(
        gather(opened.cache, [4, 5, 7]), [*rows_of([4]), *rows_of([5], 100), *rows_of([7])]
    )
    opened.write([5], 200)
    np.testing.assert_array_equal(gather(opened.cache, [5]), rows_of([5], 200))
    assert gather(opened.cache, [6]) is None
    assert fetch(opened.chain, [6]).source.tolist() == [0]


def test_changed_rows_of_the_file_stay_in_memory(opened):
    """A reader never misses because of a change, not even before the caches receive it."""
    keys = np.array([5, 7, ROWS + 1])
    opened.store.insert(TABLE, keys, rows_of(keys, 100), np.full(3, opened.version, np.uint64))
    np.testing.assert_array_equal(gather(opened.cache, [5, 7]), rows_of([5, 7], 100))
    assert (
        gather(opened.cache, [ROWS + 1]) is None
    )  # not of the file: it comes when it is asked for
    opened.store.delete(TABLE, np.array([6]), np.full(1, opened.version + 1, np.uint64))
    deleted = fetch(opened.cache, [6])
    assert not len(deleted.missing), "the cache knows the deletion"
    assert deleted.source.tolist() == [0]


def test_changes_of_a_full_cache_insert_rows_in_use_only(opened):
    for _ in range(64):
        gather(opened.cache, [1, 2])
    opened.write(np.arange(1000, 1200), 100)
    assert opened.cache.size(TABLE) > 150
    opened.write(np.arange(50), 100)
    np.testing.assert_array_equal(gather(opened.cache, [1, 2]), rows_of([1, 2], 100))
    assert all(gather(opened.cache, [key]) is None for key in range(3, 50))


def test_an_old_change_of_a_row_that_left_the_cache_does_not_come_back(opened):
    opened.write([5], 100)
    opened.cache.evict(TABLE, np.array([5]))
    older = np.array([opened.version - 100], np.uint64)
    opened.store.insert(TABLE, np.array([5]), rows_of([5], 50), older)
    assert gather(opened.cache, [5]) is None
    np.testing.assert_array_equal(fetch(opened.chain, [5]).out, rows_of([5], 100))


@pytest.mark.parametrize("keys_per_bag", [3, 1500])
def test_bags_are_pooled_from_both(opened, keys_per_bag):
    opened.write([5, 9], 100)
    opened.cache.evict(TABLE, np.array([9]))
    keys = np.array([*range(1, 10), 5, 5, 7] * (keys_per_bag // 3))
    bags = Bags(TABLE, keys, np.empty((12 // 3, DIM), np.float32))
    assert opened.cache.gather([], [bags])
    assert (keys[bags.missing] == 9).all()
    assert len(bags.missing) == (keys == 9).sum()
    assert opened.cache.complete(bags, rows_of([9] * len(bags.missing), 100))
    rows = rows_of(keys, 0)
    rows[(keys == 5) | (keys == 9)] += 100
    expected = [np.add.reduce(each, dtype=np.float64) for each in np.split(rows, 4)]
    np.testing.assert_allclose(bags.out, expected, rtol=1e-5)


def test_a_damaged_file_is_not_read(opened):
    opened.write([5], 100)
    opened.promote([5])
    opened.mapped.unreadable = "a test"
    assert gather(opened.cache, [4]) is None
    np.testing.assert_array_equal(gather(opened.cache, [5]), rows_of([5], 100))


def test_changes_reach_the_table_that_still_reads_the_file(opened):
    """Another table of the same name, as of a version that was loaded again, replaces it."""
    other = EmbeddingTable.make("items", DIM, default=1.0)
    opened.cache.add_table(other, 200)
    opened.cache.map_table(other, opened.mapped)
    opened.cache.drop_table(TABLE)
    opened.store.insert(TABLE, np.array([5]), rows_of([5], 100), np.array([opened.version], "u8"))
    out = np.empty((1, DIM), np.float32)
    assert opened.cache.gather([(other, np.array([5]), out)])
    np.testing.assert_array_equal(out, rows_of([5], 100))


def test_dropped_table_misses(opened):
    opened.cache.drop_table(TABLE)
    assert gather(opened.cache, [4]) is None
    opened.cache.add_table(TABLE, 10)
    assert gather(opened.cache, [4]) is None


def test_uses_are_ranked(opened):
    for _ in range(64 * 4):
        gather(opened.cache, [1, 2, 3])
    for _ in range(64):
        gather(opened.cache, [7])
    keys, scores = opened.cache.top_k(TABLE, 4)
    assert sorted(keys[:3].tolist()) == [1, 2, 3]
    assert keys[3] == 7
    assert scores[0] == 255
    for _ in range(32 * 300):
        gather(opened.cache, [7])
    assert opened.cache.top_k(TABLE, 1)[0].tolist() == [7]
    assert opened.cache._use_counts[TABLE]._uses.max() < 128


class CountingTable:
    """Whose rows are their keys."""

    def positions(self, keys):
        return keys

    def keys_at(self, at):
        return at


def test_uses_are_ranked_while_others_count():
    uses = np.zeros(1 << 20, np.uint8)
    counts, done = UseCounts(CountingTable(), uses), threading.Event()

    def count():
        while not done.is_set():
            uses[::7] = 1
            uses[::5] = 0

    others = [threading.Thread(target=count) for _ in range(2)]
    for each in others:
        each.start()
    try:
        for _ in range(300):
            keys, scores = counts.top_k(10)
            assert len(keys) == len(scores) <= 10
    finally:
        done.set()
        for each in others:
            each.join()


def read_acknowledged(gather_one, acknowledged, done, wrong):
    """Read keys over and over: none may be older than what was acknowledged before the read."""
    rng = np.random.default_rng()
    while not done.is_set():
        keys = rng.integers(0, 50, 30)
        known = acknowledged[keys].copy()
        out = gather_one(keys)
        torn = (out - rows_of(keys)).std(axis=1) > 1e-3
        older = out[:, 0] - keys < known
        if torn.any() or older.any():
            wrong.append((keys, known, out))
            return


def run_readers(opened, gather_one, rounds=300):
    acknowledged, done, wrong = np.zeros(50, np.int64), threading.Event(), []
    arguments = gather_one, acknowledged, done, wrong
    readers = [threading.Thread(target=read_acknowledged, args=arguments) for _ in range(3)]
    for reader in readers:
        reader.start()
    rng = np.random.default_rng(3)
    for step in range(1, rounds):
        keys = rng.choice(50, 5, replace=False)
        opened.write(keys, step)
        acknowledged[keys] = step
        opened.promote(rng.choice(50, 5, replace=False))
    done.set()
    for reader in readers:
        reader.join()
    assert not wrong


def test_acknowledged_writes_are_not_answered_by_the_file(opened):
    def gather_one(keys):
        unique, inverse = np.unique(keys, return_inverse=True)
        found = gather(opened.cache, keys)
        return fetch(opened.chain, unique).out[inverse] if found is None else found

    run_readers(opened, gather_one)


@shared
def test_attached_processes_read_the_file_and_the_marks(owner, tmp_path):
    asked = []
    attached = AttachedCache(
        "test", [TABLE], lambda _table, keys: asked.append(keys), folder=tmp_path
    )
    keys = np.random.default_rng(2).integers(0, ROWS, 9000)
    np.testing.assert_array_equal(gather(attached, keys), rows_of(keys))
    owner.write([5], 100)
    np.testing.assert_array_equal(gather(attached, [5]), rows_of([5], 100))
    owner.cache.evict(TABLE, np.array([5]))
    assert gather(attached, [4, 5]) is None
    owner.promote([5])
    np.testing.assert_array_equal(gather(attached, [5]), rows_of([5], 100))
    for _ in range(64):
        gather(attached, [7])
    assert 7 in owner.cache.top_k(TABLE, 20)[0]
    owner.cache.drop_table(TABLE)
    until(lambda: gather(attached, [4]) is None)
    attached.close()


@shared
def test_attached_readers_see_no_row_older_than_an_acknowledged_one(owner, tmp_path):
    attached = AttachedCache("test", [TABLE], lambda _table, _keys: None, folder=tmp_path)

    def gather_one(keys):
        unique, inverse = np.unique(keys, return_inverse=True)
        found = gather(attached, keys)
        if found is not None:
            return found
        part = fetch(attached, unique)
        owner.store.fetch([part], FetchContext())
        return part.out[inverse]

    run_readers(owner, gather_one)
    attached.close()


@shared
def test_a_dropped_table_is_shared_again(owner, tmp_path):
    owner.write([5], 100)
    owner.cache.drop_table(TABLE)
    owner.cache.add_table(TABLE, 200)
    owner.cache.map_table(TABLE, owner.mapped)
    attached = AttachedCache("test", [TABLE], lambda _table, _keys: None, folder=tmp_path)
    assert gather(attached, [4]) is not None
    assert gather(attached, [5]) is None
    attached.close()


@shared
def test_a_new_owner_hides_the_rows_of_a_dead_one(owner, tmp_path):
    attached = AttachedCache("test", [TABLE], lambda _table, _keys: None, folder=tmp_path)
    assert gather(attached, [4]) is not None
    attached._poll_at = np.inf  # it does not notice the new owner
    (tmp_path / "hps.test/owner.lock").unlink()  # as if the owner had been killed
    successor = Segments("test", tmp_path)
    assert gather(attached, [4]) is None
    successor.close()
    attached.close()


@shared
def test_a_file_that_is_another_one_is_not_read(owner, tmp_path, caplog):
    other = tmp_path / "other"
    other.mkdir()
    tier = MappedTier(other / "db")
    tier.open_tables([TABLE])
    keys = np.arange(10)
    path = map_rows(tier, TABLE, other / "files", keys, rows_of(keys), 1)
    path.replace(owner.mapped.file.header.path)
    attached = AttachedCache("test", [TABLE], lambda _table, _keys: None, folder=tmp_path)
    assert gather(attached, [4]) is None
    assert "mapped file of table model/1/items unusable" in caplog.text
    attached.close()
    tier.close()
