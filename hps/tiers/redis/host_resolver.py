"""Name resolution with a deadline; the system's own has none, and may hang for minutes.

Lookups run on separate threads, one at a time per name. While a new lookup runs or hangs, the last
result is used, so an unreachable name server does not affect known hosts."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass

from redis.exceptions import TimeoutError as RedisTimeout

from hps.errors import Unavailable
from hps.threads import BoundedThreadPool

_FRESH_S = 10.0
_THREADS = 4
_QUEUED = 64
# The share of the remaining time to wait for a new address, if an earlier one is known.
_SHARE_FOR_NEW = 0.5


@dataclass(slots=True)
class _ResolvedHost:
    addresses: list[str]
    at: float
    is_suspect: bool = False


class HostResolver:
    """Resolves and remembers host names. Thread-safe."""

    def __init__(self) -> None:
        self._workers = BoundedThreadPool(_THREADS, _QUEUED, name="redis-names")
        self._found: dict[str, _ResolvedHost] = {}
        self._lookups: dict[str, Future[list[str]]] = {}
        self._lock = threading.Lock()

    def look_up(self, host: str, until: float) -> list[str]:
        """Return the IP addresses of ``host``, which may be an IP address itself.

        Raises redis-py's timeout if none is known by ``until`` (``time.monotonic()``), OSError if the name
        has none."""
        if _is_address(host):
            return [host]
        resolved, now = self._found.get(host), time.monotonic()
        if resolved is not None and not resolved.is_suspect and now < resolved.at + _FRESH_S:
            return resolved.addresses
        lookup = self._look_up_async(host)
        if resolved is not None and not resolved.is_suspect:
            return resolved.addresses
        left = max(0.0, until - now) * (1.0 if resolved is None else _SHARE_FOR_NEW)
        try:
            if lookup is not None:
                return lookup.result(left)
        except (TimeoutError, OSError) as error:
            if resolved is None and not isinstance(error, TimeoutError):
                raise
        if resolved is not None:
            return resolved.addresses
        raise RedisTimeout(f"the name {host!r} was not resolved in time; check the name server")

    def invalidate(self, host: str) -> None:
        """Resolve ``host`` again at its next use, because none of its addresses answered."""
        resolved = self._found.get(host)
        if resolved is not None:
            resolved.is_suspect = True

    def close(self) -> None:
        """Stop without waiting for lookups in flight. Idempotent."""
        self._workers.close(0.0)

    def _look_up_async(self, host: str) -> Future[list[str]] | None:
        """Start a lookup, or return the one in flight; None if too many are in flight."""
        with self._lock:
            lookup = self._lookups.get(host)
            if lookup is None:
                try:
                    lookup = self._workers.submit(lambda: self._resolve(host))
                except Unavailable:
                    return None
                self._lookups[host] = lookup
        return lookup

    def _resolve(self, host: str) -> list[str]:
        try:
            resolved = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            addresses = list(dict.fromkeys(str(each[4][0]) for each in resolved))
            self._found[host] = _ResolvedHost(addresses, time.monotonic())
            return addresses
        finally:
            with self._lock:
                self._lookups.pop(host, None)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
