"""One connection to a Redis server: redis-py's, with deadlines and raw reads.

redis-py connects, authenticates and encrypts. This module adds: a deadline that covers name resolution,
connecting, sending and reading; one TLS context for all connections (making one reads the system's
certificates, which takes 20 ms each time) with a configurable server name; and a receive buffer from which
rows are decoded. A `RedisCommand` is one command and its reply."""

from __future__ import annotations

import re
import select
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import TimeoutError as RedisTimeout
from redis.retry import Retry

from hps.config.certificates import client_context
from hps.config.secrets import Secret
from hps.config.store_settings import RedisSettings
from hps.errors import TierError, TierTimeout
from hps.tiers.redis.host_resolver import HostResolver

NAME = "redis"
Address = tuple[str, int]
_BUFFER = 256 << 10


class RedisConnection(Connection):
    """A connection without TLS. Not thread-safe."""

    def __init__(self, *, resolver: HostResolver, **kwargs: Any) -> None:
        super().__init__(protocol=2, retry=Retry(NoBackoff(), 0), **kwargs)
        self.buffer = np.empty(_BUFFER, np.uint8)
        self._resolver = resolver
        self._name = self.host
        self._connect_by = 0.0

    def open(self, deadline: float, connect_timeout_s: float) -> None:
        """Connect and authenticate, unless already done."""
        left = remaining_s(deadline)
        self.socket_timeout = left
        self._connect_by = time.monotonic() + min(left, connect_timeout_s)
        self.connect()

    def _connect(self) -> Any:
        """Connect to the first of the host's addresses that accepts."""
        failure: Exception = OSError("the name has no address")
        try:
            for address in self._resolver.look_up(self._name, self._connect_by):
                self.host = address
                self.socket_connect_timeout = remaining_s(self._connect_by)
                try:
                    return super()._connect()
                except (OSError, RedisError) as error:
                    failure = error
            self._resolver.invalidate(self._name)
            raise failure
        finally:
            self.host = self._name

    @property
    def stale(self) -> bool:
        """True if it must not be reused: the server closed it, or sent bytes that nothing requested."""
        sock: Any = self._sock
        if sock is None or self.has_bytes:
            return True
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        return bool(poll.poll(0))

    @property
    def has_bytes(self) -> bool:
        """True if received bytes wait in a buffer, where polling the socket does not show them."""
        sock: Any = self._sock
        return isinstance(sock, ssl.SSLSocket) and sock.pending() > 0

    def fileno(self) -> int:
        sock: Any = self._sock
        return int(sock.fileno())

    def set_deadline(self, deadline: float) -> None:
        """Set the deadline of the next read or write, which fails with redis-py's timeout after it."""
        sock: Any = self._sock
        if sock is None:
            raise ConnectionLost("Connection closed")
        sock.settimeout(remaining_s(deadline))

    def receive(self, at: int) -> int:
        """Receive into ``buffer`` from position ``at`` on; return the number of bytes."""
        sock: Any = self._sock
        try:
            count: int = sock.recv_into(self.buffer.data[at:])
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise RedisTimeout("Timeout reading from socket") from error
            raise ConnectionLost(f"Error while reading: {error}") from error
        if count == 0:
            raise ConnectionLost("Connection closed by server.")
        return count

    def parsed(self, message: str) -> Exception:
        """Convert an error reply to redis-py's exception."""
        error: Exception = self._parser.parse_error(message)
        return error


