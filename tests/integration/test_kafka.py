"""Updates from a real Kafka broker into a store: both formats, dead letters, start positions."""

from __future__ import annotations

import logging
import os
import time

import confluent_kafka as ck
import numpy as np
import pytest
from pydantic import ValidationError

from benchmarks.peers.process import free_ports
from hps.config.update_settings import KafkaSettings
from hps.errors import BadRequest, ConfigError, TierError, Unavailable
from hps.observability import metric_names as m
from hps.tiers.positions import StreamPosition, TableChanges
from hps.tiers.rocksdb import RocksDbTier
from hps.types import EmbeddingTable, make_version
from hps.updates.codec import MessageAttributes, encode_hps, encode_native, hps_topic
from hps.updates.ingestor import Ingestor
from hps.updates.kafka import source
from hps.updates.kafka.dead_letters import DeadLetterReader
from hps.updates.kafka.hps_group import hps_group
from hps.updates.source import UpdateBatch
from hps.updates.topics import TopicTables, native_topic
from tests.support.kafka_brokers import (
    fresh_broker,
    make_topic,
    shared_broker,
    unique,
)
from tests.support.kafka_updates import NOW_MS, native, reading, sending, source_of
from tests.support.waiting import until


@pytest.fixture
def broker():
    return shared_broker()


@pytest.fixture
def model():
    return unique("m")


def test_both_formats_with_deletions_and_dead_letters_are_read(broker, model, tmp_path):
    topic = native_topic(model)
    with reading(broker, tmp_path, model) as reader:
        with sending(broker) as producer:
            rows = np.array([[1.0, 1.0], [2.0, 2.0]], np.float32)
            for message in encode_hps(np.array([1, 2]), rows):
                producer.produce(hps_topic(model, "items"), message)
            producer.flush(60)
            producer.produce(topic, native(model, 7, 7.0, 1))
            producer.produce(topic, native(model, 8, 8.0, 1))
            producer.produce(topic, native(model, 7, np.nan, 2))
            producer.produce(topic, native(model, -5, 5.0, 1, "users", dim=3))
            bad = [
                (topic, native(model, 1, 1.0, 1)[:-1]),
                (topic, native(model, 1, 1.0, 1, "unknown")),
                (topic, native(model, 1, 1.0, 1, dim=5)),
                (hps_topic(model, "items"), b"HCTR\x08\0\0\0" + bytes(17)),
                (hps_topic(model, "unknown"), encode_hps(np.array([1]), rows[:1])[0]),
            ]
            for where, payload in bad:
                producer.produce(where, payload)
            producer.produce(topic, native(model, 9, 9.0, 1))
        until(lambda: reader.rows([9]) == [9.0])
        until(lambda: reader.rows([1, 2]) == [1.0, 2.0])
        # A batch's deletions come after its rows, and one table after the other.
        until(lambda: reader.rows([7, 8]) == [None, 8.0])
        until(lambda: reader.rows([-5], reader.users) == [5.0])
        letters = read(broker, f"{model}_dead", len(bad))
        found = {(dict(m.headers())["hps-reason"], dict(m.headers())["hps-topic"]) for m in letters}
        assert found == {
            (b"truncated", topic.encode()),
            (b"unknown_table", topic.encode()),
            (b"row_size", topic.encode()),
            (b"truncated", hps_topic(model, "items").encode()),
            (b"unknown_table", hps_topic(model, "unknown").encode()),
        }
        assert sorted(m.value() for m in letters) == sorted(payload for _, payload in bad)


