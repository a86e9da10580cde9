"""HPS's messages through a real broker: formats of both sides, and messages that no reader can apply."""

from __future__ import annotations

import logging
import struct
import time

import confluent_kafka as ck
import numpy as np
import pytest

from hps.config.update_settings import KafkaSettings
from hps.types import EmbeddingTable
from hps.updates import Producer
from hps.updates.codec import encode_hps, hps_topic
from hps.updates.source import DeadLetter, Reason, TableUpdate
from hps.updates.topics import TopicTables, native_topic
from tests.support.kafka_brokers import (
    SEES_NEW_TOPICS_SOON,
    make_topic,
    shared_broker,
    unique,
)
from tests.support.kafka_updates import native, source_of
from tests.support.waiting import until

DEFAULT_RECEIVE_BYTES = 262_144  # of HPS's consumer


@pytest.fixture
def broker():
    return shared_broker()


@pytest.fixture
def model():
    return unique("m")


def messages(*rows, key="q", dim=2):
    """One of HPS's, of (key, value): each value is repeated."""
    parts = [struct.pack(f"<{key}{dim}f", k, *[v] * dim) for k, v in rows]
    return b"HCTR" + struct.pack("<I", 4 * dim) + b"".join(parts)


def send(broker, topic, payloads, **options):
    """In order, into the only partition; a pair is a record's key and payload."""
    producer = ck.Producer(
        {"bootstrap.servers": broker.address, "enable.idempotence": True},
        logger=logging.getLogger("test.producer"),
    )
    for each in payloads:
        key, payload = each if isinstance(each, tuple) else (None, each)
        producer.produce(topic, payload, key, **options)
    assert producer.flush(60) == 0


def read(broker, table: EmbeddingTable, last: int) -> tuple[list[TableUpdate], list[DeadLetter]]:
    """Everything up to the row of key ``last``."""
    settings = KafkaSettings(
        brokers=broker.address, models=[table.model], options=SEES_NEW_TOPICS_SOON
    )
    source = source_of(settings, TopicTables([table], settings.takes))
    updates: list[TableUpdate] = []
    dead: list[DeadLetter] = []

    def came() -> bool:
        batch = source.poll(0.1)
        if batch is not None:
            updates.extend(batch.updates)
            dead.extend(batch.dead)
        return any(last in update.changes.keys for update in updates)

    until(came)
    source.close()
    return updates, dead


def rows_of(updates) -> dict[int, list[float]]:
    return {
        key: row
        for update in updates
        for key, row in zip(
            update.changes.keys.tolist(), update.changes.vectors.tolist(), strict=True
        )
    }


def test_messages_ignored_or_rejected_by_hps_do_not_stop_the_stream(broker, model):
    topic = hps_topic(model, "items")
    make_topic(broker, topic)
    odd = [
        (messages((7, 7.0), dim=3), b"row_size"),
        (messages((8, 8.0), (9, 9.0))[:-3], b"truncated"),
        (messages((8, 8.0)) + b"tail", b"truncated"),
    ]
    send(
        broker,
        topic,
        [
            messages((1, 1.0)),
            messages(),  # a producer's beacon
            None,  # Kafka's tombstone
            (b"key", messages((2, 2.0))),
            *(payload for payload, _ in odd),
            messages((3, 3.0)),
        ],
    )
    updates, dead = read(broker, EmbeddingTable.make("items", 2, model=model), 3)
    assert rows_of(updates) == {1: [1.0, 1.0], 3: [3.0, 3.0]}
    found = [(letter.payload, letter.reason.name.lower().encode()) for letter in dead]
    assert found == odd
    assert [letter.position.offset for letter in dead] == [4, 5, 6]
    assert all(abs(letter.timestamp_ms - time.time() * 1e3) < 3.6e6 for letter in dead)


def test_32_bit_keys_reach_the_reader(broker, model):
    table = EmbeddingTable.make("items", 2, model=model, key_bits=32)
    keys = np.array([0, 1, 2**31, 2**32 - 1])
    rows = np.repeat(np.arange(4, dtype=np.float32)[:, None], 2, axis=1)
    with Producer(broker.address, model=model, format="hps", key_bits=32, partitions=1) as producer:
        producer.send("items", keys, rows)
    send(broker, hps_topic(model, "items"), [messages((2**32 - 2, 5.0), key="I")])
    updates, dead = read(broker, table, 2**32 - 2)
    wanted = {int(key): row for key, row in zip(keys, rows.tolist(), strict=True)}
    assert rows_of(updates) == wanted | {2**32 - 2: [5.0, 5.0]}
    assert not dead


def test_messages_fit_the_consumer_of_hps():
    keys = np.arange(100_000)
    for dim in (1, 32, 1000):
        rows = np.zeros((len(keys) // dim, dim), np.float32)
        lengths = [len(each) for each in encode_hps(keys[: len(rows)], rows)]
        assert len(lengths) > 1
        assert DEFAULT_RECEIVE_BYTES - 8 - 4 * dim <= max(lengths) <= DEFAULT_RECEIVE_BYTES


@pytest.mark.parametrize("form", ["hps", "native"])
def test_future_versions_become_dead_letters_without_blocking_the_stream(broker, model, form):
    """In HPS's format the record's timestamp counts, which Kafka's topic must allow."""
    now_ms = int(time.time() * 1000)
    late_ms = now_ms + 7_200_000
    topic = native_topic(model) if form == "native" else hps_topic(model, "items")
    make_topic(broker, topic, message_timestamp_after_max_ms=str(2**62))
    if form == "native":
        late = native(model, 5, 1.0, 0, made_ms=late_ms)
        send(broker, topic, [late])
        send(broker, topic, [native(model, 5, 2.0, 1), native(model, 6, 2.0, 1)])
    else:
        late = messages((5, 1.0))
        send(broker, topic, [late], timestamp=late_ms)
        send(broker, topic, [messages((5, 2.0)), messages((6, 2.0))])
    updates, dead = read(broker, EmbeddingTable.make("items", 2, model=model), 6)
    assert rows_of(updates) == {5: [2.0, 2.0], 6: [2.0, 2.0]}
    assert [(each.reason, each.payload) for each in dead] == [(Reason.AHEAD, late)]
    assert (dead[0].timestamp_ms == late_ms) == (form == "hps")
