"""Limits of a gRPC port and of the frames that a connection's client may send."""

from __future__ import annotations

import time
from dataclasses import dataclass

CALLS_PER_CONNECTION = 1024
"""Calls of one connection in flight; further ones are refused unprocessed (REFUSED_STREAM), which clients
report as UNAVAILABLE. A cancelled call counts until its work has ended."""
MAX_HEADER_LIST_BYTES = 16_384
"""Bound of a call's metadata, as HTTP/2 counts it: 32 bytes more per field."""
# Beyond these bounds of a header block, and of what it decodes to, the connection ends: it could not be
# decoded further. In between, the call alone fails.
MAX_BLOCK_BYTES = 6 * MAX_HEADER_LIST_BYTES
MAX_BLOCK_FRAMES = 16
LARGE_BLOCK_BYTES_PER_FRAME, LARGE_LIST_FRAMES = 16, 1000
"""A block that exceeds the bound of metadata counts as a useless frame per so many bytes, and one that
decodes to more as so many frames: decoding takes up to 10 ms."""
SETTINGS_BYTES_PER_FRAME, BLOCKED_STREAMS_PER_FRAME = 64, 16
"""SETTINGS count as a further useless frame per so many bytes, and per so many streams whose answers wait for
a window: each is examined."""
# Frames without use (pings, settings, empty data, resets, unknown ones) that a connection may send at once,
# per second, and per DATA frame or status of its answers: clients ping once per round trip while they receive
# (BDP estimation), and reset calls whose deadlines pass, in an overload all of them.
_BURST, _PER_S, _PER_ANSWER = 10_000, 5_000, 4


@dataclass(frozen=True, slots=True)
class PortSettings:
    """Limits of a port's messages and connections. Times are in seconds; ``age_s`` None: no maximum age."""

    max_message_bytes: int
    max_calls_per_connection: int = CALLS_PER_CONNECTION
    idle_s: float = 300.0
    age_s: float | None = None
    grace_s: float = 0.0
    handshake_s: float = 20.0


class FrameBudget:
    """Counts the frames of a connection that serve no call. Not thread-safe."""

    __slots__ = ("_answers", "_left", "_since")

    def __init__(self) -> None:
        self._left, self._answers, self._since = _BURST, 0, time.monotonic()

    def spend(self, answers: int, cost: int = 1) -> bool:
        """Count one frame, or several; False if the client sends too many of them.

        ``answers``: the DATA frames and statuses that the connection has sent so far."""
        if self._left < cost:
            now = time.monotonic()
            earned = int((now - self._since) * _PER_S) + (answers - self._answers) * _PER_ANSWER
            self._left, self._answers, self._since = min(_BURST, self._left + earned), answers, now
            if self._left < cost:
                return False
        self._left -= cost
        return True
