"""Dead letters in a real Kafka: each message is kept, counted and listed once, however often it is read."""

from __future__ import annotations

import logging
import time
from contextlib import closing

import confluent_kafka as ck
import numpy as np
import pytest

import hps
from hps.config.model_schema import ModelSpec, TableSpec
from hps.config.update_settings import KafkaSettings
from hps.errors import Unavailable
from hps.models.version_writer import write_version
from hps.observability import metric_names as m
from hps.tiers.positions import StreamPosition
from hps.updates.codec import encode_hps, hps_topic
from hps.updates.kafka.client import DeadLetterTopic
from hps.updates.kafka.dead_letters import DeadLetterReader, StoredDeadLetter
from hps.updates.kafka.kept_letters import KeptLetters
from hps.updates.source import DeadLetter, Reason
from hps.updates.topics import native_topic
from tests.support.kafka_brokers import (
    SEES_NEW_TOPICS_SOON,
    make_topic,
    shared_broker,
    unique,
)
from tests.support.kafka_updates import native, reading, sending
from tests.support.redis_servers import shared_server
from tests.support.waiting import PATIENT_GUARD, until


@pytest.fixture
def broker():
    return shared_broker()


@pytest.fixture
def model():
    return unique("m")


@pytest.fixture
def kafka(broker, model):
    """Settings whose topic of dead letters has two partitions."""
    make_topic(broker, f"{model}_dead", 2)
    return KafkaSettings(
        brokers=broker.address, dead_letters=f"{model}_dead", options=SEES_NEW_TOPICS_SOON
    )


def listed(kafka: KafkaSettings, *, again: bool = False) -> list[StoredDeadLetter]:
    with closing(DeadLetterReader(kafka)) as box:
        return box.letters(again=again)


def requeue(kafka: KafkaSettings) -> int:
    """Send all listed letters again; returns their number."""
    with closing(DeadLetterReader(kafka)) as box:
        letters = box.letters()
        assert not box.requeue(letters)
        return len(letters)


def keep(kafka: KafkaSettings, *letters: DeadLetter) -> None:
    """Keep letters as a reader that does not know those of others."""
    with closing(DeadLetterTopic(kafka, KeptLetters())) as topic:
        topic.keep(letters)


def letter(topic: str, offset: int, *, at_ms: int = 1000, reason=Reason.CHECKSUM) -> DeadLetter:
    return DeadLetter(reason, 0, StreamPosition(topic, 0, offset), b"HPSU", None, at_ms)


def messages_in(broker, topic: str) -> int:
    """Letters of two partitions."""
    consumer = ck.Consumer({"bootstrap.servers": broker.address, "group.id": unique("g")})
    with closing(consumer):
        places = [ck.TopicPartition(topic, p) for p in (0, 1)]
        return sum(consumer.get_watermark_offsets(each, timeout=60)[1] for each in places)


def counted(node) -> dict[str, float]:
    numbers = node.metrics.numbers()[m.UPDATE_DEAD]
    return {reason: number for (reason,), number in numbers.items() if number}


def settings_of_node(kafka: KafkaSettings, folder, model: str) -> dict:
    """Settings of a node that serves version 1 of two, whose table ``items`` has dim 2."""
    spec = ModelSpec(name=model, tables=[TableSpec(name="items", dim=2, default=-1.0)])
    for version in (1, 2):
        rows = (np.arange(100), np.full((100, 2), version, np.float32))
        write_version(folder / "models", spec, version, {"items": rows})
    return {
        "models": {"repository": str(folder / "models"), "serve": {model: {"version": 1}}},
        "tiers": {"rocksdb": {"path": str(folder / "db"), "guard": PATIENT_GUARD}},
        "updates": {"kafka": {**kafka.model_dump(exclude_unset=True), "group": unique("g")}},
    }


def test_letter_is_kept_and_counted_once_when_another_version_is_loaded(
    broker, model, kafka, tmp_path, caplog
):
    topic, unknown = native_topic(model), hps_topic(model, "unknown")
    settings = settings_of_node(kafka, tmp_path, model)
    with sending(broker) as producer:
        for payload in (b"?", native(model, 1, 1.0, 1)[:-1], native(model, 1, 1.0, 1, "unknown")):
            producer.produce(topic, payload)
        producer.produce(unknown, encode_hps(np.array([1]), np.ones((1, 2), np.float32))[0])
        made_ms = int(time.time() * 1000) + 1
        producer.produce(topic, native(model, 5, 5.0, 1, made_ms=made_ms))
    expected = {"bad_magic": 1, "truncated": 1, "unknown_table": 2}
    with caplog.at_level(logging.WARNING), hps.open(settings) as node:

        def is_applied() -> bool:
            found = node.lookup(model, {"items": np.array([5])})
            lags = [stream["lag"] for stream in node.streams.status()]
            return found.vectors["items"][0, 0] == 5.0 and not any(lags) and None not in lags

        until(is_applied)
        until(lambda: counted(node) == expected)
        node.load(model, 2)
        until(is_applied)
        assert counted(node) == expected
        with sending(broker) as producer:
            producer.produce(topic, b"??")
        until(lambda: counted(node) == {**expected, "bad_magic": 2})
    assert messages_in(broker, kafka.dead_letters) == 5
    assert len(listed(kafka)) == 5
    logged = [each.getMessage() for each in caplog.records if "dead letters kept" in each.message]
    assert f"{topic}/0 at 0" in "".join(logged)
    assert len(logged) <= 4, "not one for each message"


