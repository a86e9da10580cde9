"""Stores of a node without Redis: concurrency limits, and the effect of a slow store."""

import sys
import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest

import hps
from hps.config import Settings
from hps.config.model_schema import FeatureSpec, ModelSpec, TableSpec
from hps.models.repository import Repository
from hps.models.version_writer import write_version
from hps.node.model_opening import OpenedTables
from hps.node.shared_redis import calls_at_a_time
from hps.node.stores import NodeStores
from hps.observability.metrics import Metrics
from hps.tiers.rocksdb import RocksDbTier
from hps.types import EmbeddingTable, JaggedKeys, LookupRequest, NoProgress

SPEC = ModelSpec(
    name="m",
    tables=[TableSpec(name="a", dim=2), TableSpec(name="b", dim=2)],
    features=[FeatureSpec(name=n, table=n, pooling="none") for n in ("a", "b")],
)


@pytest.fixture
def open_node(tmp_path):
    keys = np.arange(100)
    rows = np.repeat(np.float32(keys)[:, None], 2, axis=1)
    write_version(tmp_path / "models", SPEC, 1, {"a": (keys, rows), "b": (keys, rows)})
    nodes = []

    def make(guard, **tiers):
        config = {
            "models": {"repository": str(tmp_path / "models")},
            "tiers": {
                "cpu_cache": {"enabled": False},
                "rocksdb": {"path": str(tmp_path / "db"), "guard": guard},
                **tiers,
            },
        }
        nodes.append(hps.open(config))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


def submit(node, table, key):
    keys = {table: JaggedKeys.dense(np.array([key]))}
    return node.model("m").engine.submit(LookupRequest(keys))


def test_guard_limits_concurrent_fetches(open_node, monkeypatch):
    node = open_node({"concurrency": 2, "deadline_ms": 10_000})
    gate, inside, fetch = threading.Event(), threading.Semaphore(0), RocksDbTier.fetch

    def slow(tier, parts, ctx):
        inside.release()
        gate.wait(60)
        fetch(tier, parts, ctx)

    monkeypatch.setattr(RocksDbTier, "fetch", slow)
    first = [submit(node, "a", key) for key in (1, 2)]
    assert all(inside.acquire(timeout=60) for _ in range(2))
    start = time.monotonic()
    third = submit(node, "b", 3).result(60)
    assert 1.0 <= time.monotonic() - start < 8  # a tenth of the deadline
    assert third.degraded == ("rocksdb",)
    gate.set()
    assert [f.result(60).vectors["a"][0, 0] for f in first] == [1, 2]
    assert 'hps_tier_skipped_total{reason="full",tier="rocksdb"} 1.0' in (
        node.metrics.render().decode()
    )


@pytest.mark.parametrize(
    ("threads", "connections", "rocksdb", "expected"),
    [
        (4, 8, True, 3),  # one lookup thread is always left for rows on this machine
        (16, 8, True, 7),  # and one connection for writes
        (1, 1, True, 1),
        (4, 8, False, 5),  # no other store: the lookups and the cache writer
        (16, 8, False, 8),
    ],
)
def test_concurrency_limit_of_redis(threads, connections, rocksdb, expected):
    assert calls_at_a_time(threads, connections, alone=not rocksdb) == expected


def test_models_can_be_removed_while_others_are_added(tmp_path):
    """One thread frees a version while another may load the next."""
    keys = np.arange(2)
    rows = np.zeros((2, 2), np.float32)
    write_version(tmp_path, SPEC, 1, {"a": (keys, rows), "b": (keys, rows)})
    version = Repository(tmp_path).open("m", 1, None)
    settings = Settings()
    stores = NodeStores(settings, [], Metrics(), ExitStack())

    def opened(number):
        return OpenedTables(
            version, {n: EmbeddingTable.make(n, 2, model="m", version=number) for n in ("a", "b")}
        )

    stay, failed = [], []

    def come_and_go(first):
        try:
            for number in range(first, first + 300):
                model = opened(number)
                stores.add(model, NoProgress())
                if number % 10:
                    stores.remove(model)
                else:
                    stay.extend(model.tables.values())
        except BaseException as error:
            failed.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=come_and_go, args=[n * 1_000]) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failed
    assert set(stores.tables) == set(stay)
