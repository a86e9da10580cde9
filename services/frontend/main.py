"""The server process: the port of the Open Inference Protocol and the admin port, a node behind them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hps.build import open_node
from hps.config import Configuration
from hps.config.auth import load_api_keys
from hps.config.server_settings import AdminSettings, HttpSettings
from hps.node import Node
from hps.types import Progress
from services.frontend import logs
from services.frontend.auth import guard
from services.frontend.grpc.server import GrpcServer
from services.frontend.http.app import admin_app, data_app
from services.frontend.http.asgi import Application
from services.frontend.logs import fields, log
from services.frontend.state import State
from services.process import OnUrls, Process, Server

OpenNode = Callable[[Configuration, Progress], Node]


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a running server listens: base URLs of the data port and the admin port, and ``host:port`` of
    gRPC, None where it is off."""

    http: str
    admin: str
    grpc: str | None = None


OnAddresses = Callable[[Addresses], None]


def run(
    configuration: Configuration,
    on_ready: OnAddresses | None = None,
    progress: Progress | None = None,
    on_listening: OnAddresses | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. Returns after an orderly end; the process may exit 0 then.

    ``on_listening`` is called when the ports are open, ``on_ready`` when the models are loaded; both
    on a thread of their own, so they may ask the server. Raises ``ConfigError`` (a port is taken, the
    configuration is wrong) or ``ModelError`` before anything is served.
    """
    logs.setup(configuration.settings.server.log_level)
    Frontend(configuration, progress).run(on_ready, on_listening)


class Frontend(Process[Node]):
    """One server. ``run`` blocks; ``stop`` ends it from any thread."""

    def __init__(
        self,
        configuration: Configuration,
        progress: Progress | None = None,
        open_node: OpenNode = open_node,
    ) -> None:
        self.state = State()
        super().__init__(configuration, self.state, progress)
        self._open_node = open_node
        self._guard = guard(load_api_keys(configuration.settings.auth))

    def run(
        self, on_ready: OnAddresses | None = None, on_listening: OnAddresses | None = None
    ) -> None:
        """Serve until stopped; see ``run`` of this module."""
        self._run(_with_urls(on_ready), _with_urls(on_listening))

    def _ports(self) -> Mapping[str, HttpSettings | AdminSettings]:
        return {"http": self._settings.http, "admin": self._settings.admin}

    def _others(self) -> Mapping[str, Server]:
        at = self._settings.grpc
        if at is None:
            return {}
        return {"grpc": GrpcServer(at, self.state, self._settings, self._guard)}

    def _app(self, port: str) -> Application:
        make = data_app if port == "http" else admin_app
        return make(self.state, self._settings, self._guard)

    def _open(self, progress: Progress) -> Node:
        return self._open_node(self._configuration, progress)

    def _opened(self, node: Node) -> None:
        super()._opened(node)
        for entry in self.state.entries.values():
            log.info("serving %s", fields(model=entry.name, version=entry.version))


def _with_urls(callback: OnAddresses | None) -> OnUrls | None:
    return None if callback is None else lambda urls: callback(Addresses(**urls))
