"""State of a deployment's Kafka: brokers, topics, access rights, and progress of groups."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import confluent_kafka as ck
from confluent_kafka import admin

from hps.config.update_settings import KafkaSettings
from hps.errors import ConfigError, Unavailable
from hps.tiers.positions import TopicPartition
from hps.updates.kafka.client import BrokerErrors, client_log, client_options, kafka_error_text


@dataclass(frozen=True, slots=True)
class TopicView:
    """State of a topic. ``problem``: why it could not be read; empty if it could.

    ``rights``: the operations allowed to us (``READ``, ``WRITE``, …); None if the brokers do not report
    them."""

    partitions: int = 0
    problem: str = ""
    rights: frozenset[str] | None = None
    leaderless: int = 0


@dataclass(frozen=True, slots=True)
class GroupView:
    """State of a consumer group.

    ``members``: current number; ``committed``: the first message of each partition that is not applied
    yet, as far as the group has committed it."""

    members: int = 0
    problem: str = ""
    committed: Mapping[TopicPartition, int] = field(default_factory=dict)


# The group's state while Kafka creates the topic in which it keeps groups.
_NO_COORDINATOR = GroupView(problem="no broker coordinates the group")
_SOON = (
    ck.KafkaError.NOT_COORDINATOR,
    ck.KafkaError.COORDINATOR_NOT_AVAILABLE,
    ck.KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
)
_POLL_S = 0.1


class KafkaReport:
    """Queries the brokers of ``settings``; joins no group and changes nothing.

    Each method waits for at most ``answer_s``, and raises Unavailable."""

    def __init__(self, settings: KafkaSettings, answer_s: float = 3.0) -> None:
        """Raises ConfigError for wrong options."""
        self.addresses = settings.brokers
        self._answer_s = answer_s
        self._errors = BrokerErrors()
        options = {
            **client_options(settings.brokers),
            "error_cb": self._errors,
            **settings.client_options(),
        }
        try:
            self._admin = admin.AdminClient({**options, "log_level": 3}, logger=client_log)
        except ck.KafkaException as error:
            raise ConfigError(
                f"updates.kafka.options: {kafka_error_text(error)}; correct them"
            ) from None

    def brokers(self) -> list[str]:
        """All brokers, as `host:port`."""
        try:
            found = self._admin.list_topics(timeout=self._answer_s).brokers
        except ck.KafkaException as error:
            self._admin.poll(0)
            raise Unavailable(
                f"no broker at {self.addresses} answers within {self._answer_s:g} s: "
                f"{self._errors.text or kafka_error_text(error)}; "
                "start it, or correct updates.kafka.brokers and options"
            ) from None
        return [f"{each.host}:{each.port}" for each in found.values()]

    def topics(self, names: Sequence[str]) -> dict[str, TopicView | None]:
        """Each of ``names``; None for a topic that does not exist, or is hidden from us."""
        wanted = ck.TopicCollection(list(names))
        answers = self._admin.describe_topics(
            wanted, include_authorized_operations=True, request_timeout=self._answer_s
        )
        return {name: _result_of(future, _topic_of) for name, future in answers.items()}

    def group(self, name: str) -> GroupView:
        """State of a consumer group."""
        deadline = time.monotonic() + self._answer_s
        while (view := self._members(name)) is _NO_COORDINATOR and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if view is None or view.problem:
            return view or GroupView()
        request = [ck.ConsumerGroupTopicPartitions(name)]
        offsets = self._admin.list_consumer_group_offsets(request, request_timeout=self._answer_s)
        found = _result_of(offsets[name], _committed_of)
        return GroupView(view.members, found.problem, found.committed) if found else view

    def _members(self, group: str) -> GroupView | None:
        described = self._admin.describe_consumer_groups([group], request_timeout=self._answer_s)
        view: GroupView | None = _result_of(
            described[group], lambda answer: GroupView(len(answer.members))
        )
        return view

    def ends(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """End offset of each partition."""
        return {at: found.offset for at, found in self._offsets(partitions, "latest").items()}

    def begins(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Offset of the first message of each partition that Kafka still keeps."""
        return {at: found.offset for at, found in self._offsets(partitions, "earliest").items()}

    def newest(self, partitions: Iterable[TopicPartition]) -> float | None:
        """Latest timestamp of any message, in Unix seconds; None without messages."""
        found = self._offsets(partitions, "max_timestamp").values()
        stamps = [each.timestamp for each in found if each.timestamp > 0]
        return max(stamps) / 1e3 if stamps else None

    def _offsets(
        self, partitions: Iterable[TopicPartition], which: str
    ) -> dict[TopicPartition, Any]:
        spec = getattr(admin.OffsetSpec, which)()  # type: ignore[attr-defined]
        wanted = {ck.TopicPartition(*partition): spec for partition in partitions}
        if not wanted:
            return {}
        try:
            answers = self._admin.list_offsets(wanted, request_timeout=self._answer_s)
            return {(at.topic, at.partition): answer.result() for at, answer in answers.items()}
        except ck.KafkaException as error:
            raise Unavailable(
                f"Kafka did not return the end offsets of its topics: {kafka_error_text(error)}"
            ) from None


def _topic_of(answer: Any) -> TopicView:
    rights = answer.authorized_operations
    leaderless = sum(each.leader is None for each in answer.partitions)
    names = None if rights is None else frozenset(each.name for each in rights)
    return TopicView(len(answer.partitions), "", names, leaderless)


def _committed_of(answer: Any) -> GroupView:
    partitions = {(at.topic, at.partition): at.offset for at in answer.topic_partitions}
    return GroupView(
        committed={partition: offset for partition, offset in partitions.items() if offset >= 0}
    )


def _result_of(future: Any, read: Callable[[Any], Any]) -> Any:
    """The brokers' answer; a view with a problem, or None for a topic or group that does not exist."""
    try:
        return read(future.result())
    except ck.KafkaException as error:
        code = error.args[0].code()
        if code in (
            ck.KafkaError.UNKNOWN_TOPIC_OR_PART,
            ck.KafkaError.GROUP_ID_NOT_FOUND,
        ):
            return None
        if code in _SOON:
            return _NO_COORDINATOR
        view = TopicView if read is _topic_of else GroupView
        return view(problem=kafka_error_text(error))
