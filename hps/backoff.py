"""Exponential backoff: growing pauses between attempts, in seconds or in calls."""

from __future__ import annotations

import random
from dataclasses import dataclass

_MAX_DOUBLINGS = 63
_MAX_SKIPPED = 64


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses that grow by ``factor`` with each failure in a row, from ``first_s`` up to ``max_s``.

    ``jitter`` is the share by which a pause is randomly shorter or longer, so that clients that failed
    together do not retry together."""

    first_s: float
    max_s: float
    factor: float = 2.0
    jitter: float = 0.5

    def pause_s(self, failures: int) -> float:
        """Seconds to wait after ``failures`` (1 or more) failures in a row."""
        growth = self.factor ** min(failures - 1, _MAX_DOUBLINGS)
        spread = random.uniform(1 - self.jitter, 1 + self.jitter)
        return min(self.first_s * growth * spread, self.max_s)


class CallBackoff:
    """Skips an attempt for 1, 3, 7 ... up to 64 calls after failures in a row.

    Counts calls because a clock would cost more than the attempts that it saves. Any thread may call
    it; a race only changes the count by one.
    """

    __slots__ = ("_remaining", "_skipped")

    def __init__(self) -> None:
        self._remaining = self._skipped = 0

    def is_due(self) -> bool:
        """True if this call should make the attempt; otherwise counts it as skipped."""
        if self._remaining:
            self._remaining -= 1
            return False
        return True

    def record(self, *, worked: bool) -> None:
        self._skipped = 0 if worked else min(_MAX_SKIPPED, 2 * self._skipped + 1)
        self._remaining = self._skipped
