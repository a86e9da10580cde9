"""The topics of a Kafka cluster: which there are, and where their partitions begin and end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import confluent_kafka as ck
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined] # not in __all__

from hps.config.update_settings import KafkaSettings
from hps.errors import Unavailable
from hps.tiers.positions import Place
from hps.updates.kafka.brokers import kafka_error_text
from hps.updates.kafka.client import client_log, client_options
from hps.updates.kafka.credentials import SaslCredentials

_ANSWER_S = 2.0


@dataclass(frozen=True, slots=True)
class Topic:
    """``id``: Kafka's, another one after the topic was deleted and created again; empty where the brokers
    have none (before Kafka 2.8)."""

    id: str
    partitions: int


class KafkaCluster:
    """Any thread may ask; each call waits for two seconds at most."""

    def __init__(self, settings: KafkaSettings) -> None:
        """Raises ConfigError for a file of credentials that cannot be read."""
        self._credentials = SaslCredentials(settings)
        self._lock = threading.Lock()
        self._admin: AdminClient | None = AdminClient(
            {**client_options(settings.brokers), **settings.client_options()}, logger=client_log
        )

    def topics(
        self, wanted: Callable[[str], bool], consumer: ck.Consumer | None = None
    ) -> dict[str, Topic]:
        """Topics with a ``wanted`` name, asked for by the ``consumer`` that is to read them, if given: by
        itself it looks for topics that it does not know once a second. Raises Unavailable."""
        admin = self._client()
        try:
            # To ask for one by name might create it.
            there = (consumer or admin).list_topics(timeout=_ANSWER_S).topics
        except ck.KafkaException as error:
            raise Unavailable(f"Kafka: {kafka_error_text(error)}") from None
        names = [name for name in there if wanted(name)]
        if not names:
            return {}
        asked = admin.describe_topics(ck.TopicCollection(names), request_timeout=_ANSWER_S)
        found: dict[str, Topic] = {}
        for name, answer in asked.items():
            try:
                told = answer.result()
            except ck.KafkaException as error:
                if error.args[0].code() != ck.KafkaError.UNKNOWN_TOPIC_OR_PART:
                    raise Unavailable(f"Kafka: {name}: {kafka_error_text(error)}") from None
            else:  # one that is being deleted has no partitions
                if told.partitions:
                    found[name] = Topic(_id_of(told), len(told.partitions))
        return found

    def bounds(self, places: Iterable[Place]) -> dict[Place, tuple[int, int]]:
        """The first offset of each partition and the one behind its last message; without partitions whose
        leader does not answer. Raises Unavailable."""
        wanted = list(places)
        lows, ends = self._offsets(wanted, "earliest"), self.ends(wanted)
        return {
            place: (lows[place], ends[place]) for place in wanted if place in lows and place in ends
        }

    def ends(self, places: Iterable[Place]) -> dict[Place, int]:
        """The offset behind each partition's last message; without those whose leader does not answer. Raises
        Unavailable."""
        return self._offsets(places, "latest")

    def close(self) -> None:
        """End its threads and connections; what is asked at the moment is answered first."""
        self._admin = None

    def _client(self) -> AdminClient:
        admin = self._admin
        if admin is None:
            raise Unavailable("Kafka: closed")
        with self._lock:
            self._credentials.renew(admin)
        return admin

    def _offsets(self, places: Iterable[Place], which: str) -> dict[Place, int]:
        admin, spec = self._client(), getattr(OffsetSpec, which)()
        asked = {ck.TopicPartition(*place): spec for place in places}
        found: dict[Place, int] = {}
        if not asked:
            return found
        for at, answer in admin.list_offsets(asked, request_timeout=_ANSWER_S).items():
            try:
                found[at.topic, at.partition] = answer.result().offset
            except ck.KafkaException as error:
                client_log.debug("%s/%d: %s", at.topic, at.partition, kafka_error_text(error))
        return found


def _id_of(told: Any) -> str:
    identity = told.topic_id
    bits = identity.get_most_significant_bits(), identity.get_least_significant_bits()
    return str(identity) if any(bits) else ""
