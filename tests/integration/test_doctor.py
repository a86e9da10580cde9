"""The doctor's checks of real parts: Redis, Kafka, lookup nodes, and a server in place of Triton."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import confluent_kafka as ck
import numpy as np
import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from typer.testing import CliRunner

from benchmarks.peers.hps_server import Hps
from benchmarks.peers.process import free_ports
from hps.cli.main import app
from hps.client import Admin, Client
from hps.config import Configuration, configuration_from
from hps.config.dense_settings import TritonSettings
from hps.config.schema import Settings
from hps.config.server_settings import HttpSettings
from hps.config.store_settings import RedisSettings
from hps.config.update_settings import KafkaSettings
from hps.models.repository import Repository
from hps.tools.doctor import (
    configuration as configured,
)
from hps.tools.doctor import (
    lookups,
    ports,
    servers,
    stores,
    streams,
)
from hps.tools.doctor import (
    server_status as states,
)
from hps.tools.doctor import triton as triton_checks
from hps.tools.doctor.check import DoctorCheck
from hps.tools.doctor.models import models
from hps.types import EmbeddingTable
from hps.updates.kafka.overview import TopicView
from tests.support.kafka_brokers import fresh_broker, make_topic, shared_broker, unique
from tests.support.redis_servers import shared_server
from tests.support.waiting import until


def by_name(checks: Iterable[DoctorCheck]) -> dict[str, DoctorCheck]:
    found = {check.name: check for check in checks}
    for check in found.values():
        assert check.verdict == "OK" or check.remedy, check
    return found


def verdicts(checks: dict[str, DoctorCheck]) -> dict[str, str]:
    return {name: check.verdict for name, check in checks.items()}


def test_doctor_reports_redis_version_memory_and_clock() -> None:
    redis = shared_server()
    found = by_name(stores.redis(RedisSettings(addresses=[redis.address]), []))
    assert verdicts(found) == {"Redis": "OK", "Redis: clock": "OK"}
    assert found["Redis"].found.split()[0] in ("Redis", "Valkey")
    assert "used" in found["Redis"].found


def test_unreachable_redis_is_one_line() -> None:
    (port,) = free_ports(1)
    (found,) = stores.redis(RedisSettings(addresses=[f"127.0.0.1:{port}"]), [table("m")])
    assert (found.name, found.verdict) == ("Redis", "FAIL")
    assert "tiers.redis" in found.found


def table(model: str) -> EmbeddingTable:
    return EmbeddingTable(model, 1, "t", 4, np.dtype(np.float32), np.zeros(4, np.float32))


def test_doctor_reports_kafka_topics_and_group_lag() -> None:
    broker = shared_broker()
    model, group = unique("m"), unique("g")
    dead = unique("dead")
    settings = KafkaSettings(brokers=broker.address, dead_letters=dead)

    def look() -> dict[str, DoctorCheck]:
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
    assert (lag.verdict, lag.found) == ("WARN", "no readers; 0 members, 2 messages behind")


class Guarded:
    """A broker that lets its user do what an ACL allows, and nothing else."""

    def __init__(self, folder: Path) -> None:
        rules = {
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",  # clients of the first port: the broker, and this test
        }
        self.broker = fresh_broker(folder / "kafka", rules)
        self.address = self.broker.ask_for_passwords()
        self.broker.start()
        self._admin = AdminClient({"bootstrap.servers": self.broker.address})
        info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096)
        user = UserScramCredentialUpsertion("hps", info, b"a secret")
        (done,) = self._admin.alter_user_scram_credentials([user]).values()
        done.result(60)

    def allow(self, kind: ResourceType, name: str, operation: AclOperation) -> None:
        pattern, allow = ResourcePatternType.LITERAL, AclPermissionType.ALLOW
        rule = AclBinding(kind, name, pattern, "User:hps", "*", operation, allow)
        (done,) = self._admin.create_acls([rule]).values()
        done.result(60)

    def settings(self, dead: str) -> KafkaSettings:
        options = {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "SCRAM-SHA-256",
            "sasl.username": "hps",
            "sasl.password": "a secret",
        }
        return KafkaSettings(brokers=self.address, dead_letters=dead, options=options)


def test_missing_kafka_rights_are_named_one_by_one(tmp_path: Path) -> None:
    kafka = Guarded(tmp_path)
    try:
        model, group, dead = unique("m"), unique("g"), unique("dead")
        topic = f"hps_updates.{model}"
        for name in (topic, dead):
            make_topic(kafka.broker, name)
        settings = kafka.settings(dead)

        def look() -> dict[str, str]:
            return verdicts(by_name(streams.kafka(settings, [group], [table(model)])))

        def allowed(kind: ResourceType, name: str, operation: AclOperation, makes: str) -> None:
            """Wait until the broker knows the new rights."""
            before = look()
            assert before[makes] == "FAIL", before
            kafka.allow(kind, name, operation)
            until(lambda: look() != before)

        names = [f"topic {topic}", f"topic {dead}", f"group {group}"]
        # The model's topics are unknown, so each possible one is named.
        unseen = {f"topic hps_et.{model}.t": "FAIL"}
        assert look() == {"Kafka": "OK", **dict.fromkeys(names, "FAIL"), **unseen}
        of_topic, do = ResourceType.TOPIC, AclOperation
        kafka.allow(of_topic, topic, do.DESCRIBE)  # it may be seen, not read
        until(lambda: look() == {"Kafka": "OK", **dict.fromkeys(names, "FAIL")})
        allowed(of_topic, topic, do.READ, f"topic {topic}")
        allowed(of_topic, dead, do.WRITE, f"topic {dead}")
        allowed(ResourceType.GROUP, group, do.READ, f"group {group}")
        assert look() == {"Kafka": "OK", **dict.fromkeys(names, "OK")}
        wrong = settings.model_copy(
            update={"options": {**settings.options, "sasl.password": "another"}}
        )
        (found,) = streams.kafka(wrong, [group], [table(model)])
        assert (found.name, found.verdict) == ("Kafka", "FAIL")
        assert "uthentication" in found.found
    finally:
        kafka.broker.kill()


def test_doctor_accepts_brokers_that_report_no_rights() -> None:
    lacking = {"a": TopicView(1), "b": TopicView(1, leaderless=1)}
    found = by_name(streams._topics(dict(lacking)))
    assert verdicts(found) == {"topic a": "OK", "topic b": "FAIL"}
    assert streams._dead_letters("d", TopicView(1)).verdict == "OK"


def test_unreachable_kafka_is_one_line() -> None:
    (port,) = free_ports(1)
    (found,) = streams.kafka(KafkaSettings(brokers=f"127.0.0.1:{port}"), ["g"], [table("m")])
    assert (found.name, found.verdict) == ("Kafka", "FAIL")
    assert "updates.kafka.brokers" in found.found


def front_end(nodes: list[str], repository: Path) -> Settings:
    given = {
        "server": {"role": "frontend"},
        "lookup": {"nodes": nodes},
        "models": {"repository": str(repository)},
    }
    return configuration_from(given, environ={}).settings


def test_doctor_checks_each_lookup_node(
    small_server: Hps, small_repository: Path, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    nodes = [small_server.grpc, f"127.0.0.1:{port}"]
    found = by_name(lookups.lookup_nodes(front_end(nodes, small_repository)))
    assert verdicts(found) == {f"lookup node {nodes[0]}": "OK", f"lookup node {nodes[1]}": "FAIL"}
    assert "clicks 1" in found[f"lookup node {nodes[0]}"].found
    # A front end without the nodes' tables.
    here = tmp_path / "models"
    shutil.copytree(small_repository / "clicks", here / "clicks")
    (here / "clicks/1/dense.onnx").unlink()
    found = by_name(lookups.lookup_nodes(front_end(nodes[:1], here)))
    assert verdicts(found) == {
        f"lookup node {nodes[0]}": "OK",
        "version 1 of clicks": "FAIL",
        "version 1 of words": "WARN",
    }


def test_doctor_reports_a_name_without_lookup_nodes(
    small_repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere(host: str) -> list[str]:
        raise OSError(-2, "Name or service not known")

    monkeypatch.setattr("hps.lookup.remote.addresses.resolve_addresses", nowhere)
    found = by_name(lookups.lookup_nodes(front_end(["dns:///nowhere:8001"], small_repository)))
    assert verdicts(found) == {"lookup nodes dns:///nowhere:8001": "FAIL"}
    assert "Name or service" in found["lookup nodes dns:///nowhere:8001"].found


def test_front_end_needs_no_rows(small_repository: Path, tmp_path: Path) -> None:
    shutil.copytree(small_repository, tmp_path / "models")
    for tables in (tmp_path / "models").glob("*/1/tables"):
        shutil.rmtree(tables)
    settings = front_end([f"127.0.0.1:{free_ports(1)[0]}"], tmp_path / "models")
    configuration = Configuration(settings)
    found = {check.name: check for check, _ in models(configuration)}
    assert verdicts(found) == {"model clicks": "OK", "model words": "OK"}


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_doctor_reports_triton_version_and_networks(
    small_server: Hps, small_repository: Path, protocol: str
) -> None:
    """With one of our servers, which has no separate network; a real Triton: `conformance/test_tools.py`."""
    url = small_server.grpc if protocol == "grpc" else small_server.address
    clicks = Repository(small_repository).open("clicks")
    given = {"url": url, "protocol": protocol}
    found = by_name(triton_checks.triton(TritonSettings.model_validate(given), [clicks]))
    assert verdicts(found) == {"Triton": "OK", "Triton: clicks": "FAIL"}
    assert "clicks.dense" in found["Triton: clicks"].found
    models = {"clicks": {"name": "clicks.lookup"}}
    settings = TritonSettings.model_validate({**given, "models": models})
    found = by_name(triton_checks.triton(settings, [clicks, replace(clicks, name="other")]))
    assert verdicts(found) == {"Triton": "OK", "Triton: clicks": "FAIL", "Triton: other": "OK"}
    assert "input 'dense'" in found["Triton: clicks"].found


def test_unreachable_triton_fails_unless_there_is_a_fallback() -> None:
    (port,) = free_ports(1)
    for fallback, verdict in ((False, "FAIL"), (True, "WARN")):
        settings = TritonSettings(url=f"127.0.0.1:{port}", protocol="http", fallback=fallback)
        (found,) = triton_checks.triton(settings, [])
        assert (found.name, found.verdict) == ("Triton", verdict)
        assert "dense.triton.url" in found.remedy


def test_doctor_recognizes_a_server_by_its_admin_address(small_server: Hps, tmp_path: Path) -> None:
    with Client(f"http://{small_server.address}") as client:
        client.lookup("words", {"word": [1]})
    found = by_name(servers.server(f"http://{small_server.admin}", None, None).checks)
    assert verdicts(found) == dict.fromkeys(
        ["server", "server: clock", "server: rocksdb: disk", "server: freshness"], "OK"
    )
    urls = [f"--server=http://{at}" for at in (small_server.address, small_server.admin)]
    done = CliRunner().invoke(
        app, ["doctor", *urls, f"--server=grpc://{small_server.grpc}", "--json"]
    )
    assert done.exit_code == 0, done.stdout
    names = [check["name"] for check in json.loads(done.stdout)]
    assert f"server grpc://{small_server.grpc}" in names
    assert f"server http://{small_server.admin}: freshness" in names


def test_doctor_reports_problems_in_a_servers_status() -> None:
    status = {
        "warnings": ["something"],
        "tiers": [
            {"name": "redis", "problem": "refused"},
            {"name": "rocksdb", "circuit": "open", "writes_stopped": True, "background_errors": 2},
        ],
        "lookup_nodes": [{"address": "a:1", "state": "ejected", "problem": "failed"}],
        "updates": [{"group": "g", "problem": "Kafka is away"}, {"group": "h", "state": "paused"}],
    }

    class NoMetrics:
        def metrics(self) -> list[object]:
            return []

    # The check uses only the metrics of the server it is given.
    found = list(states.state("server", status, NoMetrics()))  # type: ignore[arg-type]
    assert [check.verdict for check in found] == [
        *["WARN", "WARN", "WARN", "WARN", "FAIL", "WARN", "FAIL", "WARN", "OK"]
    ]
    assert all(check.remedy for check in found[:-1])


@contextmanager
def answering(text: bytes) -> Iterator[str]:
    """A server that answers ``text`` to every request; b"": it hangs."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.1)
        ended = threading.Event()

        def run() -> None:
            kept = []
            while not ended.is_set():
                try:
                    connection, _ = listening.accept()
                except TimeoutError:
                    continue
                kept.append(connection)
                if text:
                    connection.recv(65536)
                    connection.sendall(text)
                    connection.close()
            for connection in kept:
                connection.close()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            ended.set()
            thread.join()


