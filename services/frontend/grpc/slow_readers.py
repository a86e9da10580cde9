"""Limit on slow readers: grpc keeps an answer until its client has taken it or is gone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hps.periodic import SWEEP_IDLE_ROUNDS, PeriodicThread

# Smaller answers are not watched: the most calls that are possible take 64 MiB.
WATCHED_BYTES = 16_384
# Seconds and bytes per second that a client is allowed to take an answer, and the period of the sweep.
_SEND_TIMEOUT_S, _MIN_BYTES_PER_S, _SWEEP_S = 75.0, 100_000, 1.0
# While unsent answers take more bytes, none may take longer than one period.
_MAX_UNSENT_BYTES = 1 << 30

Event = Callable[[Any], Any]


class SlowReaderLimit:
    """Cancels the calls of clients that take their answers too slowly. Thread-safe."""

    def __init__(self) -> None:
        self._answers: dict[Any, tuple[float, int]] = {}  # start and bytes of each answer, by call
        self._sweeper = PeriodicThread(
            self._sweep, _SWEEP_S, "grpc-unsent", idle_rounds=SWEEP_IDLE_ROUNDS
        )

    def watch(self, call: Any, size: int, sent: Event) -> Event:
        """Watch ``call``, whose answer has ``size`` bytes; cancel it if sending takes too long.

        Returns the callback for grpc to call in place of ``sent``.
        """

        def sent_or_failed(event: Any) -> Any:
            self._answers.pop(call, None)
            return sent(event)

        self._answers[call] = time.monotonic(), size
        self._sweeper.start()
        return sent_or_failed

    def _sweep(self) -> bool:
        answers, now = self._answers.copy(), time.monotonic()
        too_many = sum(size for _, size in answers.values()) > _MAX_UNSENT_BYTES
        for call, (since, size) in answers.items():
            allowed_s = _SWEEP_S if too_many else _SEND_TIMEOUT_S + size / _MIN_BYTES_PER_S
            if now - since > allowed_s and self._answers.pop(call, None) is not None:
                call.cancel()
        return bool(self._answers)
