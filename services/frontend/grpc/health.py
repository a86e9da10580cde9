"""``grpc.health.v1.Health`` with ``Watch``, for Kubernetes probes and load balancers.

It replaces ``grpc_health.v1.health.HealthServicer``, in which a watcher keeps a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthServicer

from hps.errors import BadRequest, NotFound, Unavailable
from services.frontend.errors import TooManyRequests
from services.frontend.grpc.method_handlers import ServerStreamHandler
from services.frontend.grpc.protobuf_wire import parse_message
from services.frontend.grpc.responders import StreamResponder
from services.frontend.grpc.service import SERVICE
from services.server_state import ServerState

# Watchers at a time. Each takes memory, and work at every change.
WATCHERS = 1024


class GrpcHealth:
    """Health service: reports SERVING for the server and its services while the server is ready."""

    def __init__(
        self,
        state: ServerState[Any],
        pool: ThreadPoolExecutor,
        names: Sequence[str] = ("", SERVICE),
    ) -> None:
        """``pool`` runs notifications. A watcher keeps none of its threads, even if the client does not
        read (`ServerStreamHandler`). ``names`` are the services; "" is the server."""
        self._state, self._names, self._pool = state, names, pool
        self._stopped = self._ended = False
        self._watchers: set[_HealthWatcher] = set()
        self.servicer = HealthServicer()
        self.servicer.Check = self._check
        self.servicer.Watch = ServerStreamHandler(self._watch)
        state.on_phase_changed(self._notify)

    def stop(self) -> None:
        """Report NOT_SERVING from now on."""
        self._stopped = True
        self._notify()

    def end(self) -> None:
        """End all watches, once the watchers were notified: a server that ends would wait for them."""
        self._ended = True
        for watcher in list(self._watchers):
            watcher.end()

    def status(self, service: str) -> int:
        """Return the present status of ``service``."""
        if service not in self._names:
            return int(HealthCheckResponse.SERVICE_UNKNOWN)
        serving = self._state.ready and not self._stopped
        return int(HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING)

    def _notify(self) -> None:
        with suppress(RuntimeError):  # the server and its watches have ended
            for watcher in list(self._watchers):
                self._pool.submit(watcher.notify)

    def _check(self, request: HealthCheckRequest, context: Any) -> HealthCheckResponse:
        status = self.status(request.service)
        if status == HealthCheckResponse.SERVICE_UNKNOWN:
            raise NotFound(f"no service {request.service[:80]!r}")
        return HealthCheckResponse(status=status)

    def _watch(self, message: bytes, call: StreamResponder) -> None:
        """Start a watch that lasts until the client leaves or `end`."""
        try:
            service = parse_message(HealthCheckRequest, message).service
        except BadRequest as error:
            call.fail(error)
            return
        if len(self._watchers) >= WATCHERS:
            call.fail(
                TooManyRequests(
                    f"the server already has {WATCHERS} watches, its maximum; use Check", "streams"
                )
            )
            return
        watcher = _HealthWatcher(self, service, call)
        self._watchers.add(watcher)
        call.when_gone(partial(self._watchers.discard, watcher))
        if self._ended:  # `end` may have listed the watchers before this one
            call.fail(Unavailable("the server is shutting down; ask another replica"))
            return
        watcher.notify()


class _HealthWatcher:
    """One watch of a service's status. A slow client misses changes that were reverted in the meantime."""

    def __init__(self, health: GrpcHealth, service: str, call: StreamResponder) -> None:
        self._health, self._service, self._call = health, service, call
        self.end = call.cancel
        self._last_status = -1
        self._is_sending = False
        self._lock = threading.Lock()

    def notify(self) -> None:
        """Start sending the status if it has changed since the last message."""
        with self._lock:
            status = self._health.status(self._service)
            if self._is_sending or status == self._last_status:
                return  # `_sent` checks again after a message in flight
            self._last_status = status
            self._is_sending = True
        self._call.push(HealthCheckResponse(status=status).SerializeToString(), self._sent)

    def _sent(self) -> None:
        self._is_sending = False
        self.notify()
