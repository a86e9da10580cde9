"""Expired rows of mapped files: hidden all at once, from every reader, for good."""

import numpy as np
import pytest

from hps.native import COMPILED
from hps.tiers.base import FetchContext, Part
from hps.tiers.chain import TierChain
from hps.tiers.cpu.attached_cache import AttachedCache
from hps.tiers.cpu.cache import CpuCache
from hps.tiers.cpu.cache_memory import CacheMemory
from hps.tiers.cpu.segments import Segments
from hps.tiers.mapped import MappedFileTier, MappedTier
from hps.types import EmbeddingTable, make_version
from tests.support.mapped_tables import map_delta_rows, map_rows, write_files
from tests.support.rows import rising_rows

TTL_S, NOW_S = 100, 2_000_000_000
PUBLISHED = make_version((NOW_S - 50) * 1000)
STREAMED = make_version(NOW_S * 1000)
LATER_S = NOW_S + 60  # the file's rows have expired, the streamed ones have not
KEYS = np.arange(0, 300, 3)


class Clock:
    def __init__(self):
        self.now = float(NOW_S)

    def __call__(self):
        return self.now


def make_table(ttl_s=TTL_S):
    return EmbeddingTable.make("items", 4, ttl_s=ttl_s)


def rows_of(keys, add=0):
    return rising_rows(np.asarray(keys) + add, 4)


class Opened:
    def __init__(self, folder, delta=False, **options):
        self.folder, self.clock, self.table = folder, Clock(), make_table()
        self.map_rows = map_delta_rows if delta else map_rows
        self.tier = None
        self.open(**options)

    def open(self, table=None, **options):
        is_first = self.tier is None
        if not is_first:
            self.tier.close()
        self.table = table or self.table
        self.tier = MappedTier(self.folder / "db", clock=self.clock, **options)
        self.tier.open_tables([self.table])
        if is_first:
            target = self.tier, self.table, self.folder / "files"
            self.map_rows(*target, KEYS, rows_of(KEYS), PUBLISHED)

    def write(self, keys, version=STREAMED):
        versions = np.full(len(keys), version, np.uint64)
        self.tier.insert(self.table, np.array(keys), rows_of(keys, 1), versions)

    def found(self, keys, tier=None):
        """The keys with a row, whose version is added."""
        part = Part.make(self.table, np.array(keys))
        ctx = FetchContext()
        (tier or self.tier).fetch([part], ctx)
        assert not ctx.degraded
        return {k: v for k, v in zip(keys, part.versions.tolist(), strict=True) if v}


@pytest.fixture(params=[False, True], ids=["file", "delta"])
def opened(request, tmp_path):
    one = Opened(tmp_path, request.param)
    yield one
    one.tier.close()


def test_rows_of_a_file_expire_together_and_written_ones_stay(opened):
    opened.write([3, 6, 1000])
    before = opened.found([0, 3, 6, 1000, 1])
    assert before == {0: PUBLISHED, 3: STREAMED, 6: STREAMED, 1000: STREAMED}
    opened.clock.now = LATER_S
    assert opened.found([0, 3, 6, 1000, 1]) == {3: STREAMED, 6: STREAMED, 1000: STREAMED}
    mapped = opened.tier.mapped(opened.table)
    assert mapped.expired_rows == len(KEYS) - 2
    scanned = [key for chunk in opened.tier.scan(opened.table) for key in chunk.keys.tolist()]
    assert scanned == [3, 6, 1000]
    opened.write([9])
    assert opened.found([0, 9]) == {9: STREAMED}
    opened.tier.delete(opened.table, np.array([12]), np.array([STREAMED], np.uint64))
    part = Part.make(opened.table, np.array([12, 15]))
    opened.tier.fetch([part], FetchContext())
    assert part.missing.tolist() == [1]
    assert part.versions.tolist() == [STREAMED, 0]


def test_a_restart_finds_the_rows_expired(opened):
    opened.write([3])
    opened.clock.now = LATER_S
    opened.open()
    assert opened.found([0, 3]) == {3: STREAMED}


def test_removed_rows_do_not_bring_back_older_ones_of_the_file(opened):
    """With a longer time to live, the file's row would be younger than one that was removed is old."""
    opened.write([3, 1000])
    opened.clock.now = NOW_S + TTL_S + 60
    assert opened.tier.expire(opened.table) == (2, None)
    assert opened.tier.expire(opened.table) == (0, None)
    assert opened.found([0, 3, 1000]) == {}
    opened.open(make_table(10 * TTL_S))
    assert opened.found([0, 3, 1000]) == {0: PUBLISHED}


def test_a_file_without_a_store_expires(tmp_path):
    clock, table = Clock(), make_table()
    files = write_files(tmp_path, table, KEYS, rows_of(KEYS))
    tier = MappedFileTier(clock=clock)
    tier.open(table, files.folder / "mapped", PUBLISHED)
    part = Part.make(table, KEYS)
    tier.fetch([part], FetchContext())
    assert not len(part.missing)
    clock.now = LATER_S
    part = Part.make(table, KEYS)
    ctx = FetchContext()
    tier.fetch([part], ctx)
    assert len(part.missing) == len(KEYS)
    assert not ctx.degraded


@pytest.mark.parametrize("attached", [False, True])
def test_caches_that_read_the_file_stop_with_it(tmp_path, attached):
    if attached and not COMPILED:
        pytest.skip("a shared cache needs the native core")
    opened = Opened(tmp_path, shared=tmp_path if attached else None)
    segments = Segments("c", tmp_path) if attached else None
    cache = CpuCache({opened.table: 200}, memory=CacheMemory(segments))
    cache.map_table(opened.table, opened.tier.mapped(opened.table))
    chain, readers = TierChain([cache, opened.tier]), [cache]
    if attached:
        readers.append(AttachedCache("c", [opened.table], lambda *_: None, folder=tmp_path))
    opened.write([3])
    for reader in readers:
        assert opened.found([0, 3], reader) == {0: PUBLISHED, 3: STREAMED}
    opened.clock.now = LATER_S
    opened.tier.mapped(opened.table)  # as the node's pass does
    for reader in (*readers, chain):
        assert opened.found([0, 3], reader) == {3: STREAMED}
    opened.write([6])
    for reader in readers:
        assert 0 not in opened.found([0, 6], reader)
    for each in (*readers[1:], chain):
        each.close()
