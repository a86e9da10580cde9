"""Stream positions in RocksDB: how far a table contains each partition of a topic.

They are in the column family ``default`` under ``position:<column family>:<topic>/<partition>`` and are
written after their rows, through the same log: after a crash a position never covers rows that are missing.
The same name with the suffix ``/id`` holds Kafka's ID of the topic. A new bulk load, which removes streamed
rows, removes both."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rocksdict import WriteBatch

from hps.tiers.base import newest_of_each
from hps.tiers.positions import (
    Applied,
    StreamPosition,
    TableChanges,
    TopicPartition,
    split_position_name,
)
from hps.tiers.rocksdb.database import RocksDbDatabase
from hps.tiers.rocksdb.layout import family_name
from hps.tiers.rocksdb.load import position_prefix
from hps.tiers.rocksdb.rows import VersionedRows
from hps.types import EmbeddingTable, IndexArray


class RocksDbStreamPositions:
    """Stream positions of one database. One writing thread at a time; reads are thread-safe."""

    def __init__(self, database: RocksDbDatabase, rows: VersionedRows) -> None:
        self._database = database
        self._rows = rows

    def apply(
        self, table: EmbeddingTable, changes: TableChanges, positions: Sequence[StreamPosition]
    ) -> None:
        """See `hps.tiers.positions.PositionedStore`."""
        database = self._database
        with database.lock, database.errors():
            database.writable()
            self._rows.write(
                table, changes.keys, changes.vectors, changes.versions, resident_only=False
            )
            if database.layout == "native":
                self._rows.write(
                    table, changes.deleted, None, changes.deleted_versions, resident_only=False
                )
            else:
                self._rows.remove(table, changes.deleted[_decisive_deletions(changes)])
            ahead = [p for p in positions if p.offset > (self._get(table, p) or 0)]
            if ahead:
                database.mark_streamed(database.family(table))
                database.throttle.write(lambda batch: self._put(table, ahead, batch))

    def applied(self, table: EmbeddingTable, topic: str, partition: int) -> int | None:
        with self._database.errors():
            return self._get(table, StreamPosition(topic, partition, 0))

    def positions(self, table: EmbeddingTable) -> dict[TopicPartition, Applied]:
        """See `hps.tiers.positions.PositionedStore`."""
        prefix = position_prefix(family_name(table, self._database.layout))
        offsets: dict[TopicPartition, int] = {}
        ids: dict[TopicPartition, str] = {}
        with self._database.errors():
            at = self._database.db.iter()
            at.seek(prefix)
            while at.valid() and (name := at.key()).startswith(prefix):
                if (split := split_position_name(name[len(prefix) :].decode())) is not None:
                    stream, of_id = split
                    if of_id:
                        ids[stream] = at.value().decode()
                    else:
                        offsets[stream] = int(at.value())
                at.next()
            at.status()
        return {stream: Applied(at, ids.get(stream, "")) for stream, at in offsets.items()}

    def identify(self, table: EmbeddingTable, topic: str, partition: int, topic_id: str) -> bool:
        """See `hps.tiers.positions.PositionedStore`."""
        database, position = self._database, StreamPosition(topic, partition, 0)
        name = self._name(table, position) + b"/id"
        with database.lock, database.errors():
            stored = database.db.get(name)
            if stored == topic_id.encode():
                return False
            database.writable()

            def put(batch: WriteBatch) -> None:
                batch.put(name, topic_id.encode())
                if stored is not None:
                    self._put(table, [position], batch)

            database.throttle.write(put)
            return stored is not None

    def restart(self, table: EmbeddingTable, topic: str, partition: int) -> None:
        """See `hps.tiers.positions.PositionedStore`."""
        with self._database.lock, self._database.errors():
            self._database.writable()
            first = [StreamPosition(topic, partition, 0)]
            self._database.throttle.write(lambda batch: self._put(table, first, batch))

    def _name(self, table: EmbeddingTable, position: StreamPosition) -> bytes:
        family = family_name(table, self._database.layout)
        return position_prefix(family) + f"{position.topic}/{position.partition}".encode()

    def _get(self, table: EmbeddingTable, position: StreamPosition) -> int | None:
        stored = self._database.db.get(self._name(table, position))
        return None if stored is None else int(stored)

    def _put(
        self, table: EmbeddingTable, positions: Sequence[StreamPosition], batch: WriteBatch
    ) -> None:
        # If a partition occurs several times, the last put wins.
        for position in sorted(positions, key=lambda p: p.offset):
            batch.put(self._name(table, position), str(position.offset).encode())


def _decisive_deletions(changes: TableChanges) -> IndexArray:
    """Return the positions of the deletions that take effect: no insertion has a higher version.

    For a store without versions, which cannot decide that itself."""
    keys = np.concatenate([changes.keys, changes.deleted])
    at = newest_of_each(keys, np.concatenate([changes.versions, changes.deleted_versions]))
    if at is None:
        return np.arange(len(changes.deleted))
    return at[at >= len(changes.keys)] - len(changes.keys)
