"""Patience: how often to try what was in vain."""

from __future__ import annotations

_LONGEST_PAUSE = 64


class Backoff:
    """Leaves out what was in vain last time, for longer each time. Any thread may ask: none minds a turn more
    or less."""

    def __init__(self) -> None:
        self._pause = self._streak = 0

    def is_due(self) -> bool:
        if self._pause:
            self._pause -= 1
            return False
        return True

    def tell(self, *, worked: bool) -> None:
        self._streak = 0 if worked else min(_LONGEST_PAUSE, 2 * self._streak + 1)
        self._pause = self._streak
