"""hps updates publish and dlq against a real Kafka broker: messages arrive as sent."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import confluent_kafka as ck
import numpy as np
import pytest
from typer.testing import CliRunner, Result

from hps.cli.main import app
from hps.config.model_schema import ModelSpec
from hps.config.update_settings import KafkaSettings
from hps.models.loader import load_tables
from hps.models.repository import Repository
from hps.models.version_writer import write_version
from hps.observability.meters import StreamMeter, UpdateMeter
from hps.observability.metrics import Metrics
from hps.rows.compare import compare
from hps.rows.files import FileRows
from hps.rows.tiers import RocksDbRows
from hps.tiers.base import FetchContext, Part
from hps.tiers.positions import TableChanges
from hps.tiers.rocksdb import RocksDbTier
from hps.types import EmbeddingTable, NoProgress, make_version
from hps.updates import Producer
from hps.updates.codec import MessageAttributes, decode_native, encode_hps, encode_native, hps_topic
from hps.updates.ingestor import Ingestor
from hps.updates.kafka.client import DeadLetterTopic
from hps.updates.kafka.hps_group import ReaderGroup, hps_group
from hps.updates.kafka.kept_letters import KeptLetters
from hps.updates.kafka.source import KafkaSource
from hps.updates.stream_positions import FedStore, StoreStreamPositions
from hps.updates.topics import TopicTables, native_topic
from tests.support.kafka_brokers import make_topic, shared_broker, unique
from tests.support.waiting import until


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["updates", *map(str, arguments)])


def printed(result: Result, code: int = 0) -> Any:
    assert result.exit_code == code, result.stderr
    return json.loads(result.stdout)


@pytest.fixture
def broker():
    return shared_broker()


@pytest.fixture
def model():
    return unique("m")


@pytest.fixture
def models(tmp_path: Path, model: str) -> Path:
    """Versions 1 and 2 of two tables; ``items`` has 40 changed, 10 deleted and 20 new rows in 2."""
    root = tmp_path / "models"
    spec = ModelSpec.model_validate(
        {
            "name": model,
            "tables": [
                {"name": "items", "dim": 3},
                {"name": "users", "dim": 2, "key_dtype": "uint32", "dtype": "float16"},
            ],
        }
    )
    rng = np.random.default_rng(3)
    keys = rng.permutation(np.arange(-500, 500))
    rows = rng.random((1000, 3), np.float32)
    users = (np.arange(50), rng.random((50, 2), np.float32))
    write_version(root, spec, 1, {"items": (keys, rows), "users": users})
    manifest = root / model / "1" / "manifest.json"
    changed = json.loads(manifest.read_text()) | {"created": "2024-01-31T12:00:00+00:00"}
    manifest.write_text(json.dumps(changed))
    later = rows.copy()
    later[:40] += 1
    keep = np.ones(1000, bool)
    keep[100:110] = False
    new_keys = np.concatenate([keys[keep], np.arange(9000, 9020)])
    new_rows = np.concatenate([later[keep], rng.random((20, 3), np.float32)])
    write_version(root, spec, 2, {"items": (new_keys, new_rows), "users": users})
    return root


@contextmanager
def consumer_of(broker) -> Iterator[ck.Consumer]:
    consumer = ck.Consumer({"bootstrap.servers": broker.address, "group.id": unique("g")})
    yield consumer
    consumer.close()


def feed(broker, store: RocksDbTier, tables: list[EmbeddingTable]) -> None:
    """Apply Kafka's messages for the tables, from the position of the first table."""
    model = tables[0].model
    settings = KafkaSettings(brokers=broker.address, models=[model], dead_letters=f"{model}_dead")
    topics = TopicTables(tables, settings.takes)
    # The position of the first table: the others may have no updates.
    positions = StoreStreamPositions([FedStore("rocksdb", store)], lambda _topic: tables[:1])
    group = f"g.{model}"
    observe = StreamMeter(Metrics(), group)
    source = KafkaSource(settings, ReaderGroup(group, hps_group(group)), topics, positions, observe)
    positions = StoreStreamPositions([FedStore("rocksdb", store)], topics.readers)
    ingestor = Ingestor(
        source,
        topics.tables,
        positions,
        None,
        DeadLetterTopic(settings, KeptLetters()),
        UpdateMeter(Metrics()),
    )
    with consumer_of(broker) as consumer:
        there = consumer.list_topics(timeout=60).topics
        ends = {
            (name, number): consumer.get_watermark_offsets(
                ck.TopicPartition(name, number), timeout=60
            )[1]
            for name in there
            if model in name and not name.endswith("_dead")
            for number in there[name].partitions
        }

    def all_is_applied() -> bool:
        ingestor.step(0.05)
        return all(source.applied().get(place, 0) >= end for place, end in ends.items())

    until(all_is_applied)
    ingestor.record_positions()
    source.close()


