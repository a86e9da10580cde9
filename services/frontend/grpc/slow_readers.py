"""Answers that are on their way for too long: grpc keeps them until their clients take them, or are gone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hps.periodic import SWEEP_IDLE_ROUNDS, PeriodicThread

# Smaller answers are not looked at: as many as there can be calls take 64 MiB.
NOTED = 16_384
# How long an answer may take, and how many more bytes a second it may have; looked at so often.
_PATIENCE_S, _SLOWEST, _LOOK_S = 75.0, 100_000, 1.0
# Beyond so many bytes, none may take longer than a look.
_MOST = 1 << 30

Event = Callable[[Any], Any]


class SlowReaderLimit:
    """Any thread may call it."""

    def __init__(self) -> None:
        self._answers: dict[Any, tuple[float, int]] = {}  # when each began, and its bytes, by call
        self._looking = PeriodicThread(
            self._end_late, _LOOK_S, "grpc-unsent", idle_rounds=SWEEP_IDLE_ROUNDS
        )

    def noted(self, call: Any, size: int, sent: Event) -> Event:
        """``sent``, to be called when grpc has sent the ``size`` bytes that answer ``call``; it is cancelled
        when that takes too long."""

        def no_more(event: Any) -> Any:
            self._answers.pop(call, None)
            return sent(event)

        self._answers[call] = time.monotonic(), size
        self._looking.start()
        return no_more

    def _end_late(self) -> bool:
        answers, now = self._answers.copy(), time.monotonic()
        too_many = sum(size for _, size in answers.values()) > _MOST
        for call, (since, size) in answers.items():
            allowed_s = _LOOK_S if too_many else _PATIENCE_S + size / _SLOWEST
            if now - since > allowed_s and self._answers.pop(call, None) is not None:
                call.cancel()
        return bool(self._answers)
