"""``grpc.health.v1.Health`` with ``Watch``: what Kubernetes' probes and load balancers ask."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from grpc_health.v1.health import HealthServicer
from grpc_health.v1.health_pb2 import HealthCheckResponse

from services.frontend.grpc.service import SERVICE
from services.server_state import ServerState


class Health:
    """Says SERVING, of the server and of its services, while the server is ready."""

    def __init__(
        self,
        state: ServerState[Any],
        pool: ThreadPoolExecutor,
        names: Sequence[str] = ("", SERVICE),
    ) -> None:
        """``pool`` answers; a watcher keeps none of its threads. ``names``: of the services; ""
        is the server."""
        self.servicer = HealthServicer(
            experimental_non_blocking=True, experimental_thread_pool=pool
        )
        self._state, self._names = state, names
        state.watch_phase(self._tell)

    def _tell(self) -> None:
        status = HealthCheckResponse.NOT_SERVING
        if self._state.ready:
            status = HealthCheckResponse.SERVING
        for name in self._names:
            self.servicer.set(name, status)

    def stop(self) -> None:
        """NOT_SERVING from now on, whatever comes."""
        self.servicer.enter_graceful_shutdown()
