"""Stream positions kept with the rows: a second, optional protocol of stores.

After a crash, a failover or an empty restart, the store reports how much of each stream it contains. The
position is stored with the rows themselves, so no update is lost, and no other process has to be asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hps.row_format import RowFormat
from hps.types import EmbeddingTable, KeyArray, VectorArray, VersionArray

TopicPartition = tuple[str, int]
"""Topic and partition."""


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """The offset of the first message of a topic's partition that is not applied yet.

    ``continues_from``: the offset at which the batch stored with this position began. The position is valid
    only in a store that contains everything before that offset."""

    topic: str
    partition: int
    offset: int
    continues_from: int = 0


@dataclass(frozen=True, slots=True)
class Applied:
    """The offset up to which a table contains a partition; see `PositionedStore.applied`.

    ``topic_id``: Kafka's ID of the topic; empty if none is stored."""

    offset: int
    topic_id: str = ""


@dataclass(frozen=True, slots=True)
class TableChanges:
    """The changes that a batch of messages makes to one table.

    ``keys (n,)`` with ``vectors (n, dim)`` and ``versions (n,)`` are inserted, ``deleted (m,)`` with
    ``deleted_versions (m,)`` are deleted; either may be empty. For a key in both, the higher version
    wins; on a tie, the deletion.

    Where stores get them, ``vectors`` are rows as the table stores them. Before that they may be rows
    ``(n, width)`` of ``row_format``, of ``row_dim`` values each."""

    keys: KeyArray
    vectors: VectorArray
    versions: VersionArray
    deleted: KeyArray
    deleted_versions: VersionArray
    row_format: RowFormat | None = None
    row_dim: int = 0

    @property
    def dim(self) -> int:
        """The values of a row."""
        return int(self.vectors.shape[1]) if self.row_format is None else self.row_dim

    def select(self, rows: Any, deleted: Any) -> TableChanges:
        """The rows and the deletions that two NumPy indexes choose."""
        return TableChanges(
            self.keys[rows],
            self.vectors[rows],
            self.versions[rows],
            self.deleted[deleted],
            self.deleted_versions[deleted],
            self.row_format,
            self.row_dim,
        )


def no_changes(table: EmbeddingTable) -> TableChanges:
    keys, versions = np.empty(0, np.int64), np.empty(0, np.uint64)
    return TableChanges(
        keys, np.empty((0, table.row_width), table.row_dtype), versions, keys, versions
    )


def split_position_name(name: str) -> tuple[TopicPartition, bool] | None:
    """Parse ``<topic>/<partition>`` or ``<topic>/<partition>/id``; None for any other name.

    Returns the topic and partition, and whether the name ends in ``/id``."""
    of_id = name.endswith("/id")
    topic, _, partition = name.removesuffix("/id").rpartition("/")
    return ((topic, int(partition)), of_id) if topic and partition.isdecimal() else None


class PositionedStore(Protocol):
    """A store that keeps its stream positions with the rows that came from the streams."""

    def apply(
        self, table: EmbeddingTable, changes: TableChanges, positions: Sequence[StreamPosition]
    ) -> None:
        """Insert and delete by the version rule, then store ``positions``, never before their rows.

        Positions never decrease. A store that may lose rows while it is open, such as a server that
        restarts empty, rejects a position whose ``continues_from`` is beyond its stored position. If
        `apply` raises, part of the batch may be applied; applying it again is harmless."""
        ...

    def versions(self, table: EmbeddingTable, keys: KeyArray, at_least: int = 0) -> VersionArray:
        """Return the stored version, of a row or a tombstone, of each of ``keys (n,)``; 0 if unknown.

        A version below ``at_least`` may be returned as 0, which saves reading it. Raises TierError if a
        version could not be read."""
        ...

    def applied(self, table: EmbeddingTable, topic: str, partition: int) -> int | None:
        """Return the offset up to which ``table`` contains the partition.

        None if unknown, for example after a restart without the rows."""
        ...

    def positions(self, table: EmbeddingTable) -> Mapping[TopicPartition, Applied]:
        """Return all positions of ``table``. Raises TierError."""
        ...

    def identify(self, table: EmbeddingTable, topic: str, partition: int, topic_id: str) -> bool:
        """Store Kafka's ``topic_id`` with the position of this partition.

        Returns True, and resets the position to 0, if another ID was stored: the topic was deleted and
        created again."""
        ...

    def restart(self, table: EmbeddingTable, topic: str, partition: int) -> None:
        """Reset the position to 0, the only way to decrease it.

        For a partition that lost messages: its old offsets no longer show which messages were applied."""
        ...