def test_dead_letters_too_large_for_their_topic_do_not_stop_the_stream(broker, model, tmp_path):
    topic = native_topic(model)
    make_topic(broker, topic, max_message_bytes="3000000")
    make_topic(broker, f"{model}_dead")
    bad = [b"HP", os.urandom(1_030_000), b"X" * 2_000_000, os.urandom(2_000_000)]
    producer = ck.Producer(
        {"bootstrap.servers": broker.address, "message.max.bytes": 3_000_000},
        logger=logging.getLogger("test.producer"),
    )
    for payload in bad:
        producer.produce(topic, payload, key=b"key")
    producer.produce(topic, native(model, 1, 1.0, 1))
    assert producer.flush(60) == 0
    with reading(broker, tmp_path, model, max_message_bytes=1 << 20) as reader:
        until(lambda: reader.rows([1]) == [1.0])
        until(lambda: reader.source.lag() == {(topic, 0): 0})
        box = DeadLetterReader(reader.settings)
        letters = box.letters()
        assert [(each.from_offset, each.size, each.whole) for each in letters] == [
            (i, len(payload), i < 3) for i, payload in enumerate(bad)
        ]
        assert [each.reason for each in letters] == ["truncated", "bad_magic", *["oversize"] * 2]
        ((failed, why),) = box.requeue(letters[:1] + letters[3:])
        box.close()
        assert failed == letters[3]
        assert "too large to be kept" in why
    kept = {dict(m.headers())["hps-offset"]: m for m in read(broker, f"{model}_dead", 4)}
    assert [kept[b"%d" % i].value() or b"" for i in range(4)] == [*bad[:3], b""]


def read(broker, topic: str, count: int) -> list:
    consumer = ck.Consumer(
        {
            "bootstrap.servers": broker.address,
            "group.id": unique("g"),
            "auto.offset.reset": "earliest",
        }
    )
    consumer.subscribe([topic])
    found: list = []
    until(lambda: bool(found.extend(consumer.consume(count, 0.5)) or len(found) >= count))
    consumer.close()
    return found


def test_restart_continues_at_the_store_position_not_the_group_offset(broker, model, tmp_path):
    topic = native_topic(model)
    make_topic(broker, topic, 2)
    with sending(broker) as producer:
        for i in range(10):
            producer.produce(topic, native(model, i, 1.0, 1), partition=i % 2)
    with reading(broker, tmp_path / "one", model) as reader:
        until(lambda: [reader.applied(topic, p) for p in (0, 1)] == [5, 5])
    # The same group with an empty store: everything is read again, whatever was committed.
    with reading(broker, tmp_path / "two", model) as reader:
        until(lambda: reader.rows(range(10)) == [1.0] * 10)
    # The first store: only new messages; a row that was changed in it directly is not read again.
    with sending(broker) as producer:
        producer.produce(topic, native(model, 100, 2.0, 1), partition=0)
    store = RocksDbTier(tmp_path / "one")
    items = EmbeddingTable.make("items", 2, model=model)
    store.open_tables([items])
    mark = np.full((1, 2), 77.0, np.float32)
    store.insert(items, np.array([0]), mark, np.array([make_version(NOW_MS, 1)], np.uint64))
    store.close()
    with reading(broker, tmp_path / "one", model) as reader:
        until(lambda: reader.rows([100]) == [2.0])
        assert reader.rows([0]) == [77.0]


def test_broker_restart_loses_no_updates(model, tmp_path):
    broker = fresh_broker(tmp_path / "kafka")
    topic = native_topic(model)
    try:
        broker.start()
        with reading(broker, tmp_path / "db", model) as reader:
            with sending(broker) as producer:
                producer.produce(topic, native(model, 1, 1.0, 1))
            until(lambda: reader.rows([1]) == [1.0])
            broker.kill()
            broker.start()
            with sending(broker) as producer:
                producer.produce(topic, native(model, 2, 2.0, 1))
            until(lambda: reader.rows([2]) == [2.0], 120)
    finally:
        broker.kill()


