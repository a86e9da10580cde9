"""Decodes rows from Redis's replies straight into a part's arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from numpy.typing import NDArray
from redis.exceptions import ConnectionError as ConnectionLost

from hps.native import ProtocolError, RowReplies
from hps.tiers.base import Part
from hps.tiers.redis.connection import RedisCommand, RedisConnection
from hps.tiers.redis.layout import TableLayout
from hps.types import IndexArray, Source

_GROWTH = 2


@dataclass(slots=True, eq=False)
class PartRead:
    """One part, and the state of its read.

    Rows below version ``oldest_row`` and tombstones below ``oldest_tombstone`` count as missing."""

    part: Part
    layout: TableLayout
    oldest_row: int
    oldest_tombstone: int
    left: NDArray[np.bool_] = field(init=False)
    """Mask (n,) of the part's keys that were requested and not found."""
    wrong_length: int = 0
    """Length of a value that does not fit the table; 0 if all values fit."""

    def __post_init__(self) -> None:
        self.left = np.zeros(len(self.part.keys), bool)

    def replies(self, commands: Sequence[RedisCommand]) -> RowReplies:
        counts: list[int] = []
        positions = []
        for command in commands:
            keys = command.context
            if keys.attempted:  # discard the results of an interrupted attempt
                self.part.source[keys.at] = 0
                self.left[keys.at] = False
            keys.attempted = True
            counts += [-1, len(keys.at)] if command.asking else [len(keys.at)]
            positions.append(keys.at)
        part = self.part
        return RowReplies(
            np.array(counts, np.int64),
            positions[0] if len(positions) == 1 else np.concatenate(positions),
            (part.out, part.versions, part.source),
            int(Source.REDIS),
            self.layout.values.versioned,
            (self.oldest_row, self.oldest_tombstone),
        )

    def finish(self) -> None:
        """Set ``missing`` to the keys that were not found."""
        self.part.missing = np.flatnonzero(self.left)


@dataclass(slots=True, eq=False)
class CommandKeys:
    """The keys of one command: their positions (n,) in the part."""

    read: PartRead
    at: IndexArray
    attempted: bool = False

    def mark_missing(self) -> None:
        """Mark the keys as missing, because no server answered; discards results of interrupted attempts."""
        self.read.part.source[self.at] = 0
        self.read.part.versions[self.at] = 0
        self.read.left[self.at] = True


def receive_rows(
    connection: RedisConnection, commands: Sequence[RedisCommand], deadline: float
) -> None:
    """Read the replies to HMGETs, whose ``context`` is `CommandKeys`, straight into their parts."""
    begin = end = 0
    for read, group in groupby(commands, lambda command: command.context.read):
        requests = list(group)
        replies = read.replies(requests)
        while True:
            try:
                begin = replies.feed(connection.buffer, begin, end)
            except ProtocolError as error:
                raise ConnectionLost(f"Protocol error: {error}") from None
            if replies.done:
                break
            begin, end = _make_space(connection, begin, end)
            connection.set_deadline(deadline)
            end += connection.receive(end)
        _store_replies(connection, read, requests, replies)
    if begin != end:
        raise ConnectionLost("Protocol error: more bytes than expected")


def _make_space(connection: RedisConnection, begin: int, end: int) -> tuple[int, int]:
    """Make space in the buffer behind the undecoded bytes."""
    if begin:
        connection.buffer[: end - begin] = connection.buffer[begin:end].copy()
        begin, end = 0, end - begin
    if end == len(connection.buffer):
        connection.buffer = np.resize(connection.buffer, _GROWTH * end)
    return begin, end


def _store_replies(
    connection: RedisConnection,
    read: PartRead,
    requests: Sequence[RedisCommand],
    replies: RowReplies,
) -> None:
    owners = [
        c for command in requests for c in ([command, command] if command.asking else [command])
    ]
    for command in requests:
        command.reply = True
    for reply, message in replies.errors:
        owners[reply].reply = connection.parsed(message)
    read.left[replies.left] = True
    read.wrong_length = read.wrong_length or replies.wrong_length
