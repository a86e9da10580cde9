"""Random operations on every tier give the same answers as on MemoryTier, the specification."""

import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from hps.tiers.base import Bags, FetchContext, Part
from hps.tiers.chain import TierChain
from hps.tiers.cpu.cache import CpuCache
from hps.tiers.mapped import MappedTier
from hps.types import EmbeddingTable, make_version
from tests.support.mapped_tables import map_rows
from tests.support.memory_tier import MemoryTier
from tests.support.tiers import open_case

DAY_MS = 86_400_000
BASE_MS = time.time_ns() // 1_000_000
KEYS = [*range(-6, 6), -(2**63), 2**63 - 1, 2**32, -(2**32)]
# The oldest are beyond the time that tombstones are remembered.
VERSIONS = [make_version(BASE_MS - 3 * DAY_MS + n) for n in range(3)] + [
    make_version(BASE_MS, n) for n in range(8)
]
TABLE = st.integers(0, 2)
BATCH = st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(VERSIONS)), max_size=12)


def keys_and_versions(batch):
    return (
        np.array([key for key, _ in batch], np.int64),
        np.array([version for _, version in batch], np.uint64),
    )


def fetch(tier, parts):
    for part in parts:
        part.out[:] = 7
    tier.fetch(parts, FetchContext())
    return [(p.out.tolist(), p.versions.tolist(), p.source > 0, p.missing.tolist()) for p in parts]


class TierMachine(RuleBasedStateMachine):
    """Every verb with batches in which keys repeat, on a tier that drops nothing by itself."""

    def __init__(self, open_tier):
        super().__init__()
        self.folder = TemporaryDirectory()
        self.under_test = open_tier(Path(self.folder.name) / "tier")
        self.tier, self.tables = self.under_test.tier, self.under_test.tables
        self.versioned = self.under_test.case.versioned
        self.model = MemoryTier()
        self.writes = 0

    def teardown(self):
        self.tier.close()
        self.folder.cleanup()

    def rows(self, table, n):
        """Return (n, dim) rows that differ from all previous ones."""
        firsts = np.arange(self.writes, self.writes + n)
        self.writes += n
        return ((firsts[:, None] * 3 + np.arange(table.dim)) % 2039).astype(table.dtype)

    def write(self, verb, table, batch):
        keys, versions = keys_and_versions(batch)
        rows = self.rows(table, len(keys))
        getattr(self.tier, verb)(table, keys, rows, versions)
        getattr(self.model, verb)(table, keys, rows, versions * self.versioned)

    @rule(n=TABLE, batch=BATCH)
    def insert(self, n, batch):
        self.write("insert", self.tables[n], batch)

    @rule(n=TABLE, batch=BATCH)
    def update(self, n, batch):
        self.write("update", self.tables[n], batch)

    @rule(n=TABLE, batch=BATCH)
    def delete(self, n, batch):
        table, (keys, versions) = self.tables[n], keys_and_versions(batch)
        self.tier.delete(table, keys, versions)
        if self.versioned:
            self.model.delete(table, keys, versions)
        else:
            self.model.evict(table, keys)

    @rule(n=TABLE, batch=BATCH)
    def evict(self, n, batch):
        table, (keys, _) = self.tables[n], keys_and_versions(batch)
        self.tier.evict(table, keys)
        self.model.evict(table, keys)

    @rule(
        requested=st.lists(
            st.tuples(TABLE, st.lists(st.sampled_from(KEYS), unique=True)), max_size=3
        )
    )
    def fetch(self, requested):
        requested = [(self.tables[n], np.array(keys, np.int64)) for n, keys in requested]
        mine = fetch(self.tier, [Part.make(table, keys) for table, keys in requested])
        model = fetch(self.model, [Part.make(table, keys) for table, keys in requested])
        for got, wanted in zip(mine, model, strict=True):
            for one, other in zip(got, wanted, strict=True):
                np.testing.assert_array_equal(one, other)

    @rule(n=TABLE)
    def size(self, n):
        if hasattr(self.tier, "size"):
            assert self.tier.size(self.tables[n]) == self.model.size(self.tables[n])


def test_every_tier_behaves_like_memory_tier(open_tier):
    run_state_machine_as_test(
        lambda: TierMachine(open_tier),
        settings=settings(max_examples=20, stateful_step_count=30, deadline=None),
    )


@pytest.mark.parametrize("name", ["memory", "single_flight", "rocksdb", "mapped", "mapped_delta"])
def test_stores_with_expiring_rows_behave_like_memory_tier(name):
    """Some of the rows are three days old, and expire after one."""
    run_state_machine_as_test(
        lambda: TierMachine(lambda path: open_case(name, path, ttl_s=86_400)),
        settings=settings(max_examples=20, stateful_step_count=30, deadline=None),
    )


