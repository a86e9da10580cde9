"""``grpc.health.v1.Health`` with ``Watch``: what Kubernetes' probes and load balancers ask.

Not ``grpc_health.v1.health.HealthServicer``: it tells watchers while it holds the lock that it takes on
grpc's own thread when one of them leaves, and telling waits for that thread. A watcher that left at the
moment of a change stopped the whole server.
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

# At a time. Each is memory, and work at every change.
WATCHERS = 1024


class GrpcHealth:
    """Says SERVING, of the server and of its services, while the server is ready."""

    def __init__(
        self,
        state: ServerState[Any],
        pool: ThreadPoolExecutor,
        names: Sequence[str] = ("", SERVICE),
    ) -> None:
        """``pool`` answers; a watcher keeps none of its threads, whether it reads what it is told or not
        (`ServerStreamHandler`).
        ``names``: of the services; "" is the server."""
        self._state, self._names, self._pool = state, names, pool
        self._stopped = self._ended = False
        self._watchers: set[_HealthWatcher] = set()
        self.servicer = HealthServicer()
        self.servicer.Check = self._check
        self.servicer.Watch = ServerStreamHandler(self._watch, pool)
        state.watch_phase(self._tell)

    def stop(self) -> None:
        """NOT_SERVING from now on, whatever comes."""
        self._stopped = True
        self._tell()

    def end(self) -> None:
        """Who watches has been told: a server that ends would wait for them."""
        self._ended = True
        for watcher in list(self._watchers):
            watcher.end()

    def status(self, service: str) -> int:
        """At the moment."""
        if service not in self._names:
            return int(HealthCheckResponse.SERVICE_UNKNOWN)
        serving = self._state.ready and not self._stopped
        return int(HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING)

    def _tell(self) -> None:
        with suppress(RuntimeError):  # the server has ended, and watchers with it
            for watcher in list(self._watchers):
                self._pool.submit(watcher.tell)

    def _check(self, request: HealthCheckRequest, context: Any) -> HealthCheckResponse:
        status = self.status(request.service)
        if status == HealthCheckResponse.SERVICE_UNKNOWN:
            raise NotFound(f"no service {request.service[:80]!r}")
        return HealthCheckResponse(status=status)

    def _watch(self, message: bytes, call: StreamResponder) -> None:
        """Until the client is gone, or all are told to go."""
        try:
            service = parse_message(HealthCheckRequest, message).service
        except BadRequest as error:
            call.fail(error)
            return
        if len(self._watchers) >= WATCHERS:
            call.fail(TooManyRequests(f"{WATCHERS} watch already; use Check", "streams"))
            return
        watcher = _HealthWatcher(self, service, call)
        self._watchers.add(watcher)
        call.when_gone(partial(self._watchers.discard, watcher))
        if self._ended:  # perhaps after it was looked whom to tell
            call.fail(Unavailable("the server is shutting down; ask another replica"))
            return
        watcher.tell()


class _HealthWatcher:
    """Somebody who is told of changes. What came and went while a slow one was being told is left out."""

    def __init__(self, health: GrpcHealth, service: str, call: StreamResponder) -> None:
        self._health, self._service, self._call = health, service, call
        self.end = call.cancel
        self._told = -1
        self._telling = False
        self._lock = threading.Lock()

    def tell(self) -> None:
        """Begin to say what has not been said."""
        with self._lock:
            status = self._health.status(self._service)
            if self._telling or status == self._told:
                return  # who is told something is looked at again after it
            self._told = status
            self._telling = True
        self._call.push(HealthCheckResponse(status=status).SerializeToString(), self._sent)

    def _sent(self) -> None:
        self._telling = False
        self.tell()
