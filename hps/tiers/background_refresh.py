"""Remembered: what was last learnt from somebody far away, without waiting for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import Generic, TypeVar

from hps.errors import TierError, Unavailable
from hps.threads import BoundedThreadPool

T = TypeVar("T")


class BackgroundValue(Generic[T]):
    """The last answer of ``look``, which may wait and raise TierError. Asking for it never waits; when it
    is older than ``every_s`` it is renewed in the background. Any thread may ask."""

    def __init__(self, look: Callable[[], T], every_s: float, name: str) -> None:
        self._look = look
        self._every_s = every_s
        self._workers = BoundedThreadPool(1, 1, name=name)
        self._lock = Lock()
        self._due = 0.0
        self._value: T | None = None
        self._error: str | None = None

    @property
    def value(self) -> T | None:
        """None as long as there was no answer; otherwise the last one, even when ``look`` fails now."""
        self._renew()
        return self._value

    @property
    def error(self) -> str | None:
        """Why the last attempt failed; None when it didn't, or there was none yet."""
        self._renew()
        return self._error

    def look(self) -> None:
        """Renew now, waiting for it."""
        with self._lock:
            self._due = time.monotonic() + self._every_s
        try:
            self._value, self._error = self._look(), None
        except TierError as error:
            self._error = str(error)

    def close(self) -> None:
        """Idempotent. An attempt at hand is left to end by itself after a second."""
        self._workers.close(1.0)

    def _renew(self) -> None:
        with self._lock:
            if time.monotonic() < self._due:
                return
            self._due = time.monotonic() + self._every_s
        with suppress(Unavailable):
            self._workers.submit(self.look)
