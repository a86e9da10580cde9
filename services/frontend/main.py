"""The server process: two ports on one event loop, a node behind them, an orderly end.

The ports open first, so that probes and clients are told "loading" instead of being refused; the
node is opened on a thread. SIGTERM: not ready any more, no new connections, what was accepted is
answered, the node is closed.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import uvloop

from hps.build import open_node
from hps.config import Configuration
from hps.config.auth import check_exposure, load_api_keys
from hps.errors import ConfigError
from hps.node import Node
from hps.types import NoProgress, Progress
from services.frontend import logs
from services.frontend.auth import guard
from services.frontend.http.app import admin_app, data_app
from services.frontend.http.server import HttpServer, listen
from services.frontend.loading import LoadProgress, open_in_background
from services.frontend.logs import fields, log
from services.frontend.state import State

OpenNode = Callable[[Configuration, Progress], Node]


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a running server listens: base URLs of the data port and the admin port."""

    http: str
    admin: str


def run(
    configuration: Configuration,
    on_ready: Callable[[Addresses], None] | None = None,
    progress: Progress | None = None,
    on_listening: Callable[[Addresses], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. Returns after an orderly end; the process may exit 0 then.

    ``on_listening`` is called when the ports are open, ``on_ready`` when the models are loaded; both
    on a thread of their own, so they may ask the server. Raises ``ConfigError`` (a port is taken, the
    configuration is wrong) or ``ModelError`` before anything is served.
    """
    logs.setup(configuration.settings.server.log_level)
    Frontend(configuration, progress).run(on_ready, on_listening)


class Frontend:
    """One server. ``run`` blocks; ``stop`` ends it from any thread."""

    def __init__(
        self,
        configuration: Configuration,
        progress: Progress | None = None,
        open_node: OpenNode = open_node,
    ) -> None:
        settings = configuration.settings
        check_exposure(settings)
        self._configuration = configuration
        self._settings = settings.server
        self._open_node = open_node
        self._guard = guard(load_api_keys(settings.auth))
        self.state = State()
        self._progress = LoadProgress(self.state.loading, progress or NoProgress())
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._servers: list[HttpServer] = []
        self._owns_process = False

    def run(
        self,
        on_ready: Callable[[Addresses], None] | None = None,
        on_listening: Callable[[Addresses], None] | None = None,
    ) -> None:
        """Serve until stopped; see ``run`` of this module."""
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve(on_ready, on_listening))

    def stop(self) -> None:
        """Begin the orderly end; thread-safe, returns at once. The second call drops what is open."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if self._stopping.is_set():
            for server in self._servers:
                server.stop(at_once=True)
            return
        log.info("stopping %s", fields(drain_s=self._settings.drain_s))
        self.state.stop()
        self._progress.cancel()
        self._stopping.set()

    async def _serve(
        self,
        on_ready: Callable[[Addresses], None] | None,
        on_listening: Callable[[Addresses], None] | None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._owns_process = threading.current_thread() is threading.main_thread()
        if self._owns_process:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._loop.add_signal_handler(number, self._stop)
        self._listen()
        http, admin = self._servers
        addresses = Addresses(http.url, admin.url)
        tasks = [asyncio.create_task(server.serve()) for server in self._servers]
        try:
            for server, task in zip(self._servers, tasks, strict=True):
                while not server.started and not task.done():
                    await asyncio.sleep(0.005)
                # A server that ends by itself takes the process along instead of half of it.
                task.add_done_callback(lambda _: self._stopping.set())
            log.info("listening %s", fields(http=addresses.http, admin=addresses.admin))
            await _call(on_listening, addresses)
            await self._load()
            if not self._stopping.is_set():
                await _call(on_ready, addresses)
            await self._stopping.wait()
        finally:
            await self._end(tasks)

    async def _end(self, tasks: list[asyncio.Task[None]]) -> None:
        self.state.stop()
        for server, task in zip(self._servers, tasks, strict=True):
            server.stop()  # the data port first: probes on the admin port see it end
            await task
        if self.state.node is not None:
            await asyncio.to_thread(self.state.node.close)
        log.info("stopped")

    def _listen(self) -> None:
        settings = self._settings
        sockets: list[socket.socket] = []
        try:
            for name, at in (("http", settings.http), ("admin", settings.admin)):
                sockets.append(listen(at.host, at.port, f"server.{name}"))
        except ConfigError:
            for each in sockets:
                each.close()
            raise
        for make, each in zip((data_app, admin_app), sockets, strict=True):
            app = make(self.state, settings, self._guard)
            self._servers.append(HttpServer(app, each, settings.drain_s))

    async def _load(self) -> None:
        node = await open_in_background(
            lambda: self._open_node(self._configuration, self._progress),
            self._stopping,
            max(1.0, self._settings.drain_s),
        )
        if node is not None:
            self._serve_models(node)

    def _serve_models(self, node: Node) -> None:
        self.state.serve(node)
        for warning in node.warnings:
            log.warning("configuration %s", fields(warning=warning))
        for entry in self.state.entries.values():
            log.info("serving %s", fields(model=entry.name, version=entry.version))
        if self._owns_process:
            # What is loaded lives as long as the process; the collector need not walk it again.
            gc.collect()
            gc.freeze()
        if not self.state.ready:
            log.error("not ready %s", fields(reason=self.state.reason))


async def _call(callback: Callable[[Addresses], Any] | None, addresses: Addresses) -> None:
    if callback is not None:
        await asyncio.to_thread(callback, addresses)
