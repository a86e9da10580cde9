"""Positions of update streams, kept beside the rows: a second, optional protocol of stores.

A store that keeps them tells after a crash, a failover or an empty restart how far the streams are
contained in it, from the rows' own place, so that no update is lost and none need be asked of anybody else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hps.types import EmbeddingTable, KeyArray, VectorArray, VersionArray

Place = tuple[str, int]
"""Topic and partition."""


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """``offset`` of the first message that is not yet applied, of one partition of a topic. ``since``: what
    is noted with it began there, so it holds only in a store that has everything before."""

    topic: str
    partition: int
    offset: int
    since: int = 0


@dataclass(frozen=True, slots=True)
class Applied:
    """``offset``: up to which a table contains a partition, see `PositionedStore.applied`; ``topic_id``:
    Kafka's, empty where none is kept."""

    offset: int
    topic_id: str = ""


@dataclass(frozen=True, slots=True)
class TableChanges:
    """What a batch of messages does to one table: ``keys (n,)`` with ``vectors (n, dim)`` and ``versions
    (n,)`` to be inserted, ``deleted (m,)`` with ``deleted_versions (m,)`` to be deleted; either may be
    empty. Of a key that stands in both, the higher version decides, on equal ones the deletion."""

    keys: KeyArray
    vectors: VectorArray
    versions: VersionArray
    deleted: KeyArray
    deleted_versions: VersionArray


def split_position_name(name: str) -> tuple[Place, bool] | None:
    """The place of ``<topic>/<partition>`` or ``<topic>/<partition>/id``, and whether it is the second; None
    for any other name."""
    of_id = name.endswith("/id")
    topic, _, partition = name.removesuffix("/id").rpartition("/")
    return ((topic, int(partition)), of_id) if topic and partition.isdecimal() else None


class PositionedStore(Protocol):
    """A store that keeps how far it is in its streams beside the rows that came from there."""

    def apply(
        self, table: EmbeddingTable, changes: TableChanges, positions: Sequence[StreamPosition]
    ) -> None:
        """Insert and delete under the version rule; then, and never before a row, note ``positions``,
        which never go back. A store that may lose rows while it is open, as a server that restarts empty,
        notes none whose ``since`` lies beyond what it has. When it raises, some of it may have been done:
        applying it again is harmless."""
        ...

    def versions(self, table: EmbeddingTable, keys: KeyArray, at_least: int = 0) -> VersionArray:
        """The stored version of each of ``keys (n,)``: of its row, or of its deletion where that is
        remembered; 0 where the key is unknown. A version below ``at_least`` may be returned as 0, which
        spares reading it. Raises TierError when any could not be read."""
        ...

    def applied(self, table: EmbeddingTable, topic: str, partition: int) -> int | None:
        """The offset up to which ``table`` contains the topic's partition; None when nothing of it is
        certain, as after a restart without the rows."""
        ...

    def positions(self, table: EmbeddingTable) -> Mapping[Place, Applied]:
        """All positions of ``table``. Raises TierError."""
        ...

    def identify(self, table: EmbeddingTable, topic: str, partition: int, topic_id: str) -> bool:
        """Keep Kafka's ``topic_id`` beside the position of this partition. True when another id was kept: the
        topic was deleted and created again, so the position is set to 0."""
        ...

    def restart(self, table: EmbeddingTable, topic: str, partition: int) -> None:
        """Set the position to 0, the only way that it goes back: the partition lost messages, so offsets no
        longer say which of them were applied."""
        ...
