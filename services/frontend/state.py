"""What the server knows at the moment: how far it is with starting, and which models answer.

Written by the event loop (and once by the loading thread, before it hands over); read by all.
"""

from __future__ import annotations

import time
from typing import Any, Literal

from hps import metrics as m
from hps.errors import NotFound, Unavailable
from hps.metrics import Metrics
from hps.node import Node, ServedModel
from services.frontend.endpoints import Endpoint
from services.frontend.lookup_endpoint import LookupEndpoint
from services.frontend.metadata import ModelInfo, lookup_info, ranking_info, tables_info
from services.frontend.ranking_endpoint import RankingEndpoint
from services.frontend.request import Parser
from services.frontend.response import Encoder
from services.frontend.statistics import Statistics

Phase = Literal["starting", "ready", "empty", "stopping"]

_REASONS: dict[Phase, str] = {
    "starting": "the server is loading its models; /v1/status on the admin port tells how far it is",
    "empty": "the server has no model to serve; add one to the model repository and start it again",
    "stopping": "the server is shutting down; ask another replica",
}


class Entry:
    """One name (``<m>`` or ``<m>.lookup``) with what answers it and what is counted of it."""

    __slots__ = (
        "encoder",
        "endpoint",
        "info",
        "name",
        "observe_ok",
        "parser",
        "statistics",
        "version",
    )

    def __init__(
        self, endpoint: Endpoint, info: ModelInfo, metrics: Metrics, max_keys: int
    ) -> None:
        self.endpoint = endpoint
        self.parser = Parser(endpoint.name, endpoint.rules, max_keys)
        self.encoder = Encoder(endpoint.name, endpoint.version)
        self.info = info
        self.name = endpoint.name
        self.version = endpoint.version
        self.statistics = Statistics()
        self.observe_ok = metrics.histogram(
            m.REQUEST_SECONDS, "http", "infer", endpoint.name, "200"
        ).observe


class State:
    """The server's phase, its node and the names it answers to.

    ``routes`` finds an entry by the path of an inference request. ``max_keys`` bounds one request.
    """

    def __init__(self, max_keys: int = 4_000_000) -> None:
        self._max_keys = max_keys
        self.phase: Phase = "starting"
        self.node: Node | None = None
        self.metrics = Metrics()
        self.entries: dict[str, Entry] = {}
        self.routes: dict[str, Entry] = {}
        self.loading: list[dict[str, Any]] = []
        self._started = time.monotonic()

    def serve(self, node: Node) -> None:
        """Answer for the node's models from now on; never ready without one."""
        self.metrics = node.metrics
        for served in node.models.values():
            for entry in _entries(served, node.metrics, self._max_keys):
                self.entries[entry.name] = entry
                base = f"/v2/models/{entry.name}"
                self.routes[f"{base}/infer"] = entry
                self.routes[f"{base}/versions/{entry.version}/infer"] = entry
        self.node = node
        self.phase = "ready" if node.models else "empty"

    def stop(self) -> None:
        """Not ready any more; requests that are being answered go on."""
        self.phase = "stopping"

    @property
    def ready(self) -> bool:
        return self.phase == "ready"

    @property
    def reason(self) -> str:
        """Why the server is not ready."""
        return _REASONS.get(self.phase, "")

    def require_node(self) -> Node:
        """The node; ``Unavailable`` until it is there."""
        if self.node is None:
            raise Unavailable(self.reason)
        return self.node

    def entry(self, name: str, version: str | None = None) -> Entry:
        """The entry for a name; ``NotFound`` for a name or version that is not served."""
        self.require_node()
        entry = self.entries.get(name)
        if entry is None:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        if version not in (None, entry.version):
            raise NotFound(
                f"Request for unknown model: '{name}' version {version} is not found; version "
                f"{entry.version} is served"
            )
        return entry

    def status(self) -> dict[str, Any]:
        """``/v1/status``: the node's status, or how far loading is."""
        status: dict[str, Any] = {"phase": self.phase, "ready": self.ready}
        if self.node is not None:
            return status | self.node.status()
        uptime = round(time.monotonic() - self._started, 3)
        return status | {"uptime_s": uptime, "loading": [dict(task) for task in self.loading]}


def _entries(served: ServedModel, metrics: Metrics, max_keys: int) -> list[Entry]:
    lookup = f"{served.name}.lookup"
    if served.pipeline is not None:
        first = Entry(RankingEndpoint(served), ranking_info(served), metrics, max_keys)
    else:
        first = Entry(LookupEndpoint(served, served.name), tables_info(served), metrics, max_keys)
    return [first, Entry(LookupEndpoint(served, lookup), lookup_info(served), metrics, max_keys)]