def test_two_group_members_share_partitions_and_one_takes_over(broker, model, tmp_path):
    topic = native_topic(model)
    make_topic(broker, topic, 4)

    def send(first: int) -> None:
        with sending(broker) as producer:
            for i in range(first, first + 40):
                producer.produce(topic, native(model, i, 1.0, 1), partition=i % 4)

    def both(a, b, keys):
        pairs = zip(a.rows(keys), b.rows(keys), strict=True)
        return all(x == 1.0 or y == 1.0 for x, y in pairs)

    with reading(broker, tmp_path / "b", model, member="b") as second:
        with reading(broker, tmp_path / "a", model, member="a") as first:
            until(lambda: len(first.source.lag() or ()) == 2 == len(second.source.lag() or ()))
            send(0)
            until(lambda: both(first, second, range(40)))
            # A batch polled before the other reader joined, and written late.
            (other, *_) = set(second.source.lag())
            late = UpdateBatch((), [StreamPosition(*other, 10)])
            first.thread.call(lambda: first.source.commit(late)).result(60)
            assert other not in first.source.applied()
            first.thread.call(first.source.rewind).result(60)
        until(lambda: len(second.source.lag() or ()) == 4)
        send(100)
        until(lambda: second.rows(range(100, 140)) == [1.0] * 40)


def test_closed_member_leaves_the_group_immediately(broker, model, tmp_path):
    make_topic(broker, native_topic(model))
    admin = ck.admin.AdminClient({"bootstrap.servers": broker.address})

    def members() -> list[str]:
        described = admin.describe_consumer_groups([f"node.{model}"])[f"node.{model}"].result(60)
        return [member.group_instance_id for member in described.members]

    with reading(broker, tmp_path, model, member="here") as reader:
        until(lambda: reader.source.lag() == {(native_topic(model), 0): 0})
        assert members() == ["here"]
    assert members() == []


def test_readers_with_one_static_name_both_continue(broker, model, tmp_path, caplog):
    topic = native_topic(model)
    make_topic(broker, topic, 2)
    with (
        reading(broker, tmp_path / "a", model, member="here") as first,
        reading(broker, tmp_path / "b", model, member="here") as second,
    ):
        until(lambda: len(first.source.lag() or ()) == 1 == len(second.source.lag() or ()))
        with sending(broker) as producer:
            for i in range(2):
                producer.produce(topic, native(model, i, 1.0, 1), partition=i)
        until(
            lambda: (
                sorted([*first.rows([0, 1]), *second.rows([0, 1])], key=str)
                == [1.0, 1.0, None, None]
            )
        )
    assert f"Kafka refused here in the group node.{model}" in caplog.text


def test_reader_that_loses_its_static_name_before_a_commit_continues(
    broker, model, tmp_path, monkeypatch
):
    monkeypatch.setattr(source, "_CHECK_EVERY_S", 3600.0)  # nor does it commit in between
    topic = native_topic(model)
    make_topic(broker, topic, 2)
    with reading(broker, tmp_path / "a", model, member="here") as first:
        until(lambda: len(first.source.lag() or ()) == 2)
        with sending(broker) as producer:
            producer.produce(topic, native(model, 1, 1.0, 1), partition=0)
        until(lambda: first.rows([1]) == [1.0])
        with reading(broker, tmp_path / "b", model, member="here") as second:
            until(lambda: len(first.source.lag() or ()) == 1 == len(second.source.lag() or ()))


def test_plain_reader_joins_no_group_and_commits_for_kafkas_tools(broker, model, tmp_path):
    topic, group = native_topic(model), f"node.{model}"
    make_topic(broker, topic)
    with sending(broker) as producer:
        producer.produce(topic, native(model, 1, 1.0, 1))
    admin = ck.admin.AdminClient({"bootstrap.servers": broker.address})
    with reading(broker, tmp_path, model) as reader:
        until(lambda: reader.applied(topic) == 1)

        def committed() -> int:
            (described,) = admin.list_consumer_group_offsets(
                [ck.ConsumerGroupTopicPartitions(group)]
            ).values()
            return max(
                (place.offset for place in described.result(60).topic_partitions), default=-1
            )

        until(lambda: committed() == 1)
        assert admin.describe_consumer_groups([group])[group].result(60).members == []


