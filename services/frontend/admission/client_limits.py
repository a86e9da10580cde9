"""What one client may ask of the server at a time, and per second."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass

from hps.config.admission_settings import ClientSettings
from services.frontend.errors import Overloaded, TooManyRequests

# Clients that are remembered; those beyond that ask for nothing are forgotten.
_KEPT = 4096


@dataclass(slots=True)
class _ClientState:
    """``allowed`` is a token bucket: the requests it may begin at once, as of ``since``."""

    allowed: float
    since: float
    running: int = 0


class ClientLimits:
    """Requests under way by client, an API key's name or an address. Any thread may call it."""

    def __init__(self, settings: ClientSettings) -> None:
        self._most = settings.running or math.inf
        self._rate = settings.per_second or math.inf
        self._burst = max(1.0, settings.burst or self._rate)
        self._known: dict[str, _ClientState] = {}
        self._lock = threading.Lock()

    def enter(self, name: str) -> None:
        """One more of ``name``'s requests begins; ``TooManyRequests`` when that would be too many."""
        now = time.monotonic()
        with self._lock:
            client = self._known.get(name)
            if client is None:
                if len(self._known) >= _KEPT:
                    self._forget(now)
                client = self._known[name] = _ClientState(self._burst, now)
            if client.running >= self._most:
                raise TooManyRequests(
                    f"{client.running} requests of yours are under way, which is all a client may have "
                    "(server.admission.client.running); wait for an answer",
                    "client_running",
                )
            client.allowed = self._allowed(client, now)
            client.since = now
            if client.allowed < 1:
                raise TooManyRequests(
                    f"you may send {self._rate:g} requests a second "
                    "(server.admission.client.per_second); send them more slowly",
                    "client_rate",
                )
            client.allowed -= 1
            client.running += 1

    def leave(self, name: str, error: BaseException | None = None) -> None:
        """One of ``name``'s requests is answered, with ``error`` if it failed. One that was refused for want
        of room does not count as sent."""
        with self._lock:
            client = self._known[name]
            client.running -= 1
            if isinstance(error, Overloaded):
                client.allowed += 1

    def undo(self, name: str) -> None:
        """A request that had entered is begun anew, or was refused."""
        with self._lock:
            self._known[name].running -= 1
            self._known[name].allowed += 1

    def _allowed(self, client: _ClientState, now: float) -> float:
        if self._rate == math.inf:
            return self._burst
        return min(self._burst, client.allowed + (now - client.since) * self._rate)

    def _forget(self, now: float) -> None:
        """Drop those of whom nothing needs to be remembered."""
        self._known = {
            name: client
            for name, client in self._known.items()
            if client.running or self._allowed(client, now) < self._burst
        }
