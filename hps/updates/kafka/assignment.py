"""Partitions that a Kafka consumer reads: all of its topics, or those that its group assigns to it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import confluent_kafka as ck

from hps.tiers.positions import TopicPartition
from hps.updates.kafka.cluster import Topic

log = logging.getLogger(__name__)

_LEAVE_S = 3.0


class AllPartitions:
    """All partitions, without group membership: a restarted reader waits for no rebalance.

    Called by the polling thread, which assigns ``partitions`` to the consumer; None while unknown."""

    def __init__(self) -> None:
        self.partitions: Collection[TopicPartition] | None = None

    def set_topics(self, topics: Mapping[str, Topic]) -> None:
        """Set the topics to read."""
        self.partitions = {
            (name, partition)
            for name, topic in topics.items()
            for partition in range(topic.partitions)
        }

    def leave(self) -> None:
        """Release the partitions. The consumer is closed afterwards."""


class GroupMember(AllPartitions):
    """Membership of a consumer group whose members share the partitions.

    A static member, one with a `group.instance.id`, gets its partitions back immediately when it
    restarts after a crash."""

    def __init__(self, consumer: ck.Consumer, on_revoke: Callable[[], None]) -> None:
        """``on_revoke``: called when the group revokes all partitions, before other members get them."""
        super().__init__()
        self._consumer = consumer
        self._on_revoke = on_revoke
        self._topics: list[str] = []

    def set_topics(self, topics: Mapping[str, Topic]) -> None:
        """Subscribe; the group is not joined before there is a topic."""
        names = sorted(topics)
        if names and names != self._topics:
            self._consumer.subscribe(
                names, on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost
            )
        elif not names:
            if self._topics:
                self._consumer.unsubscribe()
            self.partitions = ()
        self._topics = names

    def leave(self) -> None:
        """Leave the group, so that other members take over immediately.

        Closing the consumer is not enough: a static member stays."""
        deadline = time.monotonic() + _LEAVE_S
        self._consumer.unsubscribe()
        while self.partitions and time.monotonic() < deadline:
            self._consumer.poll(0.05)
        self._consumer.poll(0.05)  # sends the departure to the group

    def _assigned(self, consumer: Any, partitions: list[ck.TopicPartition]) -> None:
        consumer.assign([])  # until their first offsets are set
        self.partitions = {(each.topic, each.partition) for each in partitions}

    def _revoked(self, _consumer: Any, _partitions: list[ck.TopicPartition]) -> None:
        self.partitions = None if self._topics else ()
        self._on_revoke()

    def _lost(self, consumer: Any, partitions: list[ck.TopicPartition]) -> None:
        log.warning("the group gave %d partitions to other members", len(partitions))
        self._revoked(consumer, partitions)
