"""Limits on open streams: in all, per client (half of them), and on their idle time."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from typing import Any

from hps.periodic import SWEEP_IDLE_ROUNDS, PeriodicThread
from services.frontend.errors import TooManyRequests

# Open streams at a time.
STREAMS = 128
# The longest time without a message from the client or an answer taken, and the period of the sweep.
_IDLE_TIMEOUT_S, _SWEEP_S = 60.0, 1.0


class OpenStream:
    """An open stream. Its thread calls ``waits`` and ``works`` in turn."""

    def __init__(self, client: str, context: Any) -> None:
        self.client = client
        self.context = context
        self.since = 0.0
        self.waits()

    def waits(self) -> None:
        """The stream waits for its client from now on."""
        self.since = time.monotonic()

    def works(self) -> None:
        """The server works on a message; the client waits."""
        self.since = math.inf


class StreamLimit:
    """Counts open streams and cancels idle ones. Thread-safe."""

    def __init__(self) -> None:
        self._open: set[OpenStream] = set()
        self._of: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._sweeper = PeriodicThread(
            self._sweep, _SWEEP_S, "grpc-silent", idle_rounds=SWEEP_IDLE_ROUNDS
        )

    def enter(self, client: str, context: Any) -> OpenStream:
        """Count a new stream, to be cancelled when it is idle too long. Raises ``TooManyRequests``."""
        stream = OpenStream(client, context)
        with self._lock:
            if len(self._open) >= STREAMS or self._of[client] >= max(1, STREAMS // 2):
                raise TooManyRequests(
                    f"too many open streams: {self._of[client]} of this client and {len(self._open)} in all; "
                    f"the limit is {STREAMS}, half of it per client; close some, or use ModelInfer",
                    "streams",
                )
            self._open.add(stream)
            self._of[client] += 1
        self._sweeper.start()
        return stream

    def leave(self, stream: OpenStream) -> None:
        """Remove a stream that has ended."""
        with self._lock:
            self._open.discard(stream)
            self._of[stream.client] -= 1
            if not self._of[stream.client]:
                del self._of[stream.client]

    def _sweep(self) -> bool:
        with self._lock:
            silent = [s for s in self._open if s.since < time.monotonic() - _IDLE_TIMEOUT_S]
        for stream in silent:
            stream.context.cancel()
        return bool(self._open)
