"""Streams that are open: so many in all, half of them at most one client's, none for ever in silence."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from typing import Any

from hps.periodic import SWEEP_IDLE_ROUNDS, PeriodicThread
from services.frontend.errors import TooManyRequests

# Streams at a time.
STREAMS = 128
# How long one may neither bring a message nor take an answer; looked at so often.
_PATIENCE_S, _LOOK_S = 60.0, 1.0


class OpenStream:
    """One that is open. ``waits`` and ``works`` are called in turn by its thread."""

    def __init__(self, client: str, context: Any) -> None:
        self.client = client
        self.context = context
        self.since = 0.0
        self.waits()

    def waits(self) -> None:
        """For its client, from now on."""
        self.since = time.monotonic()

    def works(self) -> None:
        """Its client waits for it."""
        self.since = math.inf


class StreamLimit:
    """Any thread may call it."""

    def __init__(self) -> None:
        self._open: set[OpenStream] = set()
        self._of: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._looking = PeriodicThread(
            self._end_silent, _LOOK_S, "grpc-silent", idle_rounds=SWEEP_IDLE_ROUNDS
        )

    def enter(self, client: str, context: Any) -> OpenStream:
        """One more stream; ``TooManyRequests`` when there are too many. It is cancelled when its client is
        silent for too long."""
        stream = OpenStream(client, context)
        with self._lock:
            if len(self._open) >= STREAMS or self._of[client] >= max(1, STREAMS // 2):
                raise TooManyRequests(
                    f"{self._of[client]} streams of yours and {len(self._open)} in all are open already, of "
                    f"{STREAMS}, half of which a client may have; close some, or use ModelInfer",
                    "streams",
                )
            self._open.add(stream)
            self._of[client] += 1
        self._looking.start()
        return stream

    def leave(self, stream: OpenStream) -> None:
        """It has ended."""
        with self._lock:
            self._open.discard(stream)
            self._of[stream.client] -= 1
            if not self._of[stream.client]:
                del self._of[stream.client]

    def _end_silent(self) -> bool:
        with self._lock:
            silent = [s for s in self._open if s.since < time.monotonic() - _PATIENCE_S]
        for stream in silent:
            stream.context.cancel()
        return bool(self._open)
