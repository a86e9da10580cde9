"""State of a server process: its phase, and the backend that it has opened.

Written by the event loop (and once by the loading thread, before it hands over); read by all threads."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Generic, Literal, Protocol, TypeVar

from hps.config import Settings
from hps.config.effective_settings import deployment_identity
from hps.errors import Unavailable
from hps.observability import metric_names as m
from hps.observability.metrics import Metrics
from services.certificate_expiry import publish_expiry
from services.process_metrics import publish_memory, publish_process

Phase = Literal["starting", "ready", "empty", "stopping"]

_REASONS: dict[Phase, str] = {
    "starting": "the server is loading its models; /v1/status on the admin port shows the progress",
    "empty": "the server has no model to serve; add one to the model repository and load it",
    "stopping": "the server is shutting down; ask another replica",
}


class ServerBackend(Protocol):
    """The backend of a server: `hps.node.node.Node` or `hps.node.ingest.IngestNode`."""

    @property
    def metrics(self) -> Metrics: ...

    @property
    def warnings(self) -> tuple[str, ...]: ...

    def status(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


Node = TypeVar("Node", bound=ServerBackend)


class ServerState(Generic[Node]):
    """The server's phase and its backend."""

    def __init__(self, role: str, settings: Settings | None = None) -> None:
        """``role``: the role of this process in the deployment."""
        self._settings = settings or Settings()
        self.not_ready_reason: Callable[[], str] = str
        """Reason why the server is not ready although its backend is open; empty if it is ready."""
        self.other_processes: Callable[[], list[dict[str, Any]]] = list
        """Status of the other processes, as JSON."""
        self.propagate_log_level: Callable[[Any], None] | None = lambda _level: None
        """Sets the log level of the other processes; None: the node's process does that."""
        self.ask_workers: Callable[..., list[Any]] = lambda _query, *_arguments: []
        """Sends a query with arguments to every worker; returns the answers of those that answer. Blocks."""
        self.role = role
        self._phase: Phase = "starting"
        self._phase_watchers: list[Callable[[], None]] = []
        self.node: Node | None = None
        self.metrics = Metrics()
        self._publish(self.metrics)
        self.loading: list[dict[str, Any]] = []
        self.urls: Mapping[str, str] = {}
        """Addresses of the server: base URLs by the port's name."""
        self._started = time.monotonic()

    @property
    def phase(self) -> Phase:
        """Current phase of the server."""
        return self._phase

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self._phase = phase
        self.notify_phase_watchers()

    def notify_phase_watchers(self) -> None:
        """Notify the watchers of the readiness."""
        for changed in self._phase_watchers:
            changed()

    def on_phase_changed(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` now and after each change of the phase or the readiness."""
        self._phase_watchers.append(changed)
        changed()

    def _publish(self, metrics: Metrics) -> None:
        """Export metrics of this process."""
        self.metrics = metrics
        metrics.gauge(m.READY, lambda: self.ready, self.role)
        publish_process(metrics, self.role)
        if self.role != "worker":  # workers are in the node's container, and have its settings
            publish_memory(metrics)
            publish_expiry(metrics, self._settings)

    def serve(self, node: Node) -> None:
        """Serve ``node`` from now on."""
        if node.metrics is not self.metrics:
            self._publish(node.metrics)
        self.node = node
        if self.phase != "stopping":
            self.phase = "ready"

    def stop(self) -> None:
        """Stop being ready; requests in flight continue."""
        self.phase = "stopping"

    @property
    def ready(self) -> bool:
        return self.phase == "ready" and not self.not_ready_reason()

    @property
    def reason(self) -> str:
        """Reason why the server is not ready."""
        if self.phase in ("starting", "stopping"):
            return _REASONS[self.phase]
        return self.not_ready_reason() or _REASONS.get(self.phase, "")

    def require_node(self) -> Node:
        """The node; raises ``Unavailable`` until it is open."""
        if self.node is None:
            raise Unavailable(self.reason)
        return self.node

    def status(self) -> dict[str, Any]:
        """``/v1/status``: the node's status, or the progress of loading."""
        me = {"role": self.role, "pid": os.getpid(), "state": self.phase}
        status: dict[str, Any] = {
            "phase": self.phase,
            "ready": self.ready,
            "processes": [me, *self.other_processes()],
            "server": {"urls": dict(self.urls), **deployment_identity(self._settings)},
        }
        if self.node is not None:
            return status | self.node.status()
        uptime = round(time.monotonic() - self._started, 3)
        return status | {"uptime_s": uptime, "loading": [dict(task) for task in self.loading]}
