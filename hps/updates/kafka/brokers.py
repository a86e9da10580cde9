"""Kafka brokers for producers and tools: connect, list and create topics, read end offsets."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import confluent_kafka as ck
from confluent_kafka import admin

from hps.errors import ConfigError, Unavailable
from hps.updates.kafka.client import BrokerErrors, client_log, client_options, kafka_error_text

_POLL_S = 0.1


class Brokers:
    """The brokers at ``addresses``: `host:port`, several separated by commas.

    ``options``: librdkafka's. A call waits for at most ``answer_s``. Any thread may call."""

    def __init__(
        self,
        addresses: str,
        options: Mapping[str, str | int | float | bool] | None = None,
        answer_s: float = 5.0,
    ) -> None:
        for name in {"bootstrap.servers", "metadata.broker.list"} & set(options or ()):
            raise ConfigError(f"options: {name!r} is set by hps itself; remove it")
        self.addresses = addresses
        self.answer_s = answer_s
        self._errors = BrokerErrors()
        self.options: dict[str, Any] = {
            **client_options(addresses),
            "error_cb": self._errors,
            **(options or {}),
        }

    def connect(self, kind: Any, own: Mapping[str, Any]) -> Any:
        """A client of ``kind`` (`ck.Producer`, `ck.Consumer`) with the settings ``own``.

        The user's options override these. Raises ConfigError for wrong ones, Unavailable when no broker
        responds."""
        try:
            client = kind({**own, **self.options}, logger=client_log)
        except ck.KafkaException as error:
            raise ConfigError(f"Kafka's options: {kafka_error_text(error)}") from None
        self.topics(client)
        return client

    def topics(self, client: Any) -> dict[str, int]:
        """Every topic with its number of partitions. Raises Unavailable.

        A request for one topic by name might create it with the broker's defaults."""
        try:
            found = client.list_topics(timeout=self.answer_s).topics
        except ck.KafkaException as error:
            client.poll(0)  # calls ``error_cb`` with the cause
            raise Unavailable(
                f"no Kafka broker at {self.addresses} answers within {self.answer_s:g} s"
                f"{self.why() or f' ({kafka_error_text(error)})'}; "
                "start it, or correct the address and options"
            ) from None
        return {name: len(topic.partitions) for name, topic in found.items() if topic.partitions}

    def create(self, client: Any, topic: str, partitions: int) -> int:
        """Create a topic unless another client just did; returns its partitions. Raises Unavailable."""
        new = admin.NewTopic(topic, num_partitions=partitions, replication_factor=-1)  # type: ignore[attr-defined]
        maker = self._admin()  # referenced until it has answered
        try:
            maker.create_topics([new], request_timeout=self.answer_s)[topic].result(self.answer_s)
        except ck.KafkaException as error:
            if error.args[0].code() != ck.KafkaError.TOPIC_ALREADY_EXISTS:
                raise Unavailable(
                    f"topic {topic} does not exist and Kafka at {self.addresses} refused to create it: "
                    f"{kafka_error_text(error)}; create it with {partitions} partitions"
                ) from None
        return self._wait_for_topic(client, topic)

    def ends(self, topics: Mapping[str, int]) -> dict[str, dict[int, int]]:
        """End offsets by topic and partition. Raises Unavailable.

        ``topics``: number of partitions by name."""
        wanted = {
            ck.TopicPartition(topic, number): admin.OffsetSpec.latest()  # type: ignore[attr-defined, no-untyped-call]
            for topic, partitions in topics.items()
            for number in range(partitions)
        }
        client, deadline = self._admin(), time.monotonic() + self.answer_s
        while wanted:
            found: dict[str, dict[int, int]] = {}
            try:
                answers = client.list_offsets(wanted, request_timeout=self.answer_s)
                for partition, answer in answers.items():
                    found.setdefault(partition.topic, {})[partition.partition] = (
                        answer.result().offset
                    )
            except ck.KafkaException as error:  # such as a new partition without a leader
                if time.monotonic() > deadline:
                    raise Unavailable(
                        f"Kafka at {self.addresses} did not return the end offsets of its topics: "
                        f"{kafka_error_text(error)}; "
                        "check the broker and try again"
                    ) from None
                time.sleep(_POLL_S)
            else:
                return found
        return {}

    def _admin(self) -> admin.AdminClient:
        return admin.AdminClient({**self.options, "log_level": 4}, logger=client_log)

    def _wait_for_topic(self, client: Any, topic: str) -> int:
        """Wait until all brokers know the new topic; returns its partitions."""
        deadline = time.monotonic() + self.answer_s
        while (found := self.topics(client).get(topic)) is None:
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"topic {topic} was created, but Kafka at {self.addresses} does not show it within "
                    f"{self.answer_s:g} s; try again"
                )
            time.sleep(_POLL_S)
        return found

    def why(self) -> str:
        """librdkafka's last error about the brokers, in brackets."""
        return f" ({self._errors.text})" if self._errors.text else ""