class RedisTlsConnection(RedisConnection, SSLConnection):
    """A connection with TLS."""

    def __init__(self, *, context: ssl.SSLContext, server_name: str | None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._context = context
        self._server_name = server_name

    def _wrap_socket_with_ssl(self, sock: Any) -> Any:
        return self._context.wrap_socket(sock, server_hostname=self._server_name or self._name)


class RedisConnectionFactory:
    """Makes connections from the settings. Raises ConfigError for unreadable certificates and secrets."""

    def __init__(self, settings: RedisSettings) -> None:
        self._username, self._sentinel_username = settings.username, settings.sentinel_username
        self._password = Secret(
            settings.password, settings.password_file, "tiers.redis.password_file"
        )
        self._sentinel_password = Secret(
            settings.sentinel_password,
            settings.sentinel_password_file,
            "tiers.redis.sentinel_password_file",
        )
        self._resolver = HostResolver()
        self._database = settings.database
        self._tls: dict[str, Any] = {}
        self._class: type[RedisConnection] = RedisConnection
        if (tls := settings.tls) is not None:
            self._class = RedisTlsConnection
            self._tls = {
                "context": client_context("tiers.redis.tls", tls.ca, tls.certificate, tls.key),
                "server_name": tls.server_name,
            }

    def to_server(self, address: Address) -> RedisConnection:
        return self._make(address, self._username, self._password, db=self._database)

    def close(self) -> None:
        """Stop resolving names. Open connections are closed by their owners."""
        self._resolver.close()

    def to_sentinel(self, address: Address) -> RedisConnection:
        return self._make(address, self._sentinel_username, self._sentinel_password)

    def _make(
        self, address: Address, username: str | None, password: Secret, **kwargs: Any
    ) -> RedisConnection:
        return self._class(
            host=address[0],
            port=address[1],
            resolver=self._resolver,
            username=username,
            password=password.now(),  # read again at each connection
            **self._tls,
            **kwargs,
        )


def remaining_s(deadline: float) -> float:
    """Return the seconds left. Raises redis-py's timeout if there are none."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise RedisTimeout("the deadline passed")
    return left


def is_retryable(error: Exception) -> bool:
    """Return whether a retry may help: False for missing rights, untrusted certificates or full memory."""
    if isinstance(error, AuthenticationError | AuthorizationError):
        return False
    return isinstance(error, ConnectionLost) and "CERTIFICATE" not in str(error).upper()


def translate_redis_error(error: Exception, address: Address) -> TierError:
    """Translate redis-py's error to a TierError with the cause and the remedy."""
    where, text = f"{address[0]}:{address[1]}", str(error)
    if isinstance(error, RedisTimeout):
        return TierTimeout(NAME, f"{where}: no answer in time ({text})")
    if isinstance(error, AuthenticationError | AuthorizationError):
        remedy = "check tiers.redis.username, and password or password_file"
        return TierError(NAME, f"{where} refuses this user ({text}); {remedy}")
    if isinstance(error, NoPermissionError):
        remedy = "give it read and write commands, EVALSHA and SCRIPT on the keys hps*"
        return TierError(NAME, f"{where}: this user may not do that ({text}); {remedy}")
    if isinstance(error, OutOfMemoryError):
        remedy = "raise maxmemory, or set tiers.redis.overflow_margin"
        return TierError(NAME, f"{where} is out of memory ({text}); {remedy}")
    if "CERTIFICATE" in text.upper():
        remedy = "renew the certificate, or set tiers.redis.tls.ca or server_name"
        return TierError(NAME, f"{where}: its certificate is not trusted ({text}); {remedy}")
    if isinstance(error, ConnectionLost):
        remedy = "check that it runs, or correct tiers.redis.addresses"
        return TierError(NAME, f"{where} cannot be reached ({text}); {remedy}")
    if isinstance(error, RedisError):
        code = getattr(error, "status_code", None)
        return TierError(NAME, f"{where}: {code} {text}" if code else f"{where}: {text}")
    raise error


@dataclass(slots=True, eq=False)
class RedisCommand:
    """One command: ``request`` is packed; ``reply`` is the reply or an exception.

    ``context`` belongs to the reader of the reply."""

    slot: int
    request: bytes
    context: Any = None
    reply: Any = None
    asking: Address | None = None
    """The node to which an ASK redirection sent this command; for one attempt."""


# Redis 6 reports errors inside a script as plain script errors.
_IN_SCRIPT = re.compile(r"Error running script .*: -([A-Z]+ .*)")

Receive = Callable[[RedisConnection, Sequence[RedisCommand], float], None]
"""Reads the replies to these commands; an ``asking`` one is preceded by a status line."""


def read_replies(
    connection: RedisConnection, commands: Sequence[RedisCommand], deadline: float
) -> None:
    """Read replies of any kind as Python objects."""
    for command in commands:
        connection.set_deadline(deadline)
        if command.asking:
            connection.read_response()
        try:
            command.reply = connection.read_response()
        except ResponseError as error:
            inside = _IN_SCRIPT.search(str(error))
            command.reply = connection.parsed(inside[1]) if inside else error
