"""Rows from Kafka that were lost with RocksDB's write-ahead log are read from Kafka again."""

import os
import shutil
import time
from pathlib import Path

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


def test_rows_lost_from_log_are_read_again_from_kafka(tmp_path):
    broker, topic = shared_broker(), native_topic(MODEL)
    stream = UpdateStream(1, 1000, 4000, time.time_ns() // 10**6 + 60_000)
    make_topic(broker, topic, PARTITIONS)
    ends = [0] * PARTITIONS
    with sending(broker) as producer:
        for partition, message in stream.messages(f"{MODEL}/{TABLE}", PARTITIONS):
            producer.produce(topic, message, partition=partition)
            ends[partition] += 1
    for kind in ("loaded", "mapped"):
        spec = ModelSpec(name=MODEL, tables=[TableSpec(name=TABLE, dim=DIM, default=DEFAULT)])
        rows = {TABLE: stream.first_rows}
        write_version(tmp_path / kind / "models", spec, 1, rows, mapped=kind == "mapped")
        cut_and_read_again(tmp_path / kind, broker.address, stream, ends)


def cut_and_read_again(folder: Path, brokers: str, stream: UpdateStream, ends: list[int]) -> None:
    """Kill a node, damage copies of its log, and judge what a start makes of each."""

    def start(name: str) -> FedNode:
        group = f"{folder.name}-{name}"
        settings = {
            "models": {"repository": str(folder / "models")},
            "tiers": {"rocksdb": {"path": str(folder / name / "db"), "on_lost_writes": "accept"}},
            "updates": {"kafka": {"brokers": brokers, "group": group}},
        }
        node = FedNode(folder / name, settings, stream)
        node.start()
        asked = f"applied {native_topic(MODEL)} {PARTITIONS}"
        until(lambda: node.ask(asked)[f"hps.node.{group}"] == ends)
        return node

    start("killed").kill()
    table = EmbeddingTable.make(TABLE, DIM, model=MODEL, version=1)
    for name, damage in (("cut", cut), ("flipped", flip)):
        database = shutil.copytree(folder / "killed/db", folder / name / "db")
        (*_, newest) = sorted(database.glob("*.log"))
        assert newest.stat().st_size > 50_000
        damage(newest)
        node = start(name)
        assert "acknowledged writes are missing from the write-ahead log" in node.log.read_text()
        node.close()
        store = MappedTier(database)
        judge_store(name, stream, store, table)
        store.close()
