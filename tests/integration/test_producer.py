"""The producer and a real Kafka broker: order, errors, back-pressure, a broker that comes and goes."""

from __future__ import annotations

import time

import confluent_kafka as ck
import numpy as np
import pytest

from hps.config.update_settings import KafkaSettings
from hps.errors import BadRequest, ConfigError, Unavailable
from hps.types import EmbeddingTable, version_unix_ms
from hps.updates import Producer
from hps.updates.codec import decode_native, encode_hps, hps_topic
from hps.updates.kafka.message_encoder import partition_of
from hps.updates.topics import TopicTables, native_topic
from tests.support.kafka_brokers import fresh_broker, make_topic, shared_broker, unique
from tests.support.kafka_updates import source_of
from tests.support.waiting import until


def rows(values, dim: int = 2) -> np.ndarray:
    return np.repeat(np.asarray(values, np.float32)[:, None], dim, axis=1)


def read(broker, topic: str, seconds: float = 60) -> list:
    """Everything in the topic, as messages."""
    consumer = ck.Consumer({"bootstrap.servers": broker.address, "group.id": unique("g")})
    partitions = [
        ck.TopicPartition(topic, number, 0)
        for number in consumer.list_topics(topic, 60).topics[topic].partitions
    ]
    ends = sum(consumer.get_watermark_offsets(each, timeout=60)[1] for each in partitions)
    consumer.assign(partitions)
    found: list = []
    deadline = time.monotonic() + seconds
    while len(found) < ends and time.monotonic() < deadline:
        found += [each for each in consumer.consume(1000, 0.1) if not each.error()]
    consumer.close()
    assert len(found) == ends
    return found


