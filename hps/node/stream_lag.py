"""Lag of readers: whether they miss only the latest updates."""

from __future__ import annotations

from collections.abc import Collection

from hps.node.stream_readers import Feed, UpdateReader
from hps.types import EmbeddingTable

# Messages that arrived less than this ago count as applied: under load there are always some.
_NEARLY_S = 1.0


def has_caught_up(feed: Feed) -> bool:
    """True if the readers of ``feed`` miss only the latest messages."""
    for stream in feed.streams:
        lag = stream.source.lag()
        if lag is None or stream.thread.paused or stream.ingestor.is_waiting:
            return False
        held = stream.source.held()
        late = any(messages for at, messages in lag.items() if at not in held)
        if late and not arrived_lately(stream, feed.tables):
            return False
    return True


def arrived_lately(stream: UpdateReader, tables: Collection[EmbeddingTable]) -> bool:
    """True if all unapplied messages for ``tables`` are known to have arrived just now."""
    held = stream.source.held()
    ages_s = [
        age_s
        for at, age_s in stream.pending.ages_s().items()
        if at not in held and any(table in tables for table in stream.readers(at[0]))
    ]
    known = [age_s for age_s in ages_s if age_s is not None]
    return len(known) == len(ages_s) and 0 < max(known, default=0.0) < _NEARLY_S
