"""Streams fed into nodes, while nodes, Redis and the broker are killed with ``kill -9`` at random moments."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import confluent_kafka as ck
import numpy as np

from benchmarks.peers.kafka_broker import KafkaBroker
from benchmarks.peers.redis_server import RedisServer
from hps.config.model_schema import ModelSpec, TableSpec
from hps.config.store_settings import RedisSettings
from hps.models.version_writer import write_version
from hps.tiers.mapped import MappedTier
from hps.tiers.redis import RedisTier
from hps.tiers.rocksdb import RocksDbTier
from hps.types import EmbeddingTable, KeyArray, VectorArray, VersionArray
from hps.updates.topics import native_topic
from tests.support.fed_node import MODEL, TABLE, FedNode
from tests.support.ingest_process import IngestProcess
from tests.support.kafka_brokers import fresh_broker, make_topic
from tests.support.update_stream import ABSENT, DEFAULT, DIM, UpdateStream

PARTITIONS = 4
CAUGHT_UP_S = 120.0
_QUIET = logging.getLogger("crash-run")
_QUIET.disabled = True


@dataclass
class CrashRun:
    """One seed's run in an empty ``folder``. Two nodes: ``own`` has RocksDB and a CPU cache; ``shared`` has
    a CPU cache as well and writes Redis, its only store; with ``ingest`` a process of its own writes that,
    and the node's cache may be ahead of it. ``seconds``: over which the updates are sent. ``mapped``: the
    table has a mapped file, so that the RocksDB only has its updates.

    `run` raises AssertionError for whatever is wrong in the end. ``killed``: who was, in order.
    """

    folder: Path
    seed: int
    keys: int = 4_000
    updates: int = 10_000
    seconds: float = 10.0
    ingest: bool = False
    mapped: bool = False
    killed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        spec = ModelSpec(name=MODEL, tables=[TableSpec(name=TABLE, dim=DIM, default=DEFAULT)])
        self.stream = UpdateStream(
            self.seed, self.keys, self.updates, time.time_ns() // 10**6 + 60_000
        )
        rows = {TABLE: self.stream.first_rows}
        write_version(self.folder / "models", spec, 1, rows, mapped=self.mapped)
        self.table = EmbeddingTable.make(TABLE, DIM, model=MODEL, version=1)
        self.topic = native_topic(MODEL)
        self.broker: KafkaBroker = fresh_broker(self.folder / "kafka")
        self.redis = RedisServer(self.folder / "redis")
        self.own, self.shared = self._node("own", self._own()), self._node("shared", self._shared())
        self.victims: dict[str, Any] = {
            "own node": self.own,
            "shared node": self.shared,
            "broker": self.broker,
            "redis": self.redis,
        }
        if self.ingest:
            settings = self._settings("ingest", self._shared())
            self.victims["ingest"] = IngestProcess(self.folder / "ingest", settings)
        self._random = np.random.default_rng(self.seed)

    def run(self) -> None:
        try:
            self.broker.start()
            self.redis.start()
            make_topic(self.broker, self.topic, PARTITIONS)
            for name, each in self.victims.items():
                if name not in ("broker", "redis"):
                    each.start()
            self._disturbed()
            self._settle()
            for node in (self.own, self.shared):
                self._judge_answers(node)
                node.close()
                assert not node.faults.exists(), node.faults.read_text()[:2000]
            self._judge_rocksdb()
            self._judge_redis()
        finally:
            for each in self.victims.values():
                each.kill()

    # -- settings ----------------------------------------------------------------------------------

    def _node(self, name: str, tiers: dict[str, Any]) -> FedNode:
        return FedNode(self.folder / name, self._settings(name, tiers), self.stream)

    def _settings(self, name: str, tiers: dict[str, Any]) -> dict[str, Any]:
        kafka = {
            "brokers": self.broker.address,
            "group": name,
            "shared_writer": "ingest" if self.ingest else "nodes",
        }
        cache = {"enabled": True, "capacity_bytes": 1 << 17}
        return {
            "models": {"repository": str(self.folder / "models")},
            "tiers": {**tiers, "cpu_cache": cache},
            "updates": {"kafka": kafka},
        }

    def _own(self) -> dict[str, Any]:
        return {"rocksdb": {"path": str(self.folder / "rocksdb"), "min_free_bytes": 0}}

    def _shared(self) -> dict[str, Any]:
        redis = {"addresses": [self.redis.address], "guard": {"deadline_ms": 2000}}
        return {"rocksdb": {"enabled": False}, "redis": redis}

    # -- the run -----------------------------------------------------------------------------------

    def _disturbed(self) -> None:
        """Send everything, and kill meanwhile."""
        sent = threading.Event()
        failed: list[BaseException] = []

        def send() -> None:
            try:
                self._send()
            except BaseException as error:
                failed.append(error)
            finally:
                sent.set()

        sender = threading.Thread(target=send)
        sender.start()
        # Each once, in any order, then at random: the broker takes longest to return.
        every = list(self.victims)
        names = [*self._random.permutation(every).tolist()]
        weights = np.array([1 if name == "broker" else 3 for name in every])
        while names or not sent.is_set():
            name = (
                names.pop() if names else str(self._random.choice(every, p=weights / weights.sum()))
            )
            time.sleep(float(self._random.uniform(0.05, 2.5)))
            self._again(self.victims[name])
            self.killed.append(name)
        sender.join()
        assert not failed, failed

    def _again(self, who: Any) -> None:
        who.kill()
        time.sleep(float(self._random.uniform(0, 0.5)))
        who.start()

    def _send(self) -> None:
        # Without idempotence, so that Kafka itself may repeat messages and swap them.
        options = {"bootstrap.servers": self.broker.address, "acks": "all", "linger.ms": 5}
        producer = ck.Producer(options, logger=_QUIET)
        failed: list[Any] = []
        messages = list(self.stream.messages(f"{MODEL}/{TABLE}", PARTITIONS))
        for partition, payload in messages:
            producer.produce(
                self.topic, payload, partition=partition,
                on_delivery=lambda error, _: failed.append(error) if error else None,
            )  # fmt: skip
            producer.poll(0)
            time.sleep(self.seconds / len(messages))
        assert producer.flush(120) == 0, "the broker did not take everything"
        assert not failed, failed

    def _settle(self) -> None:
        """Wait until every reader's positions are at the ends of the partitions."""
        consumer = ck.Consumer(
            {"bootstrap.servers": self.broker.address, "group.id": "ends"}, logger=_QUIET
        )
        ends = [
            consumer.get_watermark_offsets(ck.TopicPartition(self.topic, i), timeout=60)[1]
            for i in range(PARTITIONS)
        ]
        consumer.close()
        self.ends = ends
        until = time.monotonic() + CAUGHT_UP_S
        store = RedisTier(RedisSettings(addresses=[self.redis.address]))
        readers: dict[str, Callable[[], list[int | None]]] = {
            "RocksDB": lambda: self.own.ask(f"applied {self.topic} {PARTITIONS}")["hps.node.own"],
            "Redis": lambda: [store.applied(self.table, self.topic, i) for i in range(PARTITIONS)],
        }
        try:
            for name, applied in readers.items():
                while (found := applied()) != ends:
                    said = [node.ask("status") for node in (self.own, self.shared)]
                    assert time.monotonic() < until, f"{name}: {found} of {ends} applied; {said}"
                    time.sleep(0.2)
        finally:
            store.close()

    # -- judgement ---------------------------------------------------------------------------------

    def _judge_answers(self, node: FedNode) -> None:
        """Check that the outcome is served; caches are refreshed shortly after the stores."""
        until = time.monotonic() + 60
        while True:
            vectors, _sources = node.answers(self.keys)
            found = self.stream.numbers(np.arange(self.keys), vectors)
            wrong = np.flatnonzero(found != self.stream.outcome)
            if not len(wrong):
                return
            if time.monotonic() > until:
                break
            time.sleep(0.2)
        examples = [(int(k), int(found[k]), int(self.stream.outcome[k])) for k in wrong[:5]]
        raise AssertionError(
            f"{node.log.parent.name}: {len(wrong)} keys are served wrongly, as (key, served, sent "
            f"last) {examples}"
        )

    def _judge_rocksdb(self) -> None:
        store = MappedTier(self.folder / "rocksdb")
        try:
            store.open_tables([self.table])
            assert store.is_mapped(self.table) == self.mapped
            judge_store("RocksDB", self.stream, store, self.table)
        finally:
            store.close()

    def _judge_redis(self) -> None:
        store = RedisTier(RedisSettings(addresses=[self.redis.address]))
        try:
            judge_store("Redis", self.stream, store, self.table)
        finally:
            store.close()


