"""Supervisor of the workers, which serve the data port of a node in its place.

Every worker listens at the port; the node's process does not."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hps.config import Configuration
from hps.config.server_settings import GrpcSettings, HttpSettings
from hps.errors import ConfigError
from hps.observability import metric_names as m
from hps.observability.metrics import MetricValues
from services.frontend.listening import host_of, listen, reserve_port, url_of
from services.frontend.logs import Level
from services.frontend.workers.supervised_worker import SupervisedWorker

# Added to the worker's drain time, for its process to exit.
_EXIT_S = 5.0


class Supervisor:
    """Starts and replaces the workers. A `services.process.PortServer`.

    ``serve`` lasts until ``stop``, and then until the workers have drained.

    It creates one listening HTTP socket per worker, if they answer HTTP, and keeps them open: the kernel
    spreads connections over them. While a worker is replaced, the others accept its connections; without
    others, these wait for its successor."""

    def __init__(self, configuration: Configuration) -> None:
        """Open the listening sockets. Raises ConfigError if that fails."""
        server = configuration.settings.server
        self._drain_s = server.drain_delay_s + server.drain_s
        self._sockets = ExitStack()
        self.grpc_url: str | None = None
        listeners: list[socket.socket] = []
        try:
            if server.role != "lookup":
                listeners = self._listen(server.http, server.workers)
            if server.grpc is not None:
                grpc = self._reserve(server.grpc)
                self.grpc_url = f"{host_of(grpc.host)}:{grpc.port}"
                server = server.model_copy(update={"grpc": grpc})
        except ConfigError:
            self._sockets.close()
            raise
        self.url = self.grpc_url or ""
        if listeners:
            self.url = url_of(listeners[0], secured=server.http.tls is not None)
        settings = configuration.settings.model_copy(update={"server": server})
        worker_configuration = replace(configuration, settings=settings, origins={})
        self._folder = _socket_folder(server.runtime) if server.grpc is not None else None
        self.workers = [
            SupervisedWorker(
                number,
                worker_configuration,
                listeners,
                self._folder and self._folder / str(number),
                self._stop_broken,
                self._update_workers,
            )
            for number in range(1, server.workers + 1)
        ]
        self._update_lock = threading.Lock()
        self._node_reason = ""
        self.started = False
        self._stopping = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def _listen(self, at: HttpSettings, count: int) -> list[socket.socket]:
        with listen(
            at.host, at.port, "server.http"
        ) as alone:  # fails if another process listens there
            port = alone.getsockname()[1]
        listeners = []
        for _ in range(count):
            listener = listen(at.host, port, "server.http", one_of_many=True)
            listeners.append(self._sockets.enter_context(listener))
        return listeners

    def _reserve(self, at: GrpcSettings) -> GrpcSettings:
        """Reserve gRPC's port by a socket that does not listen: grpc opens its own sockets in each worker."""
        with reserve_port(at.host, at.port, "server.grpc") as alone:
            port = alone.getsockname()[1]
        self._sockets.enter_context(reserve_port(at.host, port, "server.grpc", one_of_many=True))
        return at.model_copy(update={"port": port})

    async def serve(self) -> None:
        """Serve until ``stop``, or until a worker can't start, which sets ``broken``."""
        self._loop = asyncio.get_running_loop()
        if self._folder is not None:
            with suppress(OSError):  # workers report the reason
                self._folder.mkdir(mode=0o700, parents=True)
        for worker in self.workers:
            worker.start()
        self.started = True
        await self._stopping.wait()
        for worker in self.workers:
            worker.stop()
        # Otherwise clients could still connect, and no worker would accept.
        self._sockets.close()
        await asyncio.to_thread(self._join)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def broken(self) -> bool:
        """True if a worker's configuration is wrong."""
        return any(worker.broken for worker in self.workers)

    def _join(self) -> None:
        until = time.monotonic() + max(1.0, self._drain_s) + _EXIT_S
        for worker in self.workers:
            worker.join(max(0.0, until - time.monotonic()))

    def stop(self, *, force: bool = False) -> None:
        """Stop the workers; ``force`` drops the requests that they still answer. On the event loop."""
        self._stopping.set()
        if force:
            for worker in self.workers:
                worker.stop()  # a second call drops its requests

    def _update_workers(self) -> None:
        """Make ready workers accept the connections of the others."""
        with self._update_lock:
            unready = [worker.number for worker in self.workers if not worker.ready]
            for worker in self.workers:
                worker.accept_for(unready)
                worker.set_not_ready(self._node_reason)

    def set_not_ready(self, reason: str) -> None:
        """Set the reason why all workers, and future ones, are not ready; empty: ready."""
        self._node_reason = reason
        self._update_workers()

    def _stop_broken(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)

    # -- state of the workers ---------------------------------------------------------------------

    @property
    def not_ready_reason(self) -> str:
        """The reason why not all workers answer; empty if they do."""
        ready = sum(worker.ready for worker in self.workers)
        if ready == len(self.workers):
            return ""
        stuck = [str(worker.number) for worker in self.workers if worker.watch.unresponsive]
        others = "the others are being started"
        if stuck:
            others = f"no answer from number {', '.join(stuck)}"
        return f"{ready} of {len(self.workers)} worker processes answer; {others}"

    def metrics(self) -> MetricValues:
        """Metrics of all workers, including ended ones."""
        found = MetricValues(
            {
                m.WORKERS: {(): sum(worker.ready for worker in self.workers)},
                m.WORKER_RESTARTS: {(): sum(worker.restarts for worker in self.workers)},
                m.WORKER_TIMEOUTS: {(): sum(worker.watch.timeouts for worker in self.workers)},
            }
        )
        for worker in self.workers:
            found.add(worker.metrics())
        return found

    def drop_version(self, model: str, version: int) -> None:
        """Drop the values of a released version that ended workers have counted."""
        for worker in self.workers:
            worker.drop_version(model, version)

    def set_level(self, level: Level) -> None:
        """Set the log level of all workers, and future ones."""
        for worker in self.workers:
            worker.set_level(level)

    def ask(self, query: str, *arguments: Any) -> list[Any]:
        """Send a query to all workers; return the answers of those that are ready and answer. Blocks."""
        answers = (worker.ask(query, *arguments) for worker in self.workers)
        return [answer for answer in answers if answer is not None]

    def statistics(self) -> Mapping[str, list[Any]]:
        """Values of `Statistics` of all workers, by key."""
        found: dict[str, list[Any]] = {}
        for worker in self.workers:
            for name, numbers in worker.statistics().items():
                found.setdefault(name, []).extend(numbers)
        return found


class WorkerOwnedPort:
    """A port that the workers serve: a `services.process.PortServer` that only holds the address."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.started = True
        self._stopping = asyncio.Event()

    async def serve(self) -> None:
        await self._stopping.wait()

    def stop(self, *, force: bool = False) -> None:
        self._stopping.set()


def _socket_folder(runtime: Path | None) -> Path:
    """A unique folder for the workers' sockets."""
    assert runtime is not None  # `for_workers` sets it
    return runtime.parent / f"hps-{secrets.token_hex(4)}"
