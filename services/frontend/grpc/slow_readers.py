"""Limit on slow readers: the server keeps an answer until its client has taken it or is gone."""

from __future__ import annotations

import time
from typing import Protocol

from hps.periodic import SWEEP_IDLE_ROUNDS, PeriodicThread

# Seconds and bytes per second that a client is allowed to take an answer, and the period of the sweep.
_SEND_TIMEOUT_S, _MIN_BYTES_PER_S, _SWEEP_S = 75.0, 100_000, 1.0
# While unsent answers take more bytes, none may take longer than one period.
_MAX_UNSENT_BYTES = 1 << 30


class UnsentCall(Protocol):
    """A call whose answer is being sent."""

    def cancel(self) -> None:
        """End the call, from any thread."""


class SlowReaderLimit:
    """Cancels the calls of clients that take their answers too slowly. Thread-safe."""

    def __init__(self) -> None:
        # Start and bytes of each answer, by call.
        self._answers: dict[UnsentCall, tuple[float, int]] = {}
        self._sweeper = PeriodicThread(
            self._sweep, _SWEEP_S, "grpc-unsent", idle_rounds=SWEEP_IDLE_ROUNDS
        )

    def watch(self, call: UnsentCall, size: int) -> None:
        """Watch ``call``, whose answer has ``size`` bytes; cancel it if it is not `taken` in time."""
        self._answers[call] = time.monotonic(), size
        self._sweeper.start()

    def taken(self, call: UnsentCall) -> None:
        """The answer of ``call``, if it is watched, was sent or is not needed any more."""
        self._answers.pop(call, None)

    def _sweep(self) -> bool:
        answers, now = self._answers.copy(), time.monotonic()
        too_many = sum(size for _, size in answers.values()) > _MAX_UNSENT_BYTES
        for call, (since, size) in answers.items():
            allowed_s = _SWEEP_S if too_many else _SEND_TIMEOUT_S + size / _MIN_BYTES_PER_S
            if now - since > allowed_s and self._answers.pop(call, None) is not None:
                call.cancel()
        return bool(self._answers)
