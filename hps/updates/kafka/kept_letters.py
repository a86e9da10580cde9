"""Identities of dead letters, and the set of kept ones, so that a message is kept only once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from hps.updates.source import DeadLetter, Reason

MOST = 100_000
"""Largest number of letters that are known as kept, or listed: the newest."""

K = TypeVar("K")
V = TypeVar("V")


class LetterIdentity(NamedTuple):
    """Identity of a dead letter: its message's place in Kafka, timestamp and number of sends.

    The timestamp (Unix ms) differs where a topic was created again. ``attempt`` distinguishes repetitions:
    `hps updates dlq --requeue` keeps the timestamp."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    attempt: int


class Newest(OrderedDict[K, V]):
    """The ``MOST`` entries that were set last."""

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > MOST:
            self.popitem(last=False)


class KeptLetters:
    """The newest letters that this process's readers have kept, across restarts of these.

    A reader reads a stream again when another version of a model is loaded. A message that is kept for
    one reason and then has another is kept again.

    Hold ``lock`` from `missing` to `add`: readers of one stream then do not keep a letter twice."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._kept: Newest[tuple[LetterIdentity, Reason], None] = Newest()

    def missing(self, letters: Iterable[DeadLetter]) -> list[DeadLetter]:
        """The ``letters`` that are not known as kept."""
        return [each for each in letters if (identity(each), each.reason) not in self._kept]

    def add(self, letters: Sequence[DeadLetter]) -> None:
        for each in letters:
            self._kept[identity(each), each.reason] = None


def identity(letter: DeadLetter) -> LetterIdentity:
    at = letter.position
    return LetterIdentity(at.topic, at.partition, at.offset, letter.timestamp_ms, letter.attempt)
