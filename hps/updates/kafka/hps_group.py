"""Where HPS was in the streams: what its own consumer groups have committed, once its store had it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import confluent_kafka as ck

from hps.config.update_settings import KafkaSettings
from hps.errors import Unavailable
from hps.updates.kafka.client import ANSWER_S, client_log, reader_options

NODE = "hps.node."
"""How groups of nodes begin; what follows names the node, after its host unless told otherwise."""


def hps_group(group: str) -> str:
    """HPS's group in the place of ``group``: of a host's RocksDB, or of the Redis that all share."""
    node = group.removeprefix(NODE)
    return "hps.volatile" if node == group else f"hps.persistent.{node}"


def committed(
    settings: KafkaSettings, group: str, partitions: Iterable[ck.TopicPartition]
) -> Mapping[tuple[str, int], int]:
    """The first message of each partition that ``group`` has not committed, of those it knows. It is asked,
    not joined. Raises Unavailable."""
    asked = [ck.TopicPartition(each.topic, each.partition) for each in partitions]
    consumer = ck.Consumer({**reader_options(settings), "group.id": group}, logger=client_log)
    try:
        found = consumer.committed(asked, timeout=ANSWER_S)
    except ck.KafkaException as error:
        raise Unavailable(f"Kafka: what {group} has committed: {error.args[0].str()}") from None
    finally:
        consumer.close()
    return {(each.topic, each.partition): each.offset for each in found if each.offset >= 0}
