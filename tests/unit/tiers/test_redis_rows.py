"""Decoding of replies into parts: interrupted attempts, rows larger than the buffer, excess bytes."""

import struct

import numpy as np
import pytest
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import MovedError

from hps.tiers.base import Part
from hps.tiers.redis.connection import RedisCommand, RedisConnection
from hps.tiers.redis.host_resolver import HostResolver
from hps.tiers.redis.layout import TableLayout
from hps.tiers.redis.rows import CommandKeys, PartRead, receive_rows
from hps.types import EmbeddingTable, Source


class ScriptedConnection(RedisConnection):
    """A connection that receives prepared bytes, a piece at a time."""

    def __init__(self, data, piece=10**9, buffer_bytes=64):
        super().__init__(resolver=HostResolver())
        self.data, self.piece = data, piece
        self.buffer = np.empty(buffer_bytes, np.uint8)

    def set_deadline(self, _deadline):
        if not self.data:
            raise ConnectionLost("Connection closed by server.")

    def receive(self, at):
        some = self.data[: min(self.piece, len(self.buffer) - at)]
        self.buffer[at : at + len(some)] = np.frombuffer(some, np.uint8)
        self.data = self.data[len(some) :]
        return len(some)


def make_commands(dim, *positions, n=4):
    """A part of ``n`` keys and one command per tuple of positions."""
    table = EmbeddingTable.make("user", dim)
    part = Part.make(table, np.arange(n))
    part.out[:] = -1
    read = PartRead(part, TableLayout(table, "native", 1), 0, 0)
    commands = [RedisCommand(0, b"", CommandKeys(read, np.array(at, np.int64))) for at in positions]
    return read, commands


def reply(*rows):
    """``None`` or ``(version, row)`` each."""
    parts = [b"*%d\r\n" % len(rows)]
    for row in rows:
        if row is None:
            parts.append(b"$-1\r\n")
        else:
            value = struct.pack("<QB", row[0], 0) + np.asarray(row[1], np.float32).tobytes()
            parts.append(b"$%d\r\n%s\r\n" % (len(value), value))
    return b"".join(parts)


@pytest.mark.parametrize("piece", [1, 7, 64, 10**9])
@pytest.mark.parametrize("dim", [2, 300])
def test_rows_of_any_size_are_read_in_pieces_of_any_size(piece, dim):
    read, commands = make_commands(dim, (3, 0), (2,))
    row = np.arange(dim)
    wire = ScriptedConnection(reply((5, row), None) + reply((6, row + 1)), piece)
    receive_rows(wire, commands, 0.0)
    read.finish()
    assert read.part.missing.tolist() == [0]
    assert read.part.out[3].tolist() == row.tolist()
    assert read.part.out[2].tolist() == (row + 1).tolist()
    assert (read.part.out[0] == -1).all()
    assert read.part.versions.tolist() == [0, 0, 6, 5]
    assert [command.reply for command in commands] == [True, True]


def test_hits_of_interrupted_attempt_are_ignored():
    """The row was deleted before the retry."""
    read, commands = make_commands(2, (0, 1))
    with pytest.raises(ConnectionLost):
        receive_rows(ScriptedConnection(reply((5, [1, 2]), (5, [3, 4]))[:-10]), commands, 0.0)
    assert read.part.source[0] == Source.REDIS
    receive_rows(ScriptedConnection(reply(None, (6, [5, 6]))), commands, 0.0)
    read.finish()
    assert read.part.source.tolist()[:2] == [0, Source.REDIS]
    assert read.part.missing.tolist() == [0]
    assert read.part.out[1].tolist() == [5, 6]


def test_error_becomes_reply_of_its_command():
    read, commands = make_commands(2, (0,), (1,))
    wire = ScriptedConnection(b"-MOVED 7 10.0.0.1:7001\r\n" + reply((5, [1, 2])))
    receive_rows(wire, commands, 0.0)
    assert isinstance(commands[0].reply, MovedError)
    assert (commands[0].reply.host, commands[0].reply.port) == ("10.0.0.1", 7001)
    assert commands[1].reply is True
    commands[0].asking = ("10.0.0.1", 7001)
    receive_rows(ScriptedConnection(b"+OK\r\n" + reply((4, [3, 4]))), commands[:1], 0.0)
    read.finish()
    assert read.part.out[:2].tolist() == [[3, 4], [1, 2]]
    assert not len(read.part.missing)


@pytest.mark.parametrize("extra", [b"+OK\r\n", b"x"])
def test_excess_reply_bytes_close_connection(extra):
    _, commands = make_commands(2, (0,))
    with pytest.raises(ConnectionLost, match="more bytes than expected"):
        receive_rows(ScriptedConnection(reply((5, [1, 2])) + extra), commands, 0.0)


def test_unexpected_reply_type_closes_connection():
    _, commands = make_commands(2, (0, 1))
    with pytest.raises(ConnectionLost, match="does not match the request"):
        receive_rows(ScriptedConnection(reply((5, [1, 2]))), commands, 0.0)


def test_misses_of_interrupted_attempt_count_once():
    """The first of two tables was read to its end before the connection broke; then its row was written."""
    one, (first,) = make_commands(2, (0, 1))
    two, (second,) = make_commands(2, (0,))
    with pytest.raises(ConnectionLost):
        receive_rows(ScriptedConnection(reply(None, None)), [first, second], 0.0)
    receive_rows(
        ScriptedConnection(reply((5, [1, 2]), None) + reply((5, [3, 4]))), [first, second], 0.0
    )
    one.finish()
    assert one.part.missing.tolist() == [1]
    two.finish()
    assert two.part.missing.tolist() == []
