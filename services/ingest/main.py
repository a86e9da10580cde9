"""Server process of `hps ingest`: an admin port, and a reader that writes updates into shared stores."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hps.config import Configuration
from hps.config.server_settings import HttpListener
from hps.node.ingest import IngestNode, open_ingest
from hps.types import Progress
from services.frontend.http.application import PortApplication
from services.frontend.logs import fields, log
from services.ingest.app import ingest_app
from services.process import ServerProcess
from services.server_state import ServerState

OnAdmin = Callable[[str], None]
"""Called with the admin port's base URL."""


class IngestServer(ServerProcess[IngestNode]):
    """One ingest process. ``run`` blocks; ``stop`` ends it from any thread.

    It then finishes the current batch and records the stores' positions."""

    def __init__(self, configuration: Configuration, progress: Progress | None = None) -> None:
        self.state: ServerState[IngestNode] = ServerState("ingest", configuration.settings)
        super().__init__(configuration, self.state, progress)

    def run(self, on_ready: OnAdmin | None = None) -> None:
        """Write updates until SIGTERM or SIGINT. Raises ``ConfigError`` or ``ModelError``.

        ``on_ready`` is called on a separate thread when the reader has been started."""
        self._run(None if on_ready is None else lambda urls: on_ready(urls["admin"]), None)

    def _ports(self) -> Mapping[str, HttpListener]:
        return {"admin": self._settings.admin}

    def _app(self, port: str) -> PortApplication:
        return ingest_app(self.state, self._settings, self._guard)

    def _open(self, progress: Progress) -> IngestNode:
        return open_ingest(self._configuration, progress)

    def _opened(self, node: IngestNode) -> None:
        super()._opened(node)
        for stream in node.streams.status():
            stores = ",".join(stream["stores"])
            log.info("feeding %s", fields(stores=stores, group=stream["group"]))