def test_new_partitions_are_read(broker, model, tmp_path):
    topic = native_topic(model)
    make_topic(broker, topic)
    with reading(broker, tmp_path, model) as reader:
        until(lambda: reader.source.lag() == {(topic, 0): 0})
        admin = ck.admin.AdminClient({"bootstrap.servers": broker.address})
        admin.create_partitions([ck.admin.NewPartitions(topic, 3)])[topic].result(60)
        until(lambda: len(reader.source.lag() or ()) == 3)
        with sending(broker) as producer:
            for i in range(3):
                producer.produce(topic, native(model, i, 1.0, 1), partition=i)
        until(lambda: reader.rows([0, 1, 2]) == [1.0] * 3)


def test_seek_to_an_earlier_offset_replays_messages(broker, model, tmp_path):
    topic = native_topic(model)
    with reading(broker, tmp_path, model) as reader:
        with sending(broker) as producer:
            for i in range(3):
                producer.produce(topic, native(model, i, 1.0, 1))
        until(lambda: reader.applied(topic) == 3)
        mark = np.full((1, 2), 77.0, np.float32)
        version = np.array([make_version(NOW_MS, 0)], np.uint64)
        items = reader.items
        reader.thread.call(lambda: reader.store.evict(items, np.array([0, 1, 2]))).result(60)
        reader.thread.call(lambda: reader.store.insert(items, np.array([2]), mark, version)).result(
            10
        )
        assert reader.rows([0, 1, 2]) == [None, None, 77.0]
        reader.thread.call(lambda: reader.source.seek(topic, 0, 1)).result(60)
        until(lambda: reader.rows([0, 1, 2]) == [None, 1.0, 1.0])


def test_seek_beyond_the_end_is_rejected(broker, model, tmp_path):
    topic = native_topic(model)
    with reading(broker, tmp_path, model) as reader:
        with sending(broker) as producer:
            for i in range(3):
                producer.produce(topic, native(model, i, 1.0, 1))
        until(lambda: reader.applied(topic) == 3)
        with pytest.raises(BadRequest, match="ends at 3, before 4"):
            reader.thread.call(lambda: reader.source.seek(topic, 0, 4)).result(60)
        with pytest.raises(Unavailable, match="is not read here"):
            reader.thread.call(lambda: reader.source.seek(topic, 1, 0)).result(60)
        reader.thread.call(lambda: reader.source.seek(topic, 0, 3)).result(60)
        with sending(broker) as producer:
            producer.produce(topic, native(model, 3, 1.0, 1))
        until(lambda: reader.rows([3]) == [1.0])


@pytest.mark.parametrize("why", ["paused", "store away"])
def test_waiting_member_stays_in_the_group_and_loses_nothing(
    broker, model, tmp_path, why, monkeypatch, caplog
):
    topic = native_topic(model)
    options = {"max.poll.interval.ms": 6000, "session.timeout.ms": 6000}
    away = []
    with reading(broker, tmp_path, model, options=options, member="here") as reader:
        apply = reader.store.apply

        def take(*arguments):
            if away:
                raise TierError("rocksdb", "No space left on device")
            apply(*arguments)

        monkeypatch.setattr(reader.store, "apply", take)
        with sending(broker) as producer:
            producer.produce(topic, native(model, 1, 1.0, 1))
        until(lambda: reader.rows([1]) == [1.0])
        if why == "paused":
            reader.thread.pause().result(60)
        else:
            away.append(True)
        with sending(broker) as producer:
            for i in range(2, 50):
                producer.produce(topic, native(model, i, 1.0, 1))
        until(lambda: reader.thread.paused or reader.ingestor.problem)
        time.sleep(8)
        assert reader.rows([2]) == [None]
        reader.thread.resume()
        away.clear()
        until(lambda: reader.rows(range(1, 50)) == [1.0] * 49)
    assert "maximum poll interval" not in caplog.text


