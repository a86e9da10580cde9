"""A node that feeds no store, on real parts: its caches change after the Redis or database that it reads."""

from __future__ import annotations

import time
from contextlib import contextmanager

import confluent_kafka as ck
import numpy as np
import pytest

import hps
from hps.config.model_schema import ModelSpec, TableSpec
from hps.config.store_settings import RedisSettings
from hps.models.version_writer import write_version
from hps.tiers.base import FetchContext, Part
from hps.tiers.positions import Applied, StreamPosition, TableChanges
from hps.tiers.redis import RedisTier
from hps.tiers.rocksdb import RocksDbTier
from hps.types import EmbeddingTable, make_version
from hps.updates.codec import encode_hps, hps_topic
from hps.updates.kafka.client import client_log, client_options
from hps.updates.topics import native_topic
from tests.support.kafka_brokers import SEES_NEW_TOPICS_SOON, make_topic, shared_broker, unique
from tests.support.kafka_updates import native, sending
from tests.support.redis_servers import shared_server
from tests.support.waiting import until

KEY = 5


class Fleet:
    """A model whose table ``items`` holds 0 for the keys 0 to 9, and its topic."""

    def __init__(self, folder, layout: str = "native") -> None:
        self.layout, self.redis = layout, ""
        self.model = unique("m")
        self.topic = (
            native_topic(self.model) if layout == "native" else hps_topic(self.model, "items")
        )
        self.made_ms = int(time.time() * 1000) + 1000  # newer than the model's files
        self.table = EmbeddingTable.make("items", 2, model=self.model)
        self.old = np.zeros((10, 2), np.float32)
        spec = ModelSpec(name=self.model, tables=[TableSpec(name="items", dim=2, default=-1.0)])
        write_version(folder / "models", spec, 1, {"items": (np.arange(10), self.old)})
        make_topic(shared_broker(), self.topic)

    def settings(self, folder, tiers) -> dict:
        kafka = {
            "brokers": shared_broker().address,
            "group": self.model,
            "shared_writer": "ingest",
            "shared_group": self.model,
            "options": SEES_NEW_TOPICS_SOON,
        }
        return {
            "models": {"repository": str(folder / "models")},
            "tiers": {"cpu_cache": {"warm": False}, **tiers},
            "updates": {"kafka": kafka},
        }

    def send(self, value: float) -> None:
        row = np.full((1, 2), value, np.float32)
        with sending(shared_broker()) as producer:
            payloads = (
                [native(self.model, KEY, value, int(value), made_ms=self.made_ms)]
                if self.layout == "native"
                else encode_hps(np.array([KEY]), row)
            )
            for payload in payloads:
                producer.produce(self.topic, payload, partition=0)

    def feed(self, store, value: float, offset: int | None) -> None:
        """Write as the feeder of ``store`` does, up to ``offset``; None: it records no position."""
        row = np.full((1, 2), value, np.float32)
        version = np.array([make_version(self.made_ms, int(value))], np.uint64)
        none = np.empty(0, np.int64), np.empty(0, np.uint64)
        changes = TableChanges(np.array([KEY]), row, version, *none)
        positions = [] if offset is None else [StreamPosition(self.topic, 0, offset)]
        store.apply(self.table, changes, positions)


def asked(node: hps.Node, fleet: Fleet) -> float:
    return float(node.lookup(fleet.model, {"items": np.array([KEY])}).vectors["items"][0, 0])


def cached(node: hps.Node, fleet: Fleet) -> float | None:
    """Row in the CPU cache itself."""
    (table,) = (t for m in node.models.values() for t in m.tables.values())
    part = Part.make(table, np.array([KEY]))
    (cache,) = (each.tier for each in node.tiers if each.tier.info.name == "cpu")
    cache.fetch([part], FetchContext())
    return float(part.out[0, 0]) if part.source[0] else None


def promoted(node: hps.Node, fleet: Fleet) -> float | None:
    asked(node, fleet)
    assert node.writer is not None
    assert node.writer.flush(60)
    return cached(node, fleet)


def judge(node: hps.Node, fleet: Fleet, store, offset: int | None) -> None:
    """An update is read before the store has it; the row from before is promoted, and does not stay."""
    (stream,) = node.streams._readers.streams
    fleet.send(1.0)
    until(lambda: stream.ingestor.is_waiting)
    assert promoted(node, fleet) == 0.0
    until(lambda: "hps_updates" in (stream.problem or ""))
    until(lambda: node.streams.age_s(stream.ingestor._tables[f"{fleet.model}/items"][0]) > 0)
    fleet.feed(store, 1.0, offset)
    until(lambda: cached(node, fleet) == 1.0)
    until(lambda: stream.problem is None)