class SmallCacheMachine(RuleBasedStateMachine):
    """A cache far too small, fed as a node feeds it: updates go to the store first, and promotion
    copies what the store has. Whatever the chain finds is what the store alone would answer."""

    def __init__(self, capacity):
        super().__init__()
        self.table = EmbeddingTable.make("items", 3)
        self.cache, self.store = CpuCache({self.table: capacity}), MemoryTier()
        self.chain = TierChain([self.cache, self.store])
        self.sequence = 0

    def next_rows(self, keys):
        self.sequence += 1
        versions = np.full(len(keys), make_version(BASE_MS, self.sequence), np.uint64)
        return np.full((len(keys), 3), self.sequence, np.float32), versions

    @rule(keys=st.lists(st.integers(-40, 40), max_size=20))
    def stream_upserts(self, keys):
        keys = np.array(keys, np.int64)
        rows, versions = self.next_rows(keys)
        self.store.insert(self.table, keys, rows, versions)
        self.cache.update(self.table, keys, rows, versions)

    @rule(keys=st.lists(st.integers(-40, 40), max_size=5))
    def stream_deletions(self, keys):
        keys = np.array(keys, np.int64)
        self.chain.delete(self.table, keys, self.next_rows(keys)[1])

    @rule(keys=st.lists(st.integers(-40, 40), max_size=30, unique=True))
    def promote(self, keys):
        part = Part.make(self.table, np.array(keys, np.int64))
        self.store.fetch([part], FetchContext())
        at = np.flatnonzero(part.source)
        self.cache.insert(self.table, part.keys[at], part.out[at], part.versions[at])

    @rule(keys=st.lists(st.integers(-40, 40), max_size=30, unique=True))
    def fetch(self, keys):
        keys = np.array(keys, np.int64)
        (out, versions, found, _), (wanted, wanted_versions, wanted_found, _) = (
            fetch(tier, [Part.make(self.table, keys)])[0] for tier in (self.chain, self.store)
        )
        assert out == wanted
        assert versions == wanted_versions
        assert found.tolist() == wanted_found.tolist()

    @rule()
    def counts_are_true(self):
        stats, everything = self.cache.stats(self.table), Part.make(self.table, np.arange(-40, 41))
        self.cache.fetch([everything], FetchContext())
        rows = np.count_nonzero(everything.source)
        held = len(everything.keys) - len(everything.missing)
        assert (stats.rows, stats.tombstones) == (rows, held - rows)
        assert rows == self.cache.size(self.table)
        assert held <= self.cache.capacity(self.table)


class MappedMemoryMachine(SmallCacheMachine):
    """The same above a mapped file in memory, which has rows of half of the keys."""

    def __init__(self, capacity):
        super().__init__(capacity)
        self.folder = TemporaryDirectory()
        path = Path(self.folder.name)
        self.store = MappedTier(path / "tier")
        self.store.open_tables([self.table])
        keys = np.arange(-40, 41, 2)
        rows = np.full((len(keys), 3), 3, np.float32)
        map_rows(self.store, self.table, path / "files", keys, rows, make_version(BASE_MS, 3))
        self.cache.map_table(self.table, self.store.mapped(self.table))
        self.chain = TierChain([self.cache, self.store])

    def teardown(self):
        self.chain.close()
        self.folder.cleanup()

    @rule(keys=st.lists(st.integers(-40, 40), min_size=1, max_size=30))
    def gather(self, keys):
        keys = np.array(keys, np.int64)
        part, out = Part.make(self.table, np.unique(keys)), np.empty((len(keys), 3), np.float32)
        self.store.fetch([part], FetchContext())
        at = np.searchsorted(part.keys, keys)
        if self.cache.gather([(self.table, keys, out)]):
            assert (part.source[at] > 0).all()
            np.testing.assert_array_equal(out, part.out[at])
        bags = Bags(self.table, keys, np.empty((1, 3), np.float32))
        assert self.cache.gather([], [bags])
        missing = np.zeros(len(keys), bool)
        if bags.missing is not None:
            missing[bags.missing] = True
            assert self.cache.complete(bags, np.ones((len(bags.missing), 3), np.float32))
        assert (part.source[at][~missing] > 0).all()
        expected = np.where(missing[:, None], 1, part.out[at]).sum(axis=0)
        np.testing.assert_array_equal(bags.out[0], expected)

    @rule()
    def counts_are_true(self):
        """Rows of the file take no memory of the cache."""
        part = Part.make(self.table, np.arange(-40, 41))
        self.store.fetch([part], FetchContext())
        from_file = self.store.mapped(self.table).answers(part.keys)
        assert self.cache.size(self.table) <= np.count_nonzero(~from_file)


def test_cache_above_a_mapped_file_never_returns_wrong_rows():
    for capacity in (1, 16, 40):
        run_state_machine_as_test(
            lambda capacity=capacity: MappedMemoryMachine(capacity),
            settings=settings(max_examples=30, stateful_step_count=30, deadline=None),
        )


def test_cache_too_small_never_returns_wrong_rows():
    for capacity in (1, 16, 40):
        run_state_machine_as_test(
            lambda capacity=capacity: SmallCacheMachine(capacity),
            settings=settings(max_examples=30, stateful_step_count=30, deadline=None),
        )
