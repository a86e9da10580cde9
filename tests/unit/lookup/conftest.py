"""A model on memory tiers, with the store made slow, blocking or broken as a test wants it."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from hps.lookup.base import Feature, LookupModel
from hps.lookup.engine import LookupEngine
from hps.threads import BoundedThreadPool
from hps.tiers.base import TierInfo
from hps.tiers.chain import TierChain
from hps.types import EmbeddingTable, MissPolicy, Source
from tests.support.memory_tier import MemoryTier

STORE = TierInfo("rocksdb", Source.ROCKSDB, blocking=True, volatile=False)
CACHE = TierInfo("cpu", Source.CPU, cache=True)


class Store(MemoryTier):
    """A store that may take its time, wait for leave, or fail."""

    def __init__(self, info=STORE):
        super().__init__(info)
        self.seconds = 0.0
        self.leave = threading.Event()
        self.leave.set()
        self.error = None
        self.calls = 0
        self.threads = set()

    def fetch(self, parts, ctx):
        self.calls += 1
        self.threads.add(threading.current_thread().name)
        if self.seconds:
            time.sleep(self.seconds)
        assert self.leave.wait(60)
        if self.error is not None:
            raise self.error
        super().fetch(parts, ctx)


class World:
    """Tables, tiers and an engine over them. ``row(table, key)`` is what a key's row is made to be."""

    def __init__(
        self, features, tables, *, blocking=True, threads=2, queued=8, guard=None, **model
    ):
        self.tables = {table.name: table for table in tables}
        self.cache = MemoryTier(CACHE)
        self.store = Store(replace(STORE, blocking=blocking))
        self.workers = BoundedThreadPool(threads, queued, name="test", setting="tiers.lookup_queue")
        self.promoted = []
        self.answered = []
        self.finished = []
        self.model = LookupModel("m", 1, self.tables, {f.name: f for f in features}, **model)
        self.stores = TierChain([self.store if guard is None else guard(self.store)])
        self.engine = LookupEngine(
            self.model,
            TierChain([self.cache]),
            self.stores,
            self.workers,
            lambda table, keys: self.promoted.append((table.name, keys.tolist())),
            _Recorder(self),
        )

    @staticmethod
    def row(table, keys):
        """(n, dim) rows that tell key and table apart."""
        keys = np.asarray(keys, np.int64)
        base = (keys % 1009).astype(np.float64)[:, None] + len(table.name)
        return (base + np.arange(table.dim)).astype(table.dtype)

    def put(self, tier, name, keys, version=7):
        table = self.tables[name]
        keys = np.asarray(keys, np.int64)
        tier.insert(table, keys, self.row(table, keys), np.full(len(keys), version, np.uint64))


class _Recorder:
    def __init__(self, world):
        self._world = world

    def finished(self, answers, seconds, degraded):
        assert seconds >= 0
        self._world.answered += [(table.name, list(sources)) for table, sources, _ in answers]
        self._world.finished.append(degraded)

    def finished_alike(self, answers):
        return lambda seconds: self.finished(answers, seconds, ())


@pytest.fixture
def make_world():
    worlds = []

    def make(features=None, *, policy=None, **options):
        tables = [
            EmbeddingTable.make("user", 3, default=[-1, -2, -3], miss=policy),
            EmbeddingTable.make("item", 2, default=-9.0),
        ]
        named = {table.name: table for table in tables}
        made = [
            Feature(**{**feature, "table": named[feature["table"]]})
            for feature in features
            or [
                {"name": "user", "table": "user"},
                {"name": "item", "table": "item", "pooling": "none"},
            ]
        ]
        world = World(made, tables, **options)
        worlds.append(world)
        return world

    yield make
    for world in worlds:
        world.store.leave.set()
        world.workers.close()
        world.stores.close()


@pytest.fixture
def promote_policy():
    return lambda rate: MissPolicy("default_then_promote", rate)
