"""Retry budget: bounds retries, which would worsen an overload of all nodes."""

from __future__ import annotations

import threading

_SHARE = 0.2


class RetryBudget:
    """One retry for every five lookups, plus a reserve for the loss of a node. Thread-safe.

    The reserve covers the lookups in flight at that node; see
    https://finagle.github.io/blog/2016/02/08/retry-budgets/."""

    def __init__(self, reserve: int) -> None:
        self._most = self._left = float(reserve)
        self._lock = threading.Lock()

    @property
    def is_spent(self) -> bool:
        """True if no retry is allowed now."""
        return self._left < 1.0

    def earn(self) -> None:
        """Count a lookup: it adds a fifth of a retry."""
        if self._left < self._most:
            with self._lock:
                self._left = min(self._most, self._left + _SHARE)

    def spend(self) -> bool:
        """Take one retry; False if none is left."""
        with self._lock:
            if self._left < 1.0:
                return False
            self._left -= 1.0
            return True
