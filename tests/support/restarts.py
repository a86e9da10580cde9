"""A server that is killed and started again: how soon it serves updates once it is ready."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.peers.kafka_broker import KafkaBroker
from benchmarks.peers.redis_server import RedisServer
from hps.config.model_schema import ModelSpec, TableSpec
from hps.config.store_settings import RedisSettings
from hps.models.version_writer import write_version
from hps.tiers.redis import RedisTier
from hps.types import EmbeddingTable
from hps.updates import Producer
from tests.support.deployment import Part

MODEL, TABLE, DIM = "fresh", "items", 4
KEY = 7
_CHECK_EVERY_S, _MOST_S = 0.01, 120.0


@dataclass
class Restarts:
    """A running server, ``part``, with RocksDB, a CPU cache and a Redis that it feeds as a member of the
    shared group; ``producer`` sends rows of `KEY`."""

    part: Part
    producer: Producer
    redis: RedisTier
    table: EmbeddingTable
    value: float = 0.0

    def served(self) -> float:
        """Answer of a lookup of the key."""
        keys = {"name": TABLE, "shape": [1, 1], "datatype": "INT64", "data": [KEY]}
        url = f"http://{self.part.http}/v2/models/{MODEL}.lookup/infer"
        body = json.dumps({"inputs": [keys]}).encode()
        with urllib.request.urlopen(url, body, timeout=60) as answer:
            return float(json.load(answer)["outputs"][0]["data"][0])

    def in_redis(self) -> float:
        """Row in Redis for the key."""
        return float(self.redis.get(self.table, np.array([KEY])).out[0, 0])

    def send(self) -> None:
        """A row with the next value; returns when Kafka has it."""
        self.value += 1.0
        self.producer.send(TABLE, [KEY], np.full((1, DIM), self.value, np.float32))
        self.producer.flush()

    def kill_and_start(self) -> dict[str, float]:
        """Seconds from when the server is ready again until an update is served that was sent while it was
        away, and until one that was sent then is served and is in Redis."""
        self.part.kill()
        self.send()
        self.part.start()
        while not self.part.ready:
            time.sleep(_CHECK_EVERY_S)
        ready = time.monotonic()
        missed = _until(lambda: self.served() >= self.value) - ready
        self.send()
        sent = time.monotonic()
        served = _until(lambda: self.served() >= self.value)
        shared = _until(lambda: self.in_redis() >= self.value)
        return {"missed": missed, "served": served - sent, "redis": shared - sent}


@contextmanager
def restarts(folder: Path, broker: KafkaBroker, redis: RedisServer) -> Iterator[Restarts]:
    """A server of a new model with one table, ready."""
    spec = ModelSpec(name=MODEL, tables=[TableSpec(name=TABLE, dim=DIM)])
    rows = np.zeros((100, DIM), np.float32)
    write_version(folder / "models", spec, 1, {TABLE: (np.arange(100), rows)})
    settings = {
        "models": {"repository": str(folder / "models")},
        "tiers": {
            "rocksdb": {"min_free_bytes": 0},
            "redis": {"addresses": [redis.address]},
            "cpu_cache": {"enabled": True, "capacity_bytes": 1 << 20},
        },
        "updates": {"kafka": {"brokers": broker.address, "group": "restarted"}},
    }
    with ExitStack() as stack:
        part = Part(folder / "server", settings, "serve")
        stack.callback(part.kill)
        producer = stack.enter_context(Producer(broker.address, model=MODEL, partitions=2))
        store = RedisTier(RedisSettings(addresses=[redis.address]))
        stack.callback(store.close)
        part.start()
        part.wait()
        table = EmbeddingTable.make(TABLE, DIM, model=MODEL, version=1)
        found = Restarts(part, producer, store, table)
        found.send()
        _until(lambda: found.served() >= 1.0)
        yield found


def _until(holds: Callable[[], bool]) -> float:
    """When it holds, by the monotonic clock. Raises AssertionError."""
    deadline = time.monotonic() + _MOST_S
    while not holds():
        assert time.monotonic() < deadline, f"not within {_MOST_S:g} s"
        time.sleep(_CHECK_EVERY_S)
    return time.monotonic()