def http(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


@pytest.mark.parametrize(
    "text",
    [
        b"-ERR unknown command\r\n",
        b"\x00\x01\x02",
        http(b"<html>a proxy's page</html>"),
        http(b"[1, 2]"),
        http(b'{"name": 7}'),
    ],
    ids=["redis", "bytes", "page", "list", "number"],
)
def test_server_of_another_product_is_one_line(text: bytes) -> None:
    with answering(text) as address:
        done = CliRunner().invoke(app, ["doctor", "--server", f"http://{address}", "--json"])
    assert done.exit_code == 1, done.output
    checks = [check for check in json.loads(done.stdout) if check["name"].startswith("server")]
    assert any(check["verdict"] == "FAIL" and check["remedy"] for check in checks), checks


def test_hanging_servers_are_awaited_in_parallel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One after the other, the first would time out before the second is asked."""
    monkeypatch.setattr(servers, "_TIMEOUT_S", 1.0)
    together = threading.Barrier(3)
    answers = servers._answers

    def meeting(*given: object) -> DoctorCheck:
        together.wait(60)
        return answers(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(servers, "_answers", meeting)
    with answering(b"") as address:
        found = list(servers.servers([f"http://{address}"] * 3, None, None))
    assert [check.verdict for check in found] == ["FAIL"] * 3


def folders_of(server: Hps) -> dict[str, str]:
    with Admin(f"http://{server.admin}") as admin:
        return dict(admin.status()["server"])


def on_ports(server: Hps, database: str, **changed: int) -> dict[str, DoctorCheck]:
    """Findings on the ports of a server, for a configuration that has them too."""
    given = {"http": server.address, "grpc": server.grpc, "admin": server.admin}
    numbers = {name: int(at.rpartition(":")[2]) for name, at in given.items()} | changed
    settings = configuration_from(
        {
            "models": {"repository": folders_of(server)["repository"]},
            "tiers": {"rocksdb": {"path": database}},
            "server": {name: {"port": number} for name, number in numbers.items()},
        },
        environ={},
    ).settings
    running = ports.running_server(settings, None, None)
    return by_name(ports.ports(settings, running, None, None))


def test_ports_in_use_by_the_configured_server_are_ok(small_server: Hps) -> None:
    found = on_ports(small_server, folders_of(small_server)["database"])
    assert [c for c in found.values() if c.verdict != "OK"] == []
    assert "served by this configuration's server" in found["grpc port"].found


def test_port_in_use_by_another_hps_server_fails(small_server: Hps, tmp_path: Path) -> None:
    """`hps serve` could not bind it."""
    database = str(tmp_path / "another")
    found = on_ports(small_server, database)
    taken = {name: check for name, check in found.items() if name.endswith("port")}
    assert verdicts(taken) == dict.fromkeys(["http port", "grpc port", "admin port"], "FAIL")
    for name, check in taken.items():
        assert f"another one: its database is {folders_of(small_server)['database']}" in check.found
        assert f"this configuration's is {database}" in check.found
        assert f"server.{name.split()[0]}.port" in check.remedy
    (free,) = free_ports(1)
    found = on_ports(small_server, database, admin=free)
    assert (found["admin port"].verdict, found["http port"].verdict) == ("OK", "FAIL")
    assert "nothing answers at this configuration's admin port" in found["http port"].found


def test_doctor_reports_a_served_version_that_differs_from_a_restart(
    small_repository: Path,
) -> None:
    version = Repository(small_repository).open("words")
    (found,) = configured._as_configured([version], {"words": 2})
    assert found.verdict == "WARN"
    assert found.found == "it serves version 2, a start would serve version 1"
    assert "models.serve.words.version" in found.remedy


UNKNOWN = ports.RunningServer(None, "its admin port does not report it")


def test_doctor_reports_a_port_that_cannot_be_bound_with_a_remedy() -> None:
    (port,) = free_ports(1)
    remote = ports.port("http port", HttpSettings(host="203.0.113.7", port=port), UNKNOWN)
    assert (remote.verdict, "server.http.host" in remote.remedy) == ("FAIL", True)
    with answering(b"\x00") as address:
        taken = HttpSettings(host="127.0.0.1", port=int(address.rpartition(":")[2]))
        found = ports.port("http port", taken, UNKNOWN)
    assert (found.verdict, "stop what listens there" in found.remedy) == ("FAIL", True)


def test_port_of_an_unresponsive_server_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        taken = HttpSettings(host="127.0.0.1", port=silent.getsockname()[1])
        found = ports.port("http port", taken, UNKNOWN)
    assert (found.verdict, "ask again" in found.remedy) == ("WARN", True)


def test_doctor_reports_redis_replicas_and_failed_saves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    redis = shared_server()
    parsed = stores._facts

    def check(**fields: str) -> DoctorCheck:
        monkeypatch.setattr(stores, "_facts", lambda info: {**parsed(info), **fields})
        return next(stores.redis(RedisSettings(addresses=[redis.address]), []))

    assert check().verdict == "OK"
    assert (check(role="slave").verdict, "primary" in check(role="slave").remedy) == ("FAIL", True)
    assert check(rdb_last_bgsave_status="err").verdict == "WARN"