def test_published_difference_turns_one_version_into_the_other(broker, model, models, tmp_path):
    to = ("--repository", models, "--brokers", broker.address)
    counted = printed(
        run("publish", model, "--base", 1, "--new", 2, *to, "--dry-run", "-o", "json")
    )
    expected = [("items", 60, 10, False), ("users", 0, 0, False)]
    assert [(e["table"], e["rows"], e["deleted"], e["sent"]) for e in counted] == expected
    sent = printed(run("publish", model, "--base", 1, "--new", 2, *to, "-o", "json"))
    assert [(e["table"], e["rows"], e["deleted"]) for e in sent] == [e[:3] for e in expected]
    old, new = (Repository(models).open(model, v) for v in (1, 2))
    tables = old.embedding_tables()
    store = RocksDbTier(tmp_path / "db")
    load_tables(old, list(tables.values()), store, NoProgress())
    feed(broker, store, list(tables.values()))
    for name, table in tables.items():
        other = new.embedding_tables()[name]
        found = compare(RocksDbRows(store), FileRows(new), table, NoProgress(), other=other)
        lasting = {kind: n for kind, n in found.counts.items() if kind not in ("older", "deleted")}
        assert (found.compared, lasting) == (new.tables[name].rows, {})
    store.close()


def test_publish_rejects_an_older_version_by_default(broker, model, models):
    to = ("--repository", models, "--brokers", broker.address)
    rejected = run("publish", model, "--base", 2, "--new", 1, *to)
    assert rejected.exit_code == 2
    assert "version 1 was made before version 2" in rejected.stderr
    assert "--at now" in rejected.stderr
    (items, _) = printed(
        run("publish", model, "--base", 2, "--new", 1, *to, "--at", "now", "-o", "json")
    )
    assert (items["rows"], items["deleted"]) == (50, 20)


def test_publish_in_hps_format_reports_unsent_deletions(broker, model, models):
    to = ("--repository", models, "--brokers", broker.address, "--format", "hps", "-o", "json")
    sent = printed(run("publish", model, "users", "--new", 1, *to))
    assert sent[0]["rows"] == 50
    (message, *_) = everything(broker, hps_topic(model, "users"))
    assert message.value().startswith(b"HCTR\x08\0\0\0")
    assert (len(message.value()) - 8) % 12 == 0  # keys of 32 bits
    result = run("publish", model, "items", "--base", 1, "--new", 2, *to)
    assert printed(result, 1)[0]["unsent_deletions"] == 10
    assert "10 deletions not sent" in result.stderr
    sent = printed(run("publish", model, "items", "--base", 1, "--new", 2, *to, "--no-deletions"))
    assert (sent[0]["rows"], sent[0]["unsent_deletions"]) == (60, 0)


def test_publish_sends_a_file(broker, model, tmp_path):
    path = tmp_path / "rows.npz"
    versions = np.array([7, 8, 9], np.uint64)
    arrays = {"key": [1, 2, 3], "vector": np.ones((3, 2), "f4"), "deleted": [False, True, False]}
    np.savez(path, version=versions, **arrays)
    to = ("--brokers", broker.address, "-o", "json")
    unnamed = run("publish", model, "--file", path, *to)
    assert unnamed.exit_code == 2
    assert f"name the table: hps updates publish {model} TABLE" in unnamed.stderr
    (sent,) = printed(run("publish", model, "items", "--file", path, *to, "--partitions", 1))
    assert (sent["rows"], sent["deleted"]) == (2, 1)
    (message,) = everything(broker, native_topic(model))
    (update,) = decode_native([message.value()]).updates
    assert update.changes.versions.tolist() == [7, 9]
    assert update.changes.deleted_versions.tolist() == [8]


