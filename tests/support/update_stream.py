"""A stream of updates whose outcome is known: what is sent, what every store must hold at the end, and
whether a row that was served was ever sent for its key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hps.tiers.positions import TableChanges
from hps.types import KeyArray, VectorArray, VersionArray, make_version
from hps.updates.codec import MessageAttributes, encode_native

DIM = 8
DEFAULT = -1.0
ABSENT = -1
_MIXERS = np.array(
    [0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F, 0x165667B1, 0xD3A2646C], np.uint64
)
_WINDOW = 3_000  # how many updates later an update may be sent
_LONGEST = 64  # rows of a message
_AGAIN = 0.15  # of the messages are sent twice


def rows_of(keys: KeyArray, sequences: NDArray[Any]) -> VectorArray:
    """(n, DIM): the key, the number of the update, and six words made of both."""
    mixed = keys.astype(np.uint64) << np.uint64(24) | sequences.astype(np.uint64)
    words = (mixed[:, None] * _MIXERS + np.uint64(0x5851F42D)) >> np.uint64(20) & np.uint64(
        0xFFFFFF
    )
    return np.column_stack([keys, sequences, words]).astype(np.float32)


@dataclass(frozen=True)
class UpdateStream:
    """``updates`` numbered from 1, each a row or a deletion of one of ``keys`` keys; the lower half of the
    keys has rows of number 0 to begin with. ``since_ms`` (Unix ms) is when all of them are made."""

    seed: int
    keys: int
    updates: int
    since_ms: int

    @cached_property
    def _draw(self) -> tuple[KeyArray, NDArray[np.bool_]]:
        random = np.random.default_rng(self.seed)
        hot = random.integers(0, max(1, self.keys // 50), self.updates)
        keys = np.where(
            random.random(self.updates) < 0.3, hot, random.integers(0, self.keys, self.updates)
        )
        gone = random.random(self.updates) < 0.2
        # Number 0 stands for the rows of the model's files.
        return np.insert(keys, 0, -1), np.insert(gone, 0, False)

    @property
    def first_rows(self) -> tuple[KeyArray, VectorArray]:
        keys = np.arange(self.keys // 2)
        return keys, rows_of(keys, np.zeros_like(keys))

    def versions(self, sequences: NDArray[Any]) -> VersionArray:
        return np.uint64(make_version(self.since_ms)) + sequences.astype(np.uint64)

    def messages(self, table: str, partitions: int) -> Iterator[tuple[int, bytes]]:
        """(partition, payload) each. Updates of one key come in any order, over all partitions, and some
        come again later."""
        random = np.random.default_rng(self.seed + 1)
        keys, gone = self._draw
        numbers = np.arange(1, self.updates + 1)
        order = numbers[np.argsort(numbers + random.random(self.updates) * _WINDOW)]
        again: list[bytes] = []
        at = 0
        while at < len(order):
            some = order[at : at + int(random.integers(1, _LONGEST))]
            at += len(some)
            up, down = some[~gone[some]], some[gone[some]]
            changes = TableChanges(
                keys[up], rows_of(keys[up], up), self.versions(up), keys[down], self.versions(down)
            )
            for message in encode_native(table, changes, MessageAttributes(self.since_ms)):
                yield int(random.integers(partitions)), message
                if random.random() < _AGAIN:
                    again.append(message)
            if again and random.random() < _AGAIN:
                yield int(random.integers(partitions)), again.pop(int(random.integers(len(again))))
        for message in again:
            yield int(random.integers(partitions)), message

    @cached_property
    def outcome(self) -> NDArray[np.int64]:
        """(keys,) the number of the update whose row each key has in the end; ABSENT where it has none."""
        last = self.last
        first = np.where(np.arange(self.keys) < self.keys // 2, 0, ABSENT)
        rows = np.where(self._draw[1][last], ABSENT, last)
        return np.where(last > 0, rows, first)

    @cached_property
    def last(self) -> NDArray[np.int64]:
        """(keys,) the number of the last update of each key, deletions included; 0 where there is none."""
        last = np.zeros(self.keys, np.int64)
        np.maximum.at(last, self._draw[0][1:], np.arange(1, self.updates + 1))
        return last

    def numbers(self, keys: KeyArray, vectors: VectorArray) -> NDArray[np.int64]:
        """(n,) which updates ``vectors (n, DIM)``, served for ``keys (n,)``, come from; ABSENT: the default.
        Raises AssertionError for a row that was never sent for its key."""
        default = (vectors == DEFAULT).all(axis=1)
        numbers = np.where(default, 0, vectors[:, 1]).astype(np.int64)
        known, gone = self._draw
        sent = (numbers >= 0) & (numbers <= self.updates)
        at = np.where(sent, numbers, 0)
        there = (keys >= 0) & (keys < self.keys)
        sent &= np.where(at > 0, (known[at] == keys) & ~gone[at], there & (keys < self.keys // 2))
        whole = (vectors == rows_of(keys, at)).all(axis=1)
        wrong = ~default & ~(sent & whole)
        if wrong.any():
            i = int(np.argmax(wrong))
            raise AssertionError(f"key {keys[i]}: {vectors[i].tolist()} was never sent for it")
        return np.where(default, ABSENT, numbers)
