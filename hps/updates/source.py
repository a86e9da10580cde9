"""Update sources: the batches that they return, and the protocol that they implement.

A batch holds the changes of the polled messages by table, and the stream positions that they reach. The
ingestor passes every table's changes with the positions to the stores, then to the caches, and only then
commits (`hps.tiers.positions`)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from numpy.typing import NDArray

from hps.native.twin_codec import MESSAGE, Reason
from hps.tiers.positions import StreamPosition, TableChanges

__all__ = ["MESSAGE", "DeadLetter", "Reason", "TableUpdate", "UpdateBatch", "UpdateSource"]


@dataclass(frozen=True, eq=False, slots=True)
class TableUpdate:
    """Changes of several messages to one table, in one row format.

    ``table``: its name in the messages; ``changes`` with ``vectors (n, dim)`` float32 or float16;
    ``messages (k,)`` of dtype `MESSAGE`, in the stream's order: event time (Unix ms), TTL, training
    step and dense version, each with its number of rows.

    ``numbers (k,)``: indexes of these among the polled messages, from which the caller makes dead
    letters if the table is unknown or has another dim. ``ends``: for each of their partitions the
    offset after the last message; empty where the source has none. ``key_bits``: those of the tables
    that the rows are for; 0: of any."""

    table: str
    changes: TableChanges
    messages: NDArray[Any]
    numbers: NDArray[Any]
    ends: Sequence[StreamPosition] = ()
    key_bits: int = 0


@dataclass(frozen=True, slots=True)
class HeldRows:
    """A message whose rows wait until their network is live, with those after it in its partition.

    ``offset`` of the message, ``table`` by its name in it; ``since_s``: on the monotonic clock."""

    offset: int
    table: str
    dense_version: int
    since_s: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that cannot be applied.

    ``at``: the offending byte of ``payload``; ``timestamp_ms``: Kafka's (Unix ms), -1 without one.
    ``attempt``: 1, and one more each time that the dead letter was sent again."""

    reason: Reason
    at: int
    position: StreamPosition
    payload: bytes
    key: bytes | None = None
    timestamp_ms: int = -1
    attempt: int = 1


@dataclass(frozen=True, eq=False, slots=True)
class UpdateBatch:
    """Result of one poll.

    ``positions``: for each partition of its messages the offset after the last one, dead letters and
    ignored messages included; empty where the source cannot seek. ``traceparents``: the traces that
    messages belong to, if tracing is on."""

    updates: Sequence[TableUpdate]
    positions: Sequence[StreamPosition] = ()
    dead: Sequence[DeadLetter] = ()
    traceparents: Sequence[str] = ()

    @property
    def rows(self) -> int:
        """Number of rows and deletions."""
        return sum(len(each.changes.keys) + len(each.changes.deleted) for each in self.updates)


class UpdateSource(Protocol):
    """A source of updates, used by one thread except for ``problem``, `lag` and `held`.

    Messages of one key arrive in the order in which they were sent."""

    @property
    def problem(self) -> str | None:
        """Reason why no updates arrive, while there is one."""
        ...

    def lag(self) -> Mapping[tuple[str, int], int] | None:
        """Lag by topic and partition, in messages or files, a moment ago.

        None while the partitions are unknown."""
        ...

    def held(self) -> Mapping[tuple[str, int], HeldRows]:
        """Partitions that wait for a network (`updates.hold_for_dense`)."""
        ...

    def poll(self, timeout_s: float) -> UpdateBatch | None:
        """The messages after the last poll's, committed or not; None if ``timeout_s`` passes without any."""
        ...

    def commit(self, batch: UpdateBatch) -> None:
        """Mark ``batch`` and those before it as applied, with their dead letters kept.

        After a restart, polling continues after it. Batches that were polled and not committed are
        polled again."""
        ...

    def keep_alive(self) -> None:
        """Keep the session alive without polling.

        The ingestor calls it every few seconds while it waits for a store or is paused."""
        ...

    def restart(self) -> None:
        """Continue polling at the stores' positions: one of them lost rows."""
        ...

    def rewind(self) -> None:
        """Continue polling after the last committed batch."""
        ...

    def close(self) -> None:
        """Release files and sockets; idempotent. Commits nothing."""
        ...
