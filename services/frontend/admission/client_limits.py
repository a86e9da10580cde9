"""Limits of one client: concurrent requests, and requests per second."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass

from hps.config.admission_settings import ClientSettings
from services.frontend.errors import Overloaded, TooManyRequests

# Clients to keep; beyond that, idle ones are dropped.
_MAX_CLIENTS = 4096


@dataclass(slots=True)
class _ClientState:
    """State of one client.

    ``allowed`` is a token bucket: the number of requests that it may begin now, as of ``since``."""

    allowed: float
    since: float
    running: int = 0


class ClientLimits:
    """Requests in flight by client, an API key's name or an address. Thread-safe."""

    def __init__(self, settings: ClientSettings) -> None:
        self._max_running = settings.running or math.inf
        self._rate = settings.per_second or math.inf
        self._burst = max(1.0, settings.burst or self._rate)
        self._clients: dict[str, _ClientState] = {}
        self._lock = threading.Lock()

    def enter(self, name: str) -> None:
        """Count a request of ``name``. Raises ``TooManyRequests`` if it exceeds a limit."""
        now = time.monotonic()
        with self._lock:
            client = self._clients.get(name)
            if client is None:
                if len(self._clients) >= _MAX_CLIENTS:
                    self._drop_idle(now)
                client = self._clients[name] = _ClientState(self._burst, now)
            if client.running >= self._max_running:
                raise TooManyRequests(
                    f"{client.running} requests of yours are in flight, the limit per client "
                    "(server.admission.client.running); wait for an answer",
                    "client_running",
                )
            client.allowed = self._allowed(client, now)
            client.since = now
            if client.allowed < 1:
                raise TooManyRequests(
                    f"too many requests: the limit per client is {self._rate:g} per second "
                    "(server.admission.client.per_second); send more slowly",
                    "client_rate",
                )
            client.allowed -= 1
            client.running += 1

    def leave(self, name: str, error: BaseException | None = None) -> None:
        """End a request of ``name``, with ``error`` if it failed.

        A request that the server rejected because of an overload does not count against the rate."""
        with self._lock:
            client = self._clients[name]
            client.running -= 1
            if isinstance(error, Overloaded):
                client.allowed += 1

    def undo(self, name: str) -> None:
        """Undo `enter`: the request begins again, or was rejected."""
        with self._lock:
            self._clients[name].running -= 1
            self._clients[name].allowed += 1

    def _allowed(self, client: _ClientState, now: float) -> float:
        if self._rate == math.inf:
            return self._burst
        return min(self._burst, client.allowed + (now - client.since) * self._rate)

    def _drop_idle(self, now: float) -> None:
        """Drop clients without requests in flight and with a full token bucket."""
        self._clients = {
            name: client
            for name, client in self._clients.items()
            if client.running or self._allowed(client, now) < self._burst
        }
