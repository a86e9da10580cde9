"""Update messages in Kafka: their producer, and a store that reads them."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager

import confluent_kafka as ck
import numpy as np

from hps.config.update_settings import KafkaSettings
from hps.observability.meters import StreamMeter, UpdateMeter
from hps.observability.metrics import Metrics
from hps.tiers.base import FetchContext, Part
from hps.tiers.positions import TableChanges
from hps.tiers.rocksdb import RocksDbTier
from hps.types import EmbeddingTable, make_version
from hps.updates.codec import MessageAttributes, encode_native, hps_topic
from hps.updates.ingest_thread import IngestThread
from hps.updates.ingestor import Ingestor
from hps.updates.kafka.client import DeadLetterTopic
from hps.updates.kafka.hps_group import ReaderGroup, hps_group
from hps.updates.kafka.kept_letters import KeptLetters
from hps.updates.kafka.source import KafkaSource
from hps.updates.stream_positions import FedStore, StoreStreamPositions
from hps.updates.topics import TopicTables
from tests.support.kafka_brokers import (
    SEES_NEW_TOPICS_SOON,
    unique,
)

NOW_MS = int(time.time() * 1000)


class Reader:
    """One store fed from the topics of a new model."""

    def __init__(
        self,
        broker,
        folder,
        model: str,
        *,
        begin=None,
        since_s=None,
        options=None,
        member=None,
        **settings,
    ) -> None:
        self.items = EmbeddingTable.make("items", 2, model=model)
        self.users = EmbeddingTable.make("users", 3, model=model)
        self.store = RocksDbTier(folder)
        self.store.open_tables([self.items, self.users])
        self.settings = settings = KafkaSettings(
            brokers=broker.address,
            models=[model],
            dead_letters=f"{model}_dead",
            options={**SEES_NEW_TOPICS_SOON, **(options or {})},
            **settings,
        )
        topics = TopicTables([self.items, self.users], settings.takes)
        self.metrics = Metrics()
        positions = StoreStreamPositions([FedStore("rocksdb", self.store)], topics.readers)
        positions.start_offset = begin or positions.start_offset
        group = f"node.{model}"
        observe = StreamMeter(self.metrics, group)
        self.source = KafkaSource(
            settings,
            ReaderGroup(group, hps_group(group), member),
            topics,
            positions,
            observe,
            since_s=since_s,
        )
        self.ingestor = Ingestor(
            self.source,
            topics.tables,
            positions,
            None,
            DeadLetterTopic(settings, KeptLetters()),
            UpdateMeter(self.metrics),
        )
        self.thread = IngestThread(self.ingestor, self.source, f"ingest-{model}")
        self.thread.start()

    def rows(self, keys, table=None) -> list[float | None]:
        part = Part.make(table or self.items, np.array(keys, np.int64))
        self.store.fetch([part], FetchContext())
        return [v if s else None for v, s in zip(part.out[:, 0].tolist(), part.source, strict=True)]

    def applied(self, topic: str, partition: int = 0) -> int | None:
        table = self.users if topic == hps_topic(self.users.model, "users") else self.items
        return self.store.applied(table, topic, partition)

    def close(self) -> None:
        self.thread.close()
        self.store.close()


@contextmanager
def reading(broker, folder, model: str, **given):
    reader = Reader(broker, folder, model, **given)
    try:
        yield reader
    finally:
        reader.close()


def source_of(settings: KafkaSettings, topics: TopicTables) -> KafkaSource:
    """A source without a store."""
    group, positions = unique("g"), StoreStreamPositions([], topics.readers)
    return KafkaSource(
        settings,
        ReaderGroup(group, hps_group(group)),
        topics,
        positions,
        StreamMeter(Metrics(), group),
    )


@contextmanager
def sending(broker):
    options = {"bootstrap.servers": broker.address, "enable.idempotence": True}
    producer = ck.Producer(options, logger=logging.getLogger("test.producer"))
    yield producer
    assert producer.flush(60) == 0


def native(
    model: str,
    key: int,
    value: float,
    sequence: int,
    table="items",
    dim=2,
    made_ms=NOW_MS,
    **attributes: int,
) -> bytes:
    """One row; a deletion where ``value`` is NaN. ``attributes``: of `MessageAttributes`."""
    version = np.array([make_version(made_ms, sequence)], np.uint64)
    none = (np.empty(0, np.int64), np.empty(0, np.uint64))
    row = np.full((1, dim), value, np.float32)
    if np.isnan(value):
        changes = TableChanges(none[0], row[:0], none[1], np.array([key]), version)
    else:
        changes = TableChanges(np.array([key]), row, version, *none)
    (message,) = encode_native(
        f"{model}/{table}", changes, MessageAttributes(made_ms, **attributes)
    )
    return message
