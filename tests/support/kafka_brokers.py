"""A real Kafka broker for tests: one that all share, with topics of their own."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import uuid
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from benchmarks.peers.kafka_broker import KAFKA, KafkaBroker

SEES_NEW_TOPICS_SOON = {"topic.metadata.refresh.interval.ms": 300}
"""Options of a consumer; by default it looks for new topics every ten seconds."""


def need_kafka() -> None:
    """Skip the test without the broker's jars; fail where ``CI`` is set."""
    if not KAFKA.ready():
        message = "Kafka is not set up: run `make test-services`"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)


def fresh_broker(folder: Path, options: Mapping[str, str] | None = None) -> KafkaBroker:
    """A broker of the test's own, not started, with further server properties. Killed, it comes back sooner
    than one of its kind does."""
    need_kafka()
    quick = {
        "broker.session.timeout.ms": 2000,  # until then the controller takes the dead one for alive
        "broker.heartbeat.interval.ms": 500,
        "offsets.topic.num.partitions": 4,
        "transaction.state.log.num.partitions": 4,
    }
    return KafkaBroker(folder, {**quick, **(options or {})})


@cache
def _shared() -> KafkaBroker:
    folder = Path(tempfile.mkdtemp(prefix="hps-kafka-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    broker = KafkaBroker(folder)
    atexit.register(broker.kill)
    return broker.start()


def shared_broker() -> KafkaBroker:
    """A running broker that other tests use too: take names from `unique`."""
    need_kafka()
    return _shared()


def unique(stem: str) -> str:
    """A name for a model, topic or group that no other test has."""
    return f"{stem}{uuid.uuid4().hex[:8]}"


def make_topic(broker: KafkaBroker, name: str, partitions: int = 1, **options: str) -> None:
    """Returns once the topic is there."""
    config = {key.replace("_", "."): value for key, value in options.items()}
    admin = AdminClient({"bootstrap.servers": broker.address})
    topic = NewTopic(name, num_partitions=partitions, replication_factor=1, config=config)
    admin.create_topics([topic])[name].result(60)