@pytest.mark.alone
def test_prefetch_is_bounded_while_the_store_is_slow(broker, model, tmp_path, monkeypatch):
    """A batch has the messages fetched while the previous one was written."""
    topic, n, many = native_topic(model), 8_000, 60
    make_topic(broker, topic)
    keys, rows = np.arange(n), np.ones((n, 2), np.float32)
    versions = np.full(n, make_version(NOW_MS), np.uint64)
    changes = TableChanges(keys, rows, versions, keys[:0], versions[:0])
    (message,) = encode_native(f"{model}/items", changes, MessageAttributes(NOW_MS))
    with sending(broker) as producer:
        for _ in range(many):
            producer.produce(topic, message)
    polled = []
    allowed = {"max_message_bytes": 1 << 20, "prefetch_kb": 1024}
    with reading(broker, tmp_path, model, begin=lambda _t, _p: 0, **allowed) as reader:
        take = reader.store.apply

        def slow(*arguments):
            take(*arguments)
            if len(polled) < 3:
                time.sleep(1)

        monkeypatch.setattr(reader.store, "apply", slow)
        apply = reader.ingestor.apply

        def watched(batch):
            polled.append(sum(p.offset - p.continues_from for p in batch.positions))
            apply(batch)

        monkeypatch.setattr(reader.ingestor, "apply", watched)
        until(lambda: reader.source.applied() == {(topic, 0): many})
    # One fetch may bring as much again, and the next one comes while they are taken.
    assert max(polled) * len(message) < 6 << 20, polled


def test_reader_waits_for_a_store_without_a_readable_position(broker, model, tmp_path):
    topic = native_topic(model)
    left = [3]

    def begin(topic, partition):
        if left[0]:
            left[0] -= 1
            raise TierError("redis", "it cannot be reached")
        return

    with sending(broker) as producer:
        producer.produce(topic, native(model, 1, 1.0, 1))
    with reading(broker, tmp_path, model, begin=begin) as reader:
        until(lambda: reader.rows([1]) == [1.0])
    assert left == [0]


def test_messages_that_kafka_deleted_are_counted_as_lost(broker, model, tmp_path, caplog):
    topic = native_topic(model)
    make_topic(broker, topic)
    with sending(broker) as producer:
        for i in range(5):
            producer.produce(topic, native(model, i, 1.0, 1))
    admin = ck.admin.AdminClient({"bootstrap.servers": broker.address})
    (deletion,) = admin.delete_records([ck.TopicPartition(topic, 0, 3)]).values()
    deletion.result(20)
    with reading(broker, tmp_path, model, begin=lambda _t, _p: 1) as reader:
        until(lambda: reader.rows([3, 4]) == [1.0, 1.0])
        assert reader.rows([0, 1, 2]) == [None] * 3
        assert reader.metrics.numbers()[m.UPDATE_LOST] == {(f"node.{model}", topic): 2}
    assert "keeps messages from 3 on, but 1 to 2 were not applied yet and are gone" in caplog.text


def test_position_after_a_gap_is_recorded_despite_a_failed_step(
    broker, model, tmp_path, monkeypatch
):
    """The gap may be Kafka's or an operator's."""
    topic = native_topic(model)
    make_topic(broker, topic)
    apply, failures, since = Ingestor.apply, [], []

    def fail_once(ingestor, batch):
        since.append(batch.positions[0].continues_from)
        if failures:
            raise failures.pop()
        apply(ingestor, batch)

    def send(first, last):
        with sending(broker) as producer:
            for i in range(first, last):
                producer.produce(topic, native(model, i, 1.0, 1))

    send(0, 1)
    with reading(broker, tmp_path, model) as reader:
        until(lambda: reader.applied(topic) == 1)
    send(1, 5)
    admin = ck.admin.AdminClient({"bootstrap.servers": broker.address})
    (deletion,) = admin.delete_records([ck.TopicPartition(topic, 0, 3)]).values()
    deletion.result(20)
    monkeypatch.setattr(Ingestor, "apply", fail_once)
    failures.append(RuntimeError("of ours"))
    with reading(broker, tmp_path, model) as reader:
        until(lambda: reader.applied(topic) == 5)
        assert since[:2] == [1, 1]  # a store that has less would not note what follows
        since.clear()
        reader.thread.pause().result(60)
        send(5, 8)
        reader.thread.call(lambda: reader.source.seek(topic, 0, 6)).result(60)
        failures.append(RuntimeError("of ours"))
        reader.thread.resume()
        until(lambda: reader.applied(topic) == 8)
        assert since[:2] == [0, 0]
        assert reader.rows([1, 2, 3, 5, 6]) == [None, None, 1.0, None, 1.0]