def send_on(producer, block, sent=None) -> None:
    """Send the block until that fails; ``sent`` gets the numbers of rows."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        n = producer.send("items", np.arange(len(block)), block)
        if sent is not None:
            sent.append(n)
        time.sleep(0.001)


@pytest.fixture
def broker():
    return shared_broker()


@pytest.fixture
def model():
    return unique("m")


def test_rows_of_a_key_stay_in_order_over_partitions(broker, model):
    keys, rounds = np.arange(-100, 100), 30
    with Producer(broker.address, model=model, partitions=5, message_bytes=512) as producer:
        for i in range(rounds):
            assert producer.send("items", keys, rows(np.full(200, i)), step=i) == 200
    seen: dict[int, list[tuple[int, float]]] = {}
    where: dict[int, set[int]] = {}
    for message in read(broker, native_topic(model)):
        assert message.key() is None
        (update,) = decode_native([message.value()]).updates
        assert update.table == f"{model}/items"
        changes = update.changes
        for key, version, value in zip(
            changes.keys.tolist(), changes.versions.tolist(), changes.vectors[:, 0].tolist(),
            strict=True,
        ):  # fmt: skip
            seen.setdefault(key, []).append((version, value))
            where.setdefault(key, set()).add(message.partition())
    assert all([v for _, v in each] == list(range(rounds)) for each in seen.values())
    assert all(each == sorted(each) for each in seen.values())
    expected = partition_of(keys, 5, 5).tolist()
    assert where == {k: {p} for k, p in zip(keys.tolist(), expected, strict=True)}
    assert len(set(expected)) == 5


def test_hps_messages_go_byte_for_byte_to_the_topics_of_hps(broker, model):
    make_topic(broker, hps_topic(model, "items"), 3)
    keys = np.array([1, 2, 3, 42, 1000])
    with Producer(broker.address, model=model, format="hps") as producer:
        producer.send("items", keys, rows([1, 2, 3, 42, 1000]))
        with pytest.raises(BadRequest, match="leave them out"):
            producer.send("items", keys, rows(keys), versions=keys)
    groups = {1: 3, 2: 6, 3: 0, 42: 5, 1000: 5}  # of eight, as HPS's hash has it
    found = {m.partition(): m.value() for m in read(broker, hps_topic(model, "items"))}
    for partition in range(3):
        mine = np.array([k for k, g in groups.items() if g % 3 == partition], np.int64)
        (expected,) = encode_hps(mine, rows(mine)) if len(mine) else [None]
        assert found.get(partition) == expected
    head = bytes.fromhex("48435452 08000000 02000000 00000000 00000040 00000040".replace(" ", ""))
    assert any(payload.startswith(head[:8]) for payload in found.values())
    assert not any(message.key() for message in read(broker, hps_topic(model, "items")))


def test_rejected_message_is_raised_at_the_next_send_and_at_flush(broker, model):
    make_topic(broker, native_topic(model), 1, max_message_bytes="2000")
    producer = Producer(broker.address, model=model, compression="none")
    producer.send("items", [1], rows([1]))
    producer.flush()
    producer.send("items", np.arange(500), rows(np.arange(500)))
    message = (
        r"did not accept \d+ messages: a message of 12\d{3} bytes .* "
        "raise the topic's max.message.bytes"
    )
    with pytest.raises(Unavailable, match=message):
        send_on(producer, rows([2]))
    with pytest.raises(Unavailable, match=r"send again what was sent since the last flush"):
        producer.flush()
    producer.send("items", [3], rows([3]))
    producer.close()
    found = [decode_native([m.value()]).updates[0] for m in read(broker, native_topic(model))]
    assert {1, 3} <= {int(each.changes.keys[0]) for each in found}
    with pytest.raises(BadRequest, match="closed"):
        producer.send("items", [3], rows([3]))


def test_large_rows_need_a_topic_that_allows_them(broker, model):
    wide = np.zeros((1, 100_000), np.float32)
    small = Producer(broker.address, model=model)
    with pytest.raises(BadRequest, match=r"one row has 400\d{3} bytes.*raise message_bytes"):
        small.send("items", [1], wide)
    small.close()
    with Producer(broker.address, model=model, message_bytes=1 << 20) as producer:
        producer.send("items", [1], wide)
    (message,) = read(broker, native_topic(model))
    assert len(message.value()) > 400_000


def test_deletions_can_be_sent_without_rows(broker, model):
    with Producer(broker.address, model=model, partitions=1) as producer:
        producer.send("items", [], np.empty((0, 2), np.float32), deleted=[5, 6], versions=[8, 9])
    (message,) = read(broker, native_topic(model))
    (update,) = decode_native([message.value()]).updates
    assert update.changes.deleted.tolist() == [5, 6]
    assert update.changes.deleted_versions.tolist() == [8, 9]


def test_versions_contain_the_event_time(broker, model):
    with Producer(broker.address, model=model, partitions=1) as producer:
        producer.send("items", [5], rows([1]), event_time=1_700_000_000.5)
    (message,) = read(broker, native_topic(model))
    (update,) = decode_native([message.value()]).updates
    assert [version_unix_ms(v) for v in update.changes.versions.tolist()] == [1_700_000_000_500]


def test_watermark_is_the_end_of_sent_messages(broker, model):
    other = unique("m")
    with Producer(broker.address, model=model, format="hps") as producer:
        assert producer.watermark() == {}
        producer.send("items", [1], rows([1]))
    with Producer(broker.address, model=other, partitions=2) as producer:
        assert producer.watermark() == {native_topic(other): {"0": 0, "1": 0}}
    with Producer(broker.address, model=model, partitions=1) as producer:
        producer.send("items", [1], rows([1]))
        producer.flush()
        producer.send("items", [1], rows([2]))
        producer.flush()
        found = producer.watermark()
    assert found[native_topic(model)] == {"0": 2}
    assert sum(found[hps_topic(model, "items")].values()) == 1
    assert len(found) == 2


def test_sent_message_is_polled_immediately(broker, model):
    """A poll ends with the first message; it does not wait for a full batch."""
    make_topic(broker, native_topic(model))
    settings = KafkaSettings(brokers=broker.address)
    topics = TopicTables([EmbeddingTable.make("items", 2, model=model)], settings.takes)
    source = source_of(settings, topics)
    with Producer(broker.address, model=model) as producer:
        producer.send("items", [1], rows([1]))
        until(lambda: source.poll(0.2))
        producer.send("items", [2], rows([2]))
        began = time.monotonic()
        batch = source.poll(60.0)
    assert batch is not None
    assert batch.rows == 1
    assert time.monotonic() - began < 30
    source.close()


def test_missing_broker_raises_immediately():
    began = time.monotonic()
    with pytest.raises(
        Unavailable, match=r"no Kafka broker at 127.0.0.1:1 .*refused.*start it, or correct"
    ):
        Producer("127.0.0.1:1", model="m", connect_s=1.0)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "HPS"}, "format must be native or hps"),
        ({"partitions": 0}, "partitions must be from 1"),
        ({"model": "a b"}, "a name has letters"),
        ({"compression": "best"}, "Kafka's options: .*best"),
        ({"options": {"enable.idempotence": False}}, "is set by hps"),
        ({"options": {"bootstrap.servers": "elsewhere:1"}}, "is set by hps"),
        ({"options": {"security.protokol": "ssl"}}, "Kafka's options: .*security.protokol"),
    ],
)
def test_invalid_settings_raise_config_error(options, message):
    with pytest.raises(ConfigError, match=message):
        Producer("127.0.0.1:1", **{"model": "m", **options})


def test_send_rejects_invalid_table_names(broker, model):
    producer = Producer(broker.address, model=model)
    with pytest.raises(BadRequest, match="a name has letters"):
        producer.send("a b", [1], rows([1]))
    producer.close()


def test_topic_that_kafka_refuses_to_create_raises_unavailable(broker, model):
    make_topic(broker, native_topic(model).replace(".", "_"))  # the name Kafka takes for the same
    producer = Producer(broker.address, model=model)
    with pytest.raises(
        Unavailable, match=r"does not exist and Kafka .* refused to create it: .*with 8"
    ):
        producer.send("items", [1], rows([1]))
    producer.close()


def test_send_waits_for_space_and_survives_a_broker_restart(model, tmp_path):
    """A separate broker is stopped, then killed and restarted."""
    broker = fresh_broker(tmp_path / "kafka")
    try:
        broker.start()
        _stands_still(broker, f"{model}a")
        _dies(broker, f"{model}b")
    finally:
        broker.kill()


def _stands_still(broker, model: str) -> None:
    producer = Producer(
        broker.address, model=model, buffer_bytes=1 << 20, wait_s=1.0, compression="none"
    )
    block = rows(np.arange(2000), dim=32)
    producer.send("items", np.arange(2000), block)
    producer.flush()
    broker.pause()
    try:
        began = time.monotonic()
        message = r"accepts no more: \d+ messages are queued, no space within 1 s"
        sent: list[int] = []
        with pytest.raises(Unavailable, match=message):
            send_on(producer, block, sent)
        assert 2000 <= sum(sent) <= 20_000  # 1 MiB are 7,000 rows
        assert time.monotonic() - began < 30
        with pytest.raises(Unavailable, match=r"has not acknowledged \d+ messages within 0.2 s"):
            producer.flush(0.2)
    finally:
        broker.resume()
    producer.close()
    found = read(broker, native_topic(model))
    counts = [len(decode_native([m.value()]).updates[0].changes.keys) for m in found]
    assert sum(counts) >= 2000 + sum(sent)


def _dies(broker, model: str) -> None:
    with Producer(broker.address, model=model, partitions=2) as producer:
        keys = np.arange(50)
        for i in range(60):
            producer.send("items", keys, rows(np.full(50, i)))
            if i == 20:
                broker.kill()
            if i == 40:
                broker.start()
    values: dict[int, list[float]] = {}
    for message in read(broker, native_topic(model)):
        changes = decode_native([message.value()]).updates[0].changes
        for key, value in zip(changes.keys.tolist(), changes.vectors[:, 0].tolist(), strict=True):
            values.setdefault(key, []).append(value)
    assert values == {key: list(range(60)) for key in range(50)}
