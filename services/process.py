"""A server process: its ports on one event loop, its backend opened on a thread, a graceful shutdown.

The ports open first, so that probes and clients get the status "loading" instead of a refused connection.
At SIGTERM the server is not ready; after `server.drain_delay_s` it accepts no new connections; it answers
accepted requests, then closes the backend."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Generic, Protocol

import uvloop

from hps.config import Configuration
from hps.config.auth import check_exposure, load_api_keys
from hps.config.server_settings import HttpListener
from hps.errors import ConfigError
from hps.observability import otel
from hps.tracing import set_recorder
from hps.types import NoProgress, Progress
from services.allocator import keep_freed_memory
from services.frontend.auth import guard
from services.frontend.background_open import LoadProgress, open_in_background
from services.frontend.certificates import server_context
from services.frontend.http.application import PortApplication
from services.frontend.http.server import HttpPortOptions, HttpServer
from services.frontend.listening import listen
from services.frontend.logs import fields, log
from services.frontend.path_redaction import hide_paths
from services.server_state import Node, ServerState

Urls = Mapping[str, str]
"""Addresses of a running server: base URLs by the port's name."""
OnUrls = Callable[[Urls], None]


class PortServer(Protocol):
    """One listening port. Used on the event loop."""

    url: str
    started: bool

    async def serve(self) -> None:
        """Serve until ``stop``, then answer accepted requests."""
        ...

    def stop(self, *, force: bool = False) -> None:
        """Start the shutdown; ``force`` drops requests that are being answered."""
        ...


class ServerProcess(ABC, Generic[Node]):
    """One server. ``run`` blocks; ``stop`` ends it from any thread."""

    def __init__(
        self, configuration: Configuration, state: ServerState[Node], progress: Progress | None
    ) -> None:
        settings = configuration.settings
        check_exposure(settings)
        hide_paths(settings)
        self._configuration = configuration
        self._settings = settings.server
        self._state = state
        self._guard = guard(load_api_keys(settings.auth))
        self._progress = LoadProgress(state.loading, progress or NoProgress())
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped_before_start = False
        self._lock = threading.Lock()
        self._stopping = asyncio.Event()
        self._forced = asyncio.Event()
        self._drain_delay_s = self._settings.drain_delay_s
        self._servers: dict[str, PortServer] = {}
        self._owns_process = False

    @abstractmethod
    def _ports(self) -> Mapping[str, HttpListener]:
        """HTTP ports by the setting's name below ``server``; the last one closes last."""

    @abstractmethod
    def _app(self, port: str) -> PortApplication:
        """The application of a port."""

    def _other_servers(self) -> Mapping[str, PortServer]:
        """Servers of other protocols, already listening. Raises ``ConfigError`` if one can't listen."""
        return {}

    @abstractmethod
    def _open(self, progress: Progress) -> Node:
        """Open the backend; called on a thread."""

    def _opened(self, node: Node) -> None:
        """Handle the opened ``node``; called on the event loop."""
        self._state.serve(node)
        for warning in node.warnings:
            log.warning("configuration %s", fields(warning=warning))

    async def _wait_until_ready(self) -> None:
        """Wait, after the node is open, until the server can be ready."""

    def _run(self, on_ready: OnUrls | None, on_listening: OnUrls | None) -> None:
        """Serve until stopped.

        Each callback runs on a separate thread, so it may send requests to the server."""
        tracer = otel.tracer(self._state.role)
        if tracer is not None:
            set_recorder(tracer)
            self._trace(tracer)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve(on_ready, on_listening))
        if tracer is not None:
            set_recorder(None)
            tracer.close()

    def _trace(self, tracer: otel.Tracer) -> None:
        """Record spans of this server."""

    def stop(self) -> None:
        """Start the graceful shutdown; thread-safe, returns immediately.

        The second call drops open requests. A call before ``run`` ends the server as soon as it runs."""
        with self._lock:
            if self._loop is None:
                self._stopped_before_start = True
                self._progress.cancel()
            elif not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if self._stopping.is_set():
            self._forced.set()
            for server in self._servers.values():
                server.stop(force=True)
            return
        log.info("stopping %s", fields(drain_s=self._settings.drain_s))
        self._state.stop()
        self._progress.cancel()
        self._stopping.set()

    async def _serve(self, on_ready: OnUrls | None, on_listening: OnUrls | None) -> None:
        with self._lock:
            self._loop = asyncio.get_running_loop()
        if self._stopped_before_start:
            self._stop()
        self._owns_process = threading.current_thread() is threading.main_thread()
        if self._owns_process:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._loop.add_signal_handler(number, self._stop)
        self._listen()
        urls = {name: server.url for name, server in self._servers.items()}
        self._state.urls = urls
        servers = list(self._servers.values())
        tasks = [asyncio.create_task(server.serve()) for server in servers]
        try:
            for server, task in zip(servers, tasks, strict=True):
                while not server.started and not task.done():
                    await asyncio.sleep(0.005)
                # A server that ends unexpectedly ends the whole process.
                task.add_done_callback(lambda _: self._stopping.set())
            log.info("listening %s", fields(**urls))
            await _notify(on_listening, urls)
            await self._load()
            if not self._stopping.is_set():
                await _notify(on_ready, urls)
            await self._stopping.wait()
            if not any(task.done() for task in tasks):
                await self._wait_drain_delay()
        finally:
            await self._shut_down(tasks)

    async def _wait_drain_delay(self) -> None:
        """Accept requests for `server.drain_delay_s` while not ready, until load balancers notice."""
        delay_s = self._drain_delay_s
        if not delay_s or self._state.node is None:
            return
        self._state.stop()
        for server in self._servers.values():
            if isinstance(server, HttpServer):
                server.end_keep_alive()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._forced.wait(), delay_s)

    async def _shut_down(self, tasks: list[asyncio.Task[None]]) -> None:
        self._state.stop()
        # The data ports close first: probes on the admin port observe their end.
        *data, last = zip(self._servers.values(), tasks, strict=True)
        for server, _ in data:
            server.stop()
        for _, task in data:
            await task
        server, task = last
        server.stop()
        await task
        if self._state.node is not None:
            await asyncio.to_thread(self._state.node.close)
        log.info("stopped")

    def _listen(self) -> None:
        sockets: dict[str, socket.socket] = {}
        ports = self._ports()
        tls_contexts = {name: server_context(at, f"server.{name}") for name, at in ports.items()}
        try:
            for name, at in ports.items():
                sockets[name] = listen(at.host, at.port, f"server.{name}")
            self._servers.update(self._other_servers())
        except ConfigError:
            for each in sockets.values():
                each.close()
            raise
        for name, each in sockets.items():
            options = HttpPortOptions(
                self._settings.drain_s, tls_contexts[name], ports[name].protocol
            )
            self._servers[name] = HttpServer(self._app(name), each, options)

    async def _load(self) -> None:
        node = await open_in_background(
            lambda: self._open(self._progress), self._stopping, max(1.0, self._settings.drain_s)
        )
        if node is None:
            return
        self._opened(node)
        await self._wait_until_ready()
        if self._owns_process:
            # Loaded objects live as long as the process; exclude them from garbage collection.
            gc.collect()
            gc.freeze()
            keep_freed_memory()
        if not self._state.ready and not self._stopping.is_set():
            log.error("not ready %s", fields(reason=self._state.reason))


async def _notify(callback: Callable[[Urls], Any] | None, urls: Urls) -> None:
    if callback is not None:
        await asyncio.to_thread(callback, urls)