def test_lag_is_zero_where_kafka_deleted_all_messages(broker, model, tmp_path):
    topic = native_topic(model)
    make_topic(broker, topic)
    with sending(broker) as producer:
        producer.produce(topic, native(model, 1, 1.0, 1))
    admin = ck.admin.AdminClient({"bootstrap.servers": broker.address})
    (deletion,) = admin.delete_records([ck.TopicPartition(topic, 0, 1)]).values()
    deletion.result(20)
    with reading(broker, tmp_path, model) as reader:
        until(lambda: reader.source.lag() == {(topic, 0): 0})
        assert reader.source.applied() == {(topic, 0): 1}
        with sending(broker) as producer:
            producer.produce(topic, native(model, 2, 2.0, 1))
        until(lambda: reader.rows([2]) == [2.0])
        until(lambda: reader.applied(topic) == 2)


def test_reading_starts_at_the_offset_of_hps(broker, model, tmp_path):
    topic = hps_topic(model, "items")
    make_topic(broker, topic, 2)

    def send(*keys, partition=0):
        with sending(broker) as producer:
            for key in keys:
                (message,) = encode_hps(np.array([key]), np.full((1, 2), 1.0, np.float32))
                producer.produce(topic, message, partition=partition)

    send(0, 1, 2)
    send(10, partition=1)  # which HPS has not read
    hps = ck.Consumer({"bootstrap.servers": broker.address, "group.id": "hps.volatile"})
    hps.commit(offsets=[ck.TopicPartition(topic, 0, 2)], asynchronous=False)
    hps.close()
    with reading(broker, tmp_path, model, hps_offsets=True) as reader:
        until(lambda: [reader.applied(topic, i) for i in range(2)] == [3, 1])
        assert reader.rows([0, 1, 2, 10]) == [None, None, 1.0, 1.0]
    send(3)
    # Now the store says it.
    with reading(broker, tmp_path, model, hps_offsets=True) as reader:
        until(lambda: reader.applied(topic) == 4)
        assert reader.rows([1, 2, 3]) == [None, 1.0, 1.0]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("hps.node.ml-3", "hps.persistent.ml-3"), ("hps.shared", "hps.volatile")],
)
def test_each_group_maps_to_a_group_of_hps(ours, theirs):
    assert hps_group(ours) == theirs


def test_reader_without_a_position_starts_at_a_time(broker, model, tmp_path):
    topic = native_topic(model)
    make_topic(broker, topic, 2)
    with sending(broker) as producer:
        producer.produce(topic, native(model, 1, 1.0, 1), partition=0)
    time.sleep(0.2)
    since_s = time.time()
    time.sleep(0.2)
    with sending(broker) as producer:
        producer.produce(topic, native(model, 2, 2.0, 1), partition=0)
    nowhere = {"begin": lambda _t, _p: None, "since_s": since_s}
    with reading(broker, tmp_path, model, **nowhere) as reader:
        until(lambda: reader.rows([2]) == [2.0])
        until(lambda: reader.source.lag() == {(topic, 0): 0, (topic, 1): 0})
        assert reader.rows([1]) == [None]


