"""``hps ingest`` feeds a real Redis from a real Kafka: Redis has what was sent, despite kills."""

from __future__ import annotations

import json
import logging
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import confluent_kafka as ck
import numpy as np
import pytest
from typer.testing import CliRunner

import hps
from benchmarks.peers.redis_server import RedisServer
from hps.cli.main import app
from hps.config import configuration_from
from hps.config.model_schema import ModelSpec, TableSpec
from hps.config.store_settings import RedisSettings
from hps.errors import ConfigError, Unavailable
from hps.models.version_writer import write_version
from hps.node.ingest import open_ingest
from hps.node.model_opening import OpenedTables, open_versions
from hps.node.stores import NodeStores
from hps.observability.metrics import Metrics
from hps.tiers.positions import TableChanges
from hps.tiers.redis import RedisLoadSource, RedisTier
from hps.types import EmbeddingTable, NoProgress, make_version
from hps.updates.topics import native_topic
from tests.support.crash_run import judge_store
from tests.support.ingest_process import IngestProcess
from tests.support.kafka_brokers import SEES_NEW_TOPICS_SOON, make_topic, shared_broker, unique
from tests.support.kafka_updates import native, sending
from tests.support.redis_servers import need
from tests.support.update_stream import DEFAULT, DIM, UpdateStream
from tests.support.waiting import until

PARTITIONS, TABLE = 4, "items"
KEYS, UPDATES = 3_000, 12_000
READ, ADMIN = "a-key-of-those-who-read", "a-key-of-those-who-do-all"


