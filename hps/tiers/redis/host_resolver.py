"""Host names to IP addresses, with a deadline: the system's look-up has none, and may hang for minutes.

It runs on threads of its own, once at a time per name. What it found last is used again while a new look-up
is under way or hangs, so that a name server that is gone disturbs nobody who was connected before.
"""

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
# Of the time that is left, while there is an address from before.
_SHARE_FOR_NEW = 0.5


@dataclass(slots=True)
class _ResolvedHost:
    addresses: list[str]
    at: float
    doubted: bool = False


class HostResolver:
    """Any thread may call."""

    def __init__(self) -> None:
        self._workers = BoundedThreadPool(_AT_ONCE, _QUEUED, name="redis-names")
        self._found: dict[str, _ResolvedHost] = {}
        self._asked: dict[str, Future[list[str]]] = {}
        self._lock = threading.Lock()

    def look_up(self, host: str, until: float) -> list[str]:
        """The IP addresses of ``host``, which may be one itself. Raises redis-py's timeout when none is known
        by ``until`` (``time.monotonic()``), OSError when there are none."""
        if _is_address(host):
            return [host]
        found, now = self._found.get(host), time.monotonic()
        if found is not None and not found.doubted and now < found.at + _FRESH_S:
            return found.addresses
        asked = self._ask(host)
        if found is not None and not found.doubted:
            return found.addresses
        left = max(0.0, until - now) * (1.0 if found is None else _SHARE_FOR_NEW)
        try:
            if asked is not None:
                return asked.result(left)
        except (TimeoutError, OSError) as error:
            if found is None and not isinstance(error, TimeoutError):
                raise
        if found is not None:
            return found.addresses
        raise Late(f"the name {host!r} was not looked up in time; see to the name server")

    def doubt(self, host: str) -> None:
        """Nobody answered at these addresses: the name may have moved."""
        found = self._found.get(host)
        if found is not None:
            found.doubted = True

    def close(self) -> None:
        """Idempotent. Waits for no look-up."""
        self._workers.close(0.0)

    def _ask(self, host: str) -> Future[list[str]] | None:
        """The look-up that is under way; None when too many are."""
        with self._lock:
            asked = self._asked.get(host)
            if asked is None:
                try:
                    asked = self._workers.submit(lambda: self._resolve(host))
                except Unavailable:
                    return None
                self._asked[host] = asked
        return asked

    def _resolve(self, host: str) -> list[str]:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
            self._found[host] = _ResolvedHost(addresses, time.monotonic())
            return addresses
        finally:
            with self._lock:
                self._asked.pop(host, None)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
