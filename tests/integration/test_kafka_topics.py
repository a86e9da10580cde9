"""Topics that are created again or lose messages: noticed, counted, and read from the beginning."""

from __future__ import annotations

import logging
import shutil
import time

import confluent_kafka as ck
import numpy as np
import pytest
from confluent_kafka.admin import AdminClient

from hps.observability import metric_names as m
from hps.updates.codec import encode_hps, hps_topic
from hps.updates.kafka import cluster
from hps.updates.topics import native_topic
from tests.support.kafka_brokers import fresh_broker, make_topic, shared_broker, unique
from tests.support.kafka_updates import native, reading, sending
from tests.support.waiting import until


@pytest.fixture
def broker():
    return shared_broker()


@pytest.fixture
def model():
    return unique("m")


def send(broker, model: str, first: int, last: int) -> None:
    """A row of each key from ``first`` to ``last`` - 1."""
    with sending(broker) as producer:
        for key in range(first, last):
            producer.produce(native_topic(model), native(model, key, 1.0, 1))


def create_again(broker, model: str) -> None:
    topic = native_topic(model)
    admin = AdminClient({"bootstrap.servers": broker.address})
    admin.delete_topics([topic])[topic].result(60)

    def created() -> bool:
        try:
            make_topic(broker, topic)
        except ck.KafkaException:  # the deletion takes a moment
            return False
        return True

    until(created)


def restarted(reader) -> dict:
    return reader.metrics.numbers().get(m.UPDATE_RESTARTED, {})


@pytest.mark.parametrize("member", [None, "here"], ids=["plain", "member"])
@pytest.mark.parametrize("count", [3, 8], ids=["fewer messages", "more messages"])
@pytest.mark.parametrize("running", [False, True], ids=["stopped", "running"])
def test_topic_created_again_is_read_from_its_beginning(
    broker, model, tmp_path, running, count, member, caplog
):
    topic = native_topic(model)
    make_topic(broker, topic)
    send(broker, model, 0, 5)
    with reading(broker, tmp_path, model, member=member) as reader:
        until(lambda: reader.applied(topic) == 5)
        if running:
            create_again(broker, model)
            send(broker, model, 100, 100 + count)
            until(lambda: reader.rows(range(100, 100 + count)) == [1.0] * count)
    if not running:
        create_again(broker, model)
        send(broker, model, 100, 100 + count)
    with reading(broker, tmp_path, model, member=member) as reader:
        until(lambda: reader.rows(range(100, 100 + count)) == [1.0] * count)
        send(broker, model, 200, 201)
        until(lambda: reader.applied(topic) == count + 1)
        assert reader.rows([200]) == [1.0]
        assert restarted(reader) == ({} if running else {(f"node.{model}", topic): 1})
    text = f"{topic}/0 does not continue what was applied: the topic was deleted and created again"
    assert caplog.text.count(text) == 1


def test_position_beyond_the_end_is_detected_without_topic_ids(
    broker, model, tmp_path, monkeypatch, caplog
):
    """As with brokers before Kafka 2.8."""
    monkeypatch.setattr(cluster, "_id_of", lambda _told: "")
    topic = native_topic(model)
    make_topic(broker, topic)
    send(broker, model, 0, 5)
    with reading(broker, tmp_path, model) as reader:
        until(lambda: reader.applied(topic) == 5)
    create_again(broker, model)
    send(broker, model, 100, 103)
    with reading(broker, tmp_path, model) as reader:
        until(lambda: reader.rows([100, 101, 102]) == [1.0] * 3)
        until(lambda: reader.applied(topic) == 3)
        assert restarted(reader) == {(f"node.{model}", topic): 1}
    assert "messages before 5 were lost; it ends at 3" in caplog.text


def test_log_that_lost_messages_is_read_from_its_beginning(model, tmp_path):
    """As after an unclean leader election: the same topic, cut while the reader is connected to it."""
    broker, topic = fresh_broker(tmp_path / "kafka"), native_topic(model)
    try:
        broker.start()
        make_topic(broker, topic)
        send(broker, model, 0, 5)
        with reading(broker, tmp_path / "db", model) as reader:
            until(lambda: reader.applied(topic) == 5)
            broker.stop()
            shutil.rmtree(broker.folder / "data" / f"{topic}-0")
            broker.start()
            send(broker, model, 100, 108)
            until(lambda: reader.rows(range(100, 108)) == [1.0] * 8, 120)
            assert restarted(reader) == {(f"node.{model}", topic): 1}
    finally:
        broker.kill()


def test_messages_dropped_while_paused_are_counted_as_lost(broker, model, tmp_path, caplog):
    topic = native_topic(model)
    make_topic(broker, topic)
    send(broker, model, 0, 2)
    with reading(broker, tmp_path, model) as reader:
        until(lambda: reader.applied(topic) == 2)
        reader.thread.pause().result(60)
        send(broker, model, 2, 9)
        admin = AdminClient({"bootstrap.servers": broker.address})
        (deletion,) = admin.delete_records([ck.TopicPartition(topic, 0, 6)]).values()
        deletion.result(20)
        reader.thread.resume()
        until(lambda: reader.applied(topic) == 9)
        assert reader.rows([5, 6, 8]) == [None, 1.0, 1.0]
        assert reader.metrics.numbers()[m.UPDATE_LOST] == {(f"node.{model}", topic): 4}
        assert restarted(reader) == {}
    assert "keeps messages from 6 on, but 2 to 5 were not applied yet and are gone" in caplog.text


def test_position_of_hps_beyond_the_end_is_not_used(broker, model, tmp_path):
    topic = hps_topic(model, "items")
    make_topic(broker, topic)
    with sending(broker) as producer:
        for key in range(2):
            (message,) = encode_hps(np.array([key]), np.full((1, 2), 1.0, np.float32))
            producer.produce(topic, message)
    hps = ck.Consumer(
        {"bootstrap.servers": broker.address, "group.id": "hps.volatile"},
        logger=logging.getLogger("test.consumer"),
    )
    hps.commit(offsets=[ck.TopicPartition(topic, 0, 7)], asynchronous=False)
    hps.close()
    with reading(broker, tmp_path, model, hps_offsets=True) as reader:
        until(lambda: reader.rows([0, 1]) == [1.0, 1.0])
        assert restarted(reader) == {(f"node.{model}", topic): 1}


def test_reader_without_a_store_detects_a_topic_created_again(broker, model, tmp_path):
    topic = native_topic(model)
    make_topic(broker, topic)
    send(broker, model, 0, 5)
    nowhere = {"begin": lambda _t, _p: None, "since_s": time.time() - 60}
    with reading(broker, tmp_path, model, **nowhere) as reader:
        until(lambda: reader.source.applied() == {(topic, 0): 5})
        create_again(broker, model)
        send(broker, model, 100, 108)
        until(lambda: reader.rows(range(100, 108)) == [1.0] * 8)
        until(lambda: reader.source.applied() == {(topic, 0): 8})