class Fleet:
    """A model with its stream, and the Redis that is fed with it."""

    def __init__(self, folder, redis: RedisServer) -> None:
        self.redis = redis
        self.model = unique("m")
        self.topic = native_topic(self.model)
        self.stream = UpdateStream(7, KEYS, UPDATES, time.time_ns() // 10**6 + 60_000)
        spec = ModelSpec(name=self.model, tables=[TableSpec(name=TABLE, dim=DIM, default=DEFAULT)])
        write_version(folder / "models", spec, 1, {TABLE: self.stream.first_rows})
        self.table = EmbeddingTable.make(TABLE, DIM, model=self.model, version=1)
        self.settings = {
            "models": {"repository": str(folder / "models")},
            "tiers": {
                "rocksdb": {"enabled": False},
                "redis": {"addresses": [redis.address], "guard": {"deadline_ms": 5000}},
            },
            "updates": {
                "kafka": {
                    "brokers": shared_broker().address,
                    "shared_writer": "ingest",
                    "shared_group": self.model,
                    # A dead member's partitions go over to others after this; brokers allow no less.
                    "options": {**SEES_NEW_TOPICS_SOON, "session.timeout.ms": 6000},
                }
            },
        }
        self.store = RedisTier(RedisSettings(addresses=[redis.address]))
        make_topic(shared_broker(), self.topic, PARTITIONS)

    def send(self, seconds: float, until_sent: threading.Event) -> None:
        """Send the whole stream over ``seconds``; set ``until_sent`` when half of it is sent."""
        options = {"bootstrap.servers": shared_broker().address, "linger.ms": 5}
        producer = ck.Producer(options, logger=logging.getLogger("test.producer"))
        messages = list(self.stream.messages(f"{self.model}/{TABLE}", PARTITIONS))
        for i, (partition, payload) in enumerate(messages):
            producer.produce(self.topic, payload, partition=partition)
            producer.poll(0)
            if i == len(messages) // 2:
                until_sent.set()
            time.sleep(seconds / len(messages))
        assert producer.flush(60) == 0

    def applied(self) -> list[int]:
        """Offset up to which Redis has each partition; -1 if none."""
        found = (self.store.applied(self.table, self.topic, i) for i in range(PARTITIONS))
        return [-1 if offset is None else offset for offset in found]

    def ends(self) -> list[int]:
        options = {"bootstrap.servers": shared_broker().address, "group.id": "ends"}
        consumer = ck.Consumer(options, logger=logging.getLogger("test.consumer"))
        places = [ck.TopicPartition(self.topic, i) for i in range(PARTITIONS)]
        found = [consumer.get_watermark_offsets(place, timeout=60)[1] for place in places]
        consumer.close()
        return found

    @contextmanager
    def sending(self, seconds: float):
        """Send the stream in the background: enter at half of it, leave at its end."""
        half, failed = threading.Event(), []

        def work() -> None:
            try:
                self.send(seconds, half)
            except BaseException as error:
                failed.append(error)
                half.set()

        sender = threading.Thread(target=work)
        sender.start()
        try:
            assert half.wait(120)
            yield
        finally:
            sender.join()
        assert not failed, failed

    def judge(self) -> None:
        """Wait until Redis has exactly everything that was sent."""
        ends = self.ends()
        until(lambda: self.applied() == ends, 120)
        judge_store("Redis", self.stream, self.store, self.table)


@pytest.fixture
def fleet(tmp_path):
    need("redis-server")
    shared_broker()
    redis = RedisServer(tmp_path / "redis").start()
    fleet = Fleet(tmp_path, redis)
    yield fleet
    fleet.store.close()
    redis.kill()


@pytest.fixture
def processes(fleet, tmp_path):
    """Start further processes; all are ended with the test."""
    started = []

    def start(**settings) -> IngestProcess:
        process = IngestProcess(tmp_path / f"ingest{len(started)}", {**fleet.settings, **settings})
        started.append(process)
        return process.start()

    yield start
    for each in started:
        each.kill()


def partitions(process: IngestProcess) -> int:
    (stream,) = process.updates()
    return len(stream["partitions"])


def test_other_process_takes_over_when_one_of_two_is_killed(fleet, processes):
    one, two = processes(), processes()
    until(lambda: partitions(one) == partitions(two) == PARTITIONS // 2)
    with fleet.sending(8.0):
        before = fleet.applied()
        one.kill()
    assert 0 < sum(before) < sum(fleet.ends()), "in the middle"
    fleet.judge()
    assert partitions(two) == PARTITIONS


def test_sigterm_stops_one_process_under_load_and_another_continues(fleet, processes):
    first = processes()
    until(lambda: partitions(first) == PARTITIONS)
    with fleet.sending(8.0):
        until(lambda: min(fleet.applied()) > 0)
        assert first.terminate() == 0
        there = fleet.applied()
    assert "stopped" in first.log.read_text()
    assert "Traceback" not in first.log.read_text()
    assert min(there) > 0
    assert sum(there) < sum(fleet.ends()), "in the middle"
    second = processes()
    fleet.judge()
    sent = sum(1 for _ in fleet.stream.messages(f"{fleet.model}/{TABLE}", PARTITIONS))
    assert sent == sum(fleet.ends())
    # It continued at Redis's position: one observation per message and table.
    seen = second.counted("hps_update_visible_seconds_count")
    assert seen == sent - sum(there), "positions were noted, nothing is read again"


def test_third_process_takes_a_share_of_the_partitions_under_load(fleet, processes):
    one = processes()
    until(lambda: partitions(one) == PARTITIONS)
    with fleet.sending(6.0):
        two = processes()
        until(lambda: partitions(one) == partitions(two) == PARTITIONS // 2)
    fleet.judge()


def test_start_without_redis_succeeds(fleet, processes):
    fleet.redis.kill()
    process = processes()
    (stream,) = process.updates()
    assert stream["stores"] == ["redis"]
    assert process.ask("/v2/health/ready")[0] == 200
    status = json.loads(process.ask("/v1/status")[1])
    assert "serving without it until it responds" in "".join(status["warnings"])
    fleet.redis.start()
    with sending(shared_broker()) as producer:
        row = native(fleet.model, 1, 5.0, 1, dim=DIM, made_ms=fleet.stream.since_ms)
        producer.produce(fleet.topic, row, partition=0)
    until(lambda: fleet.store.get(fleet.table, np.array([1])).out[0, 0] == 5.0)


def test_admin_port_reports_status_and_metrics(fleet, processes):
    keys = [
        {"name": "reader", "role": "read", "key": READ},
        {"name": "boss", "role": "admin", "key": ADMIN},
    ]
    process = processes(auth={"mode": "api_key", "keys": keys})
    for path in ("/v2/health/live", "/v2/health/ready", "/metrics"):
        assert process.ask(path)[0] == 200, path
    for path in ("/v1/status", "/v1/updates", "/v1/tables", "/v1/models"):
        assert process.ask(path)[0] == 401, path
        assert process.ask(path, key=READ)[0] == 403, path
        assert process.ask(path, key=ADMIN)[0] == 200, path
    until(lambda: json.loads(process.ask("/v1/updates", key=ADMIN)[1])["updates"][0]["partitions"])
    (stream,) = json.loads(process.ask("/v1/updates", key=ADMIN)[1])["updates"]
    assert (stream["group"], stream["stores"], stream["caches"]) == (fleet.model, ["redis"], False)
    for action, state in (("pause", "paused"), ("resume", "running")):
        status, text = process.ask(f"/v1/updates/{action}", {}, ADMIN)
        assert status == 200
        assert json.loads(text)["updates"][0]["state"] == state
    status = json.loads(process.ask("/v1/status", key=ADMIN)[1])
    assert (status["phase"], status["ready"]) == ("ready", True)
    assert [model["name"] for model in status["models"]] == [fleet.model]
    assert [tier["name"] for tier in status["tiers"]] == ["redis"]
    until(lambda: process.counted("hps_table_rows") == KEYS // 2)
    assert process.ask(f"/v2/models/{fleet.model}/infer", {}, ADMIN)[0] == 404, "serves no lookups"
    result = [
        CliRunner().invoke(app, [*command, "--server", process.admin, "--api-key", ADMIN])
        for command in (["status"], ["updates", "status"], ["tables"])
    ]
    assert [each.exit_code for each in result] == [0, 0, 0], [each.output for each in result]
    assert "hps ingest" in result[0].output
    assert fleet.model in result[1].output


def test_command_line_pauses_resumes_and_seeks(fleet, processes):
    process = processes()

    def cli(*command: str) -> list[dict]:
        options = ["updates", *command, "--server", process.admin, "--output", "json"]
        result = CliRunner().invoke(app, options)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    def send(value: float) -> None:
        with sending(shared_broker()) as producer:
            made_ms = fleet.stream.since_ms
            row = native(fleet.model, 1, value, int(value), dim=DIM, made_ms=made_ms)
            producer.produce(fleet.topic, row, partition=0)

    def applied() -> float:
        return process.counted("hps_update_rows_total")

    until(lambda: cli("status")[0]["lag"] == 0)
    (paused,) = cli("pause", "--group", fleet.model)
    assert paused["state"] == "paused"
    send(5.0)
    until(lambda: cli("status")[0]["tables"][0]["age_s"] > 1)
    (resumed,) = cli("resume")
    assert resumed["state"] == "running"
    until(lambda: applied() == 1)
    until(lambda: cli("status")[0]["tables"][0]["age_s"] == 0)
    cli("seek", fleet.topic, "0", "0")
    until(lambda: applied() == 2)
    shown = CliRunner().invoke(app, ["updates", "status", "--server", process.admin])
    assert f"{fleet.model}/{TABLE}" in shown.output
    assert "0.0 s" in shown.output
    # The file is also the nodes': ingest needs none of their private settings.
    theirs = ("server.role=ingest", "tiers.rocksdb.enabled=true", "tiers.rocksdb.path=/proc/none")
    options = [word for setting in theirs for word in ("--set", setting)]
    result = CliRunner().invoke(
        app, ["doctor", "--config", str(process.config), *options, "--json"]
    )
    found = {check["name"]: check for check in json.loads(result.stdout)}
    assert [check for check in found.values() if check["verdict"] == "FAIL"] == []
    assert found.keys() & {"http port", "memory", "database", "Redis", "Kafka"} == {
        "Redis",
        "Kafka",
    }
    assert "served by this configuration's server" in found["admin port"]["found"]
    assert "this server" in found
    assert [name for name in found if name.startswith("group ")] == [f"group {fleet.model}"]
    away = ["updates", "pause", "--group", "others", "--server", process.admin]
    assert CliRunner().invoke(app, away).exit_code != 0


def test_node_writes_only_its_own_store_alongside_ingest(fleet, processes, tmp_path):
    processes()
    kafka = {**fleet.settings["updates"]["kafka"], "group": fleet.model}
    tiers = {
        "redis": fleet.settings["tiers"]["redis"],
        "rocksdb": {"path": str(tmp_path / "db")},
        "cpu_cache": {"enabled": False},
    }
    with hps.open({**fleet.settings, "tiers": tiers, "updates": {"kafka": kafka}}) as node:
        (stream,) = node.status()["updates"]
        assert (stream["group"], stream["stores"]) == (f"hps.node.{fleet.model}", ["rocksdb"])
        with sending(shared_broker()) as producer:
            row = native(fleet.model, 1, 5.0, 1, dim=DIM, made_ms=fleet.stream.since_ms)
            producer.produce(fleet.topic, row, partition=0)
        until(lambda: fleet.store.get(fleet.table, np.array([1])).out[0, 0] == 5.0)


def test_load_waits_until_redis_is_fed_for_the_version(fleet, processes):
    ingest = processes()
    made_ms = fleet.stream.since_ms

    def send(value: float) -> None:
        with sending(shared_broker()) as producer:
            row = native(fleet.model, 1, value, int(value), dim=DIM, made_ms=made_ms)
            producer.produce(fleet.topic, row, partition=0)

    def has(table: EmbeddingTable, value: float) -> bool:
        return fleet.store.get(table, np.array([1])).out[0, 0] == value

    kafka = {**fleet.settings["updates"]["kafka"], "group": fleet.model}
    tiers = {**fleet.settings["tiers"], "cpu_cache": {"enabled": False}}
    models = {**fleet.settings["models"], "catch_up_s": 5.0}
    changed = {"models": models, "tiers": tiers, "updates": {"kafka": kafka}}
    with hps.open({**fleet.settings, **changed}) as node:
        send(5.0)
        until(lambda: has(fleet.table, 5.0))
        spec = ModelSpec(name=fleet.model, tables=[TableSpec(name=TABLE, dim=DIM, default=DEFAULT)])
        root = Path(fleet.settings["models"]["repository"])
        keys, vectors = fleet.stream.first_rows
        write_version(root, spec, 2, {TABLE: (keys, vectors + 1)})  # equal rows would be shared
        with pytest.raises(Unavailable, match=r"no writer \(`hps ingest`"):
            node.load(fleet.model, 2)
        assert node.models[fleet.model].version == 1
        second = EmbeddingTable.make(TABLE, DIM, model=fleet.model, version=2)
        status, answer = ingest.ask(f"/v2/repository/models/{fleet.model}/load", {})
        assert (status, json.loads(answer)["version"]) == (200, "2")
        until(lambda: fleet.store.applied(second, fleet.topic, 0))
        assert node.load(fleet.model, 2) == 2
        send(6.0)
        until(lambda: has(second, 6.0) and has(fleet.table, 6.0))
        assert node.lookup(fleet.model, {TABLE: np.array([1])}).vectors[TABLE][0, 0] == 6.0


def write_next(fleet, version) -> EmbeddingTable:
    """Publish a further version; returns its table."""
    spec = ModelSpec(name=fleet.model, tables=[TableSpec(name=TABLE, dim=DIM, default=DEFAULT)])
    root = Path(fleet.settings["models"]["repository"])
    keys, vectors = fleet.stream.first_rows
    write_version(root, spec, version, {TABLE: (keys, vectors + version)})
    return EmbeddingTable.make(TABLE, DIM, model=fleet.model, version=version)


def fed(process) -> list[int]:
    """The versions that a process feeds."""
    models = json.loads(process.ask("/v1/status")[1])["models"]
    return sorted(model["version"] for model in models)


def test_watched_repositorys_versions_are_fed_and_the_former_ones_end(fleet, processes):
    """The version before stays: nodes may not have switched, and may go back to it."""
    models = {**fleet.settings["models"], "watch_s": 0.1}
    one, two = (processes(models=models, updates=_named(fleet, n)) for n in ("one", "two"))
    until(lambda: partitions(one) == partitions(two) == PARTITIONS // 2)
    with fleet.sending(3.0):
        second = write_next(fleet, 2)
        until(lambda: fed(one) == fed(two) == [1, 2])
    fleet.judge()
    ends = fleet.ends()
    until(lambda: [fleet.store.applied(second, fleet.topic, i) for i in range(PARTITIONS)] == ends)
    # One reader has all tables again.
    until(lambda: len(one.updates()) == len(two.updates()) == 1)
    write_next(fleet, 3)
    until(lambda: fed(one) == fed(two) == [2, 3])
    found = fleet.store.get(second, np.arange(KEYS))
    streamed = fleet.store.get(fleet.table, np.arange(KEYS))
    keys, vectors = fleet.stream.first_rows
    before = np.zeros_like(streamed.out)
    before[keys] = vectors
    for each in (streamed, found):
        each.out[each.source == 0] = DEFAULT
    changed = (streamed.out != before).any(axis=1)
    assert changed.sum() > KEYS // 4
    np.testing.assert_array_equal(found.out[changed], streamed.out[changed])


def _named(fleet, name):
    return {"kafka": {**fleet.settings["updates"]["kafka"], "group": f"{fleet.model}.{name}"}}


def test_chosen_versions_are_fed_from_the_start_until_one_is_unloaded(fleet, processes):
    second = write_next(fleet, 2)
    process = processes(models={**fleet.settings["models"], "versions": {"latest": 2}})
    assert fed(process) == [1, 2]

    def send(value: float) -> None:
        made_ms = fleet.stream.since_ms
        with sending(shared_broker()) as producer:
            row = native(fleet.model, 1, value, int(value), dim=DIM, made_ms=made_ms)
            producer.produce(fleet.topic, row, partition=0)

    def values() -> list[float]:
        return [fleet.store.get(t, np.array([1])).out[0, 0] for t in (fleet.table, second)]

    send(5.0)
    until(lambda: values() == [5.0, 5.0])
    path = f"/v2/repository/models/{fleet.model}"
    assert process.ask(f"{path}/unload", {"parameters": {"version": 1}})[0] == 200
    assert fed(process) == [2]
    send(6.0)
    until(lambda: values() == [5.0, 6.0])
    for body, status, text in [
        ({"version": 1}, 404, "version 1 is not fed here"),
        ({"version": "x"}, 400, "whole number"),
    ]:
        assert process.ask(f"{path}/unload", {"parameters": body})[0] == status
        assert text in process.ask(f"{path}/unload", {"parameters": body})[1]
    assert process.ask(f"{path}/load", {"parameters": {"version": 7}})[0] == 404
    assert process.ask("/v2/repository/models/others/load", {})[0] in (400, 404)
    assert process.ask(f"{path}/load", {"parameters": {"version": 1}})[0] == 200
    until(lambda: values() == [6.0, 6.0])


# -- rows that go to Redis -------------------------------------------------------------------------


@pytest.fixture(params=["native", "hps"])
def layout(request):
    return request.param


def stores(
    fleet, resources, layout, access="primary", **redis
) -> tuple[NodeStores, EmbeddingTable]:
    """Stores of a node with RocksDB, or of `hps ingest` for such nodes, with Redis."""
    options = {**fleet.settings["tiers"]["redis"], "layout": layout, **redis}
    tiers = {"redis": options, "rocksdb": {"layout": layout, "access": access}}
    configuration = configuration_from({**fleet.settings, "tiers": tiers})
    (version,) = open_versions(configuration)
    opened = OpenedTables(version, version.embedding_tables())
    found = NodeStores(configuration.settings, [opened], Metrics(), resources)
    found.open(NoProgress(), shared_only=True)
    return found, opened.tables[TABLE]


def in_redis(store, table, keys) -> np.ndarray:
    part = store.get(table, keys)
    return np.where(part.source != 0, part.out[:, 0], np.nan)


def test_streamed_rows_keep_to_the_loaded_share(fleet, layout):
    """Half of the keys are loaded: of others, Redis takes streamed rows only if it holds them already."""
    with ExitStack() as resources:
        opened, table = stores(
            fleet, resources, layout, initial_cache_rate=0.5, cache_missed_embeddings=False
        )
        (fed,) = opened.update_targets(shared=True)
        redis = opened._redis.tier
        keys = np.arange(2 * KEYS)  # more than the files hold
        loaded = ~np.isnan(in_redis(redis, table, keys))
        assert 0.4 < loaded[: KEYS // 2].mean() < 0.6
        assert not loaded[KEYS // 2 :].any()
        inserted = 10 + int(np.flatnonzero(~loaded[10:])[0])
        version = make_version(fleet.stream.since_ms)
        row = np.ones((1, DIM), np.float32)
        redis.insert(table, np.array([inserted]), row, np.array([version], np.uint64))

        def change(value: float, sequence: int, deleted: np.ndarray) -> None:
            updated = np.setdiff1d(keys, deleted)
            versions = np.full(len(updated), version + sequence, np.uint64)
            rows = np.full((len(updated), DIM), value, np.float32)
            changes = TableChanges(updated, rows, versions, deleted, versions[: len(deleted)])
            fed.store.apply(table, changes, [])

        change(5.0, 1, np.array([1, 2, 3]))
        found = in_redis(redis, table, keys)
        held = ~np.isnan(found)
        assert (found[held] == 5.0).all()
        assert found[inserted] == 5.0, "a row in Redis is updated even outside the share"
        expected = loaded.copy()
        expected[[1, 2, 3]] = False
        expected[inserted] = True
        assert (held[: KEYS // 2] == expected[: KEYS // 2]).all()
        assert 0.4 < held[KEYS // 2 :].mean() < 0.6
        # A key that only the stream has is in the share exactly if a load would have put it into Redis.
        fresh = EmbeddingTable.make("fresh", DIM, model=fleet.model, version=1)
        redis.preload(
            fresh, RedisLoadSource([(keys, np.zeros((len(keys), DIM), np.float32))], 1, share=0.5)
        )
        share = ~np.isnan(in_redis(redis, fresh, keys))
        others = (keys >= KEYS // 2) & (keys != inserted)
        assert (held[others] == share[others]).all()
        change(6.0, 2, keys[:0])
        found = in_redis(redis, table, keys)
        assert (found[~np.isnan(found)] == 6.0).all()


@pytest.mark.parametrize(
    ("access", "options"),
    [
        ("primary", {}),
        ("primary", {"cache_missed_embeddings": True, "initial_cache_rate": 0.5}),
        ("read_only", {"cache_missed_embeddings": False, "initial_cache_rate": 0.5}),
    ],
)
def test_redis_gets_every_streamed_row_when_nodes_promote_or_only_read(fleet, access, options):
    """A node without the update could otherwise promote the older row, which would stay."""
    with ExitStack() as resources:
        opened, table = stores(fleet, resources, "native", access, **options)
        (fed,) = opened.update_targets(shared=True)
        keys = np.arange(500)
        versions = np.full(500, make_version(fleet.stream.since_ms), np.uint64)
        rows = np.full((500, DIM), 5.0, np.float32)
        none = keys[:0], versions[:0]
        fed.store.apply(table, TableChanges(keys, rows, versions, *none), [])
        assert (in_redis(opened._redis.tier, table, keys) == 5.0).all()


# -- invalid configurations ------------------------------------------------------------------------


def test_missing_settings_are_named(fleet):
    def refused(**settings) -> str:
        with pytest.raises(ConfigError) as error:
            open_ingest(configuration_from({**fleet.settings, **settings}))
        return str(error.value)

    kafka = fleet.settings["updates"]["kafka"]
    assert "tiers.redis: no Redis is configured" in refused(tiers={})
    assert "updates.kafka: no Kafka is configured" in refused(updates={})
    result = refused(updates={"kafka": {**kafka, "shared_writer": "nodes"}})
    assert result.startswith("updates.kafka.shared_writer: is nodes")
    result = refused(updates={"kafka": {**kafka, "models": ["another"]}})
    assert f"matches none of the models ({fleet.model})" in result


def test_missing_settings_end_the_command_with_2(tmp_path):
    config = tmp_path / "hps.yaml"
    config.write_text(json.dumps({"models": {"repository": str(tmp_path)}}))
    result = CliRunner().invoke(app, ["ingest", "--config", str(config)])
    assert result.exit_code == 2
    assert "no Redis is configured" in result.output
    helped = CliRunner().invoke(app, ["ingest", "--help"])
    assert "shared_writer: ingest" in helped.output
