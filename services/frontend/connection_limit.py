"""Connections that a port takes. Each is an open file, of which the process has a number: without an end to
clients' there would be none left for a store's, and rows streamed in could not be written."""

from __future__ import annotations

import resource
import threading
import time
from collections import Counter

from services.frontend.logs import fields, log

_WANTED = 65_536
# Of the files that a process may have open, the part that one port's connections may be.
_PART = 8
_FEWEST = 64
_TELL_EVERY_S = 60.0


def most_connections() -> int:
    """Of one port. The process's limit of open files is raised before, as far as that may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _WANTED if hard == resource.RLIM_INFINITY else min(hard, _WANTED)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    else:
        most = _WANTED if soft == resource.RLIM_INFINITY else soft
    return max(_FEWEST, most // _PART)


class ConnectionLimit:
    """Those of one port at the moment, half of them at most one client's. Any thread may call it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open = 0
        self._of: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._told = 0.0

    def enter(self, client: str) -> bool:
        """One more of ``client``; False when there are too many."""
        with self._lock:
            if self._open < self._most and self._of[client] < max(1, self._most // 2):
                self._open += 1
                self._of[client] += 1
                return True
            tell = time.monotonic() > self._told
            if tell:
                self._told = time.monotonic() + _TELL_EVERY_S
        if tell:
            about = fields(client=client, open=self._open, of_client=self._of[client])
            log.warning(
                "connections are refused: there are too many for the limit of open files (ulimit -n) %s",
                about,
            )
        return False

    def leave(self, client: str) -> None:
        """One that entered has ended."""
        with self._lock:
            self._open -= 1
            self._of[client] -= 1
            if not self._of[client]:
                del self._of[client]
