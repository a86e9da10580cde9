"""The server process: the port of the Open Inference Protocol and the admin port, over a node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hps.config import Configuration
from hps.config.runtime_folder import for_workers
from hps.config.server_settings import HttpListener
from hps.errors import ConfigError
from hps.node.node import Node
from hps.node.served_models import OpenModels
from hps.observability.otel import Tracer
from hps.types import Progress
from services.frontend import logs
from services.frontend.grpc.admin_port import AdminPort
from services.frontend.grpc.profile import grpc_wire
from services.frontend.grpc.server import GrpcServer
from services.frontend.http.app import admin_app, data_app
from services.frontend.http.application import PortApplication
from services.frontend.logs import fields, log
from services.frontend.request_observer import RequestObserver
from services.frontend.rollback_guard import RollbackGuard
from services.frontend.state import FrontendState
from services.frontend.statistics import Statistics
from services.frontend.workers.supervisor import Supervisor, WorkerOwnedPort
from services.process import OnUrls, PortServer, ServerProcess

# Seconds between checks of the workers' readiness.
_POLL_S = 0.02

OpenNode = Callable[[Configuration, Progress], Node]


@dataclass(frozen=True, slots=True)
class ServerUrls:
    """Addresses of a running server.

    Base URLs of the data port and the admin port; ``host:port`` of gRPC's, None if it is off."""

    admin: str
    http: str | None = None
    grpc: str | None = None
    grpc_admin: str | None = None


OnAddresses = Callable[[ServerUrls], None]