def load(fleet: Fleet, folder, tiers) -> None:
    """Let a node load the files' rows into its stores."""
    settings = fleet.settings(folder, tiers)
    del settings["updates"]
    hps.open(settings).close()


@contextmanager
def redis_of(fleet: Fleet, folder):
    """A Redis with the rows of ``fleet``'s files."""
    fleet.redis = shared_server().address
    load(fleet, folder, redis_tiers(fleet))
    store = RedisTier(RedisSettings(addresses=[fleet.redis], layout=fleet.layout))
    yield store
    store.erase(fleet.model)
    store.close()


def redis_tiers(fleet: Fleet) -> dict:
    redis = {
        "addresses": [fleet.redis],
        "layout": fleet.layout,
        "timeout_ms": 5000,
        "guard": {"deadline_ms": 5000},
    }
    return {"rocksdb": {"enabled": False}, "redis": redis}


def test_row_promoted_before_redis_has_its_update_is_replaced(tmp_path):
    fleet = Fleet(tmp_path)
    with redis_of(fleet, tmp_path) as store:
        store.apply(fleet.table, nothing(), [StreamPosition(fleet.topic, 0, 0)])
        with hps.open(fleet.settings(tmp_path, redis_tiers(fleet))) as node:
            judge(node, fleet, store, 1)


def test_row_promoted_before_reading_starts_gets_later_updates(tmp_path):
    """Redis had the first message at the promotion, and the second one when the reader started."""
    fleet = Fleet(tmp_path)
    with redis_of(fleet, tmp_path) as store:
        fleet.send(1.0)
        fleet.feed(store, 1.0, 1)
        settings = fleet.settings(tmp_path, redis_tiers(fleet))
        settings["updates"]["kafka"]["brokers"] = "127.0.0.1:9"
        with hps.open(settings) as node:
            assert promoted(node, fleet) == 1.0
            fleet.send(2.0)
            fleet.feed(store, 2.0, 2)
            (stream,) = node.streams._readers.streams
            assert stream.ingestor._positions.start_offset(fleet.topic, 0) == 1


def test_row_promoted_before_the_primary_has_its_update_is_replaced(tmp_path):
    fleet = Fleet(tmp_path)
    load(fleet, tmp_path, {"rocksdb": {"path": str(tmp_path / "db")}})
    primary = RocksDbTier(tmp_path / "db")
    primary.apply(fleet.table, nothing(), [StreamPosition(fleet.topic, 0, 0)])
    rocksdb = {"path": str(tmp_path / "db"), "access": "secondary", "catch_up_s": 0.05}
    try:
        with hps.open(fleet.settings(tmp_path, {"rocksdb": rocksdb})) as node:
            judge(node, fleet, primary, 1)
    finally:
        primary.close()


def test_row_promoted_before_hps_wrote_its_update_is_replaced(tmp_path):
    """HPS records no position in Redis; its group commits one when the rows are stored."""
    fleet = Fleet(tmp_path, "hps")
    with redis_of(fleet, tmp_path) as store:
        commit(fleet, 0)
        with hps.open(fleet.settings(tmp_path, redis_tiers(fleet))) as node:
            (stream,) = node.streams._readers.streams
            fleet.send(1.0)
            until(lambda: stream.ingestor.is_waiting)
            assert promoted(node, fleet) == 0.0
            fleet.feed(store, 1.0, None)
            commit(fleet, 1)
            until(lambda: cached(node, fleet) == 1.0)


def commit(fleet: Fleet, offset: int) -> None:
    """As HPS's consumers of Redis do."""
    options = {**client_options(shared_broker().address), "group.id": "hps.volatile"}
    consumer = ck.Consumer(options, logger=client_log)
    consumer.commit(offsets=[ck.TopicPartition(fleet.topic, 0, offset)], asynchronous=False)
    consumer.close()


def nothing() -> TableChanges:
    none, versions = np.empty(0, np.int64), np.empty(0, np.uint64)
    return TableChanges(none, np.empty((0, 2), np.float32), versions, none, versions)


@pytest.mark.parametrize("layout", ["native", "hps"])
def test_redis_returns_all_its_positions(tmp_path, layout):
    fleet = Fleet(tmp_path, layout)
    with redis_of(fleet, tmp_path) as store:
        assert store.positions(fleet.table) == {}
        store.apply(
            fleet.table, nothing(), [StreamPosition("a/b", 3, 7), StreamPosition("c", 0, 1)]
        )
        assert store.positions(fleet.table) == {("a/b", 3): Applied(7), ("c", 0): Applied(1)}
        store.identify(fleet.table, "a/b", 3, "an id")
        assert store.positions(fleet.table)["a/b", 3] == Applied(7, "an id")
