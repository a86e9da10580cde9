"""Lookups during updates, deletions, evictions and promotions return no wrong, torn or old row."""

import sys
import threading
import time

import numpy as np
import pytest

from hps.lookup.base import Feature, LookupModel
from hps.lookup.engine import LookupEngine
from hps.threads import BoundedThreadPool
from hps.tiers.base import TierInfo
from hps.tiers.chain import TierChain
from hps.tiers.cpu.cache import CpuCache
from hps.types import EmbeddingTable, JaggedKeys, LookupRequest, MissPolicy, Source, version_now
from hps.updates.cache_writer import CacheWriter, PromotionSources
from tests.support.memory_tier import MemoryTier
from tests.support.waiting import until

KEYS = 300
SECONDS = 1.5


def row(table, key, version):
    """A row that tells key and version in every element."""
    return np.full(table.dim, key * 100_003.0 + version % 100_003, np.float64)


class World:
    """One updater; ``settled[key]``: the version every lookup from now on must have reached."""

    def __init__(self, policy, capacity):
        self.table = EmbeddingTable.make("t", 8, dtype=np.float64, default=-1.0, miss=policy)
        self.store = MemoryTier(TierInfo("rocksdb", Source.ROCKSDB, blocking=True))
        self.cache = CpuCache({self.table: capacity})
        self.writer = CacheWriter(self.cache, PromotionSources([self.store]), 1 << 16)
        self.workers = BoundedThreadPool(2, 1000, name="test", setting="s")
        model = LookupModel(
            "m", 1, {"t": self.table}, {"f": Feature("f", self.table, pooling="none")}
        )
        self.engine = LookupEngine(
            model,
            TierChain([self.cache]),
            TierChain([self.store]),
            self.workers,
            self.writer.promote,
        )
        self.settled = np.zeros(KEYS, np.uint64)
        self.stop = threading.Event()
        self.faults = []
        self.seen = dict.fromkeys(Source, 0)

    def update(self):
        """Change a few keys at a time: stores first, the cache after, then call it settled."""
        rng, version = np.random.default_rng(1), version_now()
        while not self.stop.is_set():
            keys = rng.choice(KEYS, 8, replace=False).astype(np.int64)
            version += 1
            versions = np.full(len(keys), version, np.uint64)
            if rng.random() < 0.3:
                self.store.delete(self.table, keys, versions)
                change = self.writer.delete(self.table, keys, versions)
            else:
                rows = np.stack([row(self.table, key, version) for key in keys.tolist()])
                self.store.insert(self.table, keys, rows, versions)
                change = self.writer.update(self.table, keys, rows, versions)
            change.result(60)
            self.settled[keys] = versions

    def look(self, seed):
        rng = np.random.default_rng(seed)
        while not self.stop.is_set():
            keys = (rng.zipf(1.3, 40) % KEYS).astype(np.int64)
            due = self.settled[keys]
            result = self.engine.lookup(
                LookupRequest({"f": JaggedKeys(keys, len(keys))}, want_source=True)
            )
            self.check(keys, due, result)

    def check(self, keys, due, result):
        waits = self.table.miss.kind == "wait"
        answers = zip(
            keys.tolist(), due.tolist(), result.vectors["f"], result.sources["f"].tolist(),
            result.versions["f"].tolist(), strict=True,
        )  # fmt: skip
        for key, settled, vector, source, version in answers:
            self.seen[Source(source)] += 1
            if source == Source.DEFAULT:
                right = (vector == -1.0).all() and (version >= settled or not (waits or version))
            else:
                right = (vector == row(self.table, key, version)).all() and version >= settled
            if not right:
                self.faults.append((key, settled, vector, source, version))

    def seen_enough(self):
        """Or the test would show nothing."""
        waits = self.table.miss.kind == "wait"
        least = {Source.CPU: 1000, Source.DEFAULT: 10, Source.ROCKSDB: 10 if waits else -1}
        return all(self.seen[source] > n for source, n in least.items())

    def close(self):
        self.writer.close()
        self.workers.close()


@pytest.mark.parametrize("capacity", [64, 1000])
@pytest.mark.parametrize("policy", [MissPolicy(), MissPolicy("default_then_promote", 0.0)])
def test_concurrent_writes_never_give_a_wrong_row(policy, capacity):
    world = World(policy, capacity)
    threads = [threading.Thread(target=world.update)]
    threads += [threading.Thread(target=world.look, args=(seed,)) for seed in (2, 3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        time.sleep(SECONDS)
        until(lambda: world.faults or world.seen_enough())
    finally:
        world.stop.set()
        for thread in threads:
            thread.join(60)
        sys.setswitchinterval(interval)
        world.close()
    assert not world.faults[:3]
    assert world.seen_enough()
