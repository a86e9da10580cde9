"""Where new rows come from: what a poll brings, and the protocol every update source keeps.

A batch holds what the polled messages do to each table, and how far its streams have come with it. Who
applies it hands every table's changes with the batch's positions to the stores, then to the caches, and only
then commits (`hps.tiers.positions`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from hps.native.twin_codec import MESSAGE, Reason
from hps.tiers.positions import StreamPosition, TableChanges

__all__ = ["MESSAGE", "DeadLetter", "Reason", "TableUpdate", "UpdateBatch", "UpdateSource"]


@dataclass(frozen=True, eq=False, slots=True)
class TableUpdate:
    """What messages do to one table, in one row format: ``table`` as the messages name it; ``changes``
    with ``vectors (n, dim)`` float32 or float16; ``messages (k,)`` of dtype `MESSAGE`, in the stream's order:
    event time (Unix ms), TTL, training step and dense version, each with its number of rows.

    ``numbers (k,)``: which of the polled messages they are, so that the caller can dead-letter them when
    it knows no such table, or one of another dim. ``ends``: of each partition that they came from, the offset
    behind the last of them; empty where the source has none.
    """

    table: str
    changes: TableChanges
    messages: NDArray[Any]
    numbers: NDArray[Any]
    ends: Sequence[StreamPosition] = ()


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that could not be taken: why, the byte of ``payload`` that tells, where it stood, and its
    Kafka timestamp (Unix ms), -1 where it has none. ``attempt``: 1, or one more each time that it was sent
    again as a dead letter."""

    reason: Reason
    at: int
    position: StreamPosition
    payload: bytes
    key: bytes | None = None
    timestamp_ms: int = -1
    attempt: int = 1


@dataclass(frozen=True, eq=False, slots=True)
class UpdateBatch:
    """What one poll brought. ``positions``: of each partition that messages came from, the offset behind the
    last of them, dead letters and ignored ones included; empty where the source has none to come back to.
    ``traceparents``: the traces that messages belong to, where spans are kept."""

    updates: Sequence[TableUpdate]
    positions: Sequence[StreamPosition] = ()
    dead: Sequence[DeadLetter] = ()
    traceparents: Sequence[str] = ()

    @property
    def rows(self) -> int:
        """Rows and deletions."""
        return sum(len(each.changes.keys) + len(each.changes.deleted) for each in self.updates)


class UpdateSource(Protocol):
    """Called by one thread, but for ``problem`` and `lag`. Messages of one key come in the order they were
    sent in."""

    @property
    def problem(self) -> str | None:
        """Why nothing comes, while something is wrong."""
        ...

    def lag(self) -> Mapping[tuple[str, int], int] | None:
        """Lag by topic and partition, in messages or files, a moment ago; None while it is unknown what is
        read here."""
        ...

    def poll(self, timeout_s: float) -> UpdateBatch | None:
        """The next messages; None when none came within ``timeout_s``. Each call goes on behind the
        last, committed or not."""
        ...

    def commit(self, batch: UpdateBatch) -> None:
        """Everything up to and including ``batch`` is in the stores and its dead letters are kept: after
        a restart polling goes on behind it. What was polled and not committed comes again."""
        ...

    def keep_alive(self) -> None:
        """To be called every few seconds while nothing is polled, as whoever applies the updates waits for a
        store or is paused; nothing is taken."""
        ...

    def begin_again(self) -> None:
        """Polling goes on where the stores say that it must: one of them lost what it had."""
        ...

    def rewind(self) -> None:
        """Polling goes on behind the last committed batch: what was polled since comes again."""
        ...

    def close(self) -> None:
        """Release files and sockets; idempotent. Commits nothing."""
        ...
