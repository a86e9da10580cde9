"""Host names to IP addresses, with a deadline: the system's lookup has none, and may hang for minutes.

It runs on separate threads, one lookup at a time per name. Its last result is used while a new lookup
is in flight or hangs, so that an unreachable name server does not affect known hosts."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass

from redis.exceptions import TimeoutError as Late

from hps.errors import Unavailable
from hps.threads import BoundedThreadPool

_FRESH_S = 10.0
_AT_ONCE = 4
_QUEUED = 64
# Share of the remaining time, if an earlier address is known.
_SHARE_FOR_NEW = 0.5


@dataclass(slots=True)
class _ResolvedHost:
    addresses: list[str]
    at: float
    doubted: bool = False


class HostResolver:
    """Resolves and remembers host names. Thread-safe."""

    def __init__(self) -> None:
        self._workers = BoundedThreadPool(_AT_ONCE, _QUEUED, name="redis-names")
        self._found: dict[str, _ResolvedHost] = {}
        self._lookups: dict[str, Future[list[str]]] = {}
        self._lock = threading.Lock()

    def look_up(self, host: str, until: float) -> list[str]:
        """Return the IP addresses of ``host``, which may itself be one.

        Raises redis-py's timeout if none is known by ``until`` (``time.monotonic()``), OSError if there
        are none."""
        if _is_address(host):
            return [host]
        resolved, now = self._found.get(host), time.monotonic()
        if resolved is not None and not resolved.doubted and now < resolved.at + _FRESH_S:
            return resolved.addresses
        lookup = self._look_up_async(host)
        if resolved is not None and not resolved.doubted:
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
        raise Late(f"the name {host!r} was not resolved in time; check the name server")

    def doubt(self, host: str) -> None:
        """Resolve again at the next use: these addresses did not answer, the name may have moved."""
        resolved = self._found.get(host)
        if resolved is not None:
            resolved.doubted = True

    def close(self) -> None:
        """Stop; does not wait for a lookup. Idempotent."""
        self._workers.close(0.0)

    def _look_up_async(self, host: str) -> Future[list[str]] | None:
        """Return the lookup in flight; None if too many are."""
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
