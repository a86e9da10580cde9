"""One connection to a Redis server: redis-py's, with a deadline for every step and a way to the raw bytes.

redis-py does the connecting, the authentication and the encryption. What it lacks, and is added here: a
deadline that covers connecting, sending and reading alike; one TLS context for all connections (making
one reads the system's certificates, 20 ms each time) and a server name of our own choice; and receiving
into a buffer that rows are decoded from.
"""

from __future__ import annotations

import select
import ssl
import time
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
)
from redis.exceptions import ConnectionError as Lost
from redis.exceptions import TimeoutError as Late
from redis.retry import Retry

from hps.config.schema import RedisSettings, RedisTlsSettings
from hps.errors import ConfigError, TierError, TierTimeout

NAME = "redis"
Address = tuple[str, int]
_BUFFER = 256 << 10


class Wire(Connection):
    """A plain connection. For one thread at a time."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(protocol=2, retry=Retry(NoBackoff(), 0), **kwargs)
        self.buffer = np.empty(_BUFFER, np.uint8)

    def open(self, deadline: float, connect_timeout_s: float) -> None:
        """Connect and authenticate, unless that is done already."""
        left = _left(deadline)
        self.socket_timeout = left
        self.socket_connect_timeout = min(left, connect_timeout_s)
        self.connect()

    @property
    def stale(self) -> bool:
        """Whether the server closed it, or bytes wait that nobody asked for: not to be used again."""
        sock: Any = self._sock
        if sock is None or (isinstance(sock, ssl.SSLSocket) and sock.pending()):
            return True
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        return bool(poll.poll(0))

    def until(self, deadline: float) -> None:
        """The next step fails with redis-py's timeout when it takes longer."""
        sock: Any = self._sock
        if sock is None:
            raise Lost("Connection closed")
        sock.settimeout(_left(deadline))

    def receive(self, at: int) -> int:
        """Read into ``buffer`` from ``at`` on; returns the number of bytes."""
        sock: Any = self._sock
        try:
            count: int = sock.recv_into(self.buffer.data[at:])
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise Late("Timeout reading from socket") from error
            raise Lost(f"Error while reading: {error}") from error
        if count == 0:
            raise Lost("Connection closed by server.")
        return count

    def parsed(self, message: str) -> Exception:
        """An error reply as redis-py's exception."""
        error: Exception = self._parser.parse_error(message)
        return error


class TlsWire(Wire, SSLConnection):
    """The same with TLS."""

    def __init__(self, *, context: ssl.SSLContext, server_name: str | None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._context = context
        self._server_name = server_name

    def _wrap_socket_with_ssl(self, sock: Any) -> Any:
        return self._context.wrap_socket(sock, server_hostname=self._server_name or self.host)


class Wires:
    """Makes connections as the settings say. Raises ConfigError for certificates that cannot be read."""

    def __init__(self, settings: RedisSettings) -> None:
        self._user = {"username": settings.username, "password": settings.password}
        self._sentinel = {
            "username": settings.sentinel_username,
            "password": settings.sentinel_password,
        }
        self._database = settings.database
        self._tls: dict[str, Any] = {}
        self._class: type[Wire] = Wire
        if settings.tls is not None:
            self._class = TlsWire
            self._tls = {
                "context": _context(settings.tls),
                "server_name": settings.tls.server_name,
            }

    def to_server(self, address: Address) -> Wire:
        return self._make(address, self._user, db=self._database)

    def to_sentinel(self, address: Address) -> Wire:
        return self._make(address, self._sentinel)

    def _make(self, address: Address, user: dict[str, str | None], **kwargs: Any) -> Wire:
        host, port = address
        return self._class(host=host, port=port, **user, **self._tls, **kwargs)


def _context(tls: RedisTlsSettings) -> ssl.SSLContext:
    try:
        folder = tls.ca is not None and tls.ca.is_dir()
        context = ssl.create_default_context(
            cafile=tls.ca if not folder else None, capath=tls.ca if folder else None
        )
        if tls.certificate is not None:
            context.load_cert_chain(tls.certificate, tls.key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"tiers.redis.tls: the certificates cannot be read ({error}); check ca, certificate and key"
        ) from None
    return context


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise Late("the deadline passed")
    return left


def is_retryable(error: Exception) -> bool:
    """Whether another attempt may succeed: no lack of rights, of trust or of memory."""
    if isinstance(error, AuthenticationError | AuthorizationError):
        return False
    return isinstance(error, Lost) and "CERTIFICATE" not in str(error).upper()


def translate(error: Exception, address: Address) -> TierError:
    """redis-py's error -> a TierError that names the cause and the mend."""
    where, text = f"{address[0]}:{address[1]}", str(error)
    if isinstance(error, Late):
        return TierTimeout(NAME, f"{where}: no answer in time ({text})")
    if isinstance(error, AuthenticationError | AuthorizationError):
        mend = "check tiers.redis.username and password"
        return TierError(NAME, f"{where} refuses this user ({text}); {mend}")
    if isinstance(error, NoPermissionError):
        mend = "give it read and write commands, EVALSHA and SCRIPT on the keys hps*"
        return TierError(NAME, f"{where}: this user may not do that ({text}); {mend}")
    if isinstance(error, OutOfMemoryError):
        mend = "raise maxmemory, or set tiers.redis.overflow_margin"
        return TierError(NAME, f"{where} is out of memory ({text}); {mend}")
    if "CERTIFICATE" in text.upper():
        mend = "renew the certificate, or set tiers.redis.tls.ca or server_name"
        return TierError(NAME, f"{where}: its certificate is not trusted ({text}); {mend}")
    if isinstance(error, Lost):
        mend = "see that it runs, or correct tiers.redis.addresses"
        return TierError(NAME, f"{where} cannot be reached ({text}); {mend}")
    if isinstance(error, RedisError):
        code = getattr(error, "status_code", None)
        return TierError(NAME, f"{where}: {code} {text}" if code else f"{where}: {text}")
    raise error
