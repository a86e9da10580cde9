"""Backoff for attempts that may succeed later."""

from __future__ import annotations

_MAX_SKIPPED = 64


class Backoff:
    """Skips attempts after failures: 1, 3, 7, ... up to 64 of them.

    Any thread may call it without a lock; a race only changes the number of skipped attempts by one."""

    def __init__(self) -> None:
        self._pause = self._streak = 0

    def is_due(self) -> bool:
        if self._pause:
            self._pause -= 1
            return False
        return True

    def record(self, *, worked: bool) -> None:
        self._streak = 0 if worked else min(_MAX_SKIPPED, 2 * self._streak + 1)
        self._pause = self._streak