def test_publish_sends_a_file_with_32_bit_keys(broker, model, tmp_path):
    path, to = tmp_path / "rows.npz", ("--brokers", broker.address, "--format", "hps")
    rows = np.ones((2, 2), np.float32)
    np.savez(path, key=[7, 2**32 - 1], vector=rows)
    arguments = ("publish", model, "items", "--file", path, *to, "--partitions", 1)
    assert run(*arguments, "--key-bits", 32).exit_code == 0
    assert run(*arguments).exit_code == 0
    found = [each.value() for each in everything(broker, hps_topic(model, "items"))]
    keys = np.array([7, 2**32 - 1])
    assert found == [*encode_hps(keys, rows, key_bits=32), *encode_hps(keys, rows)]
    np.savez(path, key=[-1, 7], vector=rows)
    rejected = run(*arguments, "--key-bits", 32)
    assert rejected.exit_code == 1
    assert "keys of 32 bits must lie between 0 and" in rejected.stderr


def test_publish_keeps_to_the_rate_limit(broker, model, tmp_path):
    np.savez(tmp_path / "a.npz", key=np.arange(300), vector=np.ones((300, 2), "f4"))
    began = time.monotonic()
    arguments = ("items", "--file", tmp_path / "a.npz", "--brokers", broker.address, "--rate", 200)
    result = run("publish", model, *arguments)
    assert result.exit_code == 0, result.stderr
    assert 1.4 < time.monotonic() - began < 60


@pytest.mark.parametrize("command", [("publish", "m", "--new", 1), ("dlq",)])
def test_publish_reports_a_missing_broker_within_seconds(command, models):
    name = next(models.iterdir()).name
    command = tuple(name if each == "m" else each for each in command)
    where = ("--repository", models) if "publish" in command else ()
    began = time.monotonic()
    result = run(*command, *where, "--brokers", "127.0.0.1:1")
    assert result.exit_code == 1
    assert "no Kafka broker at 127.0.0.1:1" in result.stderr
    assert "start it, or correct the address" in result.stderr
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--new", 1), "no Kafka is named: give --brokers"),
        ((), "nothing to send"),
        (("--new", 1, "--file", "a.npz"), "exclude each other"),
        (("--base", 1, "--new", 1, "-b", "x:1"), "no difference to send"),
        (("--new", 7, "-b", "x:1"), "has no version 7"),
        (("unknown", "--new", 1, "-b", "x:1"), "has no table 'unknown'; it has items, users"),
        (("items", "--file", "none.npz", "-b", "x:1"), "No such file"),
        (("--new", 1, "-b", "x:1", "--format", "hps", "--ttl", 5), "has no such fields"),
        (("--new", 1, "-b", "x:1", "--key-bits", 32), "native messages always have 64-bit keys"),
        (("--new", 1, "--set", "a=b"), "--set changes a setting of --config"),
    ],
)
def test_publish_rejects_invalid_arguments(models, model, arguments, message):
    result = run("publish", model, *arguments, "--repository", models)
    assert (result.exit_code, message in result.stderr) == (2, True), result.stderr


def everything(broker, topic: str) -> list:
    with consumer_of(broker) as consumer:
        partitions = [
            ck.TopicPartition(topic, number, 0)
            for number in consumer.list_topics(topic, 60).topics[topic].partitions
        ]
        ends = sum(consumer.get_watermark_offsets(each, timeout=60)[1] for each in partitions)
        consumer.assign(partitions)
        found: list = []
        while len(found) < ends:
            found += [each for each in consumer.consume(1000, 0.1) if not each.error()]
    return found


