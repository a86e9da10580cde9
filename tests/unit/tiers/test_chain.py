"""TierChain beyond the contract: order of calls, early end of a search, info."""

import numpy as np
import pytest

from hps.errors import ConfigError, TierError
from hps.tiers.base import FetchContext, Part, TierInfo
from hps.tiers.chain import TierChain
from hps.types import EmbeddingTable, Source, version_now
from tests.support.memory_tier import MemoryTier

TABLE = EmbeddingTable.make("items", 2)
OTHER = EmbeddingTable.make("users", 2)


class Recorder(MemoryTier):
    """Records the calls of the verbs with their keys."""

    def __init__(self, name, log, **info):
        super().__init__(TierInfo(name, Source.MEMORY, **info))
        self.name, self.log, self.broken = name, log, False

    def fetch(self, parts, ctx):
        self.log.append((self.name, [part.keys[part.missing].tolist() for part in parts]))
        super().fetch(parts, ctx)

    def insert(self, *args):
        self._note("insert")
        super().insert(*args)

    def update(self, *args):
        self._note("update")

    def delete(self, *args):
        self._note("delete")
        super().delete(*args)

    def evict(self, *args):
        self._note("evict")

    def close(self):
        self._note("close")

    def _note(self, verb):
        if self.broken:
            raise TierError(self.name, "broken")
        self.log.append((self.name, verb))


@pytest.fixture
def log():
    return []


@pytest.fixture
def tiers(log):
    return [Recorder(name, log) for name in ("top", "middle", "bottom")]


def insert(tier, table, *keys):
    rows, versions = np.ones((len(keys), 2), np.float32), np.full(len(keys), version_now())
    tier.insert(table, np.array(keys), rows, versions.astype(np.uint64))


def test_each_tier_gets_misses_of_those_above(tiers, log):
    insert(tiers[0], TABLE, 1, 2)
    insert(tiers[1], TABLE, 2, 3)
    insert(tiers[1], OTHER, 7)
    insert(tiers[2], TABLE, 4)
    log.clear()
    parts = [Part.make(TABLE, np.array([1, 2, 3, 4])), Part.make(OTHER, np.array([7]))]
    TierChain(tiers).fetch(parts, FetchContext())
    assert log == [("top", [[1, 2, 3, 4], [7]]), ("middle", [[3, 4], [7]]), ("bottom", [[4]])]


def test_search_stops_when_nothing_is_missing(tiers, log):
    insert(tiers[0], TABLE, 1)
    tiers[0].delete(TABLE, np.array([2]), np.array([version_now()], np.uint64))
    insert(tiers[1], TABLE, 2)
    log.clear()
    part = Part.make(TABLE, np.array([1, 2]))
    TierChain(tiers).fetch([part], FetchContext())
    assert log == [("top", [[1, 2]])]
    assert part.source.tolist() == [Source.MEMORY, 0]


def test_writes_go_from_bottom_to_top(tiers, log):
    chain, keys = TierChain(tiers), np.array([1])
    rows, versions = np.ones((1, 2), np.float32), np.array([version_now()], np.uint64)
    chain.insert(TABLE, keys, rows, versions)
    chain.update(TABLE, keys, rows, versions)
    chain.delete(TABLE, keys, versions)
    chain.evict(TABLE, keys)
    verbs = ("insert", "update", "delete", "evict")
    assert log == [(name, verb) for verb in verbs for name in ("bottom", "middle", "top")]


def test_rejected_write_does_not_reach_upper_tiers(tiers, log):
    tiers[1].broken = True
    with pytest.raises(TierError, match="middle: broken"):
        insert(TierChain(tiers), TABLE, 1)
    assert log == [("bottom", "insert")]


def test_every_tier_is_closed_when_one_raises(tiers, log):
    tiers[1].broken = True
    with pytest.raises(TierError, match="middle: broken"):
        TierChain(tiers).close()
    assert sorted(log) == [("bottom", "close"), ("top", "close")]


def test_empty_chain_holds_nothing():
    chain = TierChain([])
    insert(chain, TABLE, 1)
    chain.update(TABLE, np.array([1]), np.ones((1, 2), np.float32), np.ones(1, np.uint64))
    chain.delete(TABLE, np.array([1]), np.ones(1, np.uint64))
    chain.evict(TABLE, np.array([1]))
    part = Part.make(TABLE, np.array([1]))
    chain.fetch([part], FetchContext())
    assert part.missing.tolist() == [0]
    assert not chain.info.blocking
    assert chain.info.cache
    chain.close()


def test_info_of_chain_combines_its_tiers(log):
    cache = Recorder("cpu", log, cache=True)
    store = Recorder("rocksdb", log, blocking=True, volatile=False)
    shared = Recorder("redis", log, blocking=True, shared=True)
    assert TierChain([cache, cache]).info == TierInfo("cpu+cpu", Source.MEMORY, cache=True)
    info = TierChain([cache, TierChain([shared, store])]).info
    assert info.name == "cpu+redis+rocksdb"
    assert info.blocking
    assert info.shared
    assert not info.volatile
    assert not info.cache


def test_source_of_chain_is_that_of_its_first_tier():
    infos = [TierInfo("cpu", Source.MEMORY), TierInfo("redis", Source.REDIS)]
    assert TierChain([MemoryTier(info) for info in infos]).info.source == Source.MEMORY


def test_tiers_of_different_memories_are_rejected(log):
    tiers = [Recorder("gpu", log, memory="cuda"), Recorder("cpu", log)]
    with pytest.raises(ConfigError, match=r"gpu in cuda memory, cpu in host memory"):
        TierChain(tiers)
