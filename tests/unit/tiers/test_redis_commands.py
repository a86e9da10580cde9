"""Replies to commands."""

import pytest
from redis.exceptions import OutOfMemoryError, ReadOnlyError, ResponseError

from hps.tiers.redis.connection import RedisCommand, RedisConnection, read_replies
from hps.tiers.redis.host_resolver import HostResolver


class Refusing(RedisConnection):
    def __init__(self, message):
        super().__init__(resolver=HostResolver())
        self.message = message

    def set_deadline(self, _deadline):
        pass

    def read_response(self):
        raise self._parser.parse_error(self.message)


RAN = "ERR Error running script (call to f_c2ea): @user_script:87: @user_script: 87: "


@pytest.mark.parametrize(
    ("message", "kind", "text"),
    [
        (RAN + "-OOM command not allowed when used memory > 'maxmemory'.", OutOfMemoryError, "command"),
        (RAN + "-READONLY You can't write against a read only replica.", ReadOnlyError, "You"),
        (RAN + "-MISCONF Errors writing to the AOF file", ResponseError, "MISCONF"),
        ("OOM command not allowed, on @user_script:87.", OutOfMemoryError, "command"),
        (RAN + "bad argument #1 to 'unpack'", ResponseError, "Error running script"),
    ],
)  # fmt: skip
def test_errors_of_commands_in_scripts_are_distinguished(message, kind, text):
    """The messages are those of Redis 6 and Redis 7."""
    command = RedisCommand(0, b"")
    read_replies(Refusing(message), [command], 0.0)
    assert type(command.reply) is kind
    assert str(command.reply).startswith(text)
