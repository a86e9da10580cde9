"""Kafka's password changes while clients run, as in a mounted Secret."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import confluent_kafka as ck
import pytest
from confluent_kafka.admin import (
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from hps.config.update_settings import KafkaSettings
from hps.errors import Unavailable
from hps.types import EmbeddingTable
from hps.updates.kafka.client import DeadLetterTopic
from hps.updates.kafka.kept_letters import KeptLetters
from hps.updates.source import DeadLetter
from hps.updates.topics import TopicTables, native_topic
from tests.support.kafka_brokers import SEES_NEW_TOPICS_SOON, fresh_broker, make_topic, unique
from tests.support.kafka_updates import source_of
from tests.support.waiting import until

WAIT_S = 120.0


class Users:
    """A broker with password authentication; ``file`` holds our clients' password."""

    def __init__(self, folder: Path) -> None:
        self.broker = fresh_broker(folder / "kafka")
        self.address = self.broker.ask_for_passwords()
        self.broker.start()
        self.file = folder / "password"
        self._admin = AdminClient({"bootstrap.servers": self.broker.address})

    def have(self, password: str) -> None:
        """Set the broker's password."""
        info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096)
        change = UserScramCredentialUpsertion("hps", info, password.encode())
        (done,) = self._admin.alter_user_scram_credentials([change]).values()
        done.result(60)

    def settings(self, model: str) -> KafkaSettings:
        options = {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "SCRAM-SHA-256",
            "sasl.username": "hps",
            **SEES_NEW_TOPICS_SOON,
        }
        return KafkaSettings(
            brokers=self.address,
            models=[model],
            options=options,
            options_files={"sasl.password": self.file},
        )


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Users]:
    opened = Users(tmp_path_factory.mktemp("users"))
    yield opened
    opened.broker.kill()


def is_kept(letters: DeadLetterTopic, dead: Sequence[DeadLetter]) -> bool:
    assert len(dead) == 1
    try:
        letters.keep(dead)
    except Unavailable:
        return False
    return True


def test_changed_password_is_read_by_consumer_and_producer(users: Users) -> None:
    model = unique("m")
    topic = native_topic(model)
    make_topic(users.broker, topic)
    users.have("the second one")
    users.file.write_text("the first one\n")
    settings = users.settings(model)
    table = EmbeddingTable.make("items", 2, model=model)
    source = source_of(settings, TopicTables([table], settings.takes))
    letters = DeadLetterTopic(settings, KeptLetters())
    try:
        until(lambda: source.poll(0.1) is None and "uthentication" in str(source.problem), WAIT_S)
        producer = ck.Producer({"bootstrap.servers": users.broker.address})
        producer.produce(topic, b"no message of ours")
        assert producer.flush(60) == 0
        users.file.write_text("the second one\n")
        batches = []
        until(lambda: batches.append(source.poll(0.1)) or batches[-1] is not None, WAIT_S)
        assert source.problem is None
        until(lambda: is_kept(letters, batches[-1].dead), WAIT_S)
    finally:
        letters.close()
        source.close()
