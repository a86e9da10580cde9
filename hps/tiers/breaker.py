"""Circuit breaker: stops calls to a tier that keeps failing, then probes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock
from typing import Literal

State = Literal["closed", "open", "half-open"]


class CircuitBreaker:
    """State machine of a tier's health: closed, open or half-open.

    Closed: calls pass; ``failures_to_open`` failures in a row open it. Open: no call passes for
    ``retry_after_s``. Half-open: one call, the probe, passes; its outcome closes or opens the circuit.

    A caller gets a permit from ``admit`` and reports the call's outcome with that permit. A permit is valid
    until the state changes, so the outcome of a call from before a change has no effect. Thread-safe."""

    def __init__(
        self,
        failures_to_open: int,
        retry_after_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._failures_to_open = failures_to_open
        self._retry_after_s = retry_after_s
        self._clock = clock
        self._lock = Lock()
        self._state: State = "closed"
        self._permit = 0
        self._failures = 0
        self._retry_at = 0.0
        self._probing = False

    @property
    def state(self) -> State:
        with self._lock:
            if self._state == "open" and self._clock() >= self._retry_at:
                return "half-open"
            return self._state

    def admit(self) -> int | None:
        """Return a permit to call the tier, or None to skip it."""
        with self._lock:
            if self._state == "closed":
                return self._permit
            if self._state == "open" and self._clock() >= self._retry_at:
                self._change("half-open")
            if self._state == "open" or self._probing:
                return None
            self._probing = True
            return self._permit

    def succeeded(self, permit: int) -> None:
        with self._lock:
            if permit == self._permit:
                self._failures = 0
                if self._state == "half-open":
                    self._change("closed")

    def failed(self, permit: int) -> None:
        with self._lock:
            if permit != self._permit:
                return
            self._failures += 1
            if self._state == "half-open" or self._failures >= self._failures_to_open:
                self._change("open")
                self._retry_at = self._clock() + self._retry_after_s

    def inconclusive(self, permit: int) -> None:
        """Report a call that shows nothing about the tier's health; another call may probe."""
        with self._lock:
            if permit == self._permit:
                self._probing = False

    def _change(self, state: State) -> None:
        self._state = state
        self._permit += 1
        self._failures = 0
        self._probing = False