def test_lag_is_unknown_before_the_broker_answers(model):
    (port,) = free_ports(1)
    settings = KafkaSettings(brokers=f"127.0.0.1:{port}")
    topics = TopicTables([EmbeddingTable.make("items", 2, model=model)], settings.takes)
    source = source_of(settings, topics)
    try:
        assert source.poll(0.0) is None
        assert source.lag() is None
    finally:
        source.close()


def test_lag_is_zero_without_a_topic(broker, model, tmp_path):
    with reading(broker, tmp_path, model) as ours:
        until(lambda: ours.source.lag() == {})
        make_topic(broker, native_topic(model))
        until(lambda: list(ours.source.lag() or ()) == [(native_topic(model), 0)])


def test_lag_counts_unpolled_messages(broker, model, tmp_path):
    topic = native_topic(model)
    with reading(broker, tmp_path, model) as reader:
        with sending(broker) as producer:
            producer.produce(topic, native(model, 1, 1.0, 1))
        until(lambda: reader.rows([1]) == [1.0])
        until(lambda: reader.source.lag() == {(topic, 0): 0})


def test_transaction_markers_do_not_count_as_lag(broker, model, tmp_path):
    """A marker takes an offset without a message; aborted rows are not delivered."""
    topic = native_topic(model)
    make_topic(broker, topic)
    options = {"bootstrap.servers": broker.address, "transactional.id": model}
    producer = ck.Producer(options, logger=logging.getLogger("test.producer"))
    producer.init_transactions(60)

    def send(key: int, *, keep: bool = True) -> None:
        producer.begin_transaction()
        producer.produce(topic, native(model, key, 1.0, 1))
        assert producer.flush(60) == 0
        if keep:
            producer.commit_transaction(60)
        else:
            producer.abort_transaction(60)

    with reading(broker, tmp_path, model) as reader:
        place = (topic, 0)
        send(1)
        until(lambda: reader.source.applied() == {place: 2})
        assert reader.rows([1]) == [1.0]
        send(2, keep=False)
        until(lambda: reader.source.applied() == {place: 4})
        until(lambda: reader.source.lag() == {place: 0})
        reader.thread.pause().result(60)
        send(3)
        reader.thread.resume()
        until(lambda: reader.source.applied() == {place: 6})
    # What is noted in the store says so too.
    with reading(broker, tmp_path, model) as reader:
        assert reader.applied(topic) == 6
        until(lambda: reader.source.lag() == {place: 0})
        assert reader.rows([1, 2, 3]) == [1.0, None, 1.0]


def test_unknown_librdkafka_option_raises_config_error(broker, model, tmp_path):
    settings = KafkaSettings(brokers=broker.address, options={"security.protokol": "ssl"})
    with pytest.raises(ConfigError, match=r"updates.kafka: .*security.protokol"):
        source_of(settings, TopicTables([], settings.takes))


def test_nothing_is_read_when_no_served_model_is_named(broker, caplog):
    settings = KafkaSettings(brokers=broker.address)
    source = source_of(settings, TopicTables([], settings.takes))
    try:
        assert source.poll(0.1) is None
        source.keep_alive()
        source.rewind()
        assert source.poll(0.1) is None
        assert (source.lag(), source.applied(), source.problem) == ({}, {}, None)
    finally:
        source.close()
    assert "reads nothing: no model is served that updates.kafka.models names" in caplog.text


def test_largest_configurable_message_size_is_accepted_by_librdkafka(model):
    most = 1_000_000_000
    (port,) = free_ports(1)
    settings = KafkaSettings(brokers=f"127.0.0.1:{port}", max_message_bytes=most)
    topics = TopicTables([EmbeddingTable.make("items", 2, model=model)], settings.takes)
    source_of(settings, topics).close()
    with pytest.raises(ValidationError, match="max_message_bytes"):
        KafkaSettings(brokers=settings.brokers, max_message_bytes=most + 1)
