"""The doctor's checks of real parts: Redis, Kafka, lookup nodes, and a server in Triton's place."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path

import confluent_kafka as ck
import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.peers.hps_server import Hps
from benchmarks.peers.process import free_ports
from hps.cli.diagnosis import parts, servers, stores, streams
from hps.cli.diagnosis.check import Check
from hps.cli.main import app
from hps.client import Client
from hps.config.dense_settings import TritonSettings
from hps.config.lookup_settings import LookupSettings
from hps.config.store_settings import RedisSettings
from hps.config.update_settings import KafkaSettings
from hps.types import EmbeddingTable
from hps.updates.kafka.overview import TopicView
from tests.support.kafka_brokers import make_topic, shared_broker, unique
from tests.support.redis_servers import shared_server


def by_name(checks: Iterable[Check]) -> dict[str, Check]:
    found = {check.name: check for check in checks}
    for check in found.values():
        assert check.verdict == "OK" or check.mend, check
    return found


def verdicts(checks: dict[str, Check]) -> dict[str, str]:
    return {name: check.verdict for name, check in checks.items()}


def test_redis_is_told_with_its_version_memory_and_clock() -> None:
    redis = shared_server()
    found = by_name(stores.redis(RedisSettings(addresses=[redis.address]), []))
    assert verdicts(found) == {"Redis": "OK", "Redis: clock": "OK"}
    assert found["Redis"].found.split()[0] in ("Redis", "Valkey")
    assert "used" in found["Redis"].found


def test_a_redis_that_is_not_there_is_one_line() -> None:
    (port,) = free_ports(1)
    (found,) = stores.redis(RedisSettings(addresses=[f"127.0.0.1:{port}"]), [table("m")])
    assert (found.name, found.verdict) == ("Redis", "FAIL")
    assert "tiers.redis" in found.mend


def table(model: str) -> EmbeddingTable:
    return EmbeddingTable(model, 1, "t", 4, np.dtype(np.float32), np.zeros(4, np.float32))


def test_kafka_with_its_topics_and_how_far_groups_are() -> None:
    broker = shared_broker()
    model, group = unique("m"), unique("g")
    dead = unique("dead")
    settings = KafkaSettings(brokers=broker.address, dead_letters=dead)

    def look() -> dict[str, Check]:
        return by_name(streams.kafka(settings, [group], [table(model)]))

    found = look()
    assert verdicts(found) == {
        "Kafka": "OK",
        "topics": "WARN",
        f"topic {dead}": "OK",
        f"group {group}": "OK",
    }
    topic = f"hps_updates.{model}"
    assert topic in found["topics"].found
    make_topic(broker, topic, 2)
    producer = ck.Producer({"bootstrap.servers": broker.address})
    ahead_ms = round((time.time() + 300) * 1000)
    for partition in (0, 0, 1):
        producer.produce(topic, b"x", partition=partition, timestamp=ahead_ms)
    producer.flush(30)
    found = look()
    assert found[f"topic {topic}"].found == "2 partitions"
    assert (found[f"group {group}"].verdict, found[f"group {group}"].found) == (
        "WARN",
        "has not read anything yet",
    )
    assert found["clock of Kafka's messages"].verdict == "FAIL"
    consumer = ck.Consumer({"bootstrap.servers": broker.address, "group.id": group})
    try:
        place = ck.TopicPartition(topic, 0, 1)
        consumer.commit(offsets=[place], asynchronous=False)
    finally:
        consumer.close()
    lag = look()[f"group {group}"]
    assert (lag.verdict, lag.found) == ("WARN", "nobody reads; 0 members, 2 messages behind")


def test_rights_that_are_missing_are_named() -> None:
    """A broker that refuses some needs users; what it would say is made up here."""
    lacking = {"a": TopicView(1, rights=frozenset({"DESCRIBE"})), "b": TopicView(problem="denied")}
    found = by_name(streams._topics(dict(lacking)))
    assert verdicts(found) == {"topic a": "FAIL", "topic b": "FAIL"}
    assert "READ" in found["topic a"].mend
    dead = streams._dead_letters("d", TopicView(1, rights=frozenset({"READ"})))
    assert (dead.verdict, "WRITE" in dead.mend) == ("FAIL", True)
    assert streams._dead_letters("d", TopicView(1)).verdict == "OK", "brokers need not tell"


def test_a_kafka_that_is_not_there_is_one_line() -> None:
    (port,) = free_ports(1)
    (found,) = streams.kafka(KafkaSettings(brokers=f"127.0.0.1:{port}"), ["g"], [table("m")])
    assert (found.name, found.verdict) == ("Kafka", "FAIL")
    assert "updates.kafka.brokers" in found.mend


def test_each_lookup_node_is_asked(small_server: Hps) -> None:
    (port,) = free_ports(1)
    nodes = [small_server.grpc, f"127.0.0.1:{port}"]
    found = by_name(parts.lookup_nodes(LookupSettings(nodes=nodes)))
    assert verdicts(found) == {f"lookup node {nodes[0]}": "OK", f"lookup node {nodes[1]}": "FAIL"}
    assert "clicks 1" in found[f"lookup node {nodes[0]}"].found


def test_a_name_that_stands_for_no_lookup_node_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(host: str) -> list[str]:
        raise OSError(-2, "Name or service not known")

    monkeypatch.setattr("hps.lookup.remote.addresses.addresses_of", nowhere)
    found = by_name(parts.lookup_nodes(LookupSettings(nodes=["dns:///nowhere:8001"])))
    assert verdicts(found) == {"lookup nodes dns:///nowhere:8001": "FAIL"}
    assert "Name or service" in found["lookup nodes dns:///nowhere:8001"].found


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_triton_is_told_with_its_version_and_networks(small_server: Hps, protocol: str) -> None:
    url = small_server.grpc if protocol == "grpc" else small_server.address
    found = by_name(parts.triton(TritonSettings(url=url, protocol=protocol), ["clicks"]))  # type: ignore[arg-type]
    assert verdicts(found) == {"Triton": "OK", "Triton: clicks": "FAIL"}
    assert "clicks.dense" in found["Triton: clicks"].found
    given = {"url": url, "protocol": protocol, "models": {"clicks": {"name": "clicks.lookup"}}}
    found = by_name(parts.triton(TritonSettings.model_validate(given), ["clicks", "other"]))
    assert set(verdicts(found).values()) == {"OK"}


def test_a_triton_that_is_away_fails_unless_networks_run_here_meanwhile() -> None:
    (port,) = free_ports(1)
    for fallback, verdict in ((False, "FAIL"), (True, "WARN")):
        settings = TritonSettings(url=f"127.0.0.1:{port}", protocol="http", fallback=fallback)
        (found,) = parts.triton(settings, ["m"])
        assert (found.name, found.verdict) == ("Triton", verdict)
        assert "dense.triton.url" in found.mend


def test_a_server_is_told_by_its_admin_address(small_server: Hps, tmp_path: Path) -> None:
    with Client(f"http://{small_server.address}") as client:
        client.lookup("words", {"word": [1]})
    found = by_name(servers.server(f"http://{small_server.admin}", None, None))
    assert verdicts(found) == {"server": "OK", "server: clock": "OK", "server: freshness": "OK"}
    urls = [f"--server=http://{at}" for at in (small_server.address, small_server.admin)]
    done = CliRunner().invoke(
        app, ["doctor", *urls, f"--server=grpc://{small_server.grpc}", "--json"]
    )
    assert done.exit_code == 0, done.stdout
    names = [check["name"] for check in json.loads(done.stdout)]
    assert f"server grpc://{small_server.grpc}" in names
    assert f"server http://{small_server.admin}: freshness" in names


def test_what_a_server_says_of_its_parts_is_passed_on() -> None:
    status = {
        "warnings": ["something"],
        "tiers": [
            {"name": "redis", "problem": "refused"},
            {"name": "rocksdb", "circuit": "open", "writes_stopped": True, "background_errors": 2},
        ],
        "lookup_nodes": [{"address": "a:1", "state": "ejected", "problem": "failed"}],
        "updates": [{"group": "g", "problem": "Kafka is away"}, {"group": "h", "state": "paused"}],
    }

    class Told:
        def metrics(self) -> list[object]:
            return []

    found = list(servers._state("server", status, Told()))  # type: ignore[arg-type]
    assert [check.verdict for check in found] == [
        *["WARN", "WARN", "WARN", "WARN", "FAIL", "WARN", "FAIL", "WARN", "OK"]
    ]
    assert all(check.mend for check in found[:-1])
