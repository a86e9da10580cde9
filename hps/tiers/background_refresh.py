"""A value that is refreshed in the background, so that readers never wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

from hps.errors import TierError
from hps.periodic import PeriodicThread

T = TypeVar("T")


class BackgroundValue(Generic[T]):
    """The last result of ``read``, a function that may block and may raise TierError.

    Reading never blocks: a value older than ``every_s`` is returned as it is, and refreshed on a thread.
    Thread-safe."""

    def __init__(self, read: Callable[[], T], every_s: float, name: str) -> None:
        self._read = read
        self._every_s = every_s
        self._thread = PeriodicThread(self._refresh_once, every_s, name, idle_rounds=1)
        self._lock = Lock()
        self._due = 0.0
        self._value: T | None = None
        self._error: str | None = None

    @property
    def value(self) -> T | None:
        """The last result, even if later attempts failed; None before the first one."""
        self._refresh_if_due()
        return self._value

    @property
    def error(self) -> str | None:
        """The error of the last attempt; None if it succeeded or there was none yet."""
        self._refresh_if_due()
        return self._error

    def refresh(self) -> None:
        """Refresh now and wait for the result."""
        with self._lock:
            self._due = time.monotonic() + self._every_s
        try:
            self._value, self._error = self._read(), None
        except TierError as error:
            self._error = str(error)

    def close(self) -> None:
        """Stop refreshing; waits at most a second for a running attempt. Idempotent."""
        self._thread.close(1.0)

    def _refresh_if_due(self) -> None:
        with self._lock:
            if time.monotonic() < self._due:
                return
            self._due = time.monotonic() + self._every_s
        self._thread.start(0)

    def _refresh_once(self) -> bool:
        self.refresh()
        return False  # ends the thread
