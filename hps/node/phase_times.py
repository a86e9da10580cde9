"""Seconds that the phases of a load took, for its log line."""

from __future__ import annotations

import time


class PhaseTimes:
    """Phases of one load, one after another. For one thread."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()
        self._seconds: dict[str, float] = {}

    def end(self, phase: str) -> None:
        """End ``phase``, which began when the one before it ended."""
        now = time.monotonic()
        self._seconds[phase] = now - self._last
        self._last = now

    def __str__(self) -> str:
        """The whole time, and that of each phase that took .1 s or more."""
        parts = [f"{name} {s:.1f}" for name, s in self._seconds.items() if s >= 0.05]
        total = f"{self._last - self._began:.1f} s"
        return f"{total} ({', '.join(parts)})" if parts else total
