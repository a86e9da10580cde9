"""Where HPS was in the streams: what its own consumer groups have committed, once its store had it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import confluent_kafka as ck

from hps.config.update_settings import NODE, KafkaSettings
from hps.errors import Unavailable
from hps.tiers.positions import Place
from hps.updates.kafka.client import ANSWER_S, client_log, reader_options


def hps_group(group: str) -> str:
    """HPS's group in the place of ``group``: of a host's RocksDB, or of the Redis that all share."""
    node = group.removeprefix(NODE)
    return "hps.volatile" if node == group else f"hps.persistent.{node}"


class HpsProgress:
    """Up to where HPS has brought the streams into its store, which its ``group`` commits after the rows.
    Used by one thread."""

    def __init__(self, settings: KafkaSettings, group: str) -> None:
        self._settings = settings
        self._group = group
        self._consumer: ck.Consumer | None = None

    def applied(self, place: Place) -> int | None:
        """The first message of the partition that is not in the store; None if the group committed none
        there. Raises Unavailable."""
        if self._consumer is None:
            self._consumer = _asking(self._settings, self._group)
        return committed_by(self._consumer, self._group, [place]).get(place)

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None


def committed_offsets(
    settings: KafkaSettings, group: str, places: Iterable[Place]
) -> Mapping[Place, int]:
    """The first message of each of ``places`` that ``group`` has not committed, of those it knows. It is
    asked, not joined. Raises Unavailable."""
    consumer = _asking(settings, group)
    try:
        return committed_by(consumer, group, places)
    finally:
        consumer.close()


def _asking(settings: KafkaSettings, group: str) -> ck.Consumer:
    """A consumer that knows the offsets of ``group`` and does not join it."""
    return ck.Consumer({**reader_options(settings), "group.id": group}, logger=client_log)


def committed_by(consumer: ck.Consumer, group: str, places: Iterable[Place]) -> dict[Place, int]:
    """`committed_offsets`, asked by a ``consumer`` of that ``group``."""
    asked = [ck.TopicPartition(*place) for place in places]
    try:
        found = consumer.committed(asked, timeout=ANSWER_S)
    except ck.KafkaException as error:
        raise Unavailable(f"Kafka: what {group} has committed: {error.args[0].str()}") from None
    return {(each.topic, each.partition): each.offset for each in found if each.offset >= 0}
