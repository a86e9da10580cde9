"""Rows from Kafka that were lost with RocksDB's write-ahead log are read from Kafka again."""

import os
import shutil
import time
from pathlib import Path

import pytest

from hps.config.model_schema import ModelSpec, TableSpec
from hps.models.version_writer import write_version
from hps.tiers.mapped import MappedTier
from hps.types import EmbeddingTable
from hps.updates.topics import native_topic
from tests.support.crash_run import judge_store
from tests.support.fed_node import MODEL, TABLE, FedNode
from tests.support.kafka_brokers import make_topic, shared_broker
from tests.support.kafka_updates import sending
from tests.support.update_stream import DEFAULT, DIM, UpdateStream
from tests.support.waiting import until

PARTITIONS = 2


def cut(log: Path) -> None:
    os.truncate(log, log.stat().st_size // 3)


def flip(log: Path) -> None:
    with log.open("r+b") as file:
        file.seek(log.stat().st_size // 3)
        file.write(bytes(100))


@pytest.mark.parametrize("mapped", [False, True])
def test_rows_lost_from_log_are_read_again_from_kafka(tmp_path, mapped):
    broker, topic = shared_broker(), native_topic(MODEL)
    stream = UpdateStream(1, 1000, 4000, time.time_ns() // 10**6 + 60_000)
    spec = ModelSpec(name=MODEL, tables=[TableSpec(name=TABLE, dim=DIM, default=DEFAULT)])
    write_version(tmp_path / "models", spec, 1, {TABLE: stream.first_rows}, mapped=mapped)
    make_topic(broker, topic, PARTITIONS)
    ends = [0] * PARTITIONS
    with sending(broker) as producer:
        for partition, message in stream.messages(f"{MODEL}/{TABLE}", PARTITIONS):
            producer.produce(topic, message, partition=partition)
            ends[partition] += 1

    def start(group: str) -> FedNode:
        settings = {
            "models": {"repository": str(tmp_path / "models")},
            "tiers": {
                "rocksdb": {"path": str(tmp_path / group / "db"), "on_lost_writes": "accept"}
            },
            "updates": {"kafka": {"brokers": broker.address, "group": group}},
        }
        node = FedNode(tmp_path / group, settings, stream)
        node.start()
        until(lambda: node.ask(f"applied {topic} {PARTITIONS}")[f"hps.node.{group}"] == ends)
        return node

    start("killed").kill()
    table = EmbeddingTable.make(TABLE, DIM, model=MODEL, version=1)
    for name, damage in (("cut", cut), ("flipped", flip)):
        database = shutil.copytree(tmp_path / "killed/db", tmp_path / name / "db")
        (*_, newest) = sorted(database.glob("*.log"))
        assert newest.stat().st_size > 50_000
        damage(newest)
        node = start(name)
        assert "acknowledged writes are missing from the write-ahead log" in node.log.read_text()
        node.close()
        store = MappedTier(database)
        judge_store(name, stream, store, table)
        store.close()
