"""How many lookups may be sent again: where all nodes are overloaded, retries would make it worse."""

from __future__ import annotations

import threading

_SHARE = 0.2


class RetryBudget:
    """One retry for every five lookups, and a reserve for the moment when a node is lost with all that was
    under way there (https://finagle.github.io/blog/2016/02/08/retry-budgets/). Any thread may call it."""

    def __init__(self, reserve: int) -> None:
        self._most = self._left = float(reserve)
        self._lock = threading.Lock()

    @property
    def is_spent(self) -> bool:
        """Whether none may be sent again at the moment."""
        return self._left < 1.0

    def earn(self) -> None:
        """A lookup came."""
        if self._left < self._most:
            with self._lock:
                self._left = min(self._most, self._left + _SHARE)

    def spend(self) -> bool:
        """Whether one may be sent again."""
        with self._lock:
            if self._left < 1.0:
                return False
            self._left -= 1.0
            return True