def judge_store(
    name: str, stream: UpdateStream, store: RedisTier | RocksDbTier, table: EmbeddingTable
) -> None:
    """Rows, versions and deletions are those of the last update of each key."""
    stored = np.full(stream.keys, ABSENT)
    versions = np.zeros(stream.keys, np.uint64)
    for keys, vectors, stamps in store.scan(table):
        stored[keys] = stream.numbers(keys, vectors)
        versions[keys] = stamps
    dead = np.zeros(stream.keys, bool)
    for keys, stamps in store.tombstones(table):
        dead[keys] = True
        versions[keys] = stamps
    assert_same(f"{name}: rows", stored, stream.outcome)
    updated = stream.last > 0
    assert_same(f"{name}: deletions", dead, updated & (stream.outcome == ABSENT))
    assert_same(f"{name}: versions", versions[updated], stream.versions(stream.last[updated]))


def assert_same(what: str, found: KeyArray | VersionArray | VectorArray | Any, wanted: Any) -> None:
    wrong = np.flatnonzero(found != wanted)
    assert not len(wrong), (
        f"{what}: {len(wrong)} of {len(found)} differ, the first at {wrong[:5].tolist()}: "
        f"{found[wrong[:5]].tolist()} instead of {wanted[wrong[:5]].tolist()}"
    )