def test_letter_is_kept_and_counted_once_by_a_node_with_two_readers(broker, model, kafka, tmp_path):
    topic = native_topic(model)
    make_topic(broker, topic)
    settings = settings_of_node(kafka, tmp_path, model)
    settings["tiers"]["redis"] = {
        "addresses": [shared_server().address],
        "timeout_ms": 5000,
        "guard": {"deadline_ms": 5000},
    }
    settings["updates"]["kafka"]["shared_group"] = unique("shared")
    with sending(broker) as producer:
        producer.produce(topic, b"?")
        producer.produce(topic, b"??")
    with hps.open(settings) as node:
        streams = node.streams
        until(lambda: [[p["lag"] for p in s["partitions"]] for s in streams.status()] == [[0], [0]])
        assert counted(node) == {"bad_magic": 2}
    assert messages_in(broker, kafka.dead_letters) == 2


def test_letter_of_an_unknown_table_is_kept_once_across_restarts(broker, model, kafka, tmp_path):
    topic, dead = hps_topic(model, "unknown"), kafka.dead_letters
    (row,) = encode_hps(np.array([1]), np.ones((1, 2), np.float32))
    for number in (1, 2):
        with sending(broker) as producer:
            producer.produce(topic, row)
        with reading(broker, tmp_path, model) as reader:
            until(lambda reader=reader: (reader.source.lag() or {}).get((topic, 0)) == 0)
            assert reader.metrics.counter(m.UPDATE_DEAD, "unknown_table").value == 1
        assert messages_in(broker, dead) == number


def test_reader_without_group_permission_reads_unknown_tables_again(
    broker, model, kafka, tmp_path, monkeypatch, caplog
):
    def refuse(*_):
        raise Unavailable("Kafka: failed to read the offsets of the group: not authorized")

    monkeypatch.setattr("hps.updates.kafka.start_positions.committed_by", refuse)
    topic = hps_topic(model, "unknown")
    with sending(broker) as producer:
        producer.produce(topic, encode_hps(np.array([1]), np.ones((1, 2), np.float32))[0])
    with reading(broker, tmp_path, model) as reader:
        until(lambda: reader.metrics.counter(m.UPDATE_DEAD, "unknown_table").value == 1)
    assert "dead letters of unknown tables are kept again: Kafka: failed" in caplog.text


def test_letters_of_one_message_are_listed_as_the_newest(model, kafka):
    topic = native_topic(model)
    keep(kafka, letter(topic, 7), letter(topic, 8))
    keep(kafka, letter(topic, 7, reason=Reason.ROW_SIZE))
    keep(kafka, letter(topic, 7, at_ms=2000))  # of a topic that was created again
    found = [(each.from_offset, each.timestamp_ms, each.reason) for each in listed(kafka)]
    assert found == [(8, 1000, "checksum"), (7, 1000, "row_size"), (7, 2000, "checksum")]


def test_requeued_message_is_not_listed_when_it_is_kept_again(broker, model, kafka):
    """For a letter of either partition; the requeued note names only its first letter."""
    topic = native_topic(model)
    make_topic(broker, topic)
    keep(kafka, letter(topic, 0))
    assert requeue(kafka) == 1
    for _ in range(6):  # no key: any partition
        keep(kafka, letter(topic, 0))
    assert messages_in(broker, kafka.dead_letters) == 8
    assert listed(kafka) == []
    (shown,) = listed(kafka, again=True)
    assert (shown.from_offset, shown.attempt) == (0, 1)


def test_requeued_message_is_listed_when_it_fails_again(broker, model, kafka, tmp_path):
    """Also in a topic that was created again, where it has the same place and timestamp."""
    topic = native_topic(model)
    make_topic(broker, topic)
    keep(kafka, letter(topic, 0))
    with reading(broker, tmp_path, model) as reader:
        for attempt in (2, 3):
            assert requeue(kafka) == 1
            until(lambda: listed(kafka))
            (found,) = listed(kafka)
            assert (found.from_offset, found.timestamp_ms) == (attempt - 2, 1000)
            assert (found.reason, found.attempt) == ("truncated", attempt)
        assert reader.metrics.counter(m.UPDATE_DEAD, "truncated").value == 2


def test_letters_are_logged_in_one_line_and_later_ones_at_close(model, kafka, caplog):
    topic = native_topic(model)
    with closing(DeadLetterTopic(kafka, KeptLetters())) as kept:
        kept.keep([letter(topic, 3), letter(topic, 4), letter(topic, 5, reason=Reason.AHEAD)])
        kept.keep([letter(topic, 6)])
        kept.keep([letter(topic, 3), letter(topic, 7)])
        kept.report()
        (line,) = [each.getMessage() for each in caplog.records if each.name.endswith("client")]
        assert line == (
            f"dead letters kept in {kafka.dead_letters}: 2 checksum (first: {topic}/0 at 3), "
            f"1 ahead (first: {topic}/0 at 5); list them with hps updates dlq"
        )
    assert f": 2 checksum (first: {topic}/0 at 6);" in caplog.records[-1].getMessage()


def test_memory_of_kept_letters_is_bounded(monkeypatch):
    monkeypatch.setattr("hps.updates.kafka.kept_letters.MOST", 2)
    kept, letters = KeptLetters(), [letter("t", offset) for offset in range(3)]
    kept.add(letters)
    assert kept.missing(letters) == letters[:1]
