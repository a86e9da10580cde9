"""Limit on a port's connections.

Each connection is an open file, and their number per process is limited. Without a limit, clients could
use all of them, and stores could not open files to write streamed rows."""

from __future__ import annotations

import resource
import threading
import time
from collections import Counter

from services.frontend.logs import fields, log

_WANTED = 65_536
# Share of the process's open files for the connections of one port.
_PART = 8
_FEWEST = 64
_LOG_EVERY_S = 60.0


def most_connections() -> int:
    """Limit per port. First raises the process's limit of open files as far as allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _WANTED if hard == resource.RLIM_INFINITY else min(hard, _WANTED)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    else:
        most = _WANTED if soft == resource.RLIM_INFINITY else soft
    return max(_FEWEST, most // _PART)


class ConnectionLimit:
    """Open connections of one port; one client may have half of them. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open = 0
        self._of: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._next_log = 0.0

    def enter(self, client: str) -> bool:
        """Count a connection of ``client``; False if there are too many."""
        with self._lock:
            if self._open < self._most and self._of[client] < max(1, self._most // 2):
                self._open += 1
                self._of[client] += 1
                return True
            is_due = time.monotonic() > self._next_log
            if is_due:
                self._next_log = time.monotonic() + _LOG_EVERY_S
        if is_due:
            about = fields(client=client, open=self._open, of_client=self._of[client])
            log.warning(
                "refused connections: too many for the limit of open files (ulimit -n) %s",
                about,
            )
        return False

    def leave(self, client: str) -> None:
        """Release a counted connection."""
        with self._lock:
            self._open -= 1
            self._of[client] -= 1
            if not self._of[client]:
                del self._of[client]