def test_dead_letters_are_listed_and_requeued(broker, model, tmp_path):
    """A message of an unknown table, a damaged one and one in HPS's format; then the table is served."""
    topic, dead = native_topic(model), f"{model}_dead"
    make_topic(broker, dead, 2)
    items = EmbeddingTable.make("items", 2, model=model)
    late = EmbeddingTable.make("late", 2, model=model)
    row = np.ones((1, 2), np.float32)
    none = (np.empty(0, np.int64), np.empty(0, np.uint64))
    changes = TableChanges(np.array([5]), row, np.array([make_version(10**12)], np.uint64), *none)
    (unknown,) = encode_native(f"{model}/late", changes, MessageAttributes(10**12))
    with Producer(broker.address, model=model, partitions=3) as producer:
        producer.send("items", [1], row)
        producer.send("late", [5], row)
        producer.send("late", np.arange(100), np.ones((100, 2), np.float32))
    raw = ck.Producer({"bootstrap.servers": broker.address})
    raw.produce(topic, unknown[:-1], partition=1)
    raw.produce(hps_topic(model, "late"), encode_hps(np.array([6]), row)[0])
    assert raw.flush(60) == 0
    at = ("--brokers", broker.address, "--topic", dead)
    assert "No dead letters" in run("dlq", *at).stdout
    store = RocksDbTier(tmp_path / "db")
    store.open_tables([items, late])
    feed(broker, store, [items])
    letters = printed(run("dlq", *at, "-o", "json"))
    causes = sorted({(e["reason"], e["table"]) for e in letters})
    assert causes == [("truncated", f"{model}/late"), ("unknown_table", f"{model}/late")]
    shown = run("dlq", *at, "--reason", "truncated")
    assert f"{topic}/1 at " in shown.stdout
    assert "unknown_table" not in shown.stdout
    assert f"The newest 1 of {len(letters)}" in run("dlq", *at, "--limit", 1).stdout
    unknown_ones = len(letters) - 1
    again = printed(run("dlq", *at, "--reason", "unknown_table", "--requeue", "-o", "json"))
    assert again == {"requeued": unknown_ones, "failed": []}
    feed(broker, store, [items, late])
    assert store.rows(late) >= 101 - 1
    assert [e["reason"] for e in printed(run("dlq", *at, "-o", "json"))] == ["truncated"]
    assert len(printed(run("dlq", *at, "--all", "-o", "json"))) == len(letters)
    store.close()


def test_requeued_letters_keep_their_timestamps(broker, model, tmp_path):
    """In HPS's format the timestamp is the version: a requeued row must not replace a later one."""
    topic, dead = hps_topic(model, "late"), f"{model}_dead"
    make_topic(broker, topic)
    make_topic(broker, dead)
    late = EmbeddingTable.make("late", 1, model=model)
    then_ms = time.time_ns() // 1_000_000 - 60_000
    raw = ck.Producer({"bootstrap.servers": broker.address})
    (old,) = encode_hps(np.array([1, 2]), np.array([[1.0], [1.0]], np.float32))
    raw.produce(topic, old, timestamp=then_ms)
    assert raw.flush(60) == 0
    store = RocksDbTier(tmp_path / "db")
    store.open_tables([late, EmbeddingTable.make("items", 1, model=model)])
    feed(broker, store, [EmbeddingTable.make("items", 1, model=model)])
    at = ("--brokers", broker.address, "--topic", dead, "-o", "json")
    (letter,) = printed(run("dlq", *at))
    assert (letter["reason"], letter["timestamp_ms"]) == ("unknown_table", then_ms)
    (new,) = encode_hps(np.array([2]), np.array([[2.0]], np.float32))
    raw.produce(topic, new, timestamp=then_ms + 1)
    assert raw.flush(60) == 0
    assert printed(run("dlq", *at, "--requeue"))["requeued"] == 1
    assert [each.timestamp()[1] for each in everything(broker, topic)] == [
        then_ms, then_ms + 1, then_ms,
    ]  # fmt: skip
    feed(broker, store, [late])
    part = Part.make(late, np.array([1, 2]))
    store.fetch([part], FetchContext())
    assert part.out[:, 0].tolist() == [1.0, 2.0]
    store.close()
