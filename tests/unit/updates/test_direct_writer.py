"""Acknowledged direct writes are in the stores, even after clock changes."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import Future

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hps.observability.meters import UpdateMeter
from hps.observability.metrics import Metrics
from hps.tiers.base import FetchContext, Part
from hps.tiers.cpu.cache import CpuCache
from hps.tiers.rocksdb import RocksDbTier
from hps.types import EmbeddingTable, make_version
from hps.updates.cache_writer import CacheWriter, PromotionSources
from hps.updates.direct_writer import DirectWriter
from hps.updates.stream_positions import FedStore
from hps.updates.version_clock import VersionClock

KEYS = 3
_NAMES = itertools.count()
NONE, NO_ROWS = np.empty(0, np.int64), np.empty((0, 2), np.float32)


@pytest.fixture(scope="module")
def databases(tmp_path_factory):
    """Two stores that both get every write, as Redis and RocksDB do."""
    stores = [RocksDbTier(tmp_path_factory.mktemp("db")) for _ in range(2)]
    yield stores
    for store in stores:
        store.close()


def row(value: float) -> np.ndarray:
    return np.full((1, 2), value, np.float32)


TABLE = EmbeddingTable.make("t", 2)


class NoCaches:
    def update(self, *_):
        done: Future[None] = Future()
        done.set_result(None)
        return done

    delete = update


class Node:
    def __init__(self, stores, table) -> None:
        self.stores, self.table = stores, table
        self.cache = CpuCache({table: 64})
        self.writer = CacheWriter(self.cache, PromotionSources(stores), 1024)
        self.start()

    def start(self) -> None:
        """Restart with a clock that has made no versions yet."""
        stores = [FedStore(f"store{i}", store) for i, store in enumerate(self.stores)]
        self.direct = DirectWriter(stores, self.writer, UpdateMeter(Metrics()))

    def held(self, tier, key: int) -> float | None:
        part = Part.make(self.table, np.array([key]))
        tier.fetch([part], FetchContext())
        return float(part.out[0, 0]) if part.source[0] else None

    def close(self) -> None:
        self.writer.close()


KEY, SHIFT = st.integers(0, KEYS - 1), st.integers(-3_600_000, 3_600_000)
EVENT = st.one_of(
    st.tuples(st.sampled_from(["write", "delete"]), KEY),
    st.tuples(st.just("stream"), KEY, st.integers(0, 1), SHIFT, st.booleans()),
    st.tuples(st.just("clock"), SHIFT),
    st.tuples(st.just("promote"), KEY),
    st.just(("restart",)),
)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(events=st.lists(EVENT, min_size=2, max_size=15))
def test_acknowledged_write_is_stored_despite_future_versions_and_clock_changes(
    databases, monkeypatch, events
):
    first_key = next(_NAMES) * KEYS  # separate keys: tables are costly to make
    table = TABLE
    node, now_ns = Node(databases, table), time.time_ns()
    try:
        for number, event in enumerate(events, 1):
            key = np.array([first_key + (event[1] if len(event) > 1 else 0)])
            match event[0]:
                case "write" | "delete" as what:
                    new, gone = (key, NONE) if what == "write" else (NONE, key)
                    node.direct.write([table], new, row(number)[: len(new)], gone)
                    wanted = float(number) if what == "write" else None
                    found = [node.held(tier, int(key[0])) for tier in databases]
                    assert found == [wanted, wanted]
                    assert node.held(node.cache, int(key[0])) in (wanted, None)
                case "stream":
                    _, _, store, shift, deleted = event
                    at = np.array([make_version(now_ns // 10**6 + shift, number)], np.uint64)
                    if deleted:
                        databases[store].delete(table, key, at)
                        node.writer.delete(table, key, at).result()
                    else:
                        databases[store].insert(table, key, row(number), at)
                        node.writer.update(table, key, row(number), at).result()
                case "clock":
                    moved_ns = now_ns + event[1] * 10**6
                    monkeypatch.setattr(
                        "hps.updates.version_clock.time.time_ns", lambda ns=moved_ns: ns
                    )
                case "promote":
                    node.writer.promote(table, key)
                    assert node.writer.flush(60)
                case "restart":
                    node.start()
    finally:
        monkeypatch.undo()
        node.close()


def test_write_reads_no_rows_unless_a_stored_version_may_be_ahead(tmp_path, monkeypatch):
    store, keys = RocksDbTier(tmp_path), np.arange(64)
    rows = np.zeros((64, 2), np.float32)
    read = []
    monkeypatch.setattr(store, "fetch", lambda parts, _ctx: read.append(parts[0].keys.tolist()))
    direct = DirectWriter([FedStore("store", store)], NoCaches(), UpdateMeter(Metrics()))
    direct.write([TABLE], keys, rows, NONE)
    ahead = direct.write([TABLE], NONE, NO_ROWS, keys)
    assert read == []
    store.insert(TABLE, keys[5:6], rows[:1], np.array([ahead + (1 << 40)], np.uint64))
    direct.write([TABLE], keys, rows, NONE)
    (some,) = read
    assert 5 in some
    assert len(some) < 32  # its bucket of high-water marks, not the table
    store.close()


def test_write_of_a_repeated_key_ahead_of_the_clock_uses_one_version(tmp_path):
    store, key = RocksDbTier(tmp_path), np.array([7])
    ahead = make_version(time.time_ns() // 10**6 + 3_600_000, 0)
    store.insert(TABLE, key, row(1), np.array([ahead], np.uint64))
    direct = DirectWriter([FedStore("store", store)], NoCaches(), UpdateMeter(Metrics()))
    version = direct.write([TABLE], np.array([7, 7]), np.concatenate([row(2), row(3)]), NONE)
    assert version > ahead
    part = Part.make(TABLE, key)
    store.fetch([part], FetchContext())
    assert (part.versions[0], part.out[0, 0]) == (version, 3)
    store.close()


def test_writes_of_two_nodes_in_one_millisecond_converge_in_all_stores(databases, monkeypatch):
    """Each store receives the two rows in a different order."""
    now_ns = time.time_ns()
    monkeypatch.setattr("hps.updates.version_clock.time.time_ns", lambda: now_ns)
    table, key = TABLE, np.array([next(_NAMES) * KEYS])
    versions = [np.array([VersionClock().now()], np.uint64) for _ in range(2)]
    for store, order in zip(databases, ([0, 1], [1, 0]), strict=True):
        for writer in order:
            store.insert(table, key, row(writer + 1.0), versions[writer])
    rows = []
    for store in databases:
        part = Part.make(table, key)
        store.fetch([part], FetchContext())
        rows.append(part.out[0, 0])
    assert rows[0] == rows[1]