def run(
    configuration: Configuration,
    on_ready: OnAddresses | None = None,
    progress: Progress | None = None,
    on_listening: OnAddresses | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; return after a graceful shutdown.

    ``on_listening`` is called when the ports are open, ``on_ready`` when the models are loaded; both on
    their own thread, so they may send requests to the server. Raises ``ConfigError`` (a port is taken, the
    configuration is wrong) or ``ModelError`` before anything is served."""
    logs.setup_logging(configuration.settings.server)
    FrontendServer(configuration, progress).run(on_ready, on_listening)


class FrontendServer(ServerProcess[OpenModels]):
    """One server. ``run`` blocks; ``stop`` ends it from any thread."""

    def __init__(
        self,
        configuration: Configuration,
        progress: Progress | None = None,
        open_node: OpenNode | None = None,
    ) -> None:
        role = configuration.settings.server.role
        self.state = FrontendState("node" if role == "all" else role, configuration.settings)
        self._created_runtime: Path | None = None
        if configuration.settings.server.workers:
            settings = for_workers(configuration.settings)
            if configuration.settings.server.runtime is None:
                self._created_runtime = settings.server.runtime
            configuration = replace(configuration, settings=settings)
        super().__init__(configuration, self.state, progress)
        self._open_node = open_node or _open_node
        self._workers: Supervisor | None = None

    def run(
        self, on_ready: OnAddresses | None = None, on_listening: OnAddresses | None = None
    ) -> None:
        """Serve until stopped; see ``run`` of this module."""
        try:
            self._run(_with_urls(on_ready), _with_urls(on_listening))
        finally:
            if self._created_runtime is not None:
                with suppress(OSError):
                    self._created_runtime.rmdir()
        if self._workers is not None and self._workers.broken:
            raise ConfigError("a worker process failed to start; see its log line")

    def _ports(self) -> Mapping[str, HttpListener]:
        if self._settings.workers or self._settings.role == "lookup":
            return {"admin": self._settings.admin}
        return {"http": self._settings.http, "admin": self._settings.admin}

    def _other_servers(self) -> Mapping[str, PortServer]:
        at = self._settings.grpc
        if self._settings.workers:
            workers = self._workers = Supervisor(self._configuration)
            self._drain_delay_s = 0.0  # the workers wait instead
            self.state.not_ready_reason = lambda: workers.not_ready_reason
            self.state.propagate_log_level = workers.set_level
            self.state.ask_workers = workers.ask
            self.state.other_processes = lambda: [worker.describe() for worker in workers.workers]
            if self._settings.role == "lookup":
                return {"grpc": workers, **self._grpc_admin()}
            by_workers = {"grpc": WorkerOwnedPort(workers.grpc_url)} if workers.grpc_url else {}
            return {"http": workers, **by_workers, **self._grpc_admin()}
        if at is None:
            return {}
        server = GrpcServer(at, self.state, self._settings, self._guard)
        return {"grpc": server, **self._grpc_admin()}

    def _grpc_admin(self) -> dict[str, PortServer]:
        at = self._settings.grpc
        if at is None or at.admin is None:
            return {}
        return {"grpc_admin": AdminPort(at.admin, self.state, self._settings, self._guard)}

    def _app(self, port: str) -> PortApplication:
        arguments = self.state, self._settings, self._guard
        if port == "http":
            return data_app(*arguments)
        return admin_app(*arguments, {"grpc": grpc_wire(self._settings)})

    def _open(self, progress: Progress) -> OpenModels:
        if self._settings.role == "frontend":
            return self._connect(progress)
        node = self._open_node(self._configuration, progress)
        self._follow_readiness(node)
        if node.control is not None:
            # For changes that no request made: of a watched repository, or the end of a rollback's time.
            node.control.on_change.append(self._refresh_models)
            traffic = node.control.traffic
            guard = RollbackGuard(self.state, traffic.roll_back, traffic.switch_before_start)
            self.state.on_models_changed(guard.start)
        if self._workers is not None and node.socket is not None:
            node.metrics.include(self._workers.metrics)
            node.metrics.on_release(self._workers.drop_version)
            node.socket.answers["statistics"] = lambda _given: self._summed_statistics()
            self.state.set_statistics_source(self._summed_statistics)
        return node

    def _follow_readiness(self, node: Node) -> None:
        """Make the server not ready whenever the node is not ready."""
        workers, workers_reason = self._workers, self.state.not_ready_reason
        self.state.not_ready_reason = lambda: workers_reason() or node.not_ready_reason()

        def changed() -> None:
            self.state.notify_phase_watchers()
            if workers is not None:
                workers.set_not_ready(node.not_ready_reason())

        node.on_damage(changed)
        if node.not_ready_reason():  # it became not ready while it was opened
            changed()

    def _opened(self, node: OpenModels) -> None:
        super()._opened(node)
        self.state.loop = asyncio.get_running_loop()
        node.complete_on(self.state.loop)
        if self._settings.role == "frontend":
            self._refresh_models()  # for changes since the first check
        for entry in self.state.entries.values():
            log.info("serving %s", fields(model=entry.name, version=entry.version))

    def _trace(self, tracer: Tracer) -> None:
        self.state.observer = RequestObserver(self._settings.access_log, tracer)

    def _connect(self, progress: Progress) -> OpenModels:
        from hps.node.connected import connect

        connected = connect(self._configuration, wait_s=None, progress=progress)
        self.state.not_ready_reason = lambda: connected.problem
        connected.watch(self._refresh_models)
        guard = RollbackGuard(self.state, self.state.withdraw)
        self.state.on_models_changed(guard.start)
        connected.watch_nodes(self.state.notify_phase_watchers)
        return connected

    def _refresh_models(self) -> None:
        """Refresh the endpoints after a change of a front end's models."""
        loop, node = self.state.loop, self.state.node
        if loop is not None and node is not None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self.state.serve, node)

    async def _wait_until_ready(self) -> None:
        """Wait until all workers answer, or a front end has lookup nodes."""
        is_frontend = self._settings.role == "frontend"
        if is_frontend and not self.state.ready:
            log.warning("not ready yet %s", fields(reason=self.state.reason))
        while not (self.state.ready or self._stopping.is_set()):
            if not (is_frontend or self.state.not_ready_reason()):
                return
            await asyncio.sleep(_POLL_S)

    def _summed_statistics(self) -> Mapping[str, dict[str, Any]]:
        """Statistics of the served names, of this process and its workers."""
        assert self._workers is not None
        sums: dict[str, dict[str, Any]] = {}
        by_workers = self._workers.statistics()
        for statistics_key, own in self.state.own_statistics().items():
            total = Statistics()
            for values in (own, *by_workers.get(statistics_key, ())):
                total.add(values)
            sums[statistics_key] = total.numbers()
        return sums


def _open_node(configuration: Configuration, progress: Progress) -> Node:
    # Imported late: a front end needs none of the stores' packages.
    from hps.node.build import open_node

    return open_node(configuration, progress)


def _with_urls(callback: OnAddresses | None) -> OnUrls | None:
    return None if callback is None else lambda urls: callback(ServerUrls(**urls))
