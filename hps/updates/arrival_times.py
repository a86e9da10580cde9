"""Arrival times of stream messages, from which the age of served rows follows.

They are read from the stream's end, not from its reader: a reader that is paused, stuck at a store or
cut off from its broker does not know which messages it misses."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from typing import Protocol

from hps.tiers.positions import TopicPartition

POLL_EVERY_S = 1.0
_MAX_POLLS = 256


class PendingUpdates(Protocol):
    """Unapplied updates of one stream, by partition."""

    def poll(self) -> None:
        """Poll the stream's ends; may take seconds. Called by one thread, at least every `POLL_EVERY_S`.

        Any error may be raised; `ages_s` then counts from the last poll that succeeded."""
        ...

    def ages_s(self) -> Mapping[TopicPartition, float | None]:
        """Age in seconds of each partition's first unapplied message; 0 when everything is applied.

        None if unknown: messages were there before the first poll, or no poll has succeeded yet. Any
        thread may call it; it never waits."""
        ...


class ArrivalTimes:
    """End offsets of a stream's partitions at several instants of a monotonic clock. Thread-safe."""

    def __init__(self) -> None:
        self._polls: dict[TopicPartition, deque[tuple[float, int]]] = {}
        self._complete_s: dict[TopicPartition, float] = {}
        self._lock = threading.Lock()

    def record_ends(self, ends: Mapping[TopicPartition, int], at_s: float) -> None:
        """Record the end offset of each partition at the instant ``at_s`` or later."""
        with self._lock:
            for partition, end in ends.items():
                polls = self._polls.setdefault(partition, deque())
                if polls and polls[-1][1] > end:  # the topic was created again
                    polls.clear()
                if polls and polls[-1][1] == end:
                    polls.pop()
                elif len(polls) >= _MAX_POLLS:  # the reader has been stuck for long
                    polls = self._polls[partition] = _thinned(polls, at_s)
                polls.append((at_s, end))

    def age_s(self, partition: TopicPartition, applied: int, now_s: float) -> float | None:
        """Age of the first message at or above the offset ``applied``; None as in `PendingUpdates.ages_s`."""
        with self._lock:
            polls = self._polls.get(partition, deque())
            while polls and polls[0][1] <= applied:
                self._complete_s[partition] = polls.popleft()[0]
            complete_s = self._complete_s.get(partition)
            if complete_s is None:
                return None
            age_s = now_s - complete_s
            return age_s if polls or age_s > 3 * POLL_EVERY_S else 0.0


def _thinned(polls: deque[tuple[float, int]], now_s: float) -> deque[tuple[float, int]]:
    """Drop polls that are close together; ages then are at most an eighth too high."""
    first, *rest = polls
    kept = deque([first])
    for poll, following in pairwise(rest):
        if following[0] - kept[-1][0] >= (now_s - following[0]) / 8:
            kept.append(poll)
    kept.append(rest[-1])
    return kept
