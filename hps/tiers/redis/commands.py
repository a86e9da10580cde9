"""Commands to Redis, and readers of their replies."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from redis.exceptions import ResponseError

from hps.tiers.redis.connection import Address, RedisConnection


@dataclass(slots=True, eq=False)
class RedisCommand:
    """One command: ``request`` is packed; ``reply`` is the reply or an exception.

    ``about`` belongs to the reader of the reply."""

    slot: int
    request: bytes
    about: Any = None
    reply: Any = None
    asking: Address | None = None
    """The node to which an ASK redirection sent this command; for one attempt."""


# Redis 6 reports errors inside a script as plain script errors.
_IN_SCRIPT = re.compile(r"Error running script .*: -([A-Z]+ .*)")

Receive = Callable[[RedisConnection, Sequence[RedisCommand], float], None]
"""Reads the replies to these commands; an ``asking`` one is preceded by a status line."""


def read_replies(wire: RedisConnection, commands: Sequence[RedisCommand], deadline: float) -> None:
    """Read replies of any kind as Python objects."""
    for command in commands:
        wire.set_deadline(deadline)
        if command.asking:
            wire.read_response()
        try:
            command.reply = wire.read_response()
        except ResponseError as error:
            inside = _IN_SCRIPT.search(str(error))
            command.reply = wire.parsed(inside[1]) if inside else error
