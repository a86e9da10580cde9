"""Stream positions in Redis: how far a table contains each partition of a topic.

They are stored with the rows, in a hash for each of the table's partitions (`hps.tiers.redis.layout`),
and written with the last rows that they cover (`RedisWriter.apply`)."""

from __future__ import annotations

from typing import Any

from hps.tiers.positions import Applied, TopicPartition, split_position_name
from hps.tiers.redis.client import RedisClient
from hps.tiers.redis.tables import RedisTables
from hps.types import EmbeddingTable


class RedisStreamPositions:
    """Stream positions of one Redis. Thread-safe; each method raises TierError.

    See `hps.tiers.positions.PositionedStore`."""

    def __init__(self, client: RedisClient, tables: RedisTables) -> None:
        self._client = client
        self._tables = tables

    def applied(self, table: EmbeddingTable, topic: str, partition: int) -> int | None:
        """Return the lowest offset of the table's partitions; None if any of them has none."""
        stored = self._each(table, "HGET", position_field(topic, partition))
        return None if None in stored else min(map(int, stored))

    def positions(self, table: EmbeddingTable) -> dict[TopicPartition, Applied]:
        """Return the lowest offset of each stream, for streams that all of the table's partitions have."""
        stored = [
            dict(zip(each[::2], each[1::2], strict=True)) for each in self._each(table, "HGETALL")
        ]
        common: dict[TopicPartition, Applied] = {}
        for field in set.intersection(*(set(each) for each in stored)):
            split = split_position_name(field.decode())
            if split is not None and not split[1]:
                lowest = min(stored, key=lambda each: int(each[field]))
                topic_id = lowest.get(field + b"/id", b"").decode()
                common[split[0]] = Applied(int(lowest[field]), topic_id)
        return common

    def identify(self, table: EmbeddingTable, topic: str, partition: int, topic_id: str) -> bool:
        """Store the topic's ID. True if one of the table's partitions has another one."""
        field, new = position_field(topic, partition) + b"/id", topic_id.encode()
        stored = set(self._each(table, "HGET", field)) - {new}
        other = bool(stored - {None})
        if stored:
            first = (position_field(topic, partition), b"0") if other else ()
            self._each(table, "HSET", field, new, *first)
        return other

    def restart(self, table: EmbeddingTable, topic: str, partition: int) -> None:
        """Set the position to 0."""
        self._each(table, "HSET", position_field(topic, partition), b"0")

    def _each(self, table: EmbeddingTable, command: str, *arguments: bytes) -> list[Any]:
        """Send ``command`` on the positions hash of each of the table's partitions; return the replies."""
        opened = self._tables.usable(table, self._client.deadline())
        keys = opened.layout.positions_keys
        return self._client.call_all((key, (command, key, *arguments)) for key in keys)


def position_field(topic: str, partition: int) -> bytes:
    return f"{topic}/{partition}".encode()
