"""The data port of a node with workers: each of them listens at it, the node's process does not."""

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
from services.frontend.http.server import host_of, listen, reserve_port, url_of
from services.frontend.logs import Level
from services.frontend.workers.supervised_worker import SupervisedWorker

# Beyond the time that a worker is given to end, for its process to go.
_GRACE_S = 5.0


class Supervisor:
    """Starts the workers and keeps as many. A `services.process.PortServer`: ``serve`` lasts until
    ``stop``, and then until what the workers have accepted is answered.

    The sockets they listen at for HTTP, if they do, are made here, one for each, and stay open here: the
    kernel spreads connections over them. Those that come to a worker that is being replaced are accepted by
    the others; where there are none they wait for its successor.
    """

    def __init__(self, configuration: Configuration) -> None:
        """Raises ConfigError when it cannot listen."""
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
        told = replace(configuration, settings=settings, origins={})
        self._folder = _beside(server.runtime) if server.grpc is not None else None
        self.workers = [
            SupervisedWorker(
                number,
                told,
                listeners,
                self._folder and self._folder / str(number),
                self._broke,
                self._spread,
            )
            for number in range(1, server.workers + 1)
        ]
        self._spreading = threading.Lock()
        self._hindrance = ""
        self.started = False
        self._stopping = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def _listen(self, at: HttpSettings, count: int) -> list[socket.socket]:
        with listen(at.host, at.port, "server.http") as alone:  # nobody else listens there
            port = alone.getsockname()[1]
        listeners = []
        for _ in range(count):
            listener = listen(at.host, port, "server.http", one_of_many=True)
            listeners.append(self._sockets.enter_context(listener))
        return listeners

    def _reserve(self, at: GrpcSettings) -> GrpcSettings:
        """gRPC's sockets are made by its own library, in each worker. One here that does not listen keeps
        the port."""
        with reserve_port(at.host, at.port, "server.grpc") as alone:
            port = alone.getsockname()[1]
        self._sockets.enter_context(reserve_port(at.host, port, "server.grpc", one_of_many=True))
        return at.model_copy(update={"port": port})

    async def serve(self) -> None:
        """Serve until ``stop``, or until a worker can't be started: then it is ``broken``."""
        self._loop = asyncio.get_running_loop()
        if self._folder is not None:
            with suppress(OSError):  # workers say why it can't be
                self._folder.mkdir(mode=0o700, parents=True)
        for worker in self.workers:
            worker.start()
        self.started = True
        await self._stopping.wait()
        for worker in self.workers:
            worker.stop()
        # Else connections would still come, and nobody take them.
        self._sockets.close()
        await asyncio.to_thread(self._join)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def broken(self) -> bool:
        """Whether a worker's configuration was found wrong."""
        return any(worker.broken for worker in self.workers)

    def _join(self) -> None:
        until = time.monotonic() + max(1.0, self._drain_s) + _GRACE_S
        for worker in self.workers:
            worker.join(max(0.0, until - time.monotonic()))

    def stop(self, *, at_once: bool = False) -> None:
        """Begin the end; ``at_once`` drops what is still being answered. Called on the event loop."""
        self._stopping.set()
        if at_once:
            for worker in self.workers:
                worker.stop()  # a worker that is told twice drops it

    def _spread(self) -> None:
        """Have the workers that are ready accept the connections of those that are not."""
        with self._spreading:
            away = [worker.number for worker in self.workers if not worker.ready]
            for worker in self.workers:
                worker.cover(away)
                worker.hinder(self._hindrance)

    def hinder(self, hindrance: str) -> None:
        """Have all of them, and those to come, say that they are not ready, and why; empty: ready again."""
        self._hindrance = hindrance
        self._spread()

    def _broke(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)

    # -- what is said of the workers ---------------------------------------------------------------

    @property
    def hindrance(self) -> str:
        """Why not all of them answer; empty when they do."""
        ready = sum(worker.ready for worker in self.workers)
        if ready == len(self.workers):
            return ""
        stuck = [str(worker.number) for worker in self.workers if worker.watch.unresponsive]
        others = "the others are being started"
        if stuck:
            others = f"no answer from number {', '.join(stuck)}"
        return f"{ready} of {len(self.workers)} worker processes answer; {others}"

    def metrics(self) -> MetricValues:
        """Of all workers that there have been."""
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

    def forget(self, model: str, version: int) -> None:
        """A version has been let go of: what those counted of it that have ended."""
        for worker in self.workers:
            worker.forget(model, version)

    def set_level(self, level: Level) -> None:
        """Have all of them, and those to come, write log lines from ``level`` upwards."""
        for worker in self.workers:
            worker.set_level(level)

    def statistics(self) -> Mapping[str, list[Any]]:
        """The numbers of `Statistics` of each of them, by what they are known as."""
        found: dict[str, list[Any]] = {}
        for worker in self.workers:
            for name, told in worker.statistics().items():
                found.setdefault(name, []).extend(told)
        return found


class WorkerOwnedPort:
    """A port that the workers have: a `services.process.PortServer` with an address and nothing to do."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.started = True
        self._stopping = asyncio.Event()

    async def serve(self) -> None:
        await self._stopping.wait()

    def stop(self, *, at_once: bool = False) -> None:
        self._stopping.set()


def _beside(runtime: Path | None) -> Path:
    """A folder that no other server has, for the workers' sockets."""
    assert runtime is not None  # as `for_workers` sees to
    return runtime.parent / f"hps-{secrets.token_hex(4)}"
