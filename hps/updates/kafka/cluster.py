"""Topics of a Kafka cluster, and the first and end offsets of their partitions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import confluent_kafka as ck
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined] # not in __all__

from hps.config.update_settings import KafkaSettings
from hps.errors import Unavailable
from hps.tiers.positions import TopicPartition
from hps.updates.kafka.client import client_log, client_options, kafka_error_text
from hps.updates.kafka.credentials import SaslCredentials

_ANSWER_S = 2.0


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic. ``id``: Kafka's, new after the topic was deleted and created again.

    Empty where the brokers have no ids (before Kafka 2.8)."""

    id: str
    partitions: int


class KafkaCluster:
    """Queries of the cluster. Any thread may call; each call waits for at most two seconds."""

    def __init__(self, settings: KafkaSettings) -> None:
        """Raises ConfigError for an unreadable credentials file."""
        self._credentials = SaslCredentials(settings)
        self._lock = threading.Lock()
        self._admin: AdminClient | None = AdminClient(
            {**client_options(settings.brokers), **settings.client_options()}, logger=client_log
        )

    def topics(
        self, wanted: Callable[[str], bool], consumer: ck.Consumer | None = None
    ) -> dict[str, Topic]:
        """Topics with a ``wanted`` name. Raises Unavailable.

        Pass the ``consumer`` that will read them, if there is one: otherwise it queries the brokers for
        topics that it does not know, once a second."""
        admin = self._client()
        try:
            # A request for one topic by name might create it.
            all_topics = (consumer or admin).list_topics(timeout=_ANSWER_S).topics
        except ck.KafkaException as error:
            raise Unavailable(f"Kafka: {kafka_error_text(error)}") from None
        names = [name for name in all_topics if wanted(name)]
        if not names:
            return {}
        answers = admin.describe_topics(ck.TopicCollection(names), request_timeout=_ANSWER_S)
        found: dict[str, Topic] = {}
        for name, answer in answers.items():
            try:
                description = answer.result()
            except ck.KafkaException as error:
                if error.args[0].code() != ck.KafkaError.UNKNOWN_TOPIC_OR_PART:
                    raise Unavailable(f"Kafka: {name}: {kafka_error_text(error)}") from None
            else:  # a topic being deleted has no partitions
                if description.partitions:
                    found[name] = Topic(_id_of(description), len(description.partitions))
        return found

    def bounds(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, tuple[int, int]]:
        """First offset and end offset of each partition whose leader responds. Raises Unavailable."""
        wanted = list(partitions)
        lows, ends = self._offsets(wanted, "earliest"), self.ends(wanted)
        return {
            partition: (lows[partition], ends[partition])
            for partition in wanted
            if partition in lows and partition in ends
        }

    def ends(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """End offset of each partition whose leader responds. Raises Unavailable."""
        return self._offsets(partitions, "latest")

    def close(self) -> None:
        """End its threads and connections; calls in flight are answered first."""
        self._admin = None

    def _client(self) -> AdminClient:
        admin = self._admin
        if admin is None:
            raise Unavailable("Kafka: closed")
        with self._lock:
            self._credentials.renew(admin)
        return admin

    def _offsets(
        self, partitions: Iterable[TopicPartition], which: str
    ) -> dict[TopicPartition, int]:
        admin, spec = self._client(), getattr(OffsetSpec, which)()
        wanted = {ck.TopicPartition(*partition): spec for partition in partitions}
        found: dict[TopicPartition, int] = {}
        if not wanted:
            return found
        for at, answer in admin.list_offsets(wanted, request_timeout=_ANSWER_S).items():
            try:
                found[at.topic, at.partition] = answer.result().offset
            except ck.KafkaException as error:
                client_log.debug("%s/%d: %s", at.topic, at.partition, kafka_error_text(error))
        return found


def _id_of(description: Any) -> str:
    identity = description.topic_id
    bits = identity.get_most_significant_bits(), identity.get_least_significant_bits()
    return str(identity) if any(bits) else ""
