"""HPS's positions in the streams: offsets that its consumer groups commit after the store has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import confluent_kafka as ck

from hps.config.update_settings import NODE, KafkaSettings
from hps.errors import Unavailable
from hps.tiers.positions import TopicPartition
from hps.updates.kafka.client import ANSWER_S, client_log, kafka_error_text, reader_options


@dataclass(frozen=True, slots=True)
class ReaderGroup:
    """The consumer group of a reader.

    ``member``: the static name of a member; the members share the partitions. None: all partitions are
    read, and the group only has the committed offsets. ``hps``: HPS's group for the same store."""

    name: str
    hps: str
    member: str | None = None


def hps_group(group: str) -> str:
    """HPS's consumer group for the store that ``group`` feeds: a host's RocksDB, or the shared Redis."""
    node = group.removeprefix(NODE)
    return "hps.volatile" if node == group else f"hps.persistent.{node}"


class HpsProgress:
    """Offsets that HPS's ``group`` has committed, after its store had the rows. Used by one thread."""

    def __init__(self, settings: KafkaSettings, group: str) -> None:
        self._settings = settings
        self._group = group
        self._consumer: ck.Consumer | None = None

    def applied(self, partition: TopicPartition) -> int | None:
        """First message of the partition that the store misses; None without a commit. Raises Unavailable."""
        if self._consumer is None:
            self._consumer = _group_reader(self._settings, self._group)
        return committed_by(self._consumer, self._group, [partition]).get(partition)

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None


def committed_offsets(
    settings: KafkaSettings, group: str, partitions: Iterable[TopicPartition]
) -> Mapping[TopicPartition, int]:
    """Offsets that ``group`` has committed, of those ``partitions`` that it has.

    The group is read, not joined. Raises Unavailable."""
    consumer = _group_reader(settings, group)
    try:
        return committed_by(consumer, group, partitions)
    finally:
        consumer.close()


def _group_reader(settings: KafkaSettings, group: str) -> ck.Consumer:
    """A consumer that reads the offsets of ``group`` and does not join it."""
    return ck.Consumer({**reader_options(settings), "group.id": group}, logger=client_log)


def committed_by(
    consumer: ck.Consumer, group: str, topic_partitions: Iterable[TopicPartition]
) -> dict[TopicPartition, int]:
    """`committed_offsets`, read by a ``consumer`` of that ``group``."""
    partitions = [ck.TopicPartition(*partition) for partition in topic_partitions]
    try:
        found = consumer.committed(partitions, timeout=ANSWER_S)
    except ck.KafkaException as error:
        raise Unavailable(
            f"Kafka: failed to read the offsets of {group}: {kafka_error_text(error)}"
        ) from None
    return {(each.topic, each.partition): each.offset for each in found if each.offset >= 0}
